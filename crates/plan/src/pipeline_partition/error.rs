//! Why there is no partition into pipeline stages.

use super::stage_plan::format_bytes;

/// Why there is no partition into pipeline stages.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PartitionError {
    /// The profile has no units.
    #[error("the profile has no units")]
    NoUnits,
    /// A unit's time is not a time.
    #[error("the forward and backward times of '{unit}' must be finite and not negative; profile it again")]
    InvalidTime {
        /// The unit's name.
        unit: String,
    },
    /// There are no workers.
    #[error("a pipeline needs at least one worker")]
    NoWorkers,
    /// The levels of links are not usable.
    #[error(
        "a level of links must connect no fewer workers than the one within it, the last one all {workers}, and have a \
         bandwidth above 0; level {level} does not"
    )]
    InvalidLinks {
        /// The index of the first level at fault, or the number of levels if another one is needed.
        level: usize,
        /// The number of workers.
        workers: usize,
    },
    /// A factor of the state is not a number of bytes.
    #[error("the bytes of state per byte of parameters must be finite and not negative")]
    InvalidState,
    /// The workers cannot form this many stages of equal size.
    #[error("{workers} workers do not divide into {stages} stages; use a divisor of {workers}")]
    UnevenStages {
        /// The requested number of stages.
        stages: usize,
        /// The number of workers.
        workers: usize,
    },
    /// A stage would be empty.
    #[error("{units} units cannot form {stages} stages; use at most {units}")]
    TooManyStages {
        /// The requested number of stages.
        stages: usize,
        /// The number of units.
        units: usize,
    },
    /// Some replicas would have nothing to compute.
    #[error(
        "{micro_batches} micro-batches are too few for {replicas} replicas; use at least {replicas}, or more stages"
    )]
    TooFewMicroBatches {
        /// The number of micro-batches in a step.
        micro_batches: usize,
        /// The least number of replicas that the grid may have.
        replicas: usize,
    },
    /// No partition fits in memory.
    #[error(
        "no partition fits in {} per worker: the one that needs least needs {}; {}",
        format_bytes(*.limit_bytes), format_bytes(*.needed_bytes), memory_remedy(*.stages)
    )]
    Memory {
        /// The memory of a worker.
        limit_bytes: usize,
        /// The memory of the fullest worker, in the partition where it is smallest.
        needed_bytes: usize,
        /// The requested number of stages.
        stages: Option<usize>,
    },
}

fn memory_remedy(stages: Option<usize>) -> String {
    let general = "shard more state, checkpoint activations, or use smaller micro-batches";
    match stages {
        Some(stages) => format!("{general}, or another number of stages than {stages}"),
        None => general.to_string(),
    }
}
