//! The program that runs on every rank. `shardwise` starts it; users do not.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Result, bail};
use clap::{Parser, Subcommand, ValueEnum};
use serde_json::json;
use shardwise_comm::{CallFault, CallFaultKind, Group, ReduceOp, mpi};
use shardwise_journal::spans::Trace;
use shardwise_journal::trace_svg;
use shardwise_torch::tch::{Cuda, Kind, Tensor};
use shardwise_train::memory_estimate::{self, MemoryEstimate, format_bytes};
use shardwise_train::recipe::schema;
use shardwise_train::{
    Error, FaultInjection, FaultKind, GenerationRequest, PlannedTrace, PositionTracker, ProfileOptions, Recipe,
    Requests, RunOutcome, Sampling, evaluate, generate_text, profile, run,
};
use shardwise_watch::FailureKind;
use signal_hook::consts::{SIGTERM, SIGUSR1, SIGUSR2};

#[path = "../launcher_env.rs"]
mod launcher_env;
use launcher_env::{RANK, REFUSED, RESUME, env_number, launcher_env};
#[path = "../layers.rs"]
mod layers;
use layers::Layers;
#[path = "../profile_table.rs"]
mod profile_table;
use profile_table::table;
#[path = "../profile_flags.rs"]
mod profile_flags;
#[path = "../rank_count.rs"]
mod rank_count;
use rank_count::RankCount;
#[path = "../generate_flags.rs"]
mod generate_flags;
use generate_flags::GenerateFlags;
#[path = "../trace_flags.rs"]
mod trace_flags;
use trace_flags::TraceFlags;
#[path = "../supervisor_link.rs"]
mod supervisor_link;
use supervisor_link::SupervisorLink;

#[derive(Parser)]
#[command(name = "shardwise-rank", about = "Run one rank; started by shardwise, see `shardwise --help`")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Print the version of a library and check that it works
    Probe { library: Library },
    /// Check that a recipe can run and fits into memory
    Check {
        #[command(flatten)]
        recipe: RecipeArguments,
        /// Assume that this many of the ranks run on this host, instead of all
        #[arg(long)]
        ranks_here: Option<usize>,
        #[arg(long)]
        fault: Vec<String>,
        #[command(flatten)]
        trace: TraceFlags,
    },
    /// Print the resolved recipe
    Config(RecipeArguments),
    /// Print the JSON schema of recipes
    Schema,
    Train {
        #[command(flatten)]
        recipe: RecipeArguments,
        #[arg(long)]
        fault: Vec<String>,
        #[command(flatten)]
        trace: TraceFlags,
    },
    Profile {
        #[command(flatten)]
        recipe: RecipeArguments,
        #[command(flatten)]
        flags: profile_flags::ProfileFlags,
        #[arg(long)]
        width: Option<usize>,
    },
    Evaluate {
        #[command(flatten)]
        recipe: RecipeArguments,
        #[arg(long)]
        corpus: Option<PathBuf>,
    },
    Generate {
        #[command(flatten)]
        recipe: RecipeArguments,
        #[command(flatten)]
        flags: GenerateFlags,
    },
}

#[derive(Clone, Copy, ValueEnum)]
enum Library {
    Libtorch,
    Mpi,
    Nccl,
}

/// A recipe and its layers.
#[derive(clap::Args)]
struct RecipeArguments {
    #[arg(value_name = "RECIPE")]
    path: PathBuf,
    #[arg(long)]
    ranks: Option<RankCount>,
    #[command(flatten)]
    layers: Layers,
}

impl RecipeArguments {
    fn read(&self) -> Result<Recipe, String> {
        let Layers { deepspeed, set } = &self.layers;
        Recipe::read_layered(&self.path, deepspeed.as_deref(), set).map_err(|error| error.to_string())
    }
}

fn main() -> Result<ExitCode> {
    match Arguments::parse().command {
        Command::Probe { library: Library::Libtorch } => probe_libtorch()?,
        Command::Probe { library: Library::Mpi } => probe_mpi()?,
        Command::Probe { library: Library::Nccl } => probe_nccl()?,
        Command::Check { recipe, ranks_here, fault, trace } => {
            return Ok(print_result(parse_trace(&trace).and_then(|_| check(&recipe, ranks_here, &fault))));
        }
        Command::Config(recipe) => return Ok(print_result(resolve(&recipe))),
        Command::Schema => return Ok(print_result(Ok(format!("{:#}", schema())))),
        Command::Train { recipe, fault, trace } => return train(&recipe, &fault, &trace),
        Command::Profile { recipe, flags, width } => return run_profile(&recipe, &flags, width),
        Command::Evaluate { recipe, corpus } => {
            return run_unsupervised(&recipe, |recipe, world| {
                let figures = evaluate(recipe, world, corpus, &mut std::io::stdout())?;
                if world.rank() == 0 {
                    drop(writeln!(std::io::stdout(), "{figures}"));
                }
                Ok(RunOutcome::Finished)
            });
        }
        Command::Generate { recipe, flags } => {
            let GenerateFlags { prompt, tokens, temperature, top_k, top_p, seed } = flags;
            let request = GenerationRequest { prompt, tokens, sampling: Sampling { temperature, top_k, top_p, seed } };
            return run_unsupervised(&recipe, |recipe, world| {
                generate_text(recipe, world, &request, &mut std::io::stdout(), &mut std::io::stderr())?;
                Ok(RunOutcome::Finished)
            });
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the result to standard output, or the error to standard error.
fn print_result(result: Result<String, String>) -> ExitCode {
    match result {
        Err(reason) => {
            eprintln!("{reason}");
            ExitCode::from(REFUSED)
        }
        Ok(text) => {
            // A closed standard output is not an error.
            drop(writeln!(std::io::stdout(), "{}", text.trim_end()));
            ExitCode::SUCCESS
        }
    }
}

/// Checks that a recipe is valid and fits into the memory of this host. Returns JSON for `shardwise`.
fn check(arguments: &RecipeArguments, ranks_here: Option<usize>, faults: &[String]) -> Result<String, String> {
    parse_faults(faults)?;
    let asked = arguments.ranks.unwrap_or(RankCount { min: 1, max: 1 });
    let recipe = arguments.read()?;
    let sizes = world_sizes(&recipe, asked)?;
    let ranks = sizes.last().copied().unwrap_or(asked.max);
    let estimate = match ranks_here {
        // No rank runs on this host, and only the other hosts know their memory.
        Some(0) => MemoryEstimate::of(&recipe, ranks).map_err(|error| error.to_string())?,
        here => check_memory(arguments, &recipe, ranks, here.unwrap_or(ranks))?,
    };
    let report = json!({
        "text": format!("a rank needs about {} of memory:\n{estimate}", format_bytes(estimate.total())),
        "ranks": sizes,
        "folder": recipe.folder(),
        "saves": recipe.checkpoints.is_some(),
        "heartbeat_timeout_s": recipe.supervision.heartbeat_timeout_s,
        "max_restarts": recipe.supervision.max_restarts,
    });
    Ok(report.to_string())
}

/// The world sizes in a range that a recipe can run on. All of them must have the same global batch size.
fn world_sizes(recipe: &Recipe, asked: RankCount) -> Result<Vec<usize>, String> {
    let batch = |ranks: usize| {
        recipe.check_replicas(ranks)?;
        Ok::<_, Error>(recipe.batch(ranks)?.global_batch_size)
    };
    let found: Vec<(usize, usize)> =
        (asked.min..=asked.max).filter_map(|ranks| Some((ranks, batch(ranks).ok()?))).collect();
    let Some(&(largest, global)) = found.last() else {
        return Err(batch(asked.max).err().map_or_else(String::new, |error| error.to_string()));
    };
    if let Some((ranks, other)) = found.iter().find(|(_, other)| *other != global) {
        return Err(format!(
            "-n {asked}: a step would have {other} sequences on {ranks} ranks and {global} on {largest}; set batch.global_batch_size and \
             batch.micro_batch_size, and leave batch.gradient_accumulation_steps out"
        ));
    }
    Ok(found.into_iter().map(|(ranks, _)| ranks).collect())
}

/// The resolved recipe as TOML.
fn resolve(arguments: &RecipeArguments) -> Result<String, String> {
    arguments.read()?.resolved_toml(arguments.ranks.map(|ranks| ranks.max)).map_err(|error| error.to_string())
}

/// Estimates the memory of a rank. If it does not fit, the error has the figures, and the settings with which it would fit.
fn check_memory(
    arguments: &RecipeArguments,
    recipe: &Recipe,
    ranks: usize,
    ranks_here: usize,
) -> Result<MemoryEstimate, String> {
    let estimate = MemoryEstimate::of(recipe, ranks).map_err(|error| error.to_string())?;
    let limit = memory_estimate::memory_limit(ranks_here, 0).filter(|limit| estimate.total() > limit.bytes);
    let Some(memory_estimate::MemoryLimit { bytes: limit, what, .. }) = limit else {
        return Ok(estimate);
    };
    let remedy = match memory_estimate::find_settings_that_fit(recipe, ranks, limit) {
        Some((keys, then)) => format!("{} would fit, with {}", keys.join(" and "), format_bytes(then.total())),
        None => {
            "no settings make it fit on these ranks: use more ranks, a smaller batch or a smaller model".to_string()
        }
    };
    let (stage, total, limit) = (recipe.zero.stage, format_bytes(estimate.total()), format_bytes(limit));
    let path = arguments.path.display();
    Err(format!(
        "{path}: at stage {stage} a rank would need about {total}, but {what} is {limit}:\n{estimate}\n{remedy}"
    ))
}

/// Whether to check the memory before a rank starts.
enum MemoryCheck {
    Training,
    /// Inference needs little more memory than the parameters, for which training had room.
    Skip,
}

/// Trains, and reports to the supervisor if one started this rank.
fn train(arguments: &RecipeArguments, faults: &[String], trace: &TraceFlags) -> Result<ExitCode> {
    let planned = parse_trace(trace).map_err(anyhow::Error::msg)?;
    let faults = parse_faults(faults).map_err(anyhow::Error::msg)?;
    let launcher = launcher_env().unwrap_or_default();
    let (rank, ranks) = (env_number(RANK).unwrap_or(0), launcher.world_size.unwrap_or(1));
    let faults: Vec<FaultInjection> = faults.into_iter().filter(|fault| fault.rank == rank).collect();
    let call_fault = faults.iter().find_map(call_fault);
    let requests = Requests { planned_trace: planned, ..register_signals()? };
    let position = Arc::new(PositionTracker::new(faults));
    let link = SupervisorLink::join(rank, ranks, &position, &requests)?;
    let result = run_ranks(arguments, MemoryCheck::Training, call_fault, &link, |recipe, world| {
        run(recipe, world, &requests, &position, &mut |entry| link.send_entry(entry), &mut std::io::stdout())
    });
    match result {
        Ok(code) => Ok(ExitCode::from(link.bye(code))),
        Err(error) if link.is_supervised() => {
            link.report_failure(rank, FailureKind::Error, &format!("{error:#}"));
            Ok(ExitCode::FAILURE)
        }
        Err(error) => Err(error),
    }
}

/// Profiles a recipe. Rank 0 prints the result.
fn run_profile(
    arguments: &RecipeArguments,
    flags: &profile_flags::ProfileFlags,
    width: Option<usize>,
) -> Result<ExitCode> {
    let rank = env_number(RANK).unwrap_or(0);
    let faults = parse_faults(&flags.fault).map_err(anyhow::Error::msg)?;
    let position = Arc::new(PositionTracker::new(faults.into_iter().filter(|fault| fault.rank == rank).collect()));
    let temporary = tempfile::tempdir()?;
    let folder = flags.keep.clone().unwrap_or_else(|| temporary.path().to_path_buf());
    let launcher = launcher_env().unwrap_or_default();
    let work = |recipe: &Recipe, world: &Arc<Group>| {
        let ranks_here = launcher.local_size.unwrap_or(world.size());
        let options = ProfileOptions { steps: flags.steps, try_changes: !flags.no_tries, folder, ranks_here };
        let Some(result) = profile(recipe, world, &position, &options)? else { return Ok(RunOutcome::Finished) };
        if let Some(file) = &flags.draw {
            let trace = Trace::read(&result.trace).map_err(|error| Error::Options(error.to_string()))?;
            let fail = |error: std::io::Error| Error::Data { path: file.clone(), problem: error.to_string() };
            std::fs::write(file, trace_svg(&trace)).map_err(fail)?;
        }
        let mut text = match flags.json {
            true => format!("{:#}\n", json!(result)),
            false => table(&result, width),
        };
        if flags.keep.is_some() && !flags.json {
            text += &format!("\ntrace: {} (opens in ui.perfetto.dev)\n", result.trace.display());
        }
        // A closed standard output is not an error.
        drop(std::io::stdout().write_all(text.as_bytes()));
        Ok(RunOutcome::Finished)
    };
    let link = SupervisorLink::none();
    run_ranks(arguments, MemoryCheck::Training, None, &link, work).map(ExitCode::from)
}

fn parse_trace(flags: &TraceFlags) -> Result<PlannedTrace, String> {
    let steps = flags.trace.as_deref().map(str::parse).transpose();
    let steps = steps.map_err(|why: String| format!("--trace: {why}"))?;
    Ok(PlannedTrace { steps, ranks: flags.trace_ranks.clone() })
}

fn parse_faults(faults: &[String]) -> Result<Vec<FaultInjection>, String> {
    faults.iter().map(|fault| fault.parse().map_err(|reason| format!("--fault: {reason}"))).collect()
}

/// Converts a fault to one that is injected into a collective call, if it is of such a kind.
fn call_fault(fault: &FaultInjection) -> Option<CallFault> {
    let kind = match fault.kind {
        FaultKind::Skip => CallFaultKind::Skip,
        FaultKind::Shorten => CallFaultKind::Shorten,
        _ => return None,
    };
    Some(CallFault { verb: None, label: fault.unit.clone().unwrap_or_default(), nth: fault.step, kind })
}

/// Runs `work` on all ranks without a supervisor.
fn run_unsupervised(
    arguments: &RecipeArguments,
    work: impl FnOnce(&Recipe, &Arc<Group>) -> Result<RunOutcome, Error>,
) -> Result<ExitCode> {
    let link = SupervisorLink::none();
    run_ranks(arguments, MemoryCheck::Skip, None, &link, work).map(ExitCode::from)
}

/// Runs `work` on all ranks, and returns the exit code of this one.
fn run_ranks(
    arguments: &RecipeArguments,
    memory: MemoryCheck,
    fault: Option<CallFault>,
    link: &SupervisorLink,
    work: impl FnOnce(&Recipe, &Arc<Group>) -> Result<RunOutcome, Error>,
) -> Result<u8> {
    shardwise_torch::enable_caching_allocator();
    let recipe = arguments.read();
    let options = recipe.as_ref().map_or_else(|_| mpi::Options::default(), |recipe| recipe.supervision.comm_options());
    let world = Arc::new(mpi::world(mpi::Options { fault, ..options })?);
    link.set_world(&world);
    let ranks = world.size();
    let launcher = launcher_env().unwrap_or_default();
    if let Some(started) = launcher.world_size.filter(|&started| started != ranks) {
        bail!(
            "the launcher started {started} ranks, but MPI sees {ranks}: they belong to different MPIs; `shardwise doctor` finds \
             a launcher that works"
        );
    }
    let recipe = recipe.and_then(|recipe| {
        if let MemoryCheck::Training = memory {
            check_memory(arguments, &recipe, ranks, launcher.local_size.unwrap_or(ranks))?;
        }
        Ok(recipe)
    });
    // Files and memory differ between hosts. If one rank cannot start, none does, and the first such rank prints why.
    let own = if recipe.is_err() { (ranks - world.rank()) as i64 } else { 0 };
    let first = world.all_reduce("start", ReduceOp::Max, vec![own]).wait()?[0];
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
        Ok(RunOutcome::Finished) => Ok(0),
        Ok(RunOutcome::Stopped) => Ok(RESUME),
        Err(error) if error.is_same_on_all_ranks() => {
            if world.rank() == 0 || link.is_supervised() {
                link.report_failure(world.rank(), failure_kind(&error), &error.to_string());
            }
            Ok(1)
        }
        // The other ranks may be waiting for this one, so it must not wait for them.
        Err(error) if link.is_supervised() => {
            link.report_failure(world.rank(), failure_kind(&error), &error.to_string());
            // The supervisor did not kill this rank. When it exits, the launcher kills the others.
            std::process::exit(1);
        }
        Err(error) => world.abort(&error.to_string()),
    }
}

/// The kind of an error, from which the supervisor can tell whether a restart helps, and which of several failures came first.
fn failure_kind(error: &Error) -> FailureKind {
    use shardwise_comm::Error as Comm;
    match error.comm_error() {
        _ if error.is_out_of_memory() => FailureKind::Memory,
        Some(Comm::TimedOut { .. }) => FailureKind::Timeout,
        Some(Comm::Mismatch { .. }) => FailureKind::Mismatch,
        Some(_) => FailureKind::Transport,
        None if matches!(error, Error::SpotCheck { .. }) => FailureKind::SpotCheck,
        // Storage may be unavailable for a while.
        None if matches!(error, Error::Checkpoint(_)) => FailureKind::Error,
        None if error.is_same_on_all_ranks() => FailureKind::Final,
        None => FailureKind::Error,
    }
}

/// Installs signal handlers: SIGUSR2 saves; SIGTERM and SIGUSR1, which Slurm sends before a job's time is up, save and stop.
fn register_signals() -> Result<Requests> {
    let requests = Requests::default();
    // A second SIGTERM ends the process at once.
    signal_hook::flag::register_conditional_default(SIGTERM, requests.stop.clone())?;
    for (signal, flag) in [(SIGUSR2, &requests.save), (SIGUSR1, &requests.stop), (SIGTERM, &requests.stop)] {
        signal_hook::flag::register(signal, flag.clone())?;
    }
    Ok(requests)
}

/// Prints what `shardwise doctor` needs to know about libtorch, as a line of JSON.
fn probe_libtorch() -> Result<()> {
    let sum = Tensor::f_from_slice(&[1f32, 2., 3.])?.f_sum(Kind::Float)?.f_double_value(&[])?;
    anyhow::ensure!(sum == 6., "libtorch computes 1 + 2 + 3 = {sum}");
    println!("{}", json!({ "version": shardwise_torch::libtorch_version(), "cuda_devices": Cuda::device_count() }));
    Ok(())
}

/// Checks MPI with an all-reduce, and prints its version.
fn probe_mpi() -> Result<()> {
    let world = mpi::world(mpi::Options { timeout: std::time::Duration::from_secs(20), ..mpi::Options::default() })?;
    let ranks = world.all_reduce("doctor", ReduceOp::Sum, vec![1i64]).wait()?[0];
    if world.rank() == 0 {
        // `mpi::world` fails at a lower thread level.
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
