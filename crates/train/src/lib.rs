//! The training step: where a model meets its shards.
//!
//! [`Trainer::step`] is the algorithm on a page. It walks the units of a model forward and backward and calls `gather`,
//! `forward`, `release`, `backward`, `reduce` and `update` by name.

#![forbid(unsafe_code)]

pub mod data;
mod fault;
pub mod fit;
mod generate;
mod options;
mod plot;
pub mod recipe;
mod resume;
mod run;
mod saving;
mod scale;
mod schedule;
pub mod start;
mod state;
mod step;
mod trained;

pub use fault::{Fault, OnNotFinite};
pub use generate::{Sampling, generate};
pub use options::{Accumulation, Options, Ranks, Recomputation};
pub use recipe::Recipe;
pub use run::{Line, run};
pub use saving::{Asked, save};
pub use scale::LossScale;
pub use schedule::{Kind, Pace, Schedule};
pub use state::Progress;
pub use step::{Evaluation, Report, Trainer};
pub use trained::{Figures, Wanted, evaluate, write_text};

/// The result of a step.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong in a step.
#[derive(Debug, thiserror::Error)]
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
    /// A checkpoint that cannot be gone on from, or a place for them that cannot be used.
    #[error("{0}")]
    Checkpoint(String),
    /// Parameters that could not be copied for a checkpoint.
    #[error("a copy for the checkpoint: {0}")]
    Copy(String),
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
            Error::Model { .. } | Error::Backward { .. } | Error::Zero(_) | Error::Comm(_) => false,
            Error::MicroBatches { .. } | Error::Data { .. } | Error::Text(_) | Error::Copy(_) => false,
        }
    }
}
