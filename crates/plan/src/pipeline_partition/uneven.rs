//! The best partition where each stage has its own number of replicas.

use std::ops::Range;

use super::cost_model::{CostModel, StageCut};
use super::error::PartitionError;
use super::stage_plan::{PlannedStage, StagePlan};

/// Finds the fastest partition, and of those one with the fewest workers.
pub(super) fn search(model: &CostModel) -> Result<StagePlan, PartitionError> {
    let memory_bytes = model.memory_bytes_max();
    let Some(any) = stay_within(model, Limits { time_s: f64::INFINITY, memory_bytes }) else {
        let smallest = bisect(memory_bytes as u64, u64::MAX, |memory_bytes| {
            let plan = stay_within(model, Limits { time_s: f64::INFINITY, memory_bytes: memory_bytes as usize })?;
            Some((plan.memory_bytes() as u64, plan))
        });
        let needed_bytes = smallest.expect("one worker has room for everything if memory is unlimited").memory_bytes();
        return Err(PartitionError::Memory { limit_bytes: memory_bytes, needed_bytes, stages: None });
    };
    // The bits of positive numbers are ordered as the numbers are, so the bisection ends at the exact bottleneck.
    let low_s = model.compute_s(0..model.units()) / model.workers() as f64 * (1. - ROUNDING);
    let fastest = bisect(low_s.to_bits(), any.bottleneck_s.to_bits(), |time_bits| {
        let plan = stay_within(model, Limits { time_s: f64::from_bits(time_bits), memory_bytes })?;
        Some((plan.bottleneck_s.to_bits(), plan))
    });
    Ok(fastest.unwrap_or(any))
}

/// More than all rounding errors of a quotient.
const ROUNDING: f64 = 1e-9;

/// What every stage must respect.
#[derive(Clone, Copy)]
struct Limits {
    time_s: f64,
    memory_bytes: usize,
}

impl Limits {
    fn allow(&self, stage: &PlannedStage) -> bool {
        stage.time_s() <= self.time_s && stage.memory_bytes <= self.memory_bytes
    }

    /// Whether the costs that fall with the number of replicas are allowed, even if the others rise.
    fn allow_falling(&self, stage: &PlannedStage) -> bool {
        stage.transfer_s <= self.time_s && stage.memory_bytes <= self.memory_bytes
    }
}

/// The result for the lowest limit from `low` to `high` that has one. `attempt` also returns a limit, not above the one it was given, that
/// its result respects.
fn bisect<T>(mut low: u64, mut high: u64, attempt: impl Fn(u64) -> Option<(u64, T)>) -> Option<T> {
    let (respected, mut best) = attempt(high)?;
    high = respected;
    while low < high {
        let middle = low + (high - low) / 2;
        match attempt(middle) {
            Some((respected, result)) => (high, best) = (respected, result),
            None => low = middle + 1,
        }
    }
    Some(best)
}

/// The partition within limits that uses the fewest workers.
fn stay_within(model: &CostModel, limits: Limits) -> Option<StagePlan> {
    let (units, workers, steps) = (model.units(), model.workers(), model.replica_steps());
    // For the units from each one on: the fewest workers, and the first stage.
    let mut fewest: Vec<Option<(usize, Option<StageCut>)>> = vec![None; units + 1];
    fewest[units] = Some((0, None));
    for start in (0..units).rev() {
        let mut best: Option<(usize, Option<StageCut>)> = None;
        for (end, later) in fewest.iter().enumerate().skip(start + 1) {
            let &Some((workers_after, _)) = later else { continue };
            let used_max = best.as_ref().map_or(workers, |(used, _)| used - 1);
            let Some(room) = used_max.checked_sub(workers_after) else { continue };
            if let Some(replicas) = fewest_replicas(model, &steps, start..end, workers_after, room, limits) {
                let cut = StageCut { units: start..end, replicas, workers_after };
                best = Some((workers_after + replicas, Some(cut)));
            }
        }
        fewest[start] = best;
    }
    let mut cuts = Vec::new();
    let mut start = 0;
    while let Some(cut) = &fewest[start].as_ref()?.1 {
        cuts.push(cut.clone());
        start = cut.units.end;
    }
    Some(model.plan(&cuts))
}

/// The fewest replicas, at most `room`, with which a stage is within limits.
fn fewest_replicas(
    model: &CostModel,
    steps: &[usize],
    units: Range<usize>,
    workers_after: usize,
    room: usize,
    limits: Limits,
) -> Option<usize> {
    let room = room.min(model.replicas_max());
    let compute_s = model.compute_s(units.clone());
    let enough = if compute_s > 0. { (compute_s / limits.time_s * (1. - ROUNDING)).ceil() as usize } else { 1 };
    let stage = |replicas: usize| model.stage(&StageCut { units: units.clone(), replicas, workers_after });
    for (index, &step) in steps.iter().enumerate() {
        let low = step.max(enough);
        let high = steps.get(index + 1).map_or(room, |&next| room.min(next - 1));
        if low > high {
            continue;
        }
        let (at_low, at_high) = (stage(low), stage(high));
        if limits.allow(&at_low) {
            return Some(low);
        }
        // Within a step, either everything falls with the number of replicas, or all but computing and reducing does.
        let busy_s = |stage: &PlannedStage| stage.compute_s + stage.reduce_s;
        let falls = busy_s(&at_high) <= busy_s(&at_low);
        let allows = |stage: &PlannedStage| if falls { limits.allow(stage) } else { limits.allow_falling(stage) };
        if !allows(&at_high) {
            continue;
        }
        let (mut refused, mut allowed) = (low, high);
        while refused + 1 < allowed {
            let middle = refused + (allowed - refused) / 2;
            match allows(&stage(middle)) {
                true => allowed = middle,
                false => refused = middle,
            }
        }
        if limits.allow(&stage(allowed)) {
            return Some(allowed);
        }
    }
    None
}
