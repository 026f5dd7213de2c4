//! Trains as one of the ranks.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Result;
use shardwise_cli::flags::TrainFlags;
use shardwise_comm::{CallFault, CallFaultKind};
use shardwise_run::{FaultInjection, FaultKind, PositionTracker, Requests};
use shardwise_supervisor::launcher_env::{RANK, env_number, launcher_env};
use shardwise_watch::FailureKind;
use signal_hook::consts::{SIGTERM, SIGUSR1, SIGUSR2};

use crate::flags::{parse_faults, parse_trace};
use crate::rank::{MemoryCheck, run_ranks};
use crate::recipe_arguments::RecipeArguments;
use crate::supervisor_link::SupervisorLink;

/// Trains, and reports to the supervisor if one started this rank.
pub(crate) fn run(arguments: &RecipeArguments, faults: &[String], flags: &TrainFlags) -> Result<ExitCode> {
    let planned = parse_trace(flags).map_err(anyhow::Error::msg)?;
    let faults = parse_faults(faults).map_err(anyhow::Error::msg)?;
    let launcher = launcher_env().unwrap_or_default();
    let (rank, ranks) = (env_number(RANK).unwrap_or(0), launcher.world_size.unwrap_or(1));
    let faults: Vec<FaultInjection> = faults.into_iter().filter(|fault| fault.rank == rank).collect();
    let call_fault = faults.iter().find_map(call_fault);
    let requests = Requests { planned_trace: planned, ..register_signals()? };
    let position = Arc::new(PositionTracker::new(faults));
    let link = SupervisorLink::join(rank, ranks, &position, &requests)?;
    let memory = if flags.force { MemoryCheck::Skip } else { MemoryCheck::Training };
    let result = run_ranks(arguments, memory, call_fault, &link, |recipe, world| {
        shardwise_run::run(
            recipe,
            world,
            &requests,
            &position,
            &mut |entry| link.send_entry(entry),
            &mut std::io::stdout(),
        )
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

/// Converts a fault to one that is injected into a collective call, if it is of such a kind.
fn call_fault(fault: &FaultInjection) -> Option<CallFault> {
    let kind = match fault.kind {
        FaultKind::Skip => CallFaultKind::Skip,
        FaultKind::Shorten => CallFaultKind::Shorten,
        _ => return None,
    };
    Some(CallFault { verb: None, label: fault.unit.clone().unwrap_or_default(), nth: fault.step, kind })
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
