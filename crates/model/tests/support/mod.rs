//! Small models with parameters that differ from each other everywhere.

use shardwise_model::{Gpt2, Init, Llama, Model};
use shardwise_torch::tch::{Device, Kind, Tensor};

/// Norms and biases included.
pub(crate) fn parameters(model: &Model) -> Vec<Vec<Tensor>> {
    let begin = |shape: &[i64], init: Init| match init {
        Init::Normal { .. } => Tensor::randn(shape, (Kind::Float, Device::Cpu)) * 0.08,
        Init::Ones => Tensor::randn(shape, (Kind::Float, Device::Cpu)) * 0.1 + 1.,
        Init::Zeros => Tensor::randn(shape, (Kind::Float, Device::Cpu)) * 0.1,
    };
    let units = model.units().iter();
    units.map(|unit| unit.parameters().iter().map(|p| begin(&p.shape, p.init)).collect()).collect()
}

/// One of each kind of attention, by name.
#[allow(dead_code, reason = "not every test wants all")]
pub(crate) fn variants(vocab_size: usize, n_positions: usize) -> Vec<(&'static str, Model)> {
    let small = Llama { loss_chunk_tokens: 10, ..Llama::new(vocab_size, 36, 2, 6, 52) };
    vec![
        ("Llama 2", small.model().unwrap()),
        ("Llama 3", Llama { num_key_value_heads: 2, tie_word_embeddings: true, ..small.clone() }.model().unwrap()),
        ("Mistral", Llama { num_key_value_heads: 3, sliding_window: Some(5), ..small.clone() }.model().unwrap()),
        ("Qwen 2", Llama { num_key_value_heads: 2, qkv_bias: true, ..small.clone() }.model().unwrap()),
        ("Qwen 3", Llama { num_key_value_heads: 2, head_dim: 8, qk_norm: true, ..small }.model().unwrap()),
        ("GPT-2", Gpt2 { loss_chunk_tokens: 10, ..Gpt2::new(vocab_size, n_positions, 36, 2, 6) }.model().unwrap()),
    ]
}
