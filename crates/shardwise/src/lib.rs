//! Trains models that do not fit on one device, from Rust: ZeRO stages 0 to 3 (FSDP-style sharding) on libtorch, MPI and NCCL.
//!
//! The same program runs on one rank or on a thousand. This one trains a small Llama at stage 3 on synthetic sequences:
//!
//! ```
//! use shardwise::model::{Batch, LlamaConfig, Model};
//! use shardwise::tch::Tensor;
//! use shardwise::{AdamW, BatchSize, Optimizer, Options, Schedule, Sharding, Trainer, init};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let ranks = shardwise::ranks()?; // started by mpirun, or this process alone
//!     let config = LlamaConfig::new(64, 32, 2, 4, 96); // vocab, hidden size, layers, heads, intermediate size
//!     let model = Model::from_config(config)?;
//!     let options = Options::new(
//!         Sharding::stage(3)?, // shard parameters, gradients and optimizer state
//!         Optimizer::AdamW(AdamW::default()),
//!         Schedule::constant(3e-3),
//!     );
//!     let mut trainer = Trainer::new(model, ranks.clone(), options, &mut init::from_seed(1))?;
//!
//!     // Sample n counts up from n. A sample depends on its index alone.
//!     let counting = |indices: &[u64]| {
//!         let row = |from: i64| indices.iter().flat_map(move |n| (0..16).map(move |i| (*n as i64 + from + i) % 64));
//!         let rows = |from| Tensor::from_slice(&row(from).collect::<Vec<i64>>()).view([-1, 16]);
//!         Ok(Batch::new(rows(0), rows(1)))
//!     };
//! #   let mut losses = Vec::new();
//!     trainer.train(&counting, BatchSize { micro_batch_size: 8, gradient_accumulation_steps: 1 }, 20, &mut |report| {
//!         if ranks.world.rank() == 0 {
//!             println!("step {:>2}  loss {:.3}", report.step, report.loss);
//!         }
//! #       losses.push(report.loss);
//!     })?;
//! #   assert!(losses[19] < 0.8 * losses[0], "it learns to count");
//!     Ok(())
//! }
//! ```
//!
//! ```sh
//! cargo build --release
//! mpirun -n 4 target/release/my-program
//! ```
//!
//! # Overview
//!
//! | to | see |
//! | --- | --- |
//! | train, evaluate, generate | [`Trainer`], [`generate`] |
//! | choose stage, precision, activation checkpointing, schedule | [`Options`], [`Sharding`], [`Precision`], [`Schedule`] |
//! | write your own model | [`model::Layer`], [`model::Unit`], [`model::Model::new`]; `examples/vision.rs` |
//! | write your own optimizer | [`Elementwise`]; `examples/optimizer.rs` |
//! | train on your own data | [`Source`]; `examples/data.rs` |
//! | tokenize text, read corpora, order samples | [`data`] |
//! | save and resume | [`save`], [`Trainer::resume`], [`checkpoint`] |
//! | load Hugging Face weights | [`init::from_weights`], [`model::ModelConfig::from_hugging_face`] |
//! | use groups of ranks and collectives | [`Ranks`], [`comm`] |
//!
//! Recipes, the supervisor and the launcher belong to the `shardwise` program and are not part of this crate.
//!
//! # Note: stability
//! This crate is the public interface, and it is small: it has only the names that programs need. The crates behind it are internal
//! and may change at any time. Enums and structs that may grow are `#[non_exhaustive]`.

#![forbid(unsafe_code)]

use std::sync::Arc;

pub use shardwise_torch::tch;
pub use shardwise_train::{
    ActivationCheckpointing, BatchSize, DynamicScale, Error, Evaluation, Gradients, LossScale, NonFiniteValue,
    OnNonFinite, Options, Probe, Progress, Ranks, Report, Result, Sampling, Schedule, Source, SourceError, StepPhase,
    Trainer, generate,
};
pub use shardwise_zero::{AdamW, Bytes, Elements, Elementwise, Groups, Lamb, Optimizer, Precision, Sgd, Sharding};

/// Learning rate schedules: the kinds of [`Schedule`].
pub mod schedule {
    pub use shardwise_train::{Kind, LrAndMomentum};
}

/// Spikes of the loss or the gradient norm: look for them between [`Trainer::compute_gradients`] and [`Trainer::apply_update`].
pub mod spikes {
    pub use shardwise_run::{Error, GradientShare, OnSpike, Spike, SpikeDetector, SpikedMetric};
}

/// Parameter initialization.
pub mod init {
    pub use shardwise_train::init::{ParameterInit, from_seed, from_weights};
    pub use shardwise_zero::{FloatsMut, InitError};
}

/// Built-in models, and the parts of custom ones: a model is a chain of units.
pub mod model {
    pub use shardwise_model::init::splitmix64;
    pub use shardwise_model::{
        Activations, Batch, Cache, ConfigError, Error, Footprint, Gpt2Config, IGNORED, Init, Layer, Llama3Rope,
        LlamaConfig, Model, ModelConfig, Parameter, Parameters, Pass, PassShape, Result, RopeScaling, TensorParallel,
        Tied, Unit, YarnRope, head_loss,
    };
    pub use shardwise_plan::{Split, TensorPlacement};
}

/// The error and result types of custom optimizers.
pub mod optimizer {
    pub use shardwise_torch::{Error, Result};
}

/// Groups of ranks and their collectives.
pub mod comm {
    pub use shardwise_comm::{Error, Group, Pending, ReduceOp, Result, mpi, single};
    pub use shardwise_plan::{Axis, Dtype, Mesh};
}

/// Tokenizers, corpora, and a sample order that needs no index in memory.
pub mod data {
    pub use shardwise_data::{
        ChatTemplate, Conversation, Corpus, Error, Inputs, Message, Mixture, Options, PackedConversations,
        PackedWindow, Permutation, Progress, Result, Sample, Summary, Tokenizer, Windows, tokenize,
    };
}

/// Checkpoints, which any number of ranks can read, and Hugging Face weights.
pub mod checkpoint {
    pub use serde_json::{Value, json};
    pub use shardwise_checkpoint::hugging_face::Weights;
    pub use shardwise_checkpoint::{Checkpoint, Error, Manifest, Result, Store};
}

/// Initializes this rank: connects to the other ranks that the launcher (`mpirun`, `srun`) started. Without a launcher, the world
/// has one rank.
///
/// Call it once per process, before creating tensors: from then on memory freed by tensors is cached for the next ones. The groups
/// are those of `shardwise train`: one for shards and one for the whole world, so that calls of one do not wait for calls of the
/// other. For other groups, use [`parallel_ranks`], or [`Ranks::on_mesh`] and [`comm::mpi::world`].
///
/// Ranks end together: a rank that is done waits for the others when it drops its groups. If a rank fails, because its `main`
/// returns an error, it panics, or it calls [`comm::Group::abort`], the launcher ends the others within seconds, long before
/// their calls time out. `mpirun` does so by default, `srun` with `--kill-on-bad-exit=1`.
pub fn ranks() -> Result<Ranks> {
    parallel_ranks(1, 1)
}

/// Like [`ranks`], for `replicas` replicas of the model (hybrid sharding) whose layers are each shared by `tensor` consecutive ranks
/// (tensor parallelism). What is left of the ranks shards each replica.
pub fn parallel_ranks(replicas: usize, tensor: usize) -> Result<Ranks> {
    shardwise_torch::enable_caching_allocator();
    Ranks::parallel(Arc::new(comm::mpi::world(comm::mpi::Options::default())?), replicas, tensor)
}

/// Saves a checkpoint and waits until it is complete. All ranks call it together. `about` is a JSON object that describes the
/// run; the manifest stores it.
pub fn save(trainer: &mut Trainer, store: &Arc<checkpoint::Store>, about: checkpoint::Value) -> Result<()> {
    shardwise_run::save(trainer, store, about).map_err(|error| match error {
        shardwise_run::Error::Train(error) => error,
        error => Error::Checkpoint(error.to_string()),
    })
}
