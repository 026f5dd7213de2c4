//! Parameters, gradients and optimizer state in slices across ranks.
//!
//! A [`ShardedUnit`] holds one unit of a model: a few named tensors that are gathered, computed with, and reduced together.
//! They are views of one flat buffer. What of it a rank keeps between uses is said by [`Sharding`]; there is one code for all
//! of ZeRO's stages. Whoever trains calls `gather`, `release`, `add_gradients`, `reduce`, `update` by name; nothing happens
//! by itself.
//!
//! # Note: the same bits at every stage
//! An element is always reduced by the rank that owns it, in rank order, and always updated by the same kernel call: the one
//! for its parameter's part of its owner's slice. Where a rank has the whole (stage 0) it makes that call for each owner in turn, because a vector
//! kernel may round an element at the end of its range differently from one in the middle. So stages differ in who does the
//! work and who keeps the result, and in nothing else.
//!
//! This crate does not know what a unit computes: no attention here, no loss.

#![forbid(unsafe_code)]

mod sharding;
mod unit;

pub use sharding::Sharding;
pub use unit::{Shape, ShardedUnit, Start};

/// The result of an operation on sharded state.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// libtorch refused.
    #[error("unit {unit}: {error}")]
    Torch {
        /// The unit at fault.
        unit: String,
        /// What libtorch says.
        error: shardwise_torch::Error,
    },
    /// Communication failed.
    #[error("unit {unit}: {error}")]
    Comm {
        /// The unit at fault.
        unit: String,
        /// What went wrong.
        error: shardwise_comm::Error,
    },
    /// There is no such stage.
    #[error("there is no ZeRO stage {0}; stages are 0 to 3")]
    Stage(u8),
}
