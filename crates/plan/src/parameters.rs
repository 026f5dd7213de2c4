//! The names and shapes of a model's parameters, derived from its configuration.
//!
//! They are those of Hugging Face checkpoints. The model that is trained declares its parameters from this list.

use crate::package::{Package, PackageParameter, PackageUnit};
use crate::{ConfigError, ExpertParameters, Gpt2Config, LlamaConfig, ModelConfig, QkNorm, Split, TensorPlacement};

/// The name and shape of a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterShape {
    /// The unit that owns it: `embedding`, `block.7`, `head`.
    pub unit: String,
    /// Its name in a Hugging Face checkpoint.
    pub name: String,
    /// Its shape in that checkpoint.
    pub shape: Vec<usize>,
    /// How it is placed on the ranks of a tensor-parallel group.
    pub placement: TensorPlacement,
    /// Whether its first dimension is the expert, so that expert parallelism divides it.
    pub is_per_expert: bool,
}

impl ParameterShape {
    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

impl ModelConfig {
    /// Lists all parameters in the order of the model, unit by unit. A tied parameter is listed once, in the unit that owns it.
    pub fn parameters(&self) -> Vec<ParameterShape> {
        match self {
            ModelConfig::Llama(llama) => llama.parameters(),
            ModelConfig::Gpt2(gpt2) => gpt2.parameters(),
            ModelConfig::Compiled(package) => of_package(package),
        }
    }

    /// The number of elements of all parameters. A tied parameter is counted once.
    pub fn num_parameters(&self) -> usize {
        self.parameters().iter().map(ParameterShape::elements).sum()
    }

    /// Checks that each of `prefixes` is the start of at least one parameter name, as freezing these parameters requires.
    pub fn check_frozen<P: AsRef<str>>(&self, prefixes: &[P]) -> Result<(), ConfigError> {
        let parameters = self.parameters();
        check_frozen_prefixes(parameters.iter().map(|parameter| parameter.name.as_str()), prefixes)
    }

    /// Whether every parameter name starts with one of `prefixes`, so that freezing them leaves nothing to train.
    pub fn is_all_frozen<P: AsRef<str>>(&self, prefixes: &[P]) -> bool {
        let is_frozen =
            |parameter: &ParameterShape| prefixes.iter().any(|prefix| parameter.name.starts_with(prefix.as_ref()));
        self.parameters().iter().all(is_frozen)
    }
}

fn of_package(package: &Package) -> Vec<ParameterShape> {
    let of_unit = |unit: &PackageUnit| {
        let shape = |parameter: &PackageParameter| ParameterShape {
            unit: unit.name.clone(),
            name: parameter.name.clone(),
            shape: parameter.shape.clone(),
            placement: TensorPlacement::Replicated,
            is_per_expert: false,
        };
        unit.parameters.iter().map(shape).collect::<Vec<_>>()
    };
    package.manifest().units.iter().flat_map(of_unit).collect()
}

/// Checks that each of `prefixes` is the start of at least one of `names`, the names of a model's parameters.
pub fn check_frozen_prefixes<'a, P: AsRef<str>>(
    names: impl Iterator<Item = &'a str> + Clone,
    prefixes: &[P],
) -> Result<(), ConfigError> {
    for prefix in prefixes.iter().map(AsRef::as_ref) {
        if !names.clone().any(|name| name.starts_with(prefix)) {
            let example = names.clone().next().unwrap_or_default();
            let problem = format!("no parameter name starts with '{prefix}'; names look like '{example}'");
            return Err(ConfigError { key: "frozen", problem });
        }
    }
    Ok(())
}

impl LlamaConfig {
    fn parameters(&self) -> Vec<ParameterShape> {
        let (hidden, heads) = (self.hidden_size, self.num_attention_heads);
        let (query, key) = (heads * self.head_dim, self.num_key_value_heads * self.head_dim);
        let whole = TensorPlacement::Replicated;
        let along = |dimension, items| TensorPlacement::Split(Split::along(dimension, items));
        let (rows, columns) = (|items| along(0, items), |items| along(1, items));
        // The query heads of a group share a key head and a value head.
        let shared_by = heads / self.num_key_value_heads.max(1);
        let key_heads = TensorPlacement::Split(Split { shared_by, ..Split::along(0, heads) });
        let mut list = List::default();
        list.add("embedding", "model.embed_tokens.weight", &[self.vocab_size, hidden], rows(self.vocab_size));
        for index in 0..self.num_hidden_layers {
            let mut add = |name: &str, shape: &[usize], placement| {
                list.add(&format!("block.{index}"), &format!("model.layers.{index}.{name}"), shape, placement);
            };
            add("input_layernorm.weight", &[hidden], whole);
            add("self_attn.q_proj.weight", &[query, hidden], rows(heads));
            add("self_attn.k_proj.weight", &[key, hidden], key_heads);
            add("self_attn.v_proj.weight", &[key, hidden], key_heads);
            add("self_attn.o_proj.weight", &[hidden, query], columns(heads));
            if self.qkv_bias {
                add("self_attn.q_proj.bias", &[query], rows(heads));
                add("self_attn.k_proj.bias", &[key], key_heads);
                add("self_attn.v_proj.bias", &[key], key_heads);
            }
            let normalized = match self.qk_norm {
                Some(QkNorm::PerHead) => Some([self.head_dim; 2]),
                Some(QkNorm::AllHeads) => Some([query, key]),
                None => None,
            };
            if let Some([query, key]) = normalized {
                add("self_attn.q_norm.weight", &[query], TensorPlacement::ReplicatedInside);
                add("self_attn.k_norm.weight", &[key], TensorPlacement::ReplicatedInside);
            }
            add("post_attention_layernorm.weight", &[hidden], whole);
            let mut add_mlp = |name: &str, intermediate: usize| {
                add(&format!("{name}.gate_proj.weight"), &[intermediate, hidden], rows(intermediate));
                add(&format!("{name}.up_proj.weight"), &[intermediate, hidden], rows(intermediate));
                add(&format!("{name}.down_proj.weight"), &[hidden, intermediate], columns(intermediate));
            };
            let Some(moe) = &self.moe else {
                add_mlp("mlp", self.intermediate_size);
                continue;
            };
            if moe.n_shared_experts > 0 {
                add_mlp("mlp.shared_experts", moe.shared_intermediate_size());
            }
            let ExpertParameters { router, gate_proj, up_proj, down_proj } = moe.names.parameters();
            let (experts, intermediate) = (moe.num_experts, moe.moe_intermediate_size);
            // The ranks that share a layer divide every expert, so that they hold and multiply equal parts, whichever experts tokens choose.
            // Each computes a part of the gradient of the router, like a part of the experts' outputs.
            add(router, &[experts, hidden], TensorPlacement::ReplicatedInside);
            let mut add_experts = |name: &str, shape, placement| {
                list.add_experts(&format!("block.{index}"), &format!("model.layers.{index}.{name}"), shape, placement);
            };
            add_experts(gate_proj, [experts, intermediate, hidden], along(1, intermediate));
            add_experts(up_proj, [experts, intermediate, hidden], along(1, intermediate));
            add_experts(down_proj, [experts, hidden, intermediate], along(2, intermediate));
        }
        list.add("head", "model.norm.weight", &[hidden], whole);
        if !self.tie_word_embeddings {
            list.add("head", "lm_head.weight", &[self.vocab_size, hidden], rows(self.vocab_size));
        }
        list.0
    }
}

impl Gpt2Config {
    fn parameters(&self) -> Vec<ParameterShape> {
        let (width, heads) = (self.n_embd, self.n_head);
        let whole = TensorPlacement::Replicated;
        let along = |dimension, items| TensorPlacement::Split(Split::along(dimension, items));
        // Query, key and value are three blocks of one matrix, and of its bias.
        let fused = |dimension| along(dimension, heads).fused(3);
        let mut list = List::default();
        list.add("embedding", "wte.weight", &[self.vocab_size, width], along(0, self.vocab_size));
        list.add("embedding", "wpe.weight", &[self.n_positions, width], whole);
        for index in 0..self.n_layer {
            // Published GPT-2 checkpoints store matrices as (in, out). The size of a bias is the last dimension of its weight.
            let mut add = |name: &str, weight: &[usize], of_weight, of_bias| {
                let bias = &weight[weight.len() - 1..];
                list.add(&format!("block.{index}"), &format!("h.{index}.{name}.weight"), weight, of_weight);
                list.add(&format!("block.{index}"), &format!("h.{index}.{name}.bias"), bias, of_bias);
            };
            add("ln_1", &[width], whole, whole);
            add("attn.c_attn", &[width, 3 * width], fused(1), fused(0));
            add("attn.c_proj", &[width, width], along(0, heads), whole);
            add("ln_2", &[width], whole, whole);
            add("mlp.c_fc", &[width, 4 * width], along(1, 4 * width), along(0, 4 * width));
            add("mlp.c_proj", &[4 * width, width], along(0, 4 * width), whole);
        }
        list.add("head", "ln_f.weight", &[width], whole);
        list.add("head", "ln_f.bias", &[width], whole);
        list.0
    }
}

#[derive(Default)]
struct List(Vec<ParameterShape>);

impl List {
    fn add(&mut self, unit: &str, name: &str, shape: &[usize], placement: TensorPlacement) {
        let (unit, name) = (unit.to_string(), name.to_string());
        self.0.push(ParameterShape { unit, name, shape: shape.to_vec(), placement, is_per_expert: false });
    }

    /// Adds the matrices of all experts of a block: (expert, outputs, inputs).
    fn add_experts(&mut self, unit: &str, name: &str, shape: [usize; 3], placement: TensorPlacement) {
        let (unit, name) = (unit.to_string(), name.to_string());
        self.0.push(ParameterShape { unit, name, shape: shape.to_vec(), placement, is_per_expert: true });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MoeConfig;

    #[test]
    fn published_models_have_their_published_numbers_of_parameters() {
        let llama_2_7b = LlamaConfig::new(32_000, 4096, 32, 32, 11_008);
        let llama_3_8b = LlamaConfig { num_key_value_heads: 8, ..LlamaConfig::new(128_256, 4096, 32, 32, 14_336) };
        let qwen_2_5 = LlamaConfig {
            num_key_value_heads: 2,
            qkv_bias: true,
            tie_word_embeddings: true,
            ..LlamaConfig::new(151_936, 896, 24, 14, 4864)
        };
        let qwen_3 = LlamaConfig {
            num_key_value_heads: 8,
            head_dim: 128,
            qk_norm: Some(QkNorm::PerHead),
            tie_word_embeddings: true,
            ..LlamaConfig::new(151_936, 1024, 28, 16, 3072)
        };
        let mixtral_8x7b = LlamaConfig {
            num_key_value_heads: 8,
            moe: Some(MoeConfig::new(8, 2, 14_336)),
            ..LlamaConfig::new(32_000, 4096, 32, 32, 14_336)
        };
        let qwen_3_30b = LlamaConfig {
            num_key_value_heads: 4,
            head_dim: 128,
            qk_norm: Some(QkNorm::PerHead),
            moe: Some(MoeConfig::new(128, 8, 768)),
            ..LlamaConfig::new(151_936, 2048, 48, 32, 6144)
        };
        let published: [(ModelConfig, usize); 7] = [
            (llama_2_7b.into(), 6_738_415_616),
            (llama_3_8b.into(), 8_030_261_248),
            (qwen_2_5.into(), 494_032_768),
            (qwen_3.into(), 596_049_920),
            (mixtral_8x7b.into(), 46_702_792_704),
            (qwen_3_30b.into(), 30_532_122_624),
            (Gpt2Config::new(50_257, 1024, 768, 12, 12).into(), 124_439_808),
        ];
        for (config, elements) in published {
            assert_eq!(config.num_parameters(), elements, "{config:?}");
        }
    }

    #[test]
    fn a_prefix_that_freezes_nothing_is_named() {
        let config = ModelConfig::from(LlamaConfig::new(101, 36, 2, 6, 52));
        assert_eq!(config.check_frozen::<&str>(&[]), Ok(()));
        assert_eq!(config.check_frozen(&["model.layers.1.", "lm_head"]), Ok(()));
        let said = config.check_frozen(&["lm_head", "model.layer.0"]).err().map(|error| error.to_string());
        let expected =
            "frozen: no parameter name starts with 'model.layer.0'; names look like 'model.embed_tokens.weight'";
        assert_eq!(said.as_deref(), Some(expected));
        assert!(config.is_all_frozen(&["model.", "lm_head"]));
        assert!(!config.is_all_frozen(&["model."]));
        assert!(!config.is_all_frozen::<&str>(&[]));
    }
}
