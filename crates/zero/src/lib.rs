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
//!
//! ```
//! use std::sync::Arc;
//!
//! use shardwise_comm::single;
//! use shardwise_torch::tch::{Device, Kind, Tensor};
//! use shardwise_zero::{Groups, Layout, Optimizer, Pool, Precision, Sgd, Shape, ShardedUnit, Sharding};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let sgd = Optimizer::Sgd(Sgd { rate: 0.1, momentum: 0., weight_decay: 0. });
//! let layout = Layout {
//!     groups: Groups::sharded(Arc::new(single::group())),
//!     sharding: Sharding::stage(3)?,
//!     precision: Precision::F32,
//!     states: sgd.states(),
//!     pool: Arc::new(Pool::new(Device::Cpu)),
//! };
//! let shapes = [Shape { dimensions: vec![2, 3], decays: true, trainable: true }];
//! let mut unit = ShardedUnit::new("block.0", &shapes, layout, &mut |_parameter, _range, elements| {
//!     elements.fill(1.);
//!     Ok(())
//! })?;
//!
//! unit.gather()?; // … the forward and backward pass …
//! unit.release()?;
//! unit.add_gradient(0, &Tensor::ones([2, 3], (Kind::Float, Device::Cpu)))?;
//! unit.begin_reduce()?; // … the next unit's backward pass …
//! unit.finish_reduce()?;
//! unit.update(&sgd, 1.)?;
//!
//! unit.gather()?;
//! assert!((unit.parameters()[0].double_value(&[1, 2]) - 0.9).abs() < 1e-6);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod error;
mod flat;
mod optimizer;
mod pool;
mod sharding;
mod unit;

pub use error::{Error, Result, StartError};
pub use optimizer::{Elements, Elementwise, Lamb, Optimizer, Own, Sgd};
pub use pool::Pool;
pub use sharding::{Groups, Precision, Sharding};
pub use shardwise_torch::optim::AdamW;
pub use unit::{Bytes, Layout, Saved, Shape, ShardedUnit, Start, StateStart};
