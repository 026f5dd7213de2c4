//! The program that runs on every rank. `shardwise` starts it; people do not.

use std::ffi::OsString;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use serde_json::json;
use shardwise_comm::{Reduce, mpi};
use shardwise_torch::tch::{Cuda, Kind, Tensor};
use shardwise_train::fit::{self, Need, gib};
use shardwise_train::{Asked, Recipe, run};
use signal_hook::consts::{SIGTERM, SIGUSR1, SIGUSR2};

#[path = "../launched.rs"]
mod launched;
use launched::{Launched, launched};

fn main() -> Result<ExitCode> {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(|argument| argument.to_str().unwrap_or_default()).collect();
    match words[..] {
        ["probe", "libtorch"] => probe_libtorch()?,
        ["probe", "mpi"] => probe_mpi()?,
        ["probe", "nccl"] => probe_nccl()?,
        ["check", _, ranks] => return Ok(check(Path::new(&arguments[1]), ranks.parse().context("RANKS")?)),
        ["train", _] => return train(Path::new(&arguments[1])),
        _ => bail!("shardwise-rank is started by shardwise; see `shardwise --help`"),
    }
    Ok(ExitCode::SUCCESS)
}

/// The exit code of a run that was refused.
const REFUSED: u8 = 2;

/// Whether a recipe is right and fits on so many ranks of this host. Says why not.
fn check(path: &Path, ranks: usize) -> ExitCode {
    match accepted(path, ranks, ranks) {
        Err(reason) => {
            eprintln!("{reason}");
            ExitCode::from(REFUSED)
        }
        Ok((_, need)) => {
            // Whoever reads the output may be gone; that is no fault of the recipe's.
            let text = format!("a rank needs about {} of memory:\n{need}", gib(need.total()));
            drop(writeln!(std::io::stdout(), "{text}"));
            ExitCode::SUCCESS
        }
    }
}

/// A recipe that is right and fits, with what it needs; or why not, with the figures and the setting that would make it fit.
fn accepted(path: &Path, ranks: usize, ranks_here: usize) -> Result<(Recipe, Need), String> {
    let recipe = Recipe::read(path).map_err(|error| error.to_string())?;
    let need = Need::of(&recipe, ranks).map_err(|error| format!("{}: {error}", path.display()))?;
    let Some((limit, what)) = fit::limit(ranks_here).filter(|&(limit, _)| need.total() > limit) else {
        return Ok((recipe, need));
    };
    let remedy = match fit::remedy(&recipe, ranks, limit) {
        Some((keys, then)) => format!("{} would fit, with {}", keys.join(" and "), gib(then.total())),
        None => {
            "no setting makes it fit on these ranks: use more ranks, a smaller batch or a smaller model".to_string()
        }
    };
    let (stage, total, limit) = (recipe.sharding.stage, gib(need.total()), gib(limit));
    let path = path.display();
    Err(format!("{path}: at stage {stage} a rank would need about {total}, and {what} is {limit}:\n{need}\n{remedy}"))
}

/// A rank of a run.
fn train(path: &Path) -> Result<ExitCode> {
    shardwise_torch::keep_freed_memory();
    let world = Arc::new(mpi::world(mpi::Options::default())?);
    let ranks = world.size();
    let told = launched().unwrap_or(Launched { ranks: None, ranks_here: None });
    if let Some(started) = told.ranks.filter(|&started| started != ranks) {
        bail!(
            "the launcher has started {started} ranks, and MPI sees {ranks}: they are of different MPIs; `shardwise doctor` says \
             which launcher works"
        );
    }
    let recipe = accepted(path, ranks, told.ranks_here.unwrap_or(ranks)).map(|(recipe, _)| recipe);
    // Files and memory are each host's own: where one rank cannot start none does, and the first that cannot says why.
    let own = if recipe.is_err() { (ranks - world.rank()) as i64 } else { 0 };
    let first = world.all_reduce("start", Reduce::Max, vec![own]).wait()?[0];
    let recipe = match recipe {
        Ok(recipe) if first == 0 => recipe,
        refused => {
            if let Some(reason) = refused.err().filter(|_| own == first) {
                eprintln!("{reason}");
            }
            return Ok(ExitCode::from(REFUSED));
        }
    };
    match run(&recipe, &world, &asked(&recipe)?, &mut std::io::stdout()) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) if error.is_everyones() => {
            if world.rank() == 0 {
                eprintln!("{error}");
            }
            Ok(ExitCode::FAILURE)
        }
        Err(error) => {
            eprintln!("rank {}: {error}", world.rank());
            // The others wait for this rank, so it cannot wait for them: the launcher sees it go, and ends them.
            std::process::exit(1);
        }
    }
}

/// What signals ask for: SIGUSR1 to save, SIGUSR2 and SIGTERM to save and end.
fn asked(recipe: &Recipe) -> Result<Asked> {
    let asked = Asked::default();
    if recipe.checkpoints.is_none() {
        return Ok(asked);
    }
    // Who asks a second time does not want to wait.
    signal_hook::flag::register_conditional_default(SIGTERM, asked.end.clone()).context("a signal's handler")?;
    for (signal, flag) in [(SIGUSR1, &asked.save), (SIGUSR2, &asked.end), (SIGTERM, &asked.end)] {
        signal_hook::flag::register(signal, flag.clone()).context("a signal's handler")?;
    }
    Ok(asked)
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
