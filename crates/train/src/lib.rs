//! The training step, and the training loop around it.
//!
//! [`Trainer::step`] is the algorithm on two screens: it walks the units of a model forward and backward, gathers and releases
//! their parameters, reduces their gradients and runs the optimizer. [`run()`] is the training loop of a [`Recipe`];
//! [`Trainer::train`] is the one for your own [`Source`].
//!
//! ```
//! use std::sync::Arc;
//!
//! use shardwise_model::{Batch, Llama};
//! use shardwise_torch::tch::Tensor;
//! use shardwise_train::{Options, Ranks, Schedule, Trainer, init};
//! use shardwise_zero::{AdamW, Optimizer, Sharding};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let ranks = Ranks::sharded(Arc::new(shardwise_comm::single::group()));
//! let options = Options::new(Sharding::stage(3)?, Optimizer::AdamW(AdamW::default()), Schedule::constant(1e-3));
//! let model = Llama::new(32, 16, 1, 2, 40).model()?;
//! let mut trainer = Trainer::new(model, ranks, options, &mut init::from_seed(1))?;
//!
//! let tokens = Tensor::from_slice(&[3i64, 1, 4, 1, 5, 9, 2, 6]).view([1, 8]);
//! let batch = Batch::new(tokens.narrow(1, 0, 7), tokens.narrow(1, 1, 7));
//! let first = trainer.step(&[batch])?;
//! println!("loss {:.3}, {} tokens, gradient norm {:.3}", first.loss, first.tokens, first.grad_norm);
//! assert_eq!(first.tokens, 7);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod advice;
mod agreement;
pub mod data;
mod expected_traffic;
mod fault_injection;
mod generate;
mod host;
mod inference;
pub mod init;
mod loss_scale;
mod lr_range_test;
pub mod memory_estimate;
mod meter;
mod nonfinite;
mod options;
mod out_of_memory;
mod peak_flops;
mod position;
mod profile;
pub mod recipe;
mod resume;
mod rollback;
mod run;
mod run_log;
mod saver;
mod schedule;
mod snapshot;
mod source;
mod spike_detector;
mod spot_check;
mod state;
mod step;
mod trace;

pub use fault_injection::{FaultInjection, FaultKind};
pub use generate::{Sampling, generate};
pub use inference::{EvaluationMetrics, GenerationRequest, evaluate, generate_text};
pub use loss_scale::{DynamicScale, LossScale};
pub use nonfinite::{NonFiniteValue, OnNonFinite};
pub use options::{ActivationCheckpointing, Options, Ranks};
pub use out_of_memory::OutOfMemoryReport;
pub use position::{Phase, Position, PositionTracker};
pub use profile::{ProfileOptions, ProfileReport, Recommendation, profile};
pub use recipe::Recipe;
pub use rollback::SkippedBatch;
pub use run::{RunOutcome, StepLine, run};
pub use saver::{Requests, save};
pub use schedule::{Kind, LrAndMomentum, Schedule};
pub use source::{BatchSize, Source, SourceError};
pub use spike_detector::{GradientShare, OnSpike, Spike, SpikedMetric};
pub use spot_check::{RankBatches, SpotCheckFailure};
pub use state::Progress;
pub use step::{Evaluation, Report, Trainer};
pub use trace::{PlannedTrace, StepRange, WrittenTrace};

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
    /// A recipe is invalid.
    #[error("{place}: {problem}")]
    Recipe {
        /// The file and line, or the argument.
        place: String,
        /// What is wrong, and how to fix it.
        problem: String,
    },
    /// A recipe has several errors, one per line.
    #[error("{0}")]
    Recipes(String),
    /// The data cannot be read.
    #[error("{}: {problem}", path.display())]
    Data {
        /// The file that cannot be read.
        path: std::path::PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// Text, tokens or conversations are invalid.
    #[error(transparent)]
    Text(#[from] shardwise_data::Error),
    /// A user's [`Source`] failed.
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
    /// Memory ran out.
    #[error("{0}")]
    OutOfMemory(Box<OutOfMemoryReport>),
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
    /// The loss or the gradient norm spikes. The parameters are unchanged.
    #[error("step {step}: {spike}; nothing was updated")]
    Spike {
        /// The step that spiked.
        step: u64,
        /// The metrics that spiked, with hints at the cause.
        spike: Box<Spike>,
    },
    /// There were too many spikes for another rollback to help.
    #[error(
        "step {step}: {spike}; nothing was updated, and the run stops: it already skipped {} after a spike. This many are \
         rarely the data's fault: lower the learning rate, or look for a rank that computes wrongly \
         (supervision.spot_check_every)",
        steps(before)
    )]
    RepeatedSpikes {
        /// The step that spiked.
        step: u64,
        /// The metrics that spiked, with hints at the cause.
        spike: Box<Spike>,
        /// The steps whose batches were skipped shortly before.
        before: Vec<u64>,
    },
    /// Ranks compute different gradients from the same samples. The parameters are unchanged.
    #[error("spot check at step {step}: {failure}; nothing was updated")]
    SpotCheck {
        /// The step that was checked.
        step: u64,
        /// The ranks and the unit that differ.
        failure: Box<SpotCheckFailure>,
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

impl Error {
    /// Whether every rank returns this same error.
    pub fn is_same_on_all_ranks(&self) -> bool {
        match self {
            Error::Options(_) | Error::Recipe { .. } | Error::Recipes(_) => true,
            Error::AllFrozen | Error::Checkpoint(_) => true,
            Error::NonFinite { .. } | Error::ScaleTooSmall { .. } | Error::AllTargetsIgnored { .. } => true,
            Error::Spike { .. } | Error::RepeatedSpikes { .. } | Error::SpotCheck { .. } => true,
            Error::Model { .. } | Error::Backward { .. } | Error::Zero(_) | Error::Comm(_) => false,
            Error::MicroBatches { .. } | Error::Data { .. } | Error::Text(_) => false,
            Error::Source { .. } => false,
            Error::OutOfMemory(_) | Error::Broken { .. } => false,
        }
    }

    /// Whether the call that returned this error left the trainer unchanged.
    fn leaves_trainer_unchanged(&self) -> bool {
        match self {
            // Detected before any work.
            Error::MicroBatches { .. } | Error::AllTargetsIgnored { .. } | Error::Options(_) => true,
            // Detected before the update; the gradients have been discarded.
            Error::NonFinite { .. } | Error::ScaleTooSmall { .. } => true,
            Error::Spike { .. } | Error::SpotCheck { .. } => true,
            _ => false,
        }
    }

    /// The communication error, if this is one.
    pub fn comm_error(&self) -> Option<&shardwise_comm::Error> {
        match self {
            Error::Comm(error) | Error::Zero(shardwise_zero::Error::Comm { error, .. }) => Some(error),
            _ => None,
        }
    }

    /// Whether memory ran out.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Error::OutOfMemory(_)) || self.out_of_memory().is_some()
    }

    /// libtorch's out-of-memory error, if this is one.
    pub(crate) fn out_of_memory(&self) -> Option<shardwise_torch::OutOfMemory> {
        match self {
            Error::Model { error: shardwise_model::Error::Torch(error), .. } => error.out_of_memory(),
            Error::Backward { error, .. } => error.out_of_memory(),
            Error::Zero(shardwise_zero::Error::Torch { error, .. }) => error.out_of_memory(),
            _ => None,
        }
    }

    /// Describes the phase and the unit in which the error occurred. `phase` is the rank's current phase.
    pub(crate) fn location(&self, phase: Phase) -> String {
        match self {
            Error::Model { unit, .. } => format!("the forward pass of unit {unit}"),
            Error::Backward { unit, .. } => format!("the backward pass of unit {unit}"),
            Error::Zero(shardwise_zero::Error::Torch { unit, .. }) => {
                format!("the {phase} of unit {unit}")
            }
            _ => "a step".to_string(),
        }
    }
}

fn steps(steps: &[u64]) -> String {
    let steps: Vec<String> = steps.iter().map(u64::to_string).collect();
    format!("step{} {}", if steps.len() == 1 { "" } else { "s" }, steps.join(", "))
}
