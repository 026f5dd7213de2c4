//! The configuration of a model, as plain data: the Llama family and GPT-2, with the fields of Hugging Face's `config.json`, and any
//! other model as a compiled package.
//!
//! A configuration can be checked without libtorch; `Model::from_config` in `shardwise-model` builds the model.

use std::sync::Arc;

use crate::config_error::ConfigError;
use crate::mixture_of_experts::MoeConfig;
use crate::package::Package;
use crate::rope_scaling::RopeScaling;

/// The configuration of a model: one of the supported families, or a compiled package.
#[derive(Clone, Debug, PartialEq)]
#[allow(clippy::large_enum_variant, reason = "a run has one")]
pub enum ModelConfig {
    /// Llama 2 and 3, Mistral and Mixtral, Qwen 2 and 3, OLMoE.
    Llama(LlamaConfig),
    /// GPT-2.
    Gpt2(Gpt2Config),
    /// Any PyTorch model, compiled ahead of time.
    Compiled(Arc<Package>),
}

/// The configuration of a model of the Llama family: Llama 2 and 3, Mistral and Mixtral, Qwen 2 and 3, dense or with a mixture of
/// experts. Fields are named as in Hugging Face's `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// The size of the vocabulary. All token ids are below it.
    pub vocab_size: usize,
    /// The size of the hidden states.
    pub hidden_size: usize,
    /// The number of transformer blocks.
    pub num_hidden_layers: usize,
    /// The number of query heads.
    pub num_attention_heads: usize,
    /// The number of key and value heads. Divides `num_attention_heads`.
    pub num_key_value_heads: usize,
    /// The size of a head; often `hidden_size / num_attention_heads`.
    pub head_dim: usize,
    /// The size of the MLP's hidden layer. A mixture of experts has its own.
    pub intermediate_size: usize,
    /// The experts that take the place of the MLP, in every block.
    pub moe: Option<MoeConfig>,
    /// The base of the rotary embedding's wavelengths.
    pub rope_theta: f64,
    /// How those wavelengths are stretched for long contexts.
    pub rope_scaling: Option<RopeScaling>,
    /// The epsilon that RMSNorm adds to the mean square.
    pub rms_norm_eps: f64,
    /// Whether the head shares the embedding's matrix.
    pub tie_word_embeddings: bool,
    /// Whether the query, key and value projections have biases, as in Qwen 2.
    pub qkv_bias: bool,
    /// How queries and keys are normalized, if they are.
    pub qk_norm: Option<QkNorm>,
    /// How many positions a position attends to, including itself, as in Mistral.
    pub sliding_window: Option<usize>,
    /// The standard deviation of initial weight matrices.
    pub initializer_range: f64,
    /// The number of tokens whose logits are in memory at once.
    pub loss_chunk_tokens: usize,
    /// How many tokens a block processes at a time, except in attention, if not all.
    pub block_chunk_tokens: Option<usize>,
}

/// What is normalized together of a position's queries or keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// A head, as in Qwen 3.
    PerHead,
    /// All heads, as in OLMoE.
    AllHeads,
}

/// The configuration of a GPT-2. Fields are named as in Hugging Face's `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpt2Config {
    /// The size of the vocabulary. All token ids are below it.
    pub vocab_size: usize,
    /// The maximum sequence length.
    pub n_positions: usize,
    /// The size of the hidden states.
    pub n_embd: usize,
    /// The number of transformer blocks.
    pub n_layer: usize,
    /// The number of attention heads. Divides `n_embd`.
    pub n_head: usize,
    /// The epsilon that LayerNorm adds to the variance.
    pub layer_norm_epsilon: f64,
    /// The standard deviation of initial weight matrices.
    pub initializer_range: f64,
    /// The number of tokens whose logits are in memory at once.
    pub loss_chunk_tokens: usize,
    /// How many tokens a block processes at a time, except in attention, if not all.
    pub block_chunk_tokens: Option<usize>,
}

impl ModelConfig {
    /// The size of the vocabulary. All token ids are below it.
    pub fn vocab_size(&self) -> usize {
        match self {
            ModelConfig::Llama(llama) => llama.vocab_size,
            ModelConfig::Gpt2(gpt2) => gpt2.vocab_size,
            ModelConfig::Compiled(package) => package.vocab_size().unwrap_or(0),
        }
    }

    /// The numbers of query heads and of key heads; `None` for a compiled model, whose attention is unknown.
    pub fn attention_heads(&self) -> Option<[usize; 2]> {
        match self {
            ModelConfig::Llama(llama) => Some([llama.num_attention_heads, llama.num_key_value_heads]),
            ModelConfig::Gpt2(gpt2) => Some([gpt2.n_head; 2]),
            ModelConfig::Compiled(_) => None,
        }
    }

    /// The number of positions that a position attends to, if it is limited.
    pub fn sliding_window(&self) -> Option<usize> {
        match self {
            ModelConfig::Llama(llama) => llama.sliding_window,
            ModelConfig::Gpt2(_) | ModelConfig::Compiled(_) => None,
        }
    }

    /// The experts that take the place of the MLP, if there are any.
    pub fn moe(&self) -> Option<&MoeConfig> {
        match self {
            ModelConfig::Llama(llama) => llama.moe.as_ref(),
            ModelConfig::Gpt2(_) | ModelConfig::Compiled(_) => None,
        }
    }

    /// How many tokens a block processes at a time, except in attention, if not all.
    pub fn block_chunk_tokens(&self) -> Option<usize> {
        match self {
            ModelConfig::Llama(llama) => llama.block_chunk_tokens,
            ModelConfig::Gpt2(gpt2) => gpt2.block_chunk_tokens,
            ModelConfig::Compiled(_) => None,
        }
    }

    /// Checks that the sizes are positive and fit together.
    pub fn check(&self) -> Result<(), ConfigError> {
        match self {
            ModelConfig::Llama(llama) => llama.check(),
            ModelConfig::Gpt2(gpt2) => gpt2.check(),
            // Checked when it was opened.
            ModelConfig::Compiled(_) => Ok(()),
        }
    }

    /// Checks that `ranks` ranks can share each layer: every rank needs the same number of attention heads, and a part of
    /// everything else that is split.
    pub fn check_tensor_parallel(&self, ranks: usize) -> Result<(), ConfigError> {
        let (key, heads, inner) = match self {
            ModelConfig::Llama(llama) => {
                let inner = llama.moe.as_ref().map_or(llama.intermediate_size, |moe| moe.moe_intermediate_size);
                ("num_attention_heads", llama.num_attention_heads, inner.min(llama.vocab_size))
            }
            ModelConfig::Gpt2(gpt2) => ("n_head", gpt2.n_head, gpt2.vocab_size),
            ModelConfig::Compiled(_) => return check_not_split(ranks),
        };
        check_chunks_not_shared(self.block_chunk_tokens(), ranks)?;
        if let ModelConfig::Llama(llama) = self {
            llama.check_norm_not_shared(ranks)?;
        }
        let works = |ranks: &usize| heads.is_multiple_of(*ranks) && *ranks <= inner;
        if works(&ranks) {
            return Ok(());
        }
        let nearest = (1..=ranks.min(heads)).rev().find(works).unwrap_or(1);
        let problem =
            format!("{heads} heads cannot be divided among {ranks} tensor-parallel ranks; {nearest} would work");
        Err(ConfigError { key, problem })
    }
}

/// Checks that ranks do not share blocks that are computed in chunks: a chunk has all of a layer's features.
pub fn check_chunks_not_shared(block_chunk_tokens: Option<usize>, ranks: usize) -> Result<(), ConfigError> {
    let problem = "blocks that are computed in chunks cannot be split among ranks; remove one of the two".to_string();
    match block_chunk_tokens.filter(|_| ranks > 1) {
        Some(_) => Err(ConfigError { key: "block_chunk_tokens", problem }),
        None => Ok(()),
    }
}

/// The functions of a package compute whole layers.
fn check_not_split(ranks: usize) -> Result<(), ConfigError> {
    let problem = "its layers were compiled whole, and cannot be split among ranks; use ZeRO or a pipeline".to_string();
    if ranks > 1 { Err(ConfigError { key: "package", problem }) } else { Ok(()) }
}

impl From<Arc<Package>> for ModelConfig {
    fn from(package: Arc<Package>) -> Self {
        ModelConfig::Compiled(package)
    }
}

impl From<LlamaConfig> for ModelConfig {
    fn from(config: LlamaConfig) -> Self {
        ModelConfig::Llama(config)
    }
}

impl From<Gpt2Config> for ModelConfig {
    fn from(config: Gpt2Config) -> Self {
        ModelConfig::Gpt2(config)
    }
}

impl LlamaConfig {
    /// Checks that ranks do not share heads that are normalized together.
    pub fn check_norm_not_shared(&self, ranks: usize) -> Result<(), ConfigError> {
        let problem =
            "all heads of a position are normalized together, so ranks cannot share them; use ZeRO or a pipeline";
        match self.qk_norm {
            Some(QkNorm::AllHeads) if ranks > 1 => Err(ConfigError { key: "qk_norm", problem: problem.to_string() }),
            _ => Ok(()),
        }
    }

    /// Creates a configuration like Llama 2's: no biases, untied embeddings, one key head per query head.
    pub fn new(
        vocab_size: usize,
        hidden_size: usize,
        num_hidden_layers: usize,
        num_attention_heads: usize,
        intermediate_size: usize,
    ) -> Self {
        LlamaConfig {
            vocab_size,
            hidden_size,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads: num_attention_heads,
            head_dim: hidden_size / num_attention_heads.max(1),
            intermediate_size,
            moe: None,
            rope_theta: 10_000.,
            rope_scaling: None,
            rms_norm_eps: 1e-5,
            tie_word_embeddings: false,
            qkv_bias: false,
            qk_norm: None,
            sliding_window: None,
            initializer_range: 0.02,
            loss_chunk_tokens: 256,
            block_chunk_tokens: None,
        }
    }

    fn check(&self) -> Result<(), ConfigError> {
        check_positive(&[
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("intermediate_size", self.intermediate_size),
            ("loss_chunk_tokens", self.loss_chunk_tokens),
            ("block_chunk_tokens", self.block_chunk_tokens.unwrap_or(1)),
        ])?;
        let fail = |key, problem: String| Err(ConfigError { key, problem });
        if !self.num_attention_heads.is_multiple_of(self.num_key_value_heads) {
            let problem =
                format!("{} does not divide the {} query heads", self.num_key_value_heads, self.num_attention_heads);
            return fail("num_key_value_heads", problem);
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(2) {
            return fail("head_dim", format!("{} is not a positive even number, as rotary pairs need", self.head_dim));
        }
        self.rope_scaling.map_or(Ok(()), |scaling| scaling.check())?;
        self.moe.as_ref().map_or(Ok(()), MoeConfig::check)?;
        if self.moe.is_some() && self.block_chunk_tokens.is_some() {
            let problem = "a mixture of experts routes all tokens at once; remove one of the two".to_string();
            return fail("block_chunk_tokens", problem);
        }
        if self.sliding_window == Some(0) {
            return fail("sliding_window", "is 0, and a position sees at least itself".to_string());
        }
        Ok(())
    }
}

impl Gpt2Config {
    /// Creates a configuration of the given size, with the constants of the published models.
    pub fn new(vocab_size: usize, n_positions: usize, n_embd: usize, n_layer: usize, n_head: usize) -> Self {
        Gpt2Config {
            vocab_size,
            n_positions,
            n_embd,
            n_layer,
            n_head,
            layer_norm_epsilon: 1e-5,
            initializer_range: 0.02,
            loss_chunk_tokens: 256,
            block_chunk_tokens: None,
        }
    }

    fn check(&self) -> Result<(), ConfigError> {
        if self.n_head == 0 || !self.n_embd.is_multiple_of(self.n_head) {
            let problem = format!("{} does not divide n_embd, which is {}", self.n_head, self.n_embd);
            return Err(ConfigError { key: "n_head", problem });
        }
        check_positive(&[
            ("vocab_size", self.vocab_size),
            ("n_positions", self.n_positions),
            ("n_embd", self.n_embd),
            ("loss_chunk_tokens", self.loss_chunk_tokens),
            ("block_chunk_tokens", self.block_chunk_tokens.unwrap_or(1)),
        ])
    }
}

fn check_positive(sizes: &[(&'static str, usize)]) -> Result<(), ConfigError> {
    match sizes.iter().find(|(_, size)| *size == 0) {
        Some(&(key, _)) => Err(ConfigError { key, problem: "is 0, but must be at least 1".to_string() }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(config: impl Into<ModelConfig>) -> Option<String> {
        config.into().check().err().map(|error| error.to_string())
    }

    #[test]
    fn a_number_of_ranks_that_works_is_named() {
        let said =
            |config: ModelConfig, ranks| config.check_tensor_parallel(ranks).err().map(|error| error.to_string());
        let llama = ModelConfig::from(LlamaConfig { num_key_value_heads: 2, ..LlamaConfig::new(101, 48, 2, 12, 52) });
        for ranks in [1, 2, 3, 4, 6, 12] {
            assert_eq!(said(llama.clone(), ranks), None);
        }
        let expected = "num_attention_heads: 12 heads cannot be divided among 5 tensor-parallel ranks; 4 would work";
        assert_eq!(said(llama, 5).as_deref(), Some(expected));
        let expected = "n_head: 6 heads cannot be divided among 12 tensor-parallel ranks; 6 would work";
        assert_eq!(said(Gpt2Config::new(101, 8, 36, 1, 6).into(), 12).as_deref(), Some(expected));
    }

    #[test]
    fn sizes_that_do_not_fit_together_are_named() {
        let llama = LlamaConfig::new(101, 36, 2, 6, 52);
        assert_eq!(problem(llama.clone()), None);
        for (wrong, expected) in [
            (LlamaConfig { vocab_size: 0, ..llama.clone() }, "vocab_size: is 0, but must be at least 1"),
            (
                LlamaConfig { num_key_value_heads: 4, ..llama.clone() },
                "num_key_value_heads: 4 does not divide the 6 query heads",
            ),
            (
                LlamaConfig { head_dim: 7, ..llama.clone() },
                "head_dim: 7 is not a positive even number, as rotary pairs need",
            ),
            (
                LlamaConfig { sliding_window: Some(0), ..llama },
                "sliding_window: is 0, and a position sees at least itself",
            ),
        ] {
            assert_eq!(problem(wrong).as_deref(), Some(expected));
        }
        let gpt2 = Gpt2Config::new(101, 8, 36, 1, 6);
        assert_eq!(problem(gpt2.clone()), None);
        for (wrong, expected) in [
            (Gpt2Config { n_head: 5, ..gpt2.clone() }, "n_head: 5 does not divide n_embd, which is 36"),
            (Gpt2Config { n_embd: 0, ..gpt2 }, "n_embd: is 0, but must be at least 1"),
        ] {
            assert_eq!(problem(wrong).as_deref(), Some(expected));
        }
    }
}
