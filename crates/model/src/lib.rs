//! Plain transformer maths: the Llama family and GPT-2 as chains of units.
//!
//! A [`Model`] is a chain of [`Unit`]s: the embedding, the blocks, the head. A unit says which parameters it has (name,
//! shape, how they begin) and computes its output from its input and those parameters. It owns no tensor: whoever runs it
//! hands it the parameters, whole, in the order in which it named them. So this crate knows nothing of ranks, sharding,
//! precision or optimizers, and the code that does knows nothing of attention.
//!
//! Parameters have the names and shapes that Hugging Face checkpoints give them.

#![forbid(unsafe_code)]

mod attention;
mod cache;
mod documents;
mod gpt2;
mod head;
pub mod hugging_face;
pub mod init;
mod llama;
mod loss;
mod recompute;
mod unit;

pub use cache::Cache;
pub use gpt2::Gpt2;
pub use llama::{Llama, Llama3Rope};
pub use loss::{IGNORED, head_loss};
pub use recompute::Activations;
pub use unit::{Batch, Footprint, Init, Layer, Model, Parameter, Parameters, Unit};

use shardwise_torch::tch::TchError;

/// The result of a unit's computation.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong in a model.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A configuration that no model has.
    #[error("{key}: {problem}")]
    Config {
        /// The key at fault.
        key: &'static str,
        /// What is wrong with it, and what would be right.
        problem: String,
    },
    /// libtorch refused.
    #[error(transparent)]
    Torch(#[from] shardwise_torch::Error),
}

impl From<TchError> for Error {
    fn from(error: TchError) -> Self {
        Error::Torch(error.into())
    }
}
