//! The errors of training.

use crate::nonfinite::NonFiniteValue;

/// The error of a [`Source`](crate::Source).
pub type SourceError = Box<dyn std::error::Error + Send + Sync>;

/// The result type of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// An error in training.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A forward pass failed.
    #[error("unit {unit}: {error}")]
    Model {
        /// The unit whose forward pass failed.
        unit: String,
        /// The model's error.
        error: shardwise_model::Error,
    },
    /// A backward pass failed.
    #[error("the backward pass of unit {unit}: {error}")]
    Backward {
        /// The unit whose backward pass failed.
        unit: String,
        /// libtorch's error.
        error: shardwise_torch::Error,
    },
    /// A batch cannot be made.
    #[error("a batch: {0}")]
    Batch(shardwise_model::Error),
    /// Nothing can be queued on the device.
    #[error("the device: {0}")]
    Device(#[from] shardwise_torch::Error),
    /// An operation on sharded state failed.
    #[error(transparent)]
    Zero(#[from] shardwise_zero::Error),
    /// Communication failed.
    #[error(transparent)]
    Comm(#[from] shardwise_comm::Error),
    /// Ranks have different numbers of micro-batches, or none.
    #[error(
        "step {step}: rank {rank} has {theirs} micro-batches, but this rank has {ours}; every rank needs the same number, at least one"
    )]
    MicroBatches {
        /// The step that was not started.
        step: u64,
        /// The first rank that differs.
        rank: usize,
        /// Its number of micro-batches.
        theirs: i64,
        /// This rank's number of micro-batches.
        ours: i64,
    },
    /// Every target of the batch is [`shardwise_model::IGNORED`].
    #[error("step {step}: every target is ignored on all ranks, so there is no loss to train on")]
    AllTargetsIgnored {
        /// The step whose batch has no targets.
        step: u64,
    },
    /// The options are invalid or contradict each other.
    #[error("{0}")]
    Options(String),
    /// A user's [`Source`](crate::Source) failed.
    #[error("step {step}: cannot read its samples: {error}")]
    Source {
        /// The step whose samples were requested.
        step: u64,
        /// The source's error.
        error: SourceError,
    },
    /// A checkpoint cannot be resumed from, or the checkpoint folder cannot be used.
    #[error("{0}")]
    Checkpoint(String),
    /// An earlier call failed halfway through a step or a pass.
    #[error(
        "this trainer can no longer be used, because an earlier call failed halfway ({error}); create a new one from the \
         newest checkpoint"
    )]
    Broken {
        /// The message of that call's error.
        error: String,
    },
    /// Every parameter is frozen.
    #[error("every parameter is frozen, so there is nothing to train; remove some from model.frozen")]
    AllFrozen,
    /// The loss or a gradient is not finite. The parameters are unchanged.
    #[error("step {step}: {fault}; nothing was updated")]
    NonFinite {
        /// The step with that value.
        step: u64,
        /// The first value that is not finite.
        fault: NonFiniteValue,
    },
    /// The loss or a gradient is not finite, and units were updated in the backward pass.
    #[error(
        "step {step}: {fault}, and parameters were updated with it in the backward pass; resume from a checkpoint, perhaps with \
         optimizer.in_backward = false, which stops before the update"
    )]
    NonFiniteUpdate {
        /// The step with that value.
        step: u64,
        /// The first value that is not finite.
        fault: NonFiniteValue,
    },
    /// Values are not finite even at the smallest loss scale.
    #[error("step {step}: {fault}, even with a loss scale of {scale}; f16 cannot train this model; use bf16 or f32")]
    ScaleTooSmall {
        /// The step that overflowed.
        step: u64,
        /// The scale that the step was tried with, which is the smallest allowed.
        scale: f64,
        /// The first value that is not finite.
        fault: NonFiniteValue,
    },
}

impl From<shardwise_zero::StageError> for Error {
    fn from(error: shardwise_zero::StageError) -> Self {
        Error::Options(error.to_string())
    }
}

impl Error {
    /// Whether every rank returns this same error.
    pub fn is_same_on_all_ranks(&self) -> bool {
        match self {
            Error::Options(_) | Error::AllFrozen | Error::Checkpoint(_) => true,
            Error::NonFinite { .. } | Error::NonFiniteUpdate { .. } => true,
            Error::ScaleTooSmall { .. } | Error::AllTargetsIgnored { .. } => true,
            Error::Model { .. } | Error::Backward { .. } | Error::Zero(_) | Error::Comm(_) => false,
            Error::MicroBatches { .. } | Error::Source { .. } | Error::Broken { .. } => false,
            Error::Batch(_) | Error::Device(_) => false,
        }
    }

    /// Whether the call that returned this error left the trainer unchanged.
    pub(crate) fn leaves_trainer_unchanged(&self) -> bool {
        match self {
            // Detected before any work.
            Error::MicroBatches { .. } | Error::AllTargetsIgnored { .. } | Error::Options(_) => true,
            // Detected before the update; the gradients have been discarded.
            Error::NonFinite { .. } | Error::ScaleTooSmall { .. } => true,
            _ => false,
        }
    }

    /// The error of a unit's forward pass.
    pub(crate) fn of_model(unit: &str, error: shardwise_model::Error) -> Self {
        Error::Model { unit: unit.to_string(), error }
    }

    /// The communication error, if this is one.
    pub fn comm_error(&self) -> Option<&shardwise_comm::Error> {
        match self {
            Error::Model { error: shardwise_model::Error::Communication(error), .. } => error.downcast_ref(),
            Error::Comm(error) | Error::Zero(shardwise_zero::Error::Comm { error, .. }) => Some(error),
            _ => None,
        }
    }

    /// libtorch's out-of-memory error, if this is one.
    pub fn out_of_memory(&self) -> Option<shardwise_torch::OutOfMemory> {
        match self {
            Error::Model { error: shardwise_model::Error::Torch(error), .. } => error.out_of_memory(),
            Error::Batch(shardwise_model::Error::Torch(error)) => error.out_of_memory(),
            Error::Backward { error, .. } | Error::Device(error) => error.out_of_memory(),
            Error::Zero(shardwise_zero::Error::Torch { error, .. }) => error.out_of_memory(),
            _ => None,
        }
    }
}
