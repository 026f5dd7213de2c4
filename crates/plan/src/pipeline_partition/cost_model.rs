//! What a stage costs. The formulas are in the documentation of [the module](super).

use std::ops::Range;

use super::error::PartitionError;
use super::problem::{Constraints, GradientReduction, LinkLevel, Replication, UnitProfile, Workers};
use super::stage_plan::{PlannedStage, StagePlan};

/// Computes what any stage costs, in constant time. Searches differ in the stages that they try, not in what those cost.
#[derive(Clone, Debug)]
pub struct CostModel {
    workers: usize,
    links: Vec<LinkLevel>,
    constraints: Constraints,
    /// The sums over the first units, from none to all of them.
    compute_s: Vec<f64>,
    parameter_bytes: Vec<usize>,
    kept_bytes: Vec<usize>,
    /// What is sent if a stage begins or ends at each of the boundaries. The input of the first and the output of the last unit
    /// are not sent.
    cut_bytes: Vec<usize>,
}

/// A stage, and what its costs depend on besides its units.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageCut {
    /// Its units.
    pub units: Range<usize>,
    /// The number of workers that run it.
    pub replicas: usize,
    /// The number of workers that run later stages.
    pub workers_after: usize,
}

/// The bandwidths that a stage communicates with.
struct Bandwidths {
    reduce: f64,
    input: f64,
    output: f64,
}

impl CostModel {
    /// Checks the profile, the workers and the constraints.
    pub fn new(units: &[UnitProfile], workers: &Workers, constraints: &Constraints) -> Result<Self, PartitionError> {
        check(units, workers, constraints)?;
        let mut cut_bytes: Vec<usize> = units.iter().map(|unit| unit.output_bytes).collect();
        cut_bytes.pop();
        cut_bytes.insert(0, 0);
        cut_bytes.push(0);
        let sums = |of: fn(&UnitProfile) -> usize| -> Vec<usize> {
            let running = units.iter().scan(0, |sum: &mut usize, unit| {
                *sum = sum.saturating_add(of(unit));
                Some(*sum)
            });
            [0].into_iter().chain(running).collect()
        };
        let compute_s = units.iter().scan(0., |sum, unit| {
            *sum += unit.forward_s + unit.backward_s;
            Some(*sum)
        });
        Ok(CostModel {
            workers: workers.count,
            links: workers.links.clone(),
            constraints: *constraints,
            compute_s: [0.].into_iter().chain(compute_s).collect(),
            parameter_bytes: sums(|unit| unit.parameter_bytes),
            kept_bytes: sums(|unit| unit.kept_bytes),
            cut_bytes,
        })
    }

    /// What a stage costs.
    ///
    /// # Panics
    /// If the stage has units or workers that do not exist, or none.
    pub fn stage(&self, cut: &StageCut) -> PlannedStage {
        let StageCut { units: Range { start, end }, replicas, workers_after } = *cut;
        assert!(start < end && replicas > 0, "a stage has a unit and a replica");
        assert!(replicas + workers_after <= self.workers, "a stage has workers that exist");
        let bandwidths = self.bandwidths(cut);
        let parameter_bytes = (self.parameter_bytes[end] - self.parameter_bytes[start]) as f64;
        let kept_bytes = self.kept_bytes[end] - self.kept_bytes[start];
        let shares = replicas as f64;

        let (reduced_micro_batches, in_flight_max) = match self.constraints.reduction {
            GradientReduction::EachStep { micro_batches } => (micro_batches, micro_batches.div_ceil(replicas)),
            GradientReduction::EachRound => (replicas, usize::MAX),
        };
        let all_reduce_s = 2. * (shares - 1.) / shares * parameter_bytes / bandwidths.reduce;
        let transfer_s = |boundary: usize, bandwidth: f64| 2. * self.cut_bytes[boundary] as f64 / (shares * bandwidth);
        let in_flight = (replicas + workers_after).div_ceil(replicas).min(in_flight_max);
        let state = self.constraints.state;
        let state_bytes = (parameter_bytes * (state.replicated + state.sharded / shares)).ceil() as usize;
        PlannedStage {
            units: start..end,
            replicas,
            in_flight,
            compute_s: self.compute_s(start..end) / shares,
            transfer_s: transfer_s(start, bandwidths.input).max(transfer_s(end, bandwidths.output)),
            reduce_s: all_reduce_s / reduced_micro_batches as f64,
            memory_bytes: state_bytes.saturating_add(kept_bytes.saturating_mul(in_flight)),
        }
    }

    /// The plan with these stages.
    pub fn plan(&self, cuts: &[StageCut]) -> StagePlan {
        StagePlan::new(cuts.iter().map(|cut| self.stage(cut)).collect(), self.workers)
    }

    /// The number of units.
    pub fn units(&self) -> usize {
        self.compute_s.len() - 1
    }

    /// The number of workers.
    pub fn workers(&self) -> usize {
        self.workers
    }

    /// The number of replicas that a stage has at most.
    pub fn replicas_max(&self) -> usize {
        match self.constraints.reduction {
            GradientReduction::EachStep { micro_batches } => micro_batches.min(self.workers),
            GradientReduction::EachRound => self.workers,
        }
    }

    /// The memory of a worker; `usize::MAX` if it is unlimited.
    pub fn memory_bytes_max(&self) -> usize {
        self.constraints.memory_bytes_max.unwrap_or(usize::MAX)
    }

    /// The time of the forward and backward passes of some units on one worker.
    pub(super) fn compute_s(&self, units: Range<usize>) -> f64 {
        self.compute_s[units.end] - self.compute_s[units.start]
    }

    /// Numbers of replicas at which the bandwidths of an uneven stage, or the kind of its all-reduce, change: between two of them,
    /// each cost of a stage either only rises or only falls with the number of replicas.
    pub(super) fn replica_steps(&self) -> Vec<usize> {
        let levels = self.links.iter().flat_map(|level| [level.workers, level.workers.saturating_add(1)]);
        let mut steps: Vec<usize> = [1, 2].into_iter().chain(levels).filter(|&step| step <= self.workers).collect();
        steps.sort_unstable();
        steps.dedup();
        steps
    }

    fn bandwidths(&self, cut: &StageCut) -> Bandwidths {
        let StageCut { replicas, workers_after, .. } = *cut;
        match self.constraints.replication {
            Replication::Grid { .. } => {
                let first = self.workers - workers_after - replicas;
                let last = first + replicas - 1;
                Bandwidths {
                    reduce: self.bandwidth_among(first, last),
                    input: self.bandwidth_among(first.saturating_sub(replicas), last),
                    output: self.bandwidth_among(first, (last + replicas).min(self.workers - 1)),
                }
            }
            Replication::Uneven => {
                let transfer = self.bandwidth_of(replicas + 1);
                Bandwidths { reduce: self.bandwidth_of(replicas), input: transfer, output: transfer }
            }
        }
    }

    /// The bandwidth among consecutive workers.
    fn bandwidth_among(&self, first: usize, last: usize) -> f64 {
        self.bandwidth(|level| first / level.workers == last / level.workers)
    }

    /// The bandwidth among this many workers in the best place.
    fn bandwidth_of(&self, workers: usize) -> f64 {
        self.bandwidth(|level| workers <= level.workers)
    }

    fn bandwidth(&self, connects: impl Fn(&LinkLevel) -> bool) -> f64 {
        let level = self.links.iter().find(|level| connects(level)).or(self.links.last());
        level.expect("the last level was checked to connect all workers").bytes_per_s
    }
}

fn check(units: &[UnitProfile], workers: &Workers, constraints: &Constraints) -> Result<(), PartitionError> {
    let is_amount = |amount: f64| amount.is_finite() && amount >= 0.;
    if units.is_empty() {
        return Err(PartitionError::NoUnits);
    }
    if let Some(unit) = units.iter().find(|unit| !is_amount(unit.forward_s) || !is_amount(unit.backward_s)) {
        return Err(PartitionError::InvalidTime { unit: unit.name.clone() });
    }
    if workers.count == 0 {
        return Err(PartitionError::NoWorkers);
    }
    let mut connected = 1;
    for (level, link) in workers.links.iter().enumerate() {
        if link.workers < connected || link.bytes_per_s.is_nan() || link.bytes_per_s <= 0. {
            return Err(PartitionError::InvalidLinks { level, workers: workers.count });
        }
        connected = link.workers;
    }
    if connected < workers.count {
        return Err(PartitionError::InvalidLinks { level: workers.links.len(), workers: workers.count });
    }
    if let GradientReduction::EachStep { micro_batches: 0 } = constraints.reduction {
        return Err(PartitionError::TooFewMicroBatches { micro_batches: 0, replicas: 1 });
    }
    match is_amount(constraints.state.replicated) && is_amount(constraints.state.sharded) {
        true => Ok(()),
        false => Err(PartitionError::InvalidState),
    }
}
