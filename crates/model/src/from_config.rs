//! Building the model that a configuration describes.

use std::path::PathBuf;
use std::sync::Arc;

use shardwise_plan::ModelConfig;
use shardwise_plan::package::Package;

use crate::{Model, Result, gpt2, llama, package};

impl Model {
    /// Builds the model of a configuration (Hugging Face: `AutoModelForCausalLM.from_config`). The model declares its parameters,
    /// but holds no tensors.
    pub fn from_config(config: impl Into<ModelConfig>) -> Result<Model> {
        let config = config.into();
        config.check()?;
        if let ModelConfig::Compiled(package) = &config {
            return Ok(Model::new(package::units(package)?)?.with_package(package.clone()));
        }
        let parameters = config.parameters();
        let rotary = Arc::default();
        let units = parameters.chunk_by(|one, next| one.unit == next.unit).map(|owned| {
            let name = owned[0].unit.as_str();
            match &config {
                ModelConfig::Llama(config) => llama::unit(config, name, owned, &rotary),
                ModelConfig::Gpt2(config) => gpt2::unit(config, name, owned),
                ModelConfig::Compiled(_) => unreachable!("a package is built above"),
            }
        });
        Model::new(units.collect()).map(Model::built_in)
    }

    /// Builds the model of a compiled package, in this folder. Reads the package's manifest; its code is loaded by the trainer.
    pub fn from_package(folder: impl Into<PathBuf>) -> Result<Model> {
        Model::from_config(Arc::new(Package::open(folder)?))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use shardwise_plan::{Gpt2Config, LlamaConfig, QkNorm};

    use super::*;
    use crate::{Init, Parameter};

    fn configs() -> Vec<ModelConfig> {
        let llama = LlamaConfig::new(101, 36, 2, 6, 53);
        let (num_key_value_heads, tie_word_embeddings) = (2, true);
        vec![
            llama.clone().into(),
            LlamaConfig { tie_word_embeddings, ..llama.clone() }.into(),
            LlamaConfig { num_key_value_heads, head_dim: 8, ..llama.clone() }.into(),
            LlamaConfig { num_key_value_heads, tie_word_embeddings, qkv_bias: true, ..llama.clone() }.into(),
            LlamaConfig { num_key_value_heads, qk_norm: Some(QkNorm::PerHead), ..llama.clone() }.into(),
            LlamaConfig { num_hidden_layers: 0, ..llama }.into(),
            Gpt2Config::new(101, 23, 36, 3, 6).into(),
        ]
    }

    #[test]
    fn a_model_has_the_parameters_that_its_config_lists() {
        for config in configs() {
            let model = Model::from_config(config.clone()).unwrap();
            let declared = model.units().iter().flat_map(|unit| {
                unit.parameters().iter().map(move |parameter| {
                    let shape = parameter.shape.iter().map(|&size| size as usize).collect::<Vec<_>>();
                    (unit.name().to_string(), parameter.name.clone(), shape)
                })
            });
            let listed = config.parameters().into_iter().map(|listed| (listed.unit, listed.name, listed.shape));
            assert_eq!(declared.collect::<Vec<_>>(), listed.collect::<Vec<_>>(), "{config:?}");
            assert_eq!(model.elements(), config.num_parameters(), "{config:?}");
        }
    }

    #[test]
    fn parameters_start_with_the_values_of_their_kind() {
        let init = |config: ModelConfig, name: &str| {
            let model = Model::from_config(config).unwrap();
            let mut parameters = model.units().iter().flat_map(|unit| unit.parameters());
            parameters.find(|parameter| parameter.name == name).map(|Parameter { init, decays, .. }| (*init, *decays))
        };
        let matrix = |std| Some((Init::Normal { std }, true));
        let qwen =
            LlamaConfig { qkv_bias: true, qk_norm: Some(QkNorm::PerHead), ..LlamaConfig::new(101, 36, 2, 6, 53) };
        for (name, expected) in [
            ("model.embed_tokens.weight", matrix(0.02)),
            ("model.layers.1.input_layernorm.weight", Some((Init::Ones, false))),
            ("model.layers.1.self_attn.q_proj.weight", matrix(0.02)),
            ("model.layers.1.self_attn.q_proj.bias", Some((Init::Zeros, false))),
            ("model.layers.1.self_attn.k_norm.weight", Some((Init::Ones, false))),
            ("model.norm.weight", Some((Init::Ones, false))),
            ("lm_head.weight", matrix(0.02)),
        ] {
            assert_eq!(init(qwen.clone().into(), name), expected, "{name}");
        }
        let gpt2 = Gpt2Config::new(101, 23, 36, 2, 6);
        for (name, expected) in [
            ("wte.weight", matrix(0.02)),
            ("wpe.weight", matrix(0.01)),
            ("h.1.ln_1.weight", Some((Init::Ones, false))),
            ("h.1.ln_1.bias", Some((Init::Zeros, false))),
            ("h.1.attn.c_attn.weight", matrix(0.02)),
            ("h.1.attn.c_attn.bias", Some((Init::Zeros, false))),
            ("h.1.attn.c_proj.weight", matrix(0.01)),
            ("h.1.mlp.c_proj.weight", matrix(0.01)),
            ("ln_f.weight", Some((Init::Ones, false))),
        ] {
            assert_eq!(init(gpt2.clone().into(), name), expected, "{name}");
        }
    }

    #[test]
    fn an_invalid_config_is_refused() {
        let config = LlamaConfig { num_key_value_heads: 4, ..LlamaConfig::new(101, 36, 2, 6, 53) };
        let error = Model::from_config(config).err().unwrap().to_string();
        assert_eq!(error, "num_key_value_heads: 4 does not divide the 6 query heads");
    }
}
