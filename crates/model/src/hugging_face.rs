//! Models as `config.json` of a Hugging Face checkpoint describes them: read, and written.
//!
//! What such a file asks for and these models do not do is an error that names the key, not something that is left out.

use serde_json::{Value, json};

use crate::{Error, Gpt2, Llama, Llama3Rope, Model, Result};

/// The shape of a model of one of the families.
#[derive(Clone, Debug, PartialEq)]
pub enum Shape {
    /// Llama 2 and 3, Mistral, Qwen 2 and 3.
    Llama(Llama),
    /// GPT-2.
    Gpt2(Gpt2),
}

impl Shape {
    /// The model as a chain of units.
    pub fn model(&self) -> Result<Model> {
        match self {
            Shape::Llama(llama) => llama.model(),
            Shape::Gpt2(gpt2) => gpt2.model(),
        }
    }

    /// Token ids are below this.
    pub fn vocabulary(&self) -> usize {
        match self {
            Shape::Llama(llama) => llama.vocabulary,
            Shape::Gpt2(gpt2) => gpt2.vocabulary,
        }
    }

    /// What a `config.json` describes.
    pub fn from_config(config: &Value) -> Result<Self> {
        let config = Config(config);
        let family = config.text("model_type")?;
        match family {
            "gpt2" => gpt2(&config).map(Shape::Gpt2),
            "llama" | "mistral" | "qwen2" | "qwen3" => llama(&config, family).map(Shape::Llama),
            other => Err(config_error(
                "model_type",
                format!("is '{other}', and only llama, mistral, qwen2, qwen3 and gpt2 are known"),
            )),
        }
    }

    /// A `config.json` that describes it, for sequences of up to so many positions; none if it is of no family, as one with
    /// Qwen 2's biases and Qwen 3's norms is not.
    pub fn config(&self, positions: usize) -> Option<Value> {
        let config = self.nearest_config(positions);
        // What Hugging Face's own code refuses.
        if matches!(self, Shape::Llama(llama) if !llama.width.is_multiple_of(llama.heads)) {
            return None;
        }
        let described = Shape::from_config(&config).ok()?;
        let same = match (described, self) {
            // In how many pieces the head works is nobody else's business.
            (Shape::Llama(described), Shape::Llama(llama)) => {
                Llama { head_chunk: llama.head_chunk, ..described } == *llama
            }
            (Shape::Gpt2(described), Shape::Gpt2(gpt2)) => Gpt2 { head_chunk: gpt2.head_chunk, ..described } == *gpt2,
            _ => false,
        };
        same.then_some(config)
    }

    fn nearest_config(&self, positions: usize) -> Value {
        match self {
            Shape::Gpt2(gpt2) => json!({
                "architectures": ["GPT2LMHeadModel"],
                "model_type": "gpt2",
                "vocab_size": gpt2.vocabulary,
                "n_positions": gpt2.positions,
                "n_embd": gpt2.width,
                "n_layer": gpt2.blocks,
                "n_head": gpt2.heads,
                "layer_norm_epsilon": gpt2.norm_epsilon,
                "initializer_range": gpt2.init_std,
                "activation_function": "gelu_new",
                "attn_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "resid_pdrop": 0.0,
            }),
            Shape::Llama(llama) => llama_config(llama, positions),
        }
    }
}

fn llama_config(llama: &Llama, positions: usize) -> Value {
    let (family, architecture) = match llama {
        Llama { qk_norm: true, .. } => ("qwen3", "Qwen3ForCausalLM"),
        Llama { qkv_bias: true, .. } => ("qwen2", "Qwen2ForCausalLM"),
        Llama { window: Some(_), .. } => ("mistral", "MistralForCausalLM"),
        _ => ("llama", "LlamaForCausalLM"),
    };
    let mut config = json!({
        "architectures": [architecture],
        "model_type": family,
        "vocab_size": llama.vocabulary,
        "hidden_size": llama.width,
        "intermediate_size": llama.mlp_width,
        "num_hidden_layers": llama.blocks,
        "num_attention_heads": llama.heads,
        "num_key_value_heads": llama.kv_heads,
        "head_dim": llama.head_width,
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        "rms_norm_eps": llama.norm_epsilon,
        "rope_theta": llama.rope_base,
        "initializer_range": llama.init_std,
        "tie_word_embeddings": llama.tied,
        "attention_dropout": 0.0,
        "use_cache": true,
    });
    match family {
        "llama" | "qwen3" => config["attention_bias"] = json!(false),
        "mistral" => config["sliding_window"] = json!(llama.window),
        _ => (),
    }
    if let Some(rope) = llama.rope_scaling {
        config["rope_scaling"] = json!({
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": rope.low_frequency_factor,
            "high_freq_factor": rope.high_frequency_factor,
            "original_max_position_embeddings": rope.original_context,
        });
    }
    config
}

fn gpt2(config: &Config<'_>) -> Result<Gpt2> {
    config.only("activation_function", &["gelu_new"], "gelu_new")?;
    config.off("scale_attn_by_inverse_layer_idx")?;
    config.off("add_cross_attention")?;
    for key in ["scale_attn_weights", "tie_word_embeddings"] {
        if config.given(key) == Some(&Value::Bool(false)) {
            return Err(config_error(key, "is false, which is not supported".to_string()));
        }
    }
    let width = config.count("n_embd")?;
    if let Some(inner) = config.maybe_count("n_inner")?.filter(|&inner| inner != 4 * width) {
        return Err(config_error("n_inner", format!("is {inner}, and only 4 × n_embd ({}) is known", 4 * width)));
    }
    let plain = Gpt2::new(
        config.count("vocab_size")?,
        config.count("n_positions")?,
        width,
        config.count("n_layer")?,
        config.count("n_head")?,
    );
    Ok(Gpt2 {
        norm_epsilon: config.number("layer_norm_epsilon", plain.norm_epsilon)?,
        init_std: config.number("initializer_range", plain.init_std)?,
        ..plain
    })
}

fn llama(config: &Config<'_>, family: &str) -> Result<Llama> {
    config.only("hidden_act", &["silu"], "silu")?;
    config.off("mlp_bias")?;
    config.off("attention_bias")?;
    config.off("use_sliding_window")?;
    let (width, heads) = (config.count("hidden_size")?, config.count("num_attention_heads")?);
    let plain = Llama::new(
        config.count("vocab_size")?,
        width,
        config.count("num_hidden_layers")?,
        heads,
        config.count("intermediate_size")?,
    );
    // Newer files have all of the rotary embedding in one place, or in one for each kind of layers.
    let rope = Config(config.0.get("rope_parameters").filter(|rope| rope.is_object()).unwrap_or(config.0));
    if rope
        .0
        .as_object()
        .is_some_and(|rope| config.0.get("rope_parameters").is_some() && rope.values().any(Value::is_object))
    {
        return Err(config_error("rope_parameters", "differ between layers, which is not supported".to_string()));
    }
    let scaling = match (config.0.get("rope_parameters"), config.0.get("rope_scaling")) {
        (Some(parameters), _) if parameters.is_object() => Some(parameters),
        (_, Some(scaling)) if scaling.is_object() => Some(scaling),
        _ => None,
    };
    Ok(Llama {
        kv_heads: match (config.maybe_count("num_key_value_heads")?, config.0.get("num_key_value_heads"), family) {
            (Some(heads), ..) => heads,
            // What a file leaves out is as the family's own code has it.
            (None, None, "mistral") => 8,
            (None, None, "qwen2" | "qwen3") => 32,
            _ => heads,
        },
        head_width: match (config.maybe_count("head_dim")?, family) {
            (Some(head_width), _) => head_width,
            (None, "qwen3") => 128,
            (None, _) => plain.head_width,
        },
        rope_base: rope.number("rope_theta", config.number("rope_theta", plain.rope_base)?)?,
        rope_scaling: scaling.map(|scaling| rope_scaling(&Config(scaling))).transpose()?.flatten(),
        norm_epsilon: config.number("rms_norm_eps", 1e-6)?,
        tied: config.flag("tie_word_embeddings")?,
        qkv_bias: family == "qwen2",
        qk_norm: family == "qwen3",
        window: match family {
            "mistral" if config.0.get("sliding_window").is_none() => Some(4096),
            "mistral" => config.maybe_count("sliding_window")?,
            _ => None,
        },
        init_std: config.number("initializer_range", plain.init_std)?,
        ..plain
    })
}

fn rope_scaling(scaling: &Config<'_>) -> Result<Option<Llama3Rope>> {
    let kind =
        scaling.0.get("rope_type").or_else(|| scaling.0.get("type")).and_then(Value::as_str).unwrap_or("default");
    match kind {
        "default" => Ok(None),
        "llama3" => Ok(Some(Llama3Rope {
            factor: scaling.needed_number("factor")?,
            low_frequency_factor: scaling.needed_number("low_freq_factor")?,
            high_frequency_factor: scaling.needed_number("high_freq_factor")?,
            original_context: scaling.count("original_max_position_embeddings")?,
        })),
        other => Err(config_error("rope_type", format!("is '{other}', and only default and llama3 are known"))),
    }
}

/// A `config.json`, key by key.
struct Config<'a>(&'a Value);

impl<'a> Config<'a> {
    fn given(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    fn text(&self, key: &'static str) -> Result<&'a str> {
        self.given(key)
            .and_then(Value::as_str)
            .ok_or_else(|| config_error(key, "is missing, or is no text".to_string()))
    }

    fn maybe_count(&self, key: &'static str) -> Result<Option<usize>> {
        let Some(value) = self.given(key) else { return Ok(None) };
        let count = value.as_u64().and_then(|count| usize::try_from(count).ok()).filter(|count| *count <= COUNT_MAX);
        count.map(Some).ok_or_else(|| config_error(key, format!("is {value}, and must be a number up to {COUNT_MAX}")))
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

    /// Something that these models do not do.
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

/// Larger than any size of a model.
const COUNT_MAX: usize = 1 << 24;

fn config_error(key: &'static str, problem: String) -> Error {
    Error::Config { key, problem }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use super::*;

    #[test]
    fn a_config_that_was_written_is_read_as_the_same_shape() {
        let plain = Llama { norm_epsilon: 1e-6, ..Llama::new(101, 36, 2, 6, 53) };
        let stretched =
            Llama3Rope { factor: 8., low_frequency_factor: 1., high_frequency_factor: 4., original_context: 64 };
        for shape in [
            Shape::Llama(plain.clone()),
            Shape::Llama(Llama { kv_heads: 2, rope_scaling: Some(stretched), tied: true, ..plain.clone() }),
            Shape::Llama(Llama { window: Some(16), head_width: 8, ..plain.clone() }),
            Shape::Llama(Llama { qkv_bias: true, rope_base: 1e6, ..plain.clone() }),
            Shape::Llama(Llama { qk_norm: true, ..plain }),
            Shape::Gpt2(Gpt2::new(101, 32, 36, 2, 6)),
        ] {
            assert_eq!(Shape::from_config(&shape.config(128).unwrap()).unwrap(), shape);
        }
        let both = Llama { qk_norm: true, qkv_bias: true, ..Llama::new(101, 36, 2, 6, 53) };
        assert_eq!(Shape::Llama(both).config(128), None);
    }

    #[test]
    fn what_is_not_supported_is_named() {
        let llama = Shape::Llama(Llama::new(101, 36, 2, 6, 53)).config(128).unwrap();
        for (key, value) in [
            ("model_type", json!("mamba")),
            ("hidden_act", json!("gelu")),
            ("attention_bias", json!(true)),
            ("rope_scaling", json!({ "rope_type": "yarn", "factor": 2. })),
            ("hidden_size", json!(-1)),
            ("vocab_size", json!(1e30)),
            ("rms_norm_eps", json!("small")),
        ] {
            let mut config = llama.clone();
            config[key] = value;
            let error = Shape::from_config(&config).unwrap_err().to_string();
            let named = if key == "rope_scaling" { "rope_type" } else { key };
            assert!(error.contains(named), "{error}");
        }
        assert!(Shape::from_config(&json!([1])).is_err());
    }
}
