//! Trains models that do not fit on one device, from Rust: ZeRO's stages and FSDP-style sharding, on libtorch, MPI and NCCL.
//!
//! A program is the same for one rank and for a thousand. This one trains a small Llama at stage 3, on sequences that it makes up:
//!
//! ```
//! use shardwise::model::{Batch, Llama};
//! use shardwise::tch::Tensor;
//! use shardwise::{AdamW, Optimizer, Options, Portion, Schedule, Sharding, Trainer, start};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let ranks = shardwise::ranks()?; // those that mpirun has started, or this process alone
//!     let model = Llama::new(64, 32, 2, 4, 96).model()?; // vocabulary, width, blocks, heads, width of the MLP
//!     let options = Options::new(
//!         Sharding::stage(3)?, // parameters, gradients and optimizer state in slices
//!         Optimizer::AdamW(AdamW::default()),
//!         Schedule::constant(3e-3),
//!     );
//!     let mut trainer = Trainer::new(model, ranks.clone(), options, &mut start::from_seed(1))?;
//!
//!     // Sample n begins with n and counts. Whoever asks for it gets the same.
//!     let counting = |numbers: &[u64]| {
//!         let row = |from: i64| numbers.iter().flat_map(move |n| (0..16).map(move |i| (*n as i64 + from + i) % 64));
//!         let rows = |from| Tensor::from_slice(&row(from).collect::<Vec<i64>>()).view([-1, 16]);
//!         Ok(Batch::new(rows(0), rows(1)))
//!     };
//! #   let mut losses = Vec::new();
//!     trainer.train(&counting, Portion { samples: 8, micro_batches: 1 }, 20, &mut |report| {
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
//! # What is where
//!
//! | you want | look at |
//! | --- | --- |
//! | to train, evaluate, generate | [`Trainer`], [`generate`] |
//! | stages, precision, recomputation, schedules | [`Options`], [`Sharding`], [`Precision`], [`Schedule`] |
//! | a model of your own | [`model::Layer`], [`model::Unit`], [`model::Model::new`]; `examples/vision.rs` |
//! | an optimizer of your own | [`Elementwise`]; `examples/optimizer.rs` |
//! | data of your own | [`Source`]; `examples/data.rs` |
//! | text as tokens: tokenizers, corpora, an order of samples | [`data`] |
//! | to save and to go on | [`save`], [`Trainer::resumed`], [`checkpoint`] |
//! | weights of Hugging Face's | [`start::from_weights`], [`model::hugging_face`] |
//! | groups of ranks, and to talk between them | [`Ranks`], [`comm`] |
//!
//! What is in a recipe (`shardwise train`) and around it, its supervisor and its launcher, is the program's and not here.
//!
//! # Note: what stays
//! This crate is the face that others build on, so it is small: a name is here when programs need it. The crates behind it are
//! for Shardwise's own use, and change as it needs. Enums and structs that will grow are marked so; errors are matched with a
//! last arm for those to come.

#![forbid(unsafe_code)]

use std::sync::Arc;

pub use shardwise_torch::tch;
pub use shardwise_train::{
    Accumulation, DynamicScale, Error, Evaluation, Fault, LossScale, OnNotFinite, OnOutlier, Options, Outlier, Portion,
    Progress, Ranks, Recomputation, Report, Result, Sampling, Schedule, Source, SourceError, Trainer, generate, save,
};
pub use shardwise_zero::{AdamW, Bytes, Elements, Elementwise, Groups, Lamb, Optimizer, Precision, Sgd, Sharding};

/// How a rate moves: the kinds of [`Schedule`].
pub mod schedule {
    pub use shardwise_train::{Kind, Pace};
}

/// What parameters begin with.
pub mod start {
    pub use shardwise_train::start::{Start, from_seed, from_weights};
    pub use shardwise_zero::StartError;
}

/// Models as chains of units: those that are here, and what one's own are made of.
pub mod model {
    pub use shardwise_model::init::mixed;
    pub use shardwise_model::{
        Activations, Batch, Cache, Error, Footprint, Gpt2, IGNORED, Init, Layer, Llama, Llama3Rope, Model, Parameter,
        Parameters, Result, Tied, Unit, head_loss, hugging_face,
    };
}

/// What an optimizer of one's own returns.
pub mod optimizer {
    pub use shardwise_torch::{Error, Result};
}

/// Groups of ranks, and the verbs they do together.
pub mod comm {
    pub use shardwise_comm::{Error, Group, Pending, Reduce, Result, mpi, single};
    pub use shardwise_plan::{Axis, Dtype, Mesh};
}

/// From text to tokens: tokenizers, corpora, and an order of samples that needs no list.
pub mod data {
    pub use shardwise_data::{
        ChatTemplate, Conversation, Corpus, Error, Inputs, Message, Mixture, Options, Packed, PackedWindow,
        Permutation, Progress, Result, Sample, Summary, Tokenizer, Windows, tokenize,
    };
}

/// What is on the disk: checkpoints that any number of ranks can read, and Hugging Face's layout.
pub mod checkpoint {
    pub use serde_json::{Value, json};
    pub use shardwise_checkpoint::hugging_face::Weights;
    pub use shardwise_checkpoint::{Checkpoint, Error, Manifest, Result, Store};
}

/// Starts this rank: finds the others that the launcher (`mpirun`, `srun`) has started, or stands alone where there was none.
///
/// A process does this once, before it makes tensors: the memory that tensors free is kept for the next ones from then on, as
/// steps want it. The groups are those that `shardwise train` uses, one for shards and one for what all ranks agree on, so that
/// neither's calls wait for the other's. Other groups, as for hybrid sharding or GPUs, are made with [`Ranks::hybrid`] and
/// [`comm::mpi::world`].
///
/// Ranks end together: a rank that is done waits for the others when it drops its groups. If one fails, because its `main`
/// returns an error, it panics or calls [`comm::Group::abort`], the launcher ends the others within seconds, long
/// before the time limit of their calls. `mpirun` does so by default, `srun` with `--kill-on-bad-exit=1`.
pub fn ranks() -> Result<Ranks> {
    shardwise_torch::keep_freed_memory();
    Ranks::hybrid(Arc::new(comm::mpi::world(comm::mpi::Options::default())?), 1)
}
