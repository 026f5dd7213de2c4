//! Small models whose sizes hardly divide evenly.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

pub(crate) mod bits;

use shardwise_model::{Gpt2Config, LlamaConfig, Model};

pub(crate) const VOCAB_SIZE: i64 = 101;

pub(crate) fn llama() -> Model {
    let llama = LlamaConfig {
        num_key_value_heads: 3,
        loss_chunk_tokens: 10,
        ..LlamaConfig::new(VOCAB_SIZE as usize, 36, 3, 6, 53)
    };
    Model::from_config(llama).unwrap()
}

pub(crate) fn gpt2() -> Model {
    Model::from_config(Gpt2Config::new(VOCAB_SIZE as usize, 16, 36, 2, 6)).unwrap()
}
