//! The program that runs on every rank. `shardwise` starts it; people do not.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Result, bail};
use clap::{Parser, Subcommand, ValueEnum};
use serde_json::json;
use shardwise_comm::{CallFault, Fault, Group, Reduce, mpi};
use shardwise_journal::spans::Trace;
use shardwise_journal::svg;
use shardwise_torch::tch::{Cuda, Kind, Tensor};
use shardwise_train::fit::{self, Need, gib};
use shardwise_train::recipe::schema;
use shardwise_train::{
    Asked, Deed, Ended, Error, PlannedTrace, Position, Profiling, Recipe, Sabotage, Sampling, Wanted, evaluate,
    profile, run, write_text,
};
use shardwise_watch::FailureKind;
use signal_hook::consts::{SIGTERM, SIGUSR1, SIGUSR2};

#[path = "../launched.rs"]
mod launched;
use launched::{RANK, REFUSED, RESUME, launched, number};
#[path = "../layers.rs"]
mod layers;
use layers::Layers;
#[path = "../profile_table.rs"]
mod profile_table;
use profile_table::table;
#[path = "../profiling.rs"]
mod profiling;
#[path = "../rank_count.rs"]
mod rank_count;
use rank_count::RankCount;
#[path = "../sampling.rs"]
mod sampling;
use sampling::Text;
#[path = "../tracing.rs"]
mod tracing;
use tracing::Tracing;
#[path = "../watched.rs"]
mod watched;
use watched::Watched;

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
    Check {
        #[command(flatten)]
        layered: Layered,
        /// How many of the ranks run on this host; all unless said otherwise.
        #[arg(long)]
        ranks_here: Option<usize>,
        #[arg(long)]
        fault: Vec<String>,
        #[command(flatten)]
        tracing: Tracing,
    },
    Config(Layered),
    Schema,
    Train {
        #[command(flatten)]
        layered: Layered,
        /// What is to go wrong.
        #[arg(long)]
        fault: Vec<String>,
        #[command(flatten)]
        tracing: Tracing,
    },
    Profile {
        #[command(flatten)]
        layered: Layered,
        #[command(flatten)]
        profiling: profiling::Profiling,
        #[arg(long)]
        width: Option<usize>,
    },
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
    ranks: Option<RankCount>,
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
        Command::Check { layered, ranks_here, fault, tracing } => {
            return Ok(told(planned(&tracing).and_then(|_| check(&layered, ranks_here, &fault))));
        }
        Command::Config(layered) => return Ok(told(config(&layered))),
        Command::Schema => return Ok(told(Ok(format!("{:#}", schema())))),
        Command::Train { layered, fault, tracing } => return train(&layered, &fault, &tracing),
        Command::Profile { layered, profiling, width } => return profiled(&layered, &profiling, width),
        Command::Evaluate { layered, corpus } => {
            return unwatched(&layered, |recipe, world| {
                let figures = evaluate(recipe, world, corpus, &mut std::io::stdout())?;
                if world.rank() == 0 {
                    drop(writeln!(std::io::stdout(), "{figures}"));
                }
                Ok(Ended::Finished)
            });
        }
        Command::Generate { layered, text } => {
            let Text { prompt, tokens, temperature, top_k, top_p, seed } = text;
            let wanted = Wanted { prompt, tokens, sampling: Sampling { temperature, top_k, top_p, seed } };
            return unwatched(&layered, |recipe, world| {
                write_text(recipe, world, &wanted, &mut std::io::stdout(), &mut std::io::stderr())?;
                Ok(Ended::Finished)
            });
        }
    }
    Ok(ExitCode::SUCCESS)
}

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
fn check(layered: &Layered, ranks_here: Option<usize>, faults: &[String]) -> Result<String, String> {
    sabotage(faults)?;
    let asked = layered.ranks.unwrap_or(RankCount { least: 1, most: 1 });
    let recipe = layered.read()?;
    let counts = counts(&recipe, asked)?;
    let ranks = counts.last().copied().unwrap_or(asked.most);
    let need = match ranks_here {
        // What other hosts have is theirs to say.
        Some(0) => Need::of(&recipe, ranks).map_err(|error| error.to_string())?,
        here => fits(layered, &recipe, ranks, here.unwrap_or(ranks))?,
    };
    let checked = json!({
        "text": format!("a rank needs about {} of memory:\n{need}", gib(need.total())),
        "ranks": counts,
        "folder": recipe.folder(),
        "saves": recipe.checkpoints.is_some(),
        "silence_s": recipe.supervision.silence_s,
        "restarts": recipe.supervision.restarts,
    });
    Ok(checked.to_string())
}

/// The numbers of ranks in a range that a recipe can be run on, all with the same global batch.
fn counts(recipe: &Recipe, asked: RankCount) -> Result<Vec<usize>, String> {
    let batch = |ranks: usize| {
        recipe.check_replicas(ranks)?;
        Ok::<_, Error>(recipe.batch(ranks)?.global)
    };
    let found: Vec<(usize, usize)> =
        (asked.least..=asked.most).filter_map(|ranks| Some((ranks, batch(ranks).ok()?))).collect();
    let Some(&(most, global)) = found.last() else {
        return Err(batch(asked.most).err().map_or_else(String::new, |error| error.to_string()));
    };
    if let Some((ranks, other)) = found.iter().find(|(_, other)| *other != global) {
        return Err(format!(
            "-n {asked}: a step would have {other} sequences on {ranks} ranks and {global} on {most}; give batch.global and \
             batch.sequences, and leave batch.micro_batches out"
        ));
    }
    Ok(found.into_iter().map(|(ranks, _)| ranks).collect())
}

/// A recipe as it comes out.
fn config(layered: &Layered) -> Result<String, String> {
    layered.read()?.resolved(layered.ranks.map(|ranks| ranks.most)).map_err(|error| error.to_string())
}

/// What a recipe that fits needs; or why it does not, with the figures and the setting that would make it fit.
fn fits(layered: &Layered, recipe: &Recipe, ranks: usize, ranks_here: usize) -> Result<Need, String> {
    let need = Need::of(recipe, ranks).map_err(|error| error.to_string())?;
    let limit = fit::limit(ranks_here, 0).filter(|limit| need.total() > limit.bytes);
    let Some(fit::Limit { bytes: limit, what, .. }) = limit else {
        return Ok(need);
    };
    let remedy = match fit::remedy(recipe, ranks, limit) {
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

/// Trains, watched by the supervisor that started this rank, if one did.
fn train(layered: &Layered, faults: &[String], tracing: &Tracing) -> Result<ExitCode> {
    let planned = planned(tracing).map_err(anyhow::Error::msg)?;
    let faults = sabotage(faults).map_err(anyhow::Error::msg)?;
    let told = launched().unwrap_or_default();
    let (rank, ranks) = (number(RANK).unwrap_or(0), told.ranks.unwrap_or(1));
    let faults: Vec<Sabotage> = faults.into_iter().filter(|fault| fault.rank == rank).collect();
    let call_fault = faults.iter().find_map(call_fault);
    let (position, asked) = (Arc::new(Position::new(faults)), Asked { planned, ..asked()? });
    let watched = Watched::join(rank, ranks, &position, &asked)?;
    let ended = together(layered, Memory::OfTraining, call_fault, &watched, |recipe, world| {
        run(recipe, world, &asked, &position, &mut |entry| watched.wrote(entry), &mut std::io::stdout())
    });
    match ended {
        Ok(code) => Ok(ExitCode::from(watched.bye(code))),
        Err(error) if watched.is_watched() => {
            watched.failed(rank, FailureKind::Error, &format!("{error:#}"));
            Ok(ExitCode::FAILURE)
        }
        Err(error) => Err(error),
    }
}

/// Profiles a recipe; the first rank says what came out.
fn profiled(layered: &Layered, profiling: &profiling::Profiling, width: Option<usize>) -> Result<ExitCode> {
    let rank = number(RANK).unwrap_or(0);
    let faults = sabotage(&profiling.fault).map_err(anyhow::Error::msg)?;
    let position = Arc::new(Position::new(faults.into_iter().filter(|fault| fault.rank == rank).collect()));
    let passing = tempfile::tempdir()?;
    let folder = profiling.keep.clone().unwrap_or_else(|| passing.path().to_path_buf());
    let told = launched().unwrap_or_default();
    let work = |recipe: &Recipe, world: &Arc<Group>| {
        let ranks_here = told.ranks_here.unwrap_or(world.size());
        let wanted = Profiling { steps: profiling.steps, tries: !profiling.no_tries, folder, ranks_here };
        let Some(profiled) = profile(recipe, world, &position, &wanted)? else { return Ok(Ended::Finished) };
        if let Some(file) = &profiling.draw {
            let read = Trace::read(&profiled.trace).map_err(|error| Error::Options(error.to_string()))?;
            let fail = |error: std::io::Error| Error::Data { path: file.clone(), problem: error.to_string() };
            std::fs::write(file, svg(&read)).map_err(fail)?;
        }
        let mut text = match profiling.json {
            true => format!("{:#}\n", json!(profiled)),
            false => table(&profiled, width),
        };
        if profiling.keep.is_some() && !profiling.json {
            text += &format!("\ntrace: {} (opens in ui.perfetto.dev)\n", profiled.trace.display());
        }
        // Whoever reads the output may be gone.
        drop(std::io::stdout().write_all(text.as_bytes()));
        Ok(Ended::Finished)
    };
    let watched = Watched::nobody();
    together(layered, Memory::OfTraining, None, &watched, work).map(ExitCode::from)
}

/// What is to be traced, as it is written.
fn planned(tracing: &Tracing) -> Result<PlannedTrace, String> {
    let steps = tracing.trace.as_deref().map(str::parse).transpose();
    let steps = steps.map_err(|why: String| format!("--trace: {why}"))?;
    Ok(PlannedTrace { steps, ranks: tracing.trace_ranks.clone() })
}

/// What is to go wrong, as it is written.
fn sabotage(faults: &[String]) -> Result<Vec<Sabotage>, String> {
    faults.iter().map(|fault| fault.parse().map_err(|reason| format!("--fault: {reason}"))).collect()
}

/// What goes wrong in a call between ranks.
fn call_fault(fault: &Sabotage) -> Option<CallFault> {
    let what = match fault.deed {
        Deed::Skip => Fault::Skip,
        Deed::Shorten => Fault::Short,
        _ => return None,
    };
    Some(CallFault { verb: None, label: fault.unit.clone().unwrap_or_default(), nth: fault.step, what })
}

/// What all ranks of a recipe do together, with nobody who watches them.
fn unwatched(layered: &Layered, work: impl FnOnce(&Recipe, &Arc<Group>) -> Result<Ended, Error>) -> Result<ExitCode> {
    let watched = Watched::nobody();
    together(layered, Memory::OfUse, None, &watched, work).map(ExitCode::from)
}

/// What all ranks of a recipe do together; the code with which this one ends.
fn together(
    layered: &Layered,
    memory: Memory,
    fault: Option<CallFault>,
    watched: &Watched,
    work: impl FnOnce(&Recipe, &Arc<Group>) -> Result<Ended, Error>,
) -> Result<u8> {
    shardwise_torch::keep_freed_memory();
    let recipe = layered.read();
    let options = recipe.as_ref().map_or_else(|_| mpi::Options::default(), |recipe| recipe.supervision.calls());
    let world = Arc::new(mpi::world(mpi::Options { fault, ..options })?);
    watched.started(&world);
    let ranks = world.size();
    let told = launched().unwrap_or_default();
    if let Some(started) = told.ranks.filter(|&started| started != ranks) {
        bail!(
            "the launcher has started {started} ranks, and MPI sees {ranks}: they are of different MPIs; `shardwise doctor` says \
             which launcher works"
        );
    }
    let recipe = recipe.and_then(|recipe| {
        if let Memory::OfTraining = memory {
            fits(layered, &recipe, ranks, told.ranks_here.unwrap_or(ranks))?;
        }
        Ok(recipe)
    });
    // Files and memory are each host's own: where one rank cannot start none does, and the first that cannot says why.
    let own = if recipe.is_err() { (ranks - world.rank()) as i64 } else { 0 };
    let first = world.all_reduce("start", Reduce::Max, vec![own]).wait()?[0];
    let recipe = match recipe {
        Ok(recipe) if first == 0 => recipe,
        refused => {
            if let Some(reason) = refused.err().filter(|_| own == first) {
                eprintln!("{reason}");
            }
            return Ok(REFUSED);
        }
    };
    for note in recipe.notes.iter().filter(|_| world.rank() == 0) {
        drop(writeln!(std::io::stdout(), "{note}"));
    }
    match work(&recipe, &world) {
        Ok(Ended::Finished) => Ok(0),
        Ok(Ended::Asked) => Ok(RESUME),
        Err(error) if error.is_everyones() => {
            if world.rank() == 0 || watched.is_watched() {
                watched.failed(world.rank(), kind(&error), &error.to_string());
            }
            Ok(1)
        }
        // The others wait for this rank, so it cannot wait for them.
        Err(error) if watched.is_watched() => {
            watched.failed(world.rank(), kind(&error), &error.to_string());
            // The supervisor has not ended it: the launcher sees it go, and ends the others.
            std::process::exit(1);
        }
        Err(error) => world.abort(&error.to_string()),
    }
}

/// What kind of failure it is, for the supervisor: whether another attempt is worth while, and which of several came first.
fn kind(error: &Error) -> FailureKind {
    use shardwise_comm::Error as Comm;
    match error.between_ranks() {
        _ if error.is_out_of_memory() => FailureKind::Memory,
        Some(Comm::TimedOut { .. }) => FailureKind::Timeout,
        Some(Comm::Mismatch { .. }) => FailureKind::Mismatch,
        Some(_) => FailureKind::Transport,
        None if matches!(error, Error::SpotCheck { .. }) => FailureKind::SpotCheck,
        // Storage may be away for a while.
        None if matches!(error, Error::Checkpoint(_)) => FailureKind::Error,
        None if error.is_everyones() => FailureKind::Final,
        None => FailureKind::Error,
    }
}

/// What signals ask for: SIGUSR2 to save; SIGUSR1, which Slurm sends before a time limit, and SIGTERM to save and end.
fn asked() -> Result<Asked> {
    let asked = Asked::default();
    // Who asks a second time does not want to wait.
    signal_hook::flag::register_conditional_default(SIGTERM, asked.end.clone())?;
    for (signal, flag) in [(SIGUSR2, &asked.save), (SIGUSR1, &asked.end), (SIGTERM, &asked.end)] {
        signal_hook::flag::register(signal, flag.clone())?;
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
    let world = mpi::world(mpi::Options { time_limit: std::time::Duration::from_secs(20), ..mpi::Options::default() })?;
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
