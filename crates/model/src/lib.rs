//! Transformer models as chains of units: the Llama family, GPT-2, and any model as a compiled package.
//!
//! A [`Model`] is a chain of [`Unit`]s: the embedding, the blocks, the head. A unit declares its parameters (name, shape, initial
//! values) and computes its output from its input and those parameters. It owns no tensors: the caller passes unsharded parameters
//! in the declared order. So this crate knows nothing about sharding, precision or optimizers, and the code that does knows
//! nothing about attention. Layers that are split among ranks get the verbs of tensor parallelism ([`TensorParallel`]) as an
//! argument.
//!
//! Parameters have the names and shapes that Hugging Face checkpoints give them.
//!
//! ```
//! use shardwise_model::{Activations, Batch, Layer, LlamaConfig, Model, Parameter, Parameters, Pass, Result, Unit};
//! use shardwise_torch::tch::{Kind, Tensor};
//!
//! // A built-in model.
//! let config = LlamaConfig { tie_word_embeddings: true, ..LlamaConfig::new(256, 64, 2, 4, 160) };
//! let llama = Model::from_config(config)?;
//! let names: Vec<&str> = llama.units().iter().map(Unit::name).collect();
//! assert_eq!(names, ["embedding", "block.0", "block.1", "head"]);
//!
//! // A custom model: a single unit, which is the first and the last.
//! struct Line;
//!
//! impl Layer for Line {
//!     fn forward(&self, p: &Parameters<'_>, _: Option<&Tensor>, batch: &Batch, _: &Pass) -> Result<Tensor> {
//!         let missed = batch.inputs.f_matmul(p.get("slope"))?.f_sub(&batch.targets)?;
//!         Ok(missed.f_square()?.f_sum(Kind::Float)?)
//!     }
//! }
//!
//! let line = Model::new(vec![Unit::new("line", vec![Parameter::matrix("slope", [1, 1], 0.02)], Line)])?;
//! let batch = Batch::new(Tensor::from_slice(&[1f32, 2.]).view([2, 1]), Tensor::from_slice(&[2f32, 4.]).view([2, 1]));
//! let slope = [Tensor::from_slice(&[3f32]).view([1, 1])];
//! let loss = line.units()[0].forward(&slope, None, None, &batch, &Pass::new(Activations::All))?;
//! assert_eq!(loss.double_value(&[]), 5.);
//! # Ok::<(), shardwise_model::Error>(())
//! ```

#![forbid(unsafe_code)]

mod activation_checkpointing;
mod attention;
mod cache;
mod chunked_head;
mod compiled;
mod context_batch;
mod context_costs;
mod context_parallel;
mod documents;
mod exchange_group;
mod expert_bias;
mod expert_costs;
mod expert_parallel;
mod experts;
mod feed_forward_costs;
mod from_config;
mod gpt2;
mod head;
mod head_exchange;
pub mod init;
mod linear;
mod llama;
mod loss;
mod package;
mod parallel_linear;
mod parameter;
mod pass;
mod ring_attention;
mod rotary;
mod router;
mod row_pieces;
mod sequence_chunks;
mod tensor_parallel;
mod unit;
mod unit_functions;

pub use activation_checkpointing::Activations;
pub use attention::may_use_flash_attention;
pub use cache::Cache;
pub use context_batch::ContextBatch;
pub use context_parallel::ContextParallel;
pub use documents::Documents;
pub use exchange_group::ExchangeGroup;
pub use expert_bias::ExpertBias;
pub use expert_parallel::ExpertParallel;
pub use experts::ExpertTokens;
pub use linear::{DeferredGradients, Linear};
pub use loss::{IGNORED, head_loss};
pub use parameter::{Init, Parameter};
pub use pass::{Pass, PassShape};
pub use tensor_parallel::{PendingTensor, TensorGroup, TensorParallel, cut};
pub use unit::{Batch, Footprint, Layer, Model, Parameters, Tied, Unit};

pub use shardwise_plan::package::Package;
pub use shardwise_plan::{
    ConfigError, Gpt2Config, Llama3Rope, LlamaConfig, ModelConfig, MoeConfig, MoeNames, QkNorm, RopeScaling,
    RouterConfig, ScoringFunc, YarnRope,
};
use shardwise_torch::tch::TchError;

/// The result of building or running a model.
pub type Result<T> = std::result::Result<T, Error>;

/// An error in a model's configuration or computation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An invalid configuration.
    #[error("{key}: {problem}")]
    Config {
        /// The key at fault.
        key: &'static str,
        /// The problem, and how to fix it.
        problem: String,
    },
    /// A libtorch operation failed.
    #[error(transparent)]
    Torch(#[from] shardwise_torch::Error),
    /// A collective inside a layer failed.
    #[error("{0}")]
    Communication(shardwise_torch::autograd::ClosureError),
}

impl From<ConfigError> for Error {
    fn from(ConfigError { key, problem }: ConfigError) -> Self {
        Error::Config { key, problem }
    }
}

impl From<TchError> for Error {
    fn from(error: TchError) -> Self {
        Error::Torch(error.into())
    }
}
