//! ZeRO: parameters, gradients and optimizer state sharded across ranks.
//!
//! A [`ShardedUnit`] is one unit of a model: a few parameters that are gathered, used and reduced together (FSDP2: a module
//! with `fully_shard`). They are views of flat buffers, of trainable and of frozen parameters, for each set of ranks that they are
//! sharded among. [`Sharding`] selects what is sharded; all ZeRO stages share the same code. There are no hooks: the trainer calls
//! each step by name.
//!
//! | here | FSDP2 |
//! | --- | --- |
//! | [`ShardedUnit::start_gather`], [`ShardedUnit::gather`] | `unshard` |
//! | [`ShardedUnit::release`] | `reshard` |
//! | [`ShardedUnit::add_gradient`] | accumulation into `unsharded_accumulated_grad` |
//! | [`ShardedUnit::start_reduce`], [`ShardedUnit::finish_reduce`] | `post_backward`: reduce-scatter, then all-reduce for HSDP |
//! | [`ShardedUnit::update`] | `optimizer.step()` |
//!
//! # Note: the same bits at every stage
//! An element is always reduced by the rank that owns it, in rank order, and always updated by the same kernel calls: one for
//! each chunk of the range that its parameter occupies in its owner's shard. A rank that has everything (stage 0) makes these
//! calls for each owner in turn, because libtorch's vector kernels may round an element at the end of its range differently from one in
//! the middle. So the stages differ only in which rank does the work and which ranks keep the result.
//!
//! This crate does not know what a unit computes: it contains no attention and no loss.
//!
//! ```
//! use std::sync::Arc;
//!
//! use shardwise_comm::single;
//! use shardwise_torch::tch::{Device, Kind, Tensor};
//! use shardwise_zero::{Groups, Layout, OffloadTargets, Optimizer, ParameterSpec, Pool, Precision, Sgd, ShardedUnit, Sharding};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let sgd = Optimizer::Sgd(Sgd { lr: 0.1, momentum: 0., weight_decay: 0. });
//! let layout = Layout {
//!     groups: Groups::sharded(Arc::new(single::group())),
//!     parts: None,
//!     sharding: Sharding::stage(3)?,
//!     precision: Precision::F32,
//!     states: sgd.states(),
//!     pool: Arc::new(Pool::new(Device::Cpu)),
//!     offload: OffloadTargets::default(),
//! };
//! let specs = [ParameterSpec { shape: vec![2, 3], decays: true, trainable: true, layout: 0, adds_gradient: true }];
//! let mut unit = ShardedUnit::new("block.0", &specs, &[layout], &mut |_parameter, _range, elements| {
//!     elements.fill(1.);
//!     Ok(())
//! })?;
//!
//! unit.gather()?; // … the forward and backward pass …
//! unit.release()?;
//! unit.add_gradient(0, &Tensor::ones([2, 3], (Kind::Float, Device::Cpu)))?;
//! unit.start_reduce()?; // … the next unit's backward pass …
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
mod flat_parameter;
mod host_memory;
mod offload;
mod offload_target;
mod optimizer;
mod pool;
mod scratch_file;
mod sharded_buffer;
mod sharding;
mod unit;

pub use error::{Error, InitError, Result};
pub use host_memory::HostMemory;
pub use offload::Offloaded;
pub use offload_target::OffloadTarget;
pub use optimizer::{CustomOptimizer, Elements, Elementwise, Lamb, Optimizer, Sgd};
pub use pool::Pool;
pub use scratch_file::{Moved, ScratchFile};
pub use sharded_buffer::{Bytes, CheckpointTensor, InitFn, Layout, OffloadTargets, ParameterSpec, StateInitFn};
pub use sharding::{Groups, Precision};
pub use shardwise_plan::FloatsMut;
pub use shardwise_plan::program::{Sharding, StageError};
pub use shardwise_torch::optim::AdamW;
pub use unit::ShardedUnit;
