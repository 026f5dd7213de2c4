//! The best partition with equally replicated stages.

use super::cost_model::{CostModel, StageCut};
use super::error::PartitionError;
use super::stage_plan::{PlannedStage, StagePlan};

/// Finds the fastest grid with this number of stages, or with any.
pub(super) fn search(model: &CostModel, stages: Option<usize>) -> Result<StagePlan, PartitionError> {
    let shapes = shapes(model, stages)?;
    let fastest = |objective: Objective| {
        let plans = shapes.iter().filter_map(|&stages| cut_stages(model, stages, objective));
        plans
            .map(|cuts| model.plan(&cuts))
            .min_by(|one, other| objective.of_plan(one).total_cmp(&objective.of_plan(other)))
    };
    if let Some(plan) = fastest(Objective::Time { memory_bytes_max: model.memory_bytes_max() }) {
        return Ok(plan);
    }
    let smallest = fastest(Objective::Memory).expect("every shape has a partition if memory is unlimited");
    Err(PartitionError::Memory { limit_bytes: model.memory_bytes_max(), needed_bytes: smallest.memory_bytes(), stages })
}

/// The numbers of stages to try, in ascending order.
fn shapes(model: &CostModel, stages: Option<usize>) -> Result<Vec<usize>, PartitionError> {
    let (units, workers) = (model.units(), model.workers());
    let candidates = match stages {
        Some(stages) if stages == 0 || !workers.is_multiple_of(stages) => {
            return Err(PartitionError::UnevenStages { stages, workers });
        }
        Some(stages) if stages > units => return Err(PartitionError::TooManyStages { stages, units }),
        Some(stages) => stages..=stages,
        None => 1..=units.min(workers),
    };
    let divisors = candidates.filter(|&stages| workers.is_multiple_of(stages));
    let (shapes, starved): (Vec<usize>, Vec<usize>) =
        divisors.partition(|&stages| workers / stages <= model.replicas_max());
    match starved.last() {
        Some(&stages) if shapes.is_empty() => {
            Err(PartitionError::TooFewMicroBatches { micro_batches: model.replicas_max(), replicas: workers / stages })
        }
        _ => Ok(shapes),
    }
}

/// What a cut should minimise, over its stages.
#[derive(Clone, Copy)]
enum Objective {
    /// The time of the slowest stage, if all stages fit in memory.
    Time { memory_bytes_max: usize },
    /// The memory of the fullest worker.
    Memory,
}

impl Objective {
    fn of_stage(self, stage: &PlannedStage) -> f64 {
        match self {
            Objective::Time { memory_bytes_max } if stage.memory_bytes > memory_bytes_max => f64::INFINITY,
            Objective::Time { .. } => stage.time_s(),
            Objective::Memory => stage.memory_bytes as f64,
        }
    }

    /// What no stage falls below that has all units of this one and more.
    fn floor(self, stage: &PlannedStage) -> f64 {
        match self {
            Objective::Time { memory_bytes_max } if stage.memory_bytes > memory_bytes_max => f64::INFINITY,
            Objective::Time { .. } => stage.compute_s,
            Objective::Memory => stage.memory_bytes as f64,
        }
    }

    fn of_plan(self, plan: &StagePlan) -> f64 {
        plan.stages.iter().map(|stage| self.of_stage(stage)).fold(0., f64::max)
    }
}

/// The best cut into this many stages, if there is one.
fn cut_stages(model: &CostModel, stages: usize, objective: Objective) -> Option<Vec<StageCut>> {
    let (units, replicas) = (model.units(), model.workers() / stages);
    let cut = |stage: usize, start: usize, end: usize| StageCut {
        units: start..end,
        replicas,
        workers_after: (stages - 1 - stage) * replicas,
    };
    // The best value for each number of first units on the stages so far, and where the last of these stages starts.
    let mut best = vec![f64::INFINITY; units + 1];
    best[0] = 0.;
    let mut starts = Vec::with_capacity(stages);
    for stage in 0..stages {
        let mut next = vec![f64::INFINITY; units + 1];
        let mut stage_starts = vec![0; units + 1];
        let later_stages = stages - 1 - stage;
        let first_end = if later_stages == 0 { units } else { stage + 1 };
        for end in first_end..=units - later_stages {
            for start in (stage..end).rev() {
                if best[start] >= next[end] {
                    continue;
                }
                let planned = model.stage(&cut(stage, start, end));
                if objective.floor(&planned) >= next[end] {
                    break;
                }
                let value = objective.of_stage(&planned).max(best[start]);
                if value < next[end] {
                    (next[end], stage_starts[end]) = (value, start);
                }
            }
        }
        best = next;
        starts.push(stage_starts);
    }
    if best[units].is_infinite() {
        return None;
    }
    let mut cuts = Vec::with_capacity(stages);
    let mut end = units;
    for stage in (0..stages).rev() {
        let start = starts[stage][end];
        cuts.push(cut(stage, start, end));
        end = start;
    }
    cuts.reverse();
    Some(cuts)
}
