//! Runs work on all ranks: joins them, checks that every one of them can start, and reports errors.

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Result, bail};
use shardwise_comm::{CallFault, Group, ReduceOp, mpi};
use shardwise_recipe::Recipe;
use shardwise_run::build::comm_options;
use shardwise_run::{Error, RunOutcome};
use shardwise_supervisor::exit_codes::{REFUSED, RESUME};
use shardwise_supervisor::launcher_env::launcher_env;
use shardwise_torch::tch::Device;
use shardwise_watch::FailureKind;

use crate::check::check_memory;
use crate::recipe_arguments::RecipeArguments;
use crate::supervisor_link::SupervisorLink;

/// Whether to check the memory before a rank starts.
pub(crate) enum MemoryCheck {
    Training,
    /// Inference needs little more memory than the parameters, for which training had room.
    Skip,
}

/// Runs `work` on all ranks without a supervisor.
pub(crate) fn run_unsupervised(
    arguments: &RecipeArguments,
    work: impl FnOnce(&Recipe, &Arc<Group>) -> Result<RunOutcome, Error>,
) -> Result<ExitCode> {
    let link = SupervisorLink::none();
    run_ranks(arguments, MemoryCheck::Skip, None, &link, work).map(ExitCode::from)
}

/// Runs `work` on all ranks, and returns the exit code of this one.
pub(crate) fn run_ranks(
    arguments: &RecipeArguments,
    memory: MemoryCheck,
    fault: Option<CallFault>,
    link: &SupervisorLink,
    work: impl FnOnce(&Recipe, &Arc<Group>) -> Result<RunOutcome, Error>,
) -> Result<u8> {
    shardwise_torch::enable_caching_allocator();
    let recipe = arguments.read();
    let options = recipe.as_ref().map_or_else(|_| mpi::Options::default(), |recipe| comm_options(&recipe.supervision));
    let world = Arc::new(mpi::world(mpi::Options { fault, ..options })?);
    link.set_world(&world);
    let ranks = world.size();
    let launcher = launcher_env().unwrap_or_default();
    if let Some(started) = launcher.world_size.filter(|&started| started != ranks) {
        bail!(
            "the launcher started {started} ranks, but MPI sees {ranks}: they belong to different MPIs, such as MPICH and Open MPI; \
             set SHARDWISE_MPI to the folder of the launcher's MPI, or let `shardwise train -n {started}` start the ranks"
        );
    }
    let recipe = recipe.and_then(|recipe| {
        if let MemoryCheck::Training = memory {
            check_memory(arguments, &recipe, ranks, launcher.local_size.unwrap_or(ranks), Device::Cpu)?;
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
        None if matches!(error, Error::Checkpoint(_) | Error::Train(shardwise_train::Error::Checkpoint(_))) => {
            FailureKind::Error
        }
        None if error.is_same_on_all_ranks() => FailureKind::Final,
        None => FailureKind::Error,
    }
}
