//! The training step: where a model meets its shards.
//!
//! [`Trainer::step`] is the algorithm on a page. It walks the units of a model forward and backward and calls `gather`,
//! `forward`, `release`, `backward`, `reduce` and `update` by name.

#![forbid(unsafe_code)]

mod step;

pub use step::{Options, Recomputation, Report, Trainer};

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
    /// Numbers that are not finite. The parameters are as they were before the step.
    #[error("step {step}: the gradients of unit {unit} are not finite; nothing was updated")]
    NotFinite {
        /// The step.
        step: u64,
        /// The first unit at fault.
        unit: String,
    },
}
