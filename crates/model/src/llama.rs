//! The Llama family: Llama 2 and 3, Mistral, Qwen 2 and 3.

use std::f64::consts::PI;
use std::ops::Range;

use shardwise_torch::tch::{Device, Kind, Tensor};

use crate::activation_checkpointing::recompute_in_backward;
use crate::documents::Documents;
use crate::head::{Head, LmHead, Sizes};
use crate::{
    Activations, Batch, Cache, Error, Footprint, Init, Layer, Model, Parameter, Parameters, Result, Tied, Unit,
    attention,
};

/// The configuration of a model of the family. Fields are named as in Hugging Face's `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct Llama {
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
    /// The size of the MLP's hidden layer.
    pub intermediate_size: usize,
    /// The base of the rotary embedding's wavelengths.
    pub rope_theta: f64,
    /// How Llama 3.1 and later stretch those wavelengths.
    pub rope_scaling: Option<Llama3Rope>,
    /// The epsilon that RMSNorm adds to the mean square.
    pub rms_norm_eps: f64,
    /// Whether the head shares the embedding's matrix.
    pub tie_word_embeddings: bool,
    /// Whether the query, key and value projections have biases, as in Qwen 2.
    pub qkv_bias: bool,
    /// Whether queries and keys are normalized per head, as in Qwen 3.
    pub qk_norm: bool,
    /// How many positions a position attends to, including itself, as in Mistral.
    pub sliding_window: Option<usize>,
    /// The standard deviation of initial weight matrices.
    pub initializer_range: f64,
    /// The number of tokens whose logits are in memory at once.
    pub loss_chunk_tokens: usize,
}

/// Llama 3.1's scaling of the rotary embedding for long contexts. Fields are named as in Hugging Face's `rope_scaling`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Llama3Rope {
    /// The factor by which long wavelengths are stretched.
    pub factor: f64,
    /// Wavelengths longer than the original context divided by this are stretched by the full factor.
    pub low_freq_factor: f64,
    /// Wavelengths shorter than the original context divided by this are not stretched.
    pub high_freq_factor: f64,
    /// The context length of the original training.
    pub original_max_position_embeddings: usize,
}

impl Llama {
    /// Creates a configuration like Llama 2's: no biases, untied embeddings, one key head per query head.
    pub fn new(
        vocab_size: usize,
        hidden_size: usize,
        num_hidden_layers: usize,
        num_attention_heads: usize,
        intermediate_size: usize,
    ) -> Self {
        Llama {
            vocab_size,
            hidden_size,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads: num_attention_heads,
            head_dim: hidden_size / num_attention_heads.max(1),
            intermediate_size,
            rope_theta: 10_000.,
            rope_scaling: None,
            rms_norm_eps: 1e-5,
            tie_word_embeddings: false,
            qkv_bias: false,
            qk_norm: false,
            sliding_window: None,
            initializer_range: 0.02,
            loss_chunk_tokens: 256,
        }
    }

    /// Builds the model, a chain of units.
    pub fn model(&self) -> Result<Model> {
        self.check()?;
        let mut units = vec![Unit::new("embedding", vec![self.embedding()], Embedding(self.hidden_size))];
        for index in 0..self.num_hidden_layers {
            units.push(Unit::new(format!("block.{index}"), self.block(index), Block(self.clone())));
        }
        let mut head = vec![Parameter::vector("model.norm.weight".to_string(), self.hidden_size, Init::Ones)];
        if !self.tie_word_embeddings {
            head.push(Parameter::matrix(
                "lm_head.weight".to_string(),
                [self.vocab_size, self.hidden_size],
                self.initializer_range,
            ));
        }
        let tied = self.tie_word_embeddings.then_some(Tied { unit: 0, parameter: 0 });
        units.push(Unit::new("head", head, Head(self.clone())).with_tied(tied));
        Model::new(units)
    }

    fn check(&self) -> Result<()> {
        let fail = |key, problem: String| Err(Error::Config { key, problem });
        for (key, value) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("intermediate_size", self.intermediate_size),
            ("loss_chunk_tokens", self.loss_chunk_tokens),
        ] {
            if value == 0 {
                return fail(key, "is 0, and must be at least 1".to_string());
            }
        }
        if !self.num_attention_heads.is_multiple_of(self.num_key_value_heads) {
            let problem =
                format!("{} does not divide the {} query heads", self.num_key_value_heads, self.num_attention_heads);
            return fail("num_key_value_heads", problem);
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(2) {
            return fail("head_dim", format!("{} is not a positive even number, as rotary pairs need", self.head_dim));
        }
        if self.sliding_window == Some(0) {
            return fail("sliding_window", "is 0, and a position sees at least itself".to_string());
        }
        Ok(())
    }

    fn embedding(&self) -> Parameter {
        Parameter::matrix(
            "model.embed_tokens.weight".to_string(),
            [self.vocab_size, self.hidden_size],
            self.initializer_range,
        )
    }

    fn block(&self, index: usize) -> Vec<Parameter> {
        let name = |ending: &str| format!("model.layers.{index}.{ending}");
        let matrix = |ending: &str, out, into| Parameter::matrix(name(ending), [out, into], self.initializer_range);
        let vector = |ending: &str, len, init| Parameter::vector(name(ending), len, init);
        let (query, key) = (self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim);
        let mut parameters = vec![
            vector("input_layernorm.weight", self.hidden_size, Init::Ones),
            matrix("self_attn.q_proj.weight", query, self.hidden_size),
            matrix("self_attn.k_proj.weight", key, self.hidden_size),
            matrix("self_attn.v_proj.weight", key, self.hidden_size),
            matrix("self_attn.o_proj.weight", self.hidden_size, query),
        ];
        if self.qkv_bias {
            parameters.push(vector("self_attn.q_proj.bias", query, Init::Zeros));
            parameters.push(vector("self_attn.k_proj.bias", key, Init::Zeros));
            parameters.push(vector("self_attn.v_proj.bias", key, Init::Zeros));
        }
        if self.qk_norm {
            parameters.push(vector("self_attn.q_norm.weight", self.head_dim, Init::Ones));
            parameters.push(vector("self_attn.k_norm.weight", self.head_dim, Init::Ones));
        }
        parameters.push(vector("post_attention_layernorm.weight", self.hidden_size, Init::Ones));
        parameters.push(matrix("mlp.gate_proj.weight", self.intermediate_size, self.hidden_size));
        parameters.push(matrix("mlp.up_proj.weight", self.intermediate_size, self.hidden_size));
        parameters.push(matrix("mlp.down_proj.weight", self.hidden_size, self.intermediate_size));
        parameters
    }

    fn norm(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        Ok(x.f_rms_norm([weight.size()[0]], Some(weight), self.rms_norm_eps)?)
    }
}

/// The token embedding; holds the hidden size.
struct Embedding(usize);

impl Layer for Embedding {
    fn forward(
        &self,
        parameters: &Parameters<'_>,
        _: Option<&Tensor>,
        batch: &Batch,
        _: Activations,
    ) -> Result<Tensor> {
        Ok(Tensor::f_embedding(parameters.get("embed_tokens.weight"), &batch.inputs, -1, false, false)?)
    }

    fn extend(
        &self,
        parameters: &Parameters<'_>,
        _: Option<&Tensor>,
        tokens: &Tensor,
        cache: &mut Cache,
    ) -> Result<Tensor> {
        cache.advance(tokens.size()[1]);
        Ok(Tensor::f_embedding(parameters.get("embed_tokens.weight"), tokens, -1, false, false)?)
    }

    fn footprint(&self, tokens: usize, _: usize, element_bytes: usize, _: Activations) -> Footprint {
        Footprint::of_output(tokens * self.0 * element_bytes)
    }

    fn backward_reads_parameters(&self) -> bool {
        false
    }
}

struct Block(Llama);

impl Layer for Block {
    fn forward(
        &self,
        parameters: &Parameters<'_>,
        input: Option<&Tensor>,
        batch: &Batch,
        activations: Activations,
    ) -> Result<Tensor> {
        let x = input.expect("a block has an input");
        let x = x.f_add(&self.attend(parameters, x, Documents::of(batch)?, activations)?)?;
        Ok(x.f_add(&self.mlp(parameters, &x, activations)?)?)
    }

    fn extend(
        &self,
        parameters: &Parameters<'_>,
        input: Option<&Tensor>,
        _: &Tensor,
        cache: &mut Cache,
    ) -> Result<Tensor> {
        let x = input.expect("a block has an input");
        let normed = self.0.norm(x, parameters.get("input_layernorm.weight"))?;
        let joined = self.core(parameters, &normed, None)?.extend(cache)?;
        let x = x.f_add(&joined.f_linear(parameters.get("self_attn.o_proj.weight"), None::<&Tensor>)?)?;
        Ok(x.f_add(&self.mlp(parameters, &x, Activations::All)?)?)
    }

    fn footprint(&self, tokens: usize, positions: usize, element_bytes: usize, activations: Activations) -> Footprint {
        let Llama { hidden_size, intermediate_size, head_dim, .. } = self.0;
        let (query, key) = (self.0.num_attention_heads * head_dim, self.0.num_key_value_heads * head_dim);
        // What autograd saves: the inputs and outputs of norms, the residual and the output; query, key, value and output of
        // attention; gate, up, and the product of the activated gate and up.
        let kept = match activations {
            Activations::All => 6 * hidden_size + 4 * query + 3 * intermediate_size,
            Activations::Selective => 4 * hidden_size + query + 2 * key + 2 * intermediate_size,
        };
        let again = 2 * hidden_size + 4 * query + 2 * intermediate_size;
        // A sliding window needs a mask of positions by positions, first of booleans and then of floats.
        let mask =
            if self.0.sliding_window.is_some_and(|window| window < positions) { positions * positions } else { 0 };
        Footprint {
            kept_bytes: tokens * kept * element_bytes + mask * (1 + element_bytes),
            output_bytes: tokens * hidden_size * element_bytes,
            temporary_bytes: tokens * (again + 3 * intermediate_size) * element_bytes + mask * 4,
        }
    }

    fn attention_flops(&self, positions: usize) -> f64 {
        attention::flops(self.0.num_attention_heads * self.0.head_dim, positions, self.0.sliding_window)
    }
}

impl Block {
    fn attend(
        &self,
        parameters: &Parameters<'_>,
        x: &Tensor,
        documents: Option<Documents>,
        activations: Activations,
    ) -> Result<Tensor> {
        let norm = parameters.get("input_layernorm.weight");
        let normed = self.0.norm(x, norm)?;
        let core = self.core(parameters, &normed, documents)?;
        let attended = core.attend()?;
        let joined = attended.last().expect("attention has an output");
        let output = joined.f_linear(parameters.get("self_attn.o_proj.weight"), None::<&Tensor>)?;
        if activations == Activations::All {
            return Ok(output);
        }
        let saved: Vec<&Tensor> = attended.iter().chain([&normed]).collect();
        let (x, norm, core) = (x.detach(), norm.detach(), core.detached());
        recompute_in_backward(output, &saved, move || {
            let mut recomputed = core.attend()?;
            recomputed.push(core.llama.norm(&x, &norm)?);
            Ok(recomputed)
        })
    }

    fn core(&self, parameters: &Parameters<'_>, normed: &Tensor, documents: Option<Documents>) -> Result<Core> {
        let project = |name: &str| -> Result<Tensor> {
            let weight = parameters.get(&format!("{name}.weight"));
            Ok(normed.f_linear(weight, parameters.find(&format!("{name}.bias")))?)
        };
        Ok(Core {
            llama: self.0.clone(),
            documents,
            query: project("self_attn.q_proj")?,
            key: project("self_attn.k_proj")?,
            value: project("self_attn.v_proj")?,
            query_norm: parameters.find("self_attn.q_norm.weight").map(Tensor::shallow_clone),
            key_norm: parameters.find("self_attn.k_norm.weight").map(Tensor::shallow_clone),
        })
    }

    fn mlp(&self, parameters: &Parameters<'_>, x: &Tensor, activations: Activations) -> Result<Tensor> {
        let llama = &self.0;
        let linear = |x: &Tensor, name: &str| x.f_linear(parameters.get(name), None::<&Tensor>);
        let norm = parameters.get("post_attention_layernorm.weight");
        let normed = llama.norm(x, norm)?;
        let gate = linear(&normed, "mlp.gate_proj.weight")?;
        let up = linear(&normed, "mlp.up_proj.weight")?;
        let opened = gate.f_silu()?;
        let gated = opened.f_mul(&up)?;
        let output = linear(&gated, "mlp.down_proj.weight")?;
        if activations == Activations::All {
            // If `up` needs no gradient, autograd does not save the activated gate.
            if !up.requires_grad() {
                return Ok(output);
            }
            // Recomputing the activated gate is one elementwise operation; keeping it takes an eighth of the memory of a
            // block's activations.
            let gate = gate.detach();
            return recompute_in_backward(output, &[&opened], move || Ok(vec![gate.f_silu()?]));
        }
        let (llama, x, norm, gate, up) = (llama.clone(), x.detach(), norm.detach(), gate.detach(), up.detach());
        recompute_in_backward(output, &[&normed, &opened, &gated], move || {
            let opened = gate.f_silu()?;
            let gated = opened.f_mul(&up)?;
            Ok(vec![llama.norm(&x, &norm)?, opened, gated])
        })
    }
}

/// Attention between the input projections and the output projection (Megatron: core attention).
struct Core {
    llama: Llama,
    documents: Option<Documents>,
    /// The projected query (sequences, positions, heads × head dim). Key and value have the same layout.
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_norm: Option<Tensor>,
    key_norm: Option<Tensor>,
}

impl Core {
    /// Returns everything that attention computes: the query and key that the kernel gets; the value, if it was expanded; the
    /// output of each document, if sequences are packed; and last the whole output.
    fn attend(&self) -> Result<Vec<Tensor>> {
        let [query, key, value] = self.heads(0)?;
        let documents = self.documents.as_ref();
        let attended = attention::causal(&query, &key, &value, self.llama.sliding_window, documents)?;
        let mut computed = match attended.expanded {
            Some([key, value]) => vec![query, key, value],
            None => vec![query, key],
        };
        computed.extend(attended.parts);
        computed.push(attended.output);
        Ok(computed)
    }

    /// Returns the output for positions that come after those in `cache`.
    fn extend(&self, cache: &mut Cache) -> Result<Tensor> {
        let [query, key, value] = self.heads(cache.positions() as i64)?;
        let [key, value] = cache.extend(&key, &value, self.llama.sliding_window)?;
        attention::extend(&query, &key, &value, self.llama.sliding_window)
    }

    /// Query, key and value (sequences, heads, positions, head dim), normalized and rotated. The first position is `first`.
    fn heads(&self, first: i64) -> Result<[Tensor; 3]> {
        let llama = &self.llama;
        let (sequences, positions) = (self.query.size()[0], self.query.size()[1]);
        let rope = Rope::new(llama, first..first + positions, self.query.kind(), self.query.device())?;
        let heads = |projected: &Tensor, norm: &Option<Tensor>| -> Result<Tensor> {
            let split = projected.f_view([sequences, positions, -1, llama.head_dim as i64])?;
            let normed = match norm {
                Some(weight) => llama.norm(&split, weight)?,
                None => split,
            };
            Ok(normed.f_transpose(1, 2)?)
        };
        let query = rope.rotate(&heads(&self.query, &self.query_norm)?)?;
        let key = rope.rotate(&heads(&self.key, &self.key_norm)?)?;
        Ok([query, key, heads(&self.value, &None)?])
    }

    /// Returns a copy that is detached from the autograd graph.
    fn detached(&self) -> Core {
        let detach = |norm: &Option<Tensor>| norm.as_ref().map(Tensor::detach);
        Core {
            llama: self.llama.clone(),
            documents: self.documents.clone(),
            query: self.query.detach(),
            key: self.key.detach(),
            value: self.value.detach(),
            query_norm: detach(&self.query_norm),
            key_norm: detach(&self.key_norm),
        }
    }
}

impl LmHead for Llama {
    fn final_norm_and_weight<'a>(
        &self,
        parameters: &'a Parameters<'_>,
        input: &Tensor,
    ) -> Result<(Tensor, &'a Tensor)> {
        let weight = parameters.tied().unwrap_or_else(|| parameters.get("lm_head.weight"));
        Ok((self.norm(input, parameters.get("model.norm.weight"))?, weight))
    }

    fn sizes(&self) -> Sizes {
        Sizes { vocab_size: self.vocab_size, hidden_size: self.hidden_size, chunk_tokens: self.loss_chunk_tokens }
    }
}

/// The rotary position embedding: pairs of elements of a head, one from each half, rotated by an angle that grows with position.
struct Rope {
    cosines: Tensor,
    sines: Tensor,
}

impl Rope {
    fn new(llama: &Llama, positions: Range<i64>, kind: Kind, device: Device) -> Result<Self> {
        let frequencies: Vec<f64> = (0..llama.head_dim / 2)
            .map(|pair| llama.rope_theta.powf(-2. * pair as f64 / llama.head_dim as f64))
            .map(|frequency| llama.rope_scaling.map_or(frequency, |scaling| scaling.stretch(frequency)))
            .collect();
        // Angles are f32, as in the original code of the models.
        let frequencies: Vec<f32> = frequencies.into_iter().map(|frequency| frequency as f32).collect();
        let frequencies = Tensor::f_from_slice(&frequencies)?.to_device(device);
        let positions = Tensor::f_arange_start(positions.start, positions.end, (Kind::Float, device))?;
        let angles = positions.f_outer(&frequencies)?;
        let angles = Tensor::f_cat(&[&angles, &angles], -1)?;
        Ok(Rope { cosines: angles.f_cos()?.to_kind(kind), sines: angles.f_sin()?.to_kind(kind) })
    }

    fn rotate(&self, x: &Tensor) -> Result<Tensor> {
        let half = x.size()[3] / 2;
        let rotated = Tensor::f_cat(&[x.f_narrow(3, half, half)?.f_neg()?, x.f_narrow(3, 0, half)?], -1)?;
        Ok(x.f_mul(&self.cosines)?.f_add(&rotated.f_mul(&self.sines)?)?)
    }
}

impl Llama3Rope {
    fn stretch(self, frequency: f64) -> f64 {
        let wavelength = 2. * PI / frequency;
        let context = self.original_max_position_embeddings as f64;
        if wavelength < context / self.high_freq_factor {
            frequency
        } else if wavelength > context / self.low_freq_factor {
            frequency / self.factor
        } else {
            let smooth = (context / wavelength - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor);
            (1. - smooth) * frequency / self.factor + smooth * frequency
        }
    }
}
