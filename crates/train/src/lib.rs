//! The training step: where a model meets its shards.
//!
//! [`Trainer::step`] is the algorithm on a page. It walks the units of a model forward and backward and calls `gather`,
//! `forward`, `release`, `backward`, `reduce` and `update` by name. [`run()`] is the loop around it that a [`Recipe`] describes;
//! [`Trainer::train`] is the one for a user's own [`Source`].
//!
//! ```
//! use std::sync::Arc;
//!
//! use shardwise_model::{Batch, Llama};
//! use shardwise_torch::tch::Tensor;
//! use shardwise_train::{Options, Ranks, Schedule, Trainer, start};
//! use shardwise_zero::{AdamW, Optimizer, Sharding};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let ranks = Ranks::sharded(Arc::new(shardwise_comm::single::group()));
//! let options = Options::new(Sharding::stage(3)?, Optimizer::AdamW(AdamW::default()), Schedule::constant(1e-3));
//! let model = Llama::new(32, 16, 1, 2, 40).model()?;
//! let mut trainer = Trainer::new(model, ranks, options, &mut start::from_seed(1))?;
//!
//! let tokens = Tensor::from_slice(&[3i64, 1, 4, 1, 5, 9, 2, 6]).view([1, 8]);
//! let batch = Batch::new(tokens.narrow(1, 0, 7), tokens.narrow(1, 1, 7));
//! let first = trainer.step(&[batch])?;
//! println!("loss {:.3} of {} tokens, gradients of norm {:.3}", first.loss, first.tokens, first.gradient_norm);
//! assert_eq!(first.tokens, 7);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod agreement;
mod changes;
pub mod data;
mod diary;
mod fault;
pub mod fit;
mod generate;
mod guard;
mod host;
mod memory;
mod meter;
mod options;
mod outliers;
mod peak;
mod plot;
mod position;
mod profile;
pub mod recipe;
mod resume;
mod run;
mod sabotage;
mod saving;
mod scale;
mod schedule;
mod snapshot;
mod source;
mod spot_check;
pub mod start;
mod state;
mod step;
mod theory;
mod trace;
mod trained;

pub use fault::{Fault, OnNotFinite};
pub use generate::{Sampling, generate};
pub use guard::{Far, OnOutlier, Outlier, Share};
pub use memory::Shortage;
pub use options::{Accumulation, Options, Ranks, Recomputation};
pub use outliers::PassedOver;
pub use position::{Phase, Place, Position};
pub use profile::{Change, Profiled, Profiling, profile};
pub use recipe::Recipe;
pub use run::{Ended, Line, run};
pub use sabotage::{Deed, Sabotage};
pub use saving::{Asked, save};
pub use scale::{DynamicScale, LossScale};
pub use schedule::{Kind, Pace, Schedule};
pub use source::{Portion, Source, SourceError};
pub use spot_check::{Finding, MicroBatchesOf};
pub use state::Progress;
pub use step::{Evaluation, Report, Trainer};
pub use trace::{PlannedTrace, Traced, TracedSteps};
pub use trained::{Figures, Wanted, evaluate, write_text};

/// The result of a step.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong in a step.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// In the model's maths.
    #[error("unit {unit}: {error}")]
    Model {
        /// The unit at fault.
        unit: String,
        /// What went wrong.
        error: shardwise_model::Error,
    },
    /// In the backward pass.
    #[error("the backward pass of unit {unit}: {error}")]
    Backward {
        /// The unit at fault.
        unit: String,
        /// What went wrong.
        error: shardwise_torch::Error,
    },
    /// In the sharded state.
    #[error(transparent)]
    Zero(#[from] shardwise_zero::Error),
    /// Between ranks.
    #[error(transparent)]
    Comm(#[from] shardwise_comm::Error),
    /// Ranks with different numbers of micro-batches, or with none.
    #[error(
        "step {step}: rank {rank} has {theirs} micro-batches and this rank {ours}; all ranks need as many, and at least one"
    )]
    MicroBatches {
        /// The step.
        step: u64,
        /// A rank that differs, by its place in the group.
        rank: usize,
        /// How many it has.
        theirs: i64,
        /// How many this one has.
        ours: i64,
    },
    /// A batch in which nothing counts.
    #[error("step {step}: no rank has a token that counts; every target is ignored")]
    NothingToLearn {
        /// The step.
        step: u64,
    },
    /// Options that contradict each other.
    #[error("{0}")]
    Options(String),
    /// A recipe that cannot be followed.
    #[error("{place}: {problem}")]
    Recipe {
        /// The file and line, or the argument, at fault.
        place: String,
        /// What is wrong, and what to do.
        problem: String,
    },
    /// A recipe with several faults, a line for each.
    #[error("{0}")]
    Recipes(String),
    /// Tokens that cannot be read.
    #[error("{}: {problem}", path.display())]
    Data {
        /// The file.
        path: std::path::PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// Text, tokens or conversations that cannot be used.
    #[error(transparent)]
    Text(#[from] shardwise_data::Error),
    /// Samples that a user's own source does not have.
    #[error("step {step}: its samples could not be read: {error}")]
    Source {
        /// The step.
        step: u64,
        /// What the source says.
        error: SourceError,
    },
    /// A checkpoint that cannot be gone on from, or a place for them that cannot be used.
    #[error("{0}")]
    Checkpoint(String),
    /// Memory that there was not: who asked for it, and what would fit.
    #[error("{0}")]
    OutOfMemory(Box<Shortage>),
    /// A trainer that was interrupted in the middle of a step or a pass.
    #[error(
        "an earlier call failed halfway ({error}), so this trainer can no longer be used; make a new one from the newest checkpoint"
    )]
    Broken {
        /// The error of that call.
        error: String,
    },
    /// Nothing to train.
    #[error("every parameter is frozen, so there is nothing to train; leave some out of 'frozen'")]
    AllFrozen,
    /// Numbers that are not finite. The parameters are as they were before the step.
    #[error("step {step}: {fault}; nothing was updated")]
    NotFinite {
        /// The step.
        step: u64,
        /// What was first at fault.
        fault: Fault,
    },
    /// Numbers that are far outside what they usually are. The parameters are as they were before the step.
    #[error("step {step}: {outlier}; nothing was updated")]
    Outlier {
        /// The step.
        step: u64,
        /// What is far out.
        outlier: Box<Outlier>,
    },
    /// The same, too often for going back to be a remedy.
    #[error(
        "step {step}: {outlier}; nothing was updated, and the run stops, since it has passed over {} for the like: so often it \
         is not the samples, but perhaps the learning rate, or a rank that computes wrongly (supervision.spot_check_every)",
        steps(before)
    )]
    Outliers {
        /// The step.
        step: u64,
        /// What is far out.
        outlier: Box<Outlier>,
        /// Which steps were passed over not long before.
        before: Vec<u64>,
    },
    /// Ranks that compute different gradients from the same samples. The parameters are as they were before the step.
    #[error("spot check at step {step}: {finding}; nothing was updated")]
    SpotCheck {
        /// The step.
        step: u64,
        /// Who computes what differently.
        finding: Box<Finding>,
    },
    /// Numbers that are not finite, however small the loss scale.
    #[error("step {step}: {fault}, also with a loss scale of {scale}; f16 will not do here, bf16 or f32 may")]
    ScaleTooSmall {
        /// The step.
        step: u64,
        /// The scale that would be next.
        scale: f64,
        /// What was first at fault.
        fault: Fault,
    },
}

impl Error {
    /// Whether every rank has the same to say.
    pub fn is_everyones(&self) -> bool {
        match self {
            Error::Options(_) | Error::Recipe { .. } | Error::Recipes(_) => true,
            Error::AllFrozen | Error::Checkpoint(_) => true,
            Error::NotFinite { .. } | Error::ScaleTooSmall { .. } | Error::NothingToLearn { .. } => true,
            Error::Outlier { .. } | Error::Outliers { .. } | Error::SpotCheck { .. } => true,
            Error::Model { .. } | Error::Backward { .. } | Error::Zero(_) | Error::Comm(_) => false,
            Error::MicroBatches { .. } | Error::Data { .. } | Error::Text(_) => false,
            Error::Source { .. } => false,
            Error::OutOfMemory(_) | Error::Broken { .. } => false,
        }
    }

    /// Whether a trainer whose call returned this is as it was before that call.
    fn leaves_trainer_as_it_was(&self) -> bool {
        match self {
            // Found before anything is done.
            Error::MicroBatches { .. } | Error::NothingToLearn { .. } | Error::Options(_) => true,
            // Found before anything is updated, with the gradients discarded.
            Error::NotFinite { .. } | Error::ScaleTooSmall { .. } => true,
            Error::Outlier { .. } | Error::SpotCheck { .. } => true,
            _ => false,
        }
    }

    /// What went wrong between ranks, if that is what it is about.
    pub fn between_ranks(&self) -> Option<&shardwise_comm::Error> {
        match self {
            Error::Comm(error) | Error::Zero(shardwise_zero::Error::Comm { error, .. }) => Some(error),
            _ => None,
        }
    }

    /// Whether there was no memory left.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Error::OutOfMemory(_)) || self.out_of_memory().is_some()
    }

    /// What libtorch says of memory that there was not, if that is what it is about.
    pub(crate) fn out_of_memory(&self) -> Option<shardwise_torch::OutOfMemory> {
        match self {
            Error::Model { error: shardwise_model::Error::Torch(error), .. } => error.out_of_memory(),
            Error::Backward { error, .. } => error.out_of_memory(),
            Error::Zero(shardwise_zero::Error::Torch { error, .. }) => error.out_of_memory(),
            _ => None,
        }
    }

    /// What was being done when it went wrong, and to which unit. `phase` is what the rank was at.
    pub(crate) fn place(&self, phase: Phase) -> String {
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
