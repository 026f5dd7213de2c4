//! The program that runs on every rank. `shardwise` starts it; people do not.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use serde_json::json;
use shardwise_comm::{Reduce, mpi};
use shardwise_torch::tch::{Cuda, Kind, Tensor};
use shardwise_train::fit::{self, Need, gib};
use shardwise_train::{Recipe, run};

fn main() -> Result<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["probe", "libtorch"] => probe_libtorch()?,
        ["probe", "mpi"] => probe_mpi()?,
        ["probe", "nccl"] => probe_nccl()?,
        ["check", recipe, ranks] => return Ok(check(Path::new(recipe), ranks.parse().context("RANKS")?)),
        ["train", recipe] => return train(Path::new(recipe)),
        _ => bail!("shardwise-rank is started by shardwise; see `shardwise --help`"),
    }
    Ok(ExitCode::SUCCESS)
}

/// The exit code of a run that was refused.
const REFUSED: u8 = 2;

/// Whether a recipe is right and fits on so many ranks of this host. Says why not.
fn check(recipe: &Path, ranks: usize) -> ExitCode {
    let need = Recipe::read(recipe).and_then(|recipe| Ok((Need::of(&recipe, ranks)?, recipe)));
    match need {
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(REFUSED)
        }
        Ok((need, recipe)) => match refusal(&need, &recipe, ranks, ranks) {
            Some(refusal) => {
                eprintln!("{}: {refusal}", recipe_name(&recipe));
                ExitCode::from(REFUSED)
            }
            None => {
                println!("a rank needs about {} of memory:\n{need}", gib(need.total()));
                ExitCode::SUCCESS
            }
        },
    }
}

fn recipe_name(recipe: &Recipe) -> String {
    format!("stage {} of this recipe", recipe.sharding.stage)
}

/// Why a run cannot fit, with the figures and the setting that would make it fit.
fn refusal(need: &Need, recipe: &Recipe, ranks: usize, ranks_here: usize) -> Option<String> {
    let (limit, what) = fit::limit(ranks_here).filter(|&(limit, _)| need.total() > limit)?;
    let remedy = match fit::remedy(recipe, ranks, limit) {
        Some((keys, then)) => format!("{} would fit, with {}", keys.join(" and "), gib(then.total())),
        None => {
            "no setting makes it fit on these ranks: use more ranks, a smaller batch or a smaller model".to_string()
        }
    };
    let total = gib(need.total());
    Some(format!("a rank would need about {total}, and {what} is {}:\n{need}\n{remedy}", gib(limit)))
}

/// A rank of a run.
fn train(path: &Path) -> Result<ExitCode> {
    shardwise_torch::keep_freed_memory();
    let world = mpi::world(mpi::Options::default())?;
    let (rank, ranks) = (world.rank(), world.size());
    let here = std::env::var("OMPI_COMM_WORLD_LOCAL_SIZE").ok().and_then(|size| size.parse().ok()).unwrap_or(ranks);
    let say_once = |text: &dyn std::fmt::Display| {
        if rank == 0 {
            eprintln!("{text}");
        }
    };
    let recipe = match Recipe::read(path) {
        Ok(recipe) => recipe,
        Err(error) => {
            say_once(&error);
            return Ok(ExitCode::from(REFUSED));
        }
    };
    // The host with the least decides for all: a rank that left alone would leave the others waiting.
    let need = Need::of(&recipe, ranks)?;
    let refusal = refusal(&need, &recipe, ranks, here);
    let refused = world.all_reduce("fits", Reduce::Max, vec![i64::from(refusal.is_some())]).wait()?[0];
    if refused != 0 {
        if let Some(refusal) = refusal {
            say_once(&refusal);
        }
        return Ok(ExitCode::from(REFUSED));
    }
    match run(&recipe, world, &mut std::io::stdout()) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) if error.is_everyones() => {
            say_once(&error);
            Ok(ExitCode::FAILURE)
        }
        Err(error) => {
            eprintln!("rank {rank}: {error}");
            Ok(ExitCode::FAILURE)
        }
    }
}

/// What `shardwise doctor` wants to know of libtorch, as a line of JSON.
fn probe_libtorch() -> Result<()> {
    let sum = Tensor::f_from_slice(&[1f32, 2., 3.])?.f_sum(Kind::Float)?.f_double_value(&[])?;
    anyhow::ensure!(sum == 6., "libtorch adds 1, 2 and 3 to {sum}");
    println!("{}", json!({ "version": shardwise_torch::libtorch_version(), "cuda_devices": Cuda::device_count() }));
    Ok(())
}

/// The same of MPI, on every rank.
fn probe_mpi() -> Result<()> {
    let world = mpi::world(mpi::Options { time_limit: std::time::Duration::from_secs(20) })?;
    let ranks = world.all_reduce("doctor", Reduce::Sum, vec![1i64]).wait()?[0];
    if world.rank() == 0 {
        // Without that thread level there would be no world.
        let version = mpi::library_version();
        println!("{}", json!({ "version": version.lines().next(), "ranks": ranks, "threads": "funneled or better" }));
    }
    Ok(())
}

#[cfg(feature = "cuda")]
fn probe_nccl() -> Result<()> {
    println!("{}", json!({ "version": shardwise_comm::nccl::library_version()? }));
    Ok(())
}

#[cfg(not(feature = "cuda"))]
fn probe_nccl() -> Result<()> {
    println!("{}", json!({ "version": null }));
    Ok(())
}
