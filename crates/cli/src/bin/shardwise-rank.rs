//! The program that runs on every rank. `shardwise` starts it; people do not.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Result, bail};
use clap::{Parser, Subcommand, ValueEnum};
use serde_json::json;
use shardwise_comm::{Group, Reduce, mpi};
use shardwise_torch::tch::{Cuda, Kind, Tensor};
use shardwise_train::fit::{self, Need, gib};
use shardwise_train::recipe::schema;
use shardwise_train::{Asked, Error, Recipe, Sampling, Wanted, evaluate, run, write_text};
use signal_hook::consts::{SIGTERM, SIGUSR1, SIGUSR2};

#[path = "../launched.rs"]
mod launched;
use launched::{Launched, launched};
#[path = "../layers.rs"]
mod layers;
use layers::Layers;
#[path = "../sampling.rs"]
mod sampling;
use sampling::Text;

#[derive(Parser)]
#[command(name = "shardwise-rank", about = "Started by shardwise; see `shardwise --help`")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Probe {
        what: Probe,
    },
    Check(Layered),
    Config(Layered),
    Schema,
    Train(Layered),
    Evaluate {
        #[command(flatten)]
        layered: Layered,
        #[arg(long)]
        corpus: Option<PathBuf>,
    },
    Generate {
        #[command(flatten)]
        layered: Layered,
        #[command(flatten)]
        text: Text,
    },
}

#[derive(Clone, Copy, ValueEnum)]
enum Probe {
    Libtorch,
    Mpi,
    Nccl,
}

/// A recipe with what is laid over it.
#[derive(clap::Args)]
struct Layered {
    recipe: PathBuf,
    #[arg(long)]
    ranks: Option<usize>,
    #[command(flatten)]
    layers: Layers,
}

impl Layered {
    fn read(&self) -> Result<Recipe, String> {
        let Layers { deepspeed, set } = &self.layers;
        Recipe::layered(&self.recipe, deepspeed.as_deref(), set).map_err(|error| error.to_string())
    }
}

fn main() -> Result<ExitCode> {
    match Arguments::parse().command {
        Command::Probe { what: Probe::Libtorch } => probe_libtorch()?,
        Command::Probe { what: Probe::Mpi } => probe_mpi()?,
        Command::Probe { what: Probe::Nccl } => probe_nccl()?,
        Command::Check(layered) => return Ok(told(check(&layered))),
        Command::Config(layered) => return Ok(told(config(&layered))),
        Command::Schema => return Ok(told(Ok(format!("{:#}", schema())))),
        Command::Train(layered) => {
            return together(&layered, Memory::OfTraining, |recipe, world| {
                run(recipe, world, &asked(recipe)?, &mut std::io::stdout())
            });
        }
        Command::Evaluate { layered, corpus } => {
            return together(&layered, Memory::OfUse, |recipe, world| {
                let figures = evaluate(recipe, world, corpus, &mut std::io::stdout())?;
                if world.rank() == 0 {
                    drop(writeln!(std::io::stdout(), "{figures}"));
                }
                Ok(())
            });
        }
        Command::Generate { layered, text } => {
            let Text { prompt, tokens, temperature, top_k, top_p, seed } = text;
            let wanted = Wanted { prompt, tokens, sampling: Sampling { temperature, top_k, top_p, seed } };
            return together(&layered, Memory::OfUse, |recipe, world| {
                write_text(recipe, world, &wanted, &mut std::io::stdout())
            });
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The exit code of a run that was refused.
const REFUSED: u8 = 2;

/// Says what came out, or why nothing did.
fn told(outcome: Result<String, String>) -> ExitCode {
    match outcome {
        Err(reason) => {
            eprintln!("{reason}");
            ExitCode::from(REFUSED)
        }
        Ok(text) => {
            // Whoever reads the output may be gone; that is no fault of the recipe's.
            drop(writeln!(std::io::stdout(), "{}", text.trim_end()));
            ExitCode::SUCCESS
        }
    }
}

/// Whether a recipe is right and fits on so many ranks of this host.
fn check(layered: &Layered) -> Result<String, String> {
    let ranks = layered.ranks.unwrap_or(1);
    let (_, need) = accepted(layered, ranks, ranks)?;
    Ok(format!("a rank needs about {} of memory:\n{need}", gib(need.total())))
}

/// A recipe as it comes out.
fn config(layered: &Layered) -> Result<String, String> {
    layered.read()?.resolved(layered.ranks).map_err(|error| error.to_string())
}

/// A recipe that is right and fits, with what it needs; or why not, with the figures and the setting that would make it fit.
fn accepted(layered: &Layered, ranks: usize, ranks_here: usize) -> Result<(Recipe, Need), String> {
    let recipe = layered.read()?;
    let need = Need::of(&recipe, ranks).map_err(|error| error.to_string())?;
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
    let path = layered.recipe.display();
    Err(format!("{path}: at stage {stage} a rank would need about {total}, and {what} is {limit}:\n{need}\n{remedy}"))
}

/// What is asked of a rank's memory before it starts.
enum Memory {
    /// What training needs.
    OfTraining,
    /// Parameters and little else, which training had room for.
    OfUse,
}

/// What all ranks of a recipe do together.
fn together(
    layered: &Layered,
    memory: Memory,
    work: impl FnOnce(&Recipe, &Arc<Group>) -> Result<(), Error>,
) -> Result<ExitCode> {
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
    let recipe = match memory {
        Memory::OfTraining => accepted(layered, ranks, told.ranks_here.unwrap_or(ranks)).map(|(recipe, _)| recipe),
        Memory::OfUse => layered.read(),
    };
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
    for note in recipe.notes.iter().filter(|_| world.rank() == 0) {
        drop(writeln!(std::io::stdout(), "{note}"));
    }
    match work(&recipe, &world) {
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
fn asked(recipe: &Recipe) -> Result<Asked, Error> {
    let asked = Asked::default();
    if recipe.checkpoints.is_none() {
        return Ok(asked);
    }
    let fail = |error: std::io::Error| Error::Options(format!("a signal's handler: {error}"));
    // Who asks a second time does not want to wait.
    signal_hook::flag::register_conditional_default(SIGTERM, asked.end.clone()).map_err(fail)?;
    for (signal, flag) in [(SIGUSR1, &asked.save), (SIGUSR2, &asked.end), (SIGTERM, &asked.end)] {
        signal_hook::flag::register(signal, flag.clone()).map_err(fail)?;
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
