//! Reading and writing the `config.json` of Hugging Face checkpoints.
//!
//! An unsupported setting is never ignored: it is an error that names the key.

use serde_json::{Value, json};

use crate::{
    ConfigError, Gpt2Config, Llama3Rope, LlamaConfig, ModelConfig, MoeConfig, MoeNames, QkNorm, RopeScaling,
    RouterConfig, YarnRope,
};

type Result<T> = std::result::Result<T, ConfigError>;

impl ModelConfig {
    /// Reads a Hugging Face `config.json`.
    pub fn from_hugging_face(config: &Value) -> std::result::Result<Self, ConfigError> {
        let config = Config(config);
        let family = config.text("model_type")?;
        match family {
            "gpt2" => gpt2(&config).map(ModelConfig::Gpt2),
            "llama" | "mistral" | "mixtral" | "olmoe" | "qwen2" | "qwen3" | "qwen3_moe" => {
                llama(&config, family).map(ModelConfig::Llama)
            }
            other => Err(config_error(
                "model_type",
                format!(
                    "is '{other}', and only llama, mistral, mixtral, olmoe, qwen2, qwen3, qwen3_moe and gpt2 are known"
                ),
            )),
        }
    }

    /// Returns the Hugging Face `config.json` for sequences of up to `positions` tokens, or `None` if it cannot express this
    /// model, for instance one with both the biases of Qwen 2 and the norms of Qwen 3.
    pub fn to_hugging_face(&self, positions: usize) -> Option<Value> {
        let config = match self {
            ModelConfig::Llama(llama) => llama_to_hugging_face(llama, positions),
            ModelConfig::Gpt2(gpt2) => gpt2_to_hugging_face(gpt2),
            ModelConfig::Compiled(package) => return package.config().cloned(),
        };
        // Hugging Face's code refuses a hidden size that is not a multiple of the number of heads.
        if matches!(self, ModelConfig::Llama(llama) if !llama.hidden_size.is_multiple_of(llama.num_attention_heads)) {
            return None;
        }
        let described = ModelConfig::from_hugging_face(&config).ok()?;
        let same = match (described, self) {
            // The sizes of chunks and the losses of a router are ours, and not part of the file, or rounded.
            (ModelConfig::Llama(described), ModelConfig::Llama(llama)) => {
                let &LlamaConfig { loss_chunk_tokens, block_chunk_tokens, .. } = llama;
                let mut described = LlamaConfig { loss_chunk_tokens, block_chunk_tokens, ..described };
                if let (Some(experts), Some(moe)) = (&mut described.moe, &llama.moe) {
                    let RouterConfig { router_aux_loss_coef, router_z_loss_coef, .. } = moe.router;
                    experts.router = RouterConfig { router_aux_loss_coef, router_z_loss_coef, ..experts.router };
                    // Only training drops tokens.
                    experts.capacity_factor = moe.capacity_factor;
                    // There is no MLP that would have this size.
                    described.intermediate_size = llama.intermediate_size;
                }
                described == *llama
            }
            (ModelConfig::Gpt2(described), ModelConfig::Gpt2(gpt2)) => {
                let &Gpt2Config { loss_chunk_tokens, block_chunk_tokens, .. } = gpt2;
                Gpt2Config { loss_chunk_tokens, block_chunk_tokens, ..described } == *gpt2
            }
            _ => false,
        };
        same.then_some(config)
    }
}

fn gpt2_to_hugging_face(gpt2: &Gpt2Config) -> Value {
    json!({
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": gpt2.vocab_size,
        "n_positions": gpt2.n_positions,
        "n_embd": gpt2.n_embd,
        "n_layer": gpt2.n_layer,
        "n_head": gpt2.n_head,
        "layer_norm_epsilon": gpt2.layer_norm_epsilon,
        "initializer_range": gpt2.initializer_range,
        "activation_function": "gelu_new",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    })
}

fn llama_to_hugging_face(llama: &LlamaConfig, positions: usize) -> Value {
    let names = llama.moe.as_ref().map(|moe| moe.names);
    let (family, architecture) = match llama {
        _ if names == Some(MoeNames::Mixtral) => ("mixtral", "MixtralForCausalLM"),
        LlamaConfig { qk_norm: Some(QkNorm::AllHeads), .. } => ("olmoe", "OlmoeForCausalLM"),
        _ if names == Some(MoeNames::Qwen) => ("qwen3_moe", "Qwen3MoeForCausalLM"),
        LlamaConfig { qk_norm: Some(QkNorm::PerHead), .. } => ("qwen3", "Qwen3ForCausalLM"),
        LlamaConfig { qkv_bias: true, .. } => ("qwen2", "Qwen2ForCausalLM"),
        LlamaConfig { sliding_window: Some(_), .. } => ("mistral", "MistralForCausalLM"),
        _ => ("llama", "LlamaForCausalLM"),
    };
    let mut config = json!({
        "architectures": [architecture],
        "model_type": family,
        "vocab_size": llama.vocab_size,
        "hidden_size": llama.hidden_size,
        "intermediate_size": llama.intermediate_size,
        "num_hidden_layers": llama.num_hidden_layers,
        "num_attention_heads": llama.num_attention_heads,
        "num_key_value_heads": llama.num_key_value_heads,
        "head_dim": llama.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        "rms_norm_eps": llama.rms_norm_eps,
        "rope_theta": llama.rope_theta,
        "initializer_range": llama.initializer_range,
        "tie_word_embeddings": llama.tie_word_embeddings,
        "attention_dropout": 0.0,
        "use_cache": true,
    });
    match family {
        "llama" | "olmoe" | "qwen3" | "qwen3_moe" => config["attention_bias"] = json!(false),
        "mistral" | "mixtral" => config["sliding_window"] = json!(llama.sliding_window),
        _ => (),
    }
    if let Some(moe) = &llama.moe {
        write_moe(moe, family, llama.num_hidden_layers, &mut config);
    }
    if let Some(RopeScaling::Dynamic { max_position_embeddings, .. }) = llama.rope_scaling {
        config["max_position_embeddings"] = json!(max_position_embeddings);
    }
    if let Some(scaling) = llama.rope_scaling {
        config["rope_scaling"] = write_rope_scaling(scaling);
    }
    config
}

fn gpt2(config: &Config<'_>) -> Result<Gpt2Config> {
    config.only("activation_function", &["gelu_new"], "gelu_new")?;
    config.off("scale_attn_by_inverse_layer_idx")?;
    config.off("add_cross_attention")?;
    for key in ["scale_attn_weights", "tie_word_embeddings"] {
        if config.given(key) == Some(&Value::Bool(false)) {
            return Err(config_error(key, "is false, which is not supported".to_string()));
        }
    }
    let n_embd = config.count("n_embd")?;
    if let Some(inner) = config.maybe_count("n_inner")?.filter(|&inner| inner != 4 * n_embd) {
        return Err(config_error("n_inner", format!("is {inner}, and only 4 × n_embd ({}) is known", 4 * n_embd)));
    }
    let plain = Gpt2Config::new(
        config.count("vocab_size")?,
        config.count("n_positions")?,
        n_embd,
        config.count("n_layer")?,
        config.count("n_head")?,
    );
    Ok(Gpt2Config {
        layer_norm_epsilon: config.number("layer_norm_epsilon", plain.layer_norm_epsilon)?,
        initializer_range: config.number("initializer_range", plain.initializer_range)?,
        ..plain
    })
}

fn llama(config: &Config<'_>, family: &str) -> Result<LlamaConfig> {
    config.only("hidden_act", &["silu"], "silu")?;
    config.off("mlp_bias")?;
    config.off("attention_bias")?;
    config.off("use_sliding_window")?;
    if let Some(limit) = config.given("clip_qkv") {
        return Err(config_error("clip_qkv", format!("is {limit}, and clipping is not supported")));
    }
    let (hidden_size, heads) = (config.count("hidden_size")?, config.count("num_attention_heads")?);
    let plain = LlamaConfig::new(
        config.count("vocab_size")?,
        hidden_size,
        config.count("num_hidden_layers")?,
        heads,
        config.count("intermediate_size")?,
    );
    // The defaults of each family in Hugging Face's code.
    let (rope_theta, rms_norm_eps) = match family {
        "mixtral" => (1e6, 1e-5),
        "olmoe" => (plain.rope_theta, 1e-5),
        _ => (plain.rope_theta, 1e-6),
    };
    // Newer files have all settings of the rotary embedding in one object, or in one object per type of layer.
    let rope = Config(config.0.get("rope_parameters").filter(|rope| rope.is_object()).unwrap_or(config.0));
    if rope
        .0
        .as_object()
        .is_some_and(|rope| config.0.get("rope_parameters").is_some() && rope.values().any(Value::is_object))
    {
        return Err(config_error("rope_parameters", "differ between layers, which is not supported".to_string()));
    }
    // As in transformers, the older object has priority.
    let objects = ["rope_scaling", "rope_parameters"].map(|key| config.0.get(key).filter(|value| value.is_object()));
    let scaling = objects.into_iter().flatten().next();
    Ok(LlamaConfig {
        num_key_value_heads: match (
            config.maybe_count("num_key_value_heads")?,
            config.0.get("num_key_value_heads"),
            family,
        ) {
            (Some(heads), ..) => heads,
            // The defaults of each family in Hugging Face's code.
            (None, None, "mistral" | "mixtral") => 8,
            (None, None, "qwen3_moe") => 4,
            (None, None, "qwen2" | "qwen3") => 32,
            _ => heads,
        },
        head_dim: match (config.maybe_count("head_dim")?, family) {
            (Some(head_dim), _) => head_dim,
            (None, "qwen3") => 128,
            (None, _) => plain.head_dim,
        },
        rope_theta: rope.number("rope_theta", config.number("rope_theta", rope_theta)?)?,
        rope_scaling: scaling.map(|scaling| rope_scaling(&Config(scaling), config)).transpose()?.flatten(),
        rms_norm_eps: config.number("rms_norm_eps", rms_norm_eps)?,
        tie_word_embeddings: config.flag("tie_word_embeddings")?,
        qkv_bias: family == "qwen2",
        qk_norm: match family {
            "qwen3" | "qwen3_moe" => Some(QkNorm::PerHead),
            "olmoe" => Some(QkNorm::AllHeads),
            _ => None,
        },
        moe: match family {
            "mixtral" => Some(mixtral(config)?),
            "olmoe" => Some(olmoe(config)?),
            "qwen3_moe" => Some(qwen_moe(config)?),
            _ => None,
        },
        sliding_window: match family {
            "mistral" if config.0.get("sliding_window").is_none() => Some(4096),
            "mistral" | "mixtral" => config.maybe_count("sliding_window")?,
            _ => None,
        },
        initializer_range: config.number("initializer_range", plain.initializer_range)?,
        ..plain
    })
}

fn mixtral(config: &Config<'_>) -> Result<MoeConfig> {
    if config.number("router_jitter_noise", 0.)? > 0. {
        return Err(config_error("router_jitter_noise", "is not 0, which is not supported".to_string()));
    }
    let plain = MoeConfig::new(
        config.maybe_count("num_local_experts")?.unwrap_or(8),
        config.maybe_count("num_experts_per_tok")?.unwrap_or(2),
        config.count("intermediate_size")?,
    );
    let router_aux_loss_coef = aux_loss_coef(config, plain.num_experts_per_tok)?;
    let router = RouterConfig { router_aux_loss_coef, ..plain.router };
    Ok(MoeConfig { names: MoeNames::Mixtral, router, ..plain })
}

fn olmoe(config: &Config<'_>) -> Result<MoeConfig> {
    let plain = MoeConfig::new(
        // transformers 5 writes the second name.
        config.maybe_count("num_experts")?.or(config.maybe_count("num_local_experts")?).unwrap_or(64),
        config.maybe_count("num_experts_per_tok")?.unwrap_or(8),
        config.count("intermediate_size")?,
    );
    Ok(MoeConfig { router: router_of_qwen(config, &plain)?, ..plain })
}

fn qwen_moe(config: &Config<'_>) -> Result<MoeConfig> {
    if config.maybe_count("decoder_sparse_step")?.is_some_and(|step| step != 1) {
        return Err(config_error(
            "decoder_sparse_step",
            "is not 1: only models with experts in every block are known".to_string(),
        ));
    }
    if config.given("mlp_only_layers").is_some_and(|layers| layers != &json!([])) {
        return Err(config_error(
            "mlp_only_layers",
            "is not empty: only models with experts in every block are known".to_string(),
        ));
    }
    let plain = MoeConfig::new(
        // transformers 5 writes the second name.
        config.maybe_count("num_experts")?.or(config.maybe_count("num_local_experts")?).unwrap_or(128),
        config.maybe_count("num_experts_per_tok")?.unwrap_or(8),
        config.maybe_count("moe_intermediate_size")?.unwrap_or(768),
    );
    Ok(MoeConfig { router: router_of_qwen(config, &plain)?, ..plain })
}

/// The router of Qwen 3 and OLMoE.
fn router_of_qwen(config: &Config<'_>, moe: &MoeConfig) -> Result<RouterConfig> {
    Ok(RouterConfig {
        norm_topk_prob: config.flag("norm_topk_prob")?,
        router_aux_loss_coef: aux_loss_coef(config, moe.num_experts_per_tok)?,
        ..moe.router
    })
}

/// The coefficient of the balance loss. As in transformers, a model has that loss only if it returns its router's logits. There it is the mean
/// over all layers, and as large as the number of experts per token if experts are balanced. Here it is the sum over layers, and 1.
fn aux_loss_coef(config: &Config<'_>, num_experts_per_tok: usize) -> Result<f64> {
    match config.flag("output_router_logits")? {
        true => {
            let (coef, layers) = (config.number("router_aux_loss_coef", 0.001)?, config.count("num_hidden_layers")?);
            Ok(coef * num_experts_per_tok as f64 / layers.max(1) as f64)
        }
        false => Ok(0.),
    }
}

fn write_moe(moe: &MoeConfig, family: &str, layers: usize, config: &mut Value) {
    let router = &moe.router;
    config["num_experts_per_tok"] = json!(moe.num_experts_per_tok);
    config["output_router_logits"] = json!(router.router_aux_loss_coef > 0.);
    let coef = router.router_aux_loss_coef * layers as f64 / moe.num_experts_per_tok as f64;
    config["router_aux_loss_coef"] = json!(coef);
    match family {
        "mixtral" => {
            config["num_local_experts"] = json!(moe.num_experts);
            config["intermediate_size"] = json!(moe.moe_intermediate_size);
        }
        "olmoe" => {
            config["num_experts"] = json!(moe.num_experts);
            config["intermediate_size"] = json!(moe.moe_intermediate_size);
            config["norm_topk_prob"] = json!(router.norm_topk_prob);
            config["clip_qkv"] = Value::Null;
        }
        _ => {
            config["num_experts"] = json!(moe.num_experts);
            config["moe_intermediate_size"] = json!(moe.moe_intermediate_size);
            config["norm_topk_prob"] = json!(router.norm_topk_prob);
            config["decoder_sparse_step"] = json!(1);
            config["mlp_only_layers"] = json!([]);
        }
    }
}

fn write_rope_scaling(scaling: RopeScaling) -> Value {
    match scaling {
        RopeScaling::Linear { factor } => json!({ "rope_type": "linear", "factor": factor }),
        RopeScaling::Dynamic { factor, .. } => json!({ "rope_type": "dynamic", "factor": factor }),
        RopeScaling::Yarn(yarn) => json!({
            "rope_type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_max_position_embeddings,
            "attention_factor": yarn.attention_factor,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "truncate": yarn.truncate,
        }),
        RopeScaling::Llama3(llama) => json!({
            "rope_type": "llama3",
            "factor": llama.factor,
            "low_freq_factor": llama.low_freq_factor,
            "high_freq_factor": llama.high_freq_factor,
            "original_max_position_embeddings": llama.original_max_position_embeddings,
        }),
    }
}

/// Reads a scaling of the rotary embedding. `config` is the whole file.
fn rope_scaling(scaling: &Config<'_>, config: &Config<'_>) -> Result<Option<RopeScaling>> {
    let kind =
        scaling.0.get("rope_type").or_else(|| scaling.0.get("type")).and_then(Value::as_str).unwrap_or("default");
    match kind {
        "default" => Ok(None),
        "linear" => Ok(Some(RopeScaling::Linear { factor: scaling.needed_number("factor")? })),
        "dynamic" => Ok(Some(RopeScaling::Dynamic {
            factor: scaling.needed_number("factor")?,
            max_position_embeddings: config.count("max_position_embeddings")?,
        })),
        "yarn" => Ok(Some(RopeScaling::Yarn(yarn(scaling, config)?))),
        "llama3" => Ok(Some(RopeScaling::Llama3(Llama3Rope {
            factor: scaling.needed_number("factor")?,
            low_freq_factor: scaling.needed_number("low_freq_factor")?,
            high_freq_factor: scaling.needed_number("high_freq_factor")?,
            original_max_position_embeddings: original_context(scaling, config)?,
        }))),
        other => {
            let problem = format!("is '{other}', and only default, linear, dynamic, yarn and llama3 are known");
            Err(config_error("rope_type", problem))
        }
    }
}

/// The context length of the original training, which files have in one of three places.
fn original_context(scaling: &Config<'_>, config: &Config<'_>) -> Result<usize> {
    let key = "original_max_position_embeddings";
    match (config.maybe_count(key)?, scaling.maybe_count(key)?) {
        (Some(context), _) | (None, Some(context)) => Ok(context),
        (None, None) => config.count("max_position_embeddings"),
    }
}

/// As transformers reads it: what is not given follows from the rest.
fn yarn(scaling: &Config<'_>, config: &Config<'_>) -> Result<YarnRope> {
    let context = original_context(scaling, config)?;
    let factor = match scaling.given("factor") {
        Some(_) => scaling.needed_number("factor")?,
        None => config.count("max_position_embeddings")? as f64 / context.max(1) as f64,
    };
    let plain = YarnRope::new(factor, context);
    let (weight, of_all) = (scaling.number("mscale", 0.)?, scaling.number("mscale_all_dim", 0.)?);
    let sharpness = match weight > 0. && of_all > 0. {
        true => YarnRope::sharpness(factor, weight) / YarnRope::sharpness(factor, of_all),
        false => plain.attention_factor,
    };
    Ok(YarnRope {
        attention_factor: scaling.number("attention_factor", sharpness)?,
        beta_fast: Some(scaling.number("beta_fast", 0.)?).filter(|beta| *beta > 0.).unwrap_or(plain.beta_fast),
        beta_slow: Some(scaling.number("beta_slow", 0.)?).filter(|beta| *beta > 0.).unwrap_or(plain.beta_slow),
        truncate: scaling.0.get("truncate").is_none() || scaling.flag("truncate")?,
        ..plain
    })
}

/// Reads and checks the keys of a `config.json`.
struct Config<'a>(&'a Value);

impl<'a> Config<'a> {
    fn given(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    fn text(&self, key: &'static str) -> Result<&'a str> {
        self.given(key)
            .and_then(Value::as_str)
            .ok_or_else(|| config_error(key, "is missing or not a string".to_string()))
    }

    fn maybe_count(&self, key: &'static str) -> Result<Option<usize>> {
        let Some(value) = self.given(key) else { return Ok(None) };
        let count = value.as_u64().and_then(|count| usize::try_from(count).ok()).filter(|count| *count <= COUNT_MAX);
        count.map(Some).ok_or_else(|| config_error(key, format!("is {value}, but must be a number up to {COUNT_MAX}")))
    }

    fn count(&self, key: &'static str) -> Result<usize> {
        self.maybe_count(key)?.ok_or_else(|| config_error(key, "is missing".to_string()))
    }

    fn number(&self, key: &'static str, unless_given: f64) -> Result<f64> {
        match self.given(key) {
            None => Ok(unless_given),
            Some(_) => self.needed_number(key),
        }
    }

    fn needed_number(&self, key: &'static str) -> Result<f64> {
        let number = self.given(key).and_then(Value::as_f64).filter(|number| number.is_finite() && *number >= 0.);
        number.ok_or_else(|| config_error(key, "must be a number that is not negative".to_string()))
    }

    fn flag(&self, key: &'static str) -> Result<bool> {
        match self.given(key) {
            None => Ok(false),
            Some(value) => value.as_bool().ok_or_else(|| config_error(key, "must be true or false".to_string())),
        }
    }

    /// Checks that an unsupported setting is off.
    fn off(&self, key: &'static str) -> Result<()> {
        match self.flag(key)? {
            false => Ok(()),
            true => Err(config_error(key, "is true, which is not supported".to_string())),
        }
    }

    fn only(&self, key: &'static str, known: &[&str], unless_given: &str) -> Result<()> {
        let value = self.given(key).map_or(Some(unless_given), Value::as_str).unwrap_or_default();
        match known.contains(&value) {
            true => Ok(()),
            false => Err(config_error(key, format!("is '{value}', and only {} is known", known.join(", ")))),
        }
    }
}

/// An upper bound for sizes and counts, far above those of any real model.
const COUNT_MAX: usize = 1 << 24;

fn config_error(key: &'static str, problem: String) -> ConfigError {
    ConfigError { key, problem }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use super::*;

    fn mixture(names: MoeNames, router: RouterConfig) -> LlamaConfig {
        let moe = MoeConfig { names, router, ..MoeConfig::new(8, 2, 53) };
        assert_eq!(
            moe.num_experts_per_tok, 2,
            "as many as blocks, so that the coefficient of the balance loss is not rounded"
        );
        LlamaConfig { rms_norm_eps: 1e-6, moe: Some(moe), ..LlamaConfig::new(101, 36, 2, 6, 53) }
    }

    #[test]
    fn a_config_that_was_written_is_read_as_the_same_shape() {
        let plain = LlamaConfig { rms_norm_eps: 1e-6, ..LlamaConfig::new(101, 36, 2, 6, 53) };
        let stretched =
            Llama3Rope { factor: 8., low_freq_factor: 1., high_freq_factor: 4., original_max_position_embeddings: 64 };
        let scaled = |scaling| ModelConfig::Llama(LlamaConfig { rope_scaling: Some(scaling), ..plain.clone() });
        for shape in [
            ModelConfig::Llama(plain.clone()),
            ModelConfig::Llama(LlamaConfig {
                num_key_value_heads: 2,
                rope_scaling: Some(RopeScaling::Llama3(stretched)),
                tie_word_embeddings: true,
                ..plain.clone()
            }),
            scaled(RopeScaling::Linear { factor: 2. }),
            scaled(RopeScaling::Dynamic { factor: 2., max_position_embeddings: 77 }),
            scaled(RopeScaling::Yarn(YarnRope { truncate: false, beta_fast: 16., ..YarnRope::new(4., 64) })),
            ModelConfig::Llama(LlamaConfig { sliding_window: Some(16), head_dim: 8, ..plain.clone() }),
            ModelConfig::Llama(LlamaConfig { qkv_bias: true, rope_theta: 1e6, ..plain.clone() }),
            ModelConfig::Llama(LlamaConfig { qk_norm: Some(QkNorm::PerHead), ..plain.clone() }),
            ModelConfig::Llama(mixture(MoeNames::Mixtral, RouterConfig::default())),
            ModelConfig::Llama(LlamaConfig {
                qk_norm: Some(QkNorm::AllHeads),
                ..mixture(MoeNames::Qwen, RouterConfig { norm_topk_prob: false, ..RouterConfig::default() })
            }),
            ModelConfig::Llama(LlamaConfig {
                qk_norm: Some(QkNorm::PerHead),
                ..mixture(
                    MoeNames::Qwen,
                    RouterConfig { norm_topk_prob: false, router_aux_loss_coef: 0.01, ..RouterConfig::default() },
                )
            }),
            ModelConfig::Gpt2(Gpt2Config::new(101, 32, 36, 2, 6)),
        ] {
            assert_eq!(ModelConfig::from_hugging_face(&shape.to_hugging_face(128).unwrap()).unwrap(), shape);
        }
        let all_heads = LlamaConfig { qk_norm: Some(QkNorm::AllHeads), ..LlamaConfig::new(101, 36, 2, 6, 53) };
        assert_eq!(ModelConfig::Llama(all_heads).to_hugging_face(128), None);
        let both =
            LlamaConfig { qk_norm: Some(QkNorm::PerHead), qkv_bias: true, ..LlamaConfig::new(101, 36, 2, 6, 53) };
        assert_eq!(ModelConfig::Llama(both).to_hugging_face(128), None);
        // The size of an MLP that does not exist is not part of the file.
        let smaller = LlamaConfig { intermediate_size: 106, ..mixture(MoeNames::Mixtral, RouterConfig::default()) };
        assert!(ModelConfig::Llama(smaller).to_hugging_face(128).is_some());
        let minimal = json!({
            "model_type": "mixtral", "vocab_size": 101, "hidden_size": 36, "intermediate_size": 53, "num_hidden_layers": 2,
            "num_attention_heads": 8,
        });
        let ModelConfig::Llama(minimal) = ModelConfig::from_hugging_face(&minimal).unwrap() else {
            panic!("{minimal}")
        };
        assert_eq!((minimal.rope_theta, minimal.rms_norm_eps, minimal.num_key_value_heads), (1e6, 1e-5, 8));
        // Mixtral has no norms of queries and keys, and divides scores by their sum.
        let unlike =
            LlamaConfig { qk_norm: Some(QkNorm::PerHead), ..mixture(MoeNames::Mixtral, RouterConfig::default()) };
        assert_eq!(ModelConfig::Llama(unlike).to_hugging_face(128), None);
        let scaled = RouterConfig { routed_scaling_factor: 2.5, ..RouterConfig::default() };
        let biased = RouterConfig { router_bias_update_rate: 0.001, ..RouterConfig::default() };
        for router in [scaled, biased] {
            assert_eq!(ModelConfig::Llama(mixture(MoeNames::Mixtral, router)).to_hugging_face(128), None);
        }
    }

    #[test]
    fn what_is_not_supported_is_named() {
        let llama = ModelConfig::Llama(LlamaConfig::new(101, 36, 2, 6, 53)).to_hugging_face(128).unwrap();
        for (key, value) in [
            ("model_type", json!("mamba")),
            ("hidden_act", json!("gelu")),
            ("attention_bias", json!(true)),
            ("rope_scaling", json!({ "rope_type": "longrope", "factor": 2. })),
            ("hidden_size", json!(-1)),
            ("vocab_size", json!(1e30)),
            ("rms_norm_eps", json!("small")),
        ] {
            let mut config = llama.clone();
            config[key] = value;
            let error = ModelConfig::from_hugging_face(&config).unwrap_err().to_string();
            let named = if key == "rope_scaling" { "rope_type" } else { key };
            assert!(error.contains(named), "{error}");
        }
        assert!(ModelConfig::from_hugging_face(&json!([1])).is_err());
    }
}
