//! Parses the flags that `shardwise` passes on as text.

use shardwise_cli::flags::TrainFlags;
use shardwise_run::{FaultInjection, PlannedTrace};

pub(crate) fn parse_faults(faults: &[String]) -> Result<Vec<FaultInjection>, String> {
    faults.iter().map(|fault| fault.parse().map_err(|reason| format!("--fault: {reason}"))).collect()
}

pub(crate) fn parse_trace(flags: &TrainFlags) -> Result<PlannedTrace, String> {
    let steps = flags.trace.as_deref().map(str::parse).transpose();
    let steps = steps.map_err(|why: String| format!("--trace: {why}"))?;
    Ok(PlannedTrace { steps, ranks: flags.trace_ranks.clone() })
}
