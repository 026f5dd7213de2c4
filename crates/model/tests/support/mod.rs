//! Small models with parameters that differ from each other everywhere.

use shardwise_model::{Gpt2Config, Init, LlamaConfig, Model, ModelConfig, QkNorm};
use shardwise_torch::tch::{Device, Kind, Tensor};

/// Norms and biases included.
pub(crate) fn parameters(model: &Model) -> Vec<Vec<Tensor>> {
    let begin = |shape: &[i64], init: Init| match init {
        Init::Normal { .. } => Tensor::randn(shape, (Kind::Float, Device::Cpu)) * 0.08,
        Init::Ones => Tensor::randn(shape, (Kind::Float, Device::Cpu)) * 0.1 + 1.,
        Init::Zeros => Tensor::randn(shape, (Kind::Float, Device::Cpu)) * 0.1,
        Init::Weights => unreachable!("a built-in model draws its values"),
    };
    let units = model.units().iter();
    units.map(|unit| unit.parameters().iter().map(|p| begin(&p.shape, p.init)).collect()).collect()
}

/// One of each kind of attention, by name.
#[allow(dead_code, reason = "not every test wants all")]
pub(crate) fn variants(vocab_size: usize, n_positions: usize) -> Vec<(&'static str, Model)> {
    let small = LlamaConfig { loss_chunk_tokens: 10, ..LlamaConfig::new(vocab_size, 36, 2, 6, 52) };
    let gpt2 = Gpt2Config { loss_chunk_tokens: 10, ..Gpt2Config::new(vocab_size, n_positions, 36, 2, 6) };
    let configs: [(&str, ModelConfig); 7] = [
        ("Llama 2", small.clone().into()),
        ("Llama 3", LlamaConfig { num_key_value_heads: 2, tie_word_embeddings: true, ..small.clone() }.into()),
        ("Mistral", LlamaConfig { num_key_value_heads: 3, sliding_window: Some(5), ..small.clone() }.into()),
        ("Qwen 2", LlamaConfig { num_key_value_heads: 2, qkv_bias: true, ..small.clone() }.into()),
        (
            "Qwen 3",
            LlamaConfig { num_key_value_heads: 2, head_dim: 8, qk_norm: Some(QkNorm::PerHead), ..small.clone() }.into(),
        ),
        ("OLMoE", LlamaConfig { num_key_value_heads: 2, qk_norm: Some(QkNorm::AllHeads), ..small }.into()),
        ("GPT-2", gpt2.into()),
    ];
    configs.into_iter().map(|(name, config)| (name, Model::from_config(config).unwrap())).collect()
}
