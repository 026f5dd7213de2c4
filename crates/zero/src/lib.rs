//! Parameters, gradients and optimizer state in slices across ranks.
//!
//! A [`ShardedUnit`] holds one unit of a model: a few named tensors that are gathered, computed with, and reduced together.
//! They are views of two flat buffers, of what is trained and of what is not. What of them a rank keeps between uses is said by
//! [`Sharding`]; there is one code for all of ZeRO's stages. Whoever trains calls `gather`, `release`, `add_gradient`,
//! `begin_reduce`, `update` by name; nothing happens by itself.
//!
//! # Note: the same bits at every stage
//! An element is always reduced by the rank that owns it, in rank order, and always updated by the same kernel calls: those
//! for its parameter's part of its owner's slice, cut into chunks from the beginning of that part. Where a rank has the whole
//! (stage 0) it makes those calls for each owner in turn, because a vector kernel may round an element at the end of its range
//! differently from one in the middle. So stages differ in who does the work and who keeps the result, and in nothing else.
//!
//! This crate does not know what a unit computes: no attention here, no loss.

#![forbid(unsafe_code)]

mod error;
mod flat;
mod optimizer;
mod pool;
mod sharding;
mod unit;

pub use error::{Error, Result, StartError};
pub use optimizer::{Lamb, Optimizer, Sgd};
pub use pool::Pool;
pub use sharding::{Groups, Precision, Sharding};
pub use shardwise_torch::optim::AdamW;
pub use unit::{Bytes, Layout, Saved, Shape, ShardedUnit, Start, StateStart};
