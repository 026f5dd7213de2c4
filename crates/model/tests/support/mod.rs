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
pub(crate) fn variants(vocabulary: usize, positions: usize) -> Vec<(&'static str, Model)> {
    let small = Llama { head_chunk: 10, ..Llama::new(vocabulary, 36, 2, 6, 52) };
    vec![
        ("Llama 2", small.model().unwrap()),
        ("Llama 3", Llama { kv_heads: 2, tied: true, ..small.clone() }.model().unwrap()),
        ("Mistral", Llama { kv_heads: 3, window: Some(5), ..small.clone() }.model().unwrap()),
        ("Qwen 2", Llama { kv_heads: 2, qkv_bias: true, ..small.clone() }.model().unwrap()),
        ("Qwen 3", Llama { kv_heads: 2, head_width: 8, qk_norm: true, ..small }.model().unwrap()),
        ("GPT-2", Gpt2 { head_chunk: 10, ..Gpt2::new(vocabulary, positions, 36, 2, 6) }.model().unwrap()),
    ]
}
