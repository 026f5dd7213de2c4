//! The Llama family: Llama 2 and 3, Mistral, Qwen 2 and 3.

use std::f64::consts::PI;
use std::ops::Range;

use shardwise_torch::tch::{Device, Kind, Tensor};

use crate::documents::Documents;
use crate::head::{Head, Headed, Sizes};
use crate::recompute::computed_again;
use crate::{
    Activations, Batch, Cache, Error, Footprint, Init, Layer, Model, Parameter, Parameters, Result, Tied, Unit,
    attention,
};

/// The shape of a model of the family.
#[derive(Clone, Debug, PartialEq)]
pub struct Llama {
    /// Token ids are below this.
    pub vocabulary: usize,
    /// The width of the hidden states.
    pub width: usize,
    /// The number of blocks.
    pub blocks: usize,
    /// The number of query heads.
    pub heads: usize,
    /// The number of key and value heads, which divides the number of query heads.
    pub kv_heads: usize,
    /// The width of a head; often `width / heads`.
    pub head_width: usize,
    /// The width of the MLP.
    pub mlp_width: usize,
    /// The base of the rotary embedding's wavelengths.
    pub rope_base: f64,
    /// How Llama 3.1 and later stretch those wavelengths.
    pub rope_scaling: Option<Llama3Rope>,
    /// Added to the mean square in the norms.
    pub norm_epsilon: f64,
    /// Whether the head uses the embedding's matrix.
    pub tied: bool,
    /// Whether query, key and value have biases, as in Qwen 2.
    pub qkv_bias: bool,
    /// Whether queries and keys are normed per head, as in Qwen 3.
    pub qk_norm: bool,
    /// How many positions a position sees, itself included, as in Mistral.
    pub window: Option<usize>,
    /// The standard deviation with which matrices begin.
    pub init_std: f64,
    /// Tokens whose logits exist at once.
    pub head_chunk: usize,
}

/// Llama 3.1's stretching of the rotary embedding for long contexts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Llama3Rope {
    /// By how much long wavelengths are stretched.
    pub factor: f64,
    /// Wavelengths longer than the original context divided by this are stretched whole.
    pub low_frequency_factor: f64,
    /// Wavelengths shorter than the original context divided by this are left alone.
    pub high_frequency_factor: f64,
    /// The context that the model was first trained for.
    pub original_context: usize,
}

impl Llama {
    /// A model of Llama 2's kind: no biases, untied, one key head per query head.
    pub fn new(vocabulary: usize, width: usize, blocks: usize, heads: usize, mlp_width: usize) -> Self {
        Llama {
            vocabulary,
            width,
            blocks,
            heads,
            kv_heads: heads,
            head_width: width / heads.max(1),
            mlp_width,
            rope_base: 10_000.,
            rope_scaling: None,
            norm_epsilon: 1e-5,
            tied: false,
            qkv_bias: false,
            qk_norm: false,
            window: None,
            init_std: 0.02,
            head_chunk: 256,
        }
    }

    /// The model as a chain of units.
    pub fn model(&self) -> Result<Model> {
        self.check()?;
        let mut units = vec![Unit::new("embedding", vec![self.embedding()], Embedding(self.width))];
        for index in 0..self.blocks {
            units.push(Unit::new(format!("block.{index}"), self.block(index), Block(self.clone())));
        }
        let mut head = vec![Parameter::vector("model.norm.weight".to_string(), self.width, Init::Ones)];
        if !self.tied {
            head.push(Parameter::matrix("lm_head.weight".to_string(), [self.vocabulary, self.width], self.init_std));
        }
        let tied = self.tied.then_some(Tied { unit: 0, parameter: 0 });
        units.push(Unit::new("head", head, Head(self.clone())).with_tied(tied));
        Model::new(units)
    }

    fn check(&self) -> Result<()> {
        let fail = |key, problem: String| Err(Error::Config { key, problem });
        for (key, value) in [
            ("vocabulary", self.vocabulary),
            ("width", self.width),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("mlp_width", self.mlp_width),
            ("head_chunk", self.head_chunk),
        ] {
            if value == 0 {
                return fail(key, "is 0, and must be at least 1".to_string());
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            let problem = format!("{} does not divide the {} query heads", self.kv_heads, self.heads);
            return fail("kv_heads", problem);
        }
        if self.head_width == 0 || !self.head_width.is_multiple_of(2) {
            return fail(
                "head_width",
                format!("{} is not a positive even number, as rotary pairs need", self.head_width),
            );
        }
        if self.window == Some(0) {
            return fail("window", "is 0, and a position sees at least itself".to_string());
        }
        Ok(())
    }

    fn embedding(&self) -> Parameter {
        Parameter::matrix("model.embed_tokens.weight".to_string(), [self.vocabulary, self.width], self.init_std)
    }

    fn block(&self, index: usize) -> Vec<Parameter> {
        let name = |ending: &str| format!("model.layers.{index}.{ending}");
        let matrix = |ending: &str, out, into| Parameter::matrix(name(ending), [out, into], self.init_std);
        let vector = |ending: &str, len, init| Parameter::vector(name(ending), len, init);
        let (query, key) = (self.heads * self.head_width, self.kv_heads * self.head_width);
        let mut parameters = vec![
            vector("input_layernorm.weight", self.width, Init::Ones),
            matrix("self_attn.q_proj.weight", query, self.width),
            matrix("self_attn.k_proj.weight", key, self.width),
            matrix("self_attn.v_proj.weight", key, self.width),
            matrix("self_attn.o_proj.weight", self.width, query),
        ];
        if self.qkv_bias {
            parameters.push(vector("self_attn.q_proj.bias", query, Init::Zeros));
            parameters.push(vector("self_attn.k_proj.bias", key, Init::Zeros));
            parameters.push(vector("self_attn.v_proj.bias", key, Init::Zeros));
        }
        if self.qk_norm {
            parameters.push(vector("self_attn.q_norm.weight", self.head_width, Init::Ones));
            parameters.push(vector("self_attn.k_norm.weight", self.head_width, Init::Ones));
        }
        parameters.push(vector("post_attention_layernorm.weight", self.width, Init::Ones));
        parameters.push(matrix("mlp.gate_proj.weight", self.mlp_width, self.width));
        parameters.push(matrix("mlp.up_proj.weight", self.mlp_width, self.width));
        parameters.push(matrix("mlp.down_proj.weight", self.width, self.mlp_width));
        parameters
    }

    fn norm(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        Ok(x.f_rms_norm([weight.size()[0]], Some(weight), self.norm_epsilon)?)
    }
}

/// With the width of what it looks up.
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
        Ok(x.f_add(&self.mlp(parameters, &x, Activations::Kept)?)?)
    }

    fn footprint(&self, tokens: usize, positions: usize, element_bytes: usize, activations: Activations) -> Footprint {
        let Llama { width, mlp_width, heads, kv_heads, head_width, .. } = self.0;
        let (query, key) = (heads * head_width, kv_heads * head_width);
        // As autograd saves them: outputs of norms with what they were made of, residual and output; query, key, value and
        // output of attention; gate, up, and the product of the opened gate and up.
        let kept = match activations {
            Activations::Kept => 6 * width + 4 * query + 3 * mlp_width,
            Activations::Few => 4 * width + query + 2 * key + 2 * mlp_width,
        };
        let again = 2 * width + 4 * query + 2 * mlp_width;
        // A window is a mask of positions by positions, of truths and then of numbers.
        let mask = if self.0.window.is_some_and(|window| window < positions) { positions * positions } else { 0 };
        Footprint {
            kept_bytes: tokens * kept * element_bytes + mask * (1 + element_bytes),
            output_bytes: tokens * width * element_bytes,
            passing_bytes: tokens * (again + 3 * mlp_width) * element_bytes + mask * 4,
        }
    }

    fn attention_flops(&self, positions: usize) -> f64 {
        attention::flops(self.0.heads * self.0.head_width, positions, self.0.window)
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
        if activations == Activations::Kept {
            return Ok(output);
        }
        let saved: Vec<&Tensor> = attended.iter().chain([&normed]).collect();
        let (x, norm, core) = (x.detach(), norm.detach(), core.detached());
        computed_again(output, &saved, move || {
            let mut again = core.attend()?;
            again.push(core.llama.norm(&x, &norm)?);
            Ok(again)
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
        if activations == Activations::Kept {
            // Where up learns nothing, the opened gate is not saved.
            if !up.requires_grad() {
                return Ok(output);
            }
            // It takes one look at the gate to open it again, and an eighth of a block's memory to keep it open.
            let gate = gate.detach();
            return computed_again(output, &[&opened], move || Ok(vec![gate.f_silu()?]));
        }
        let (llama, x, norm, gate, up) = (llama.clone(), x.detach(), norm.detach(), gate.detach(), up.detach());
        computed_again(output, &[&normed, &opened, &gated], move || {
            let opened = gate.f_silu()?;
            let gated = opened.f_mul(&up)?;
            Ok(vec![llama.norm(&x, &norm)?, opened, gated])
        })
    }
}

/// From the projections to the heads' outputs.
struct Core {
    llama: Llama,
    documents: Option<Documents>,
    /// Sequences by positions by heads' widths, as are the next two.
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_norm: Option<Tensor>,
    key_norm: Option<Tensor>,
}

impl Core {
    /// Everything that was computed: query and key as the kernel sees them, expanded or not; the value, if it was expanded;
    /// the documents' outputs, if there are several; and last the output.
    fn attend(&self) -> Result<Vec<Tensor>> {
        let [query, key, value] = self.heads(0)?;
        let documents = self.documents.as_ref();
        let attended = attention::causal(&query, &key, &value, self.llama.window, documents)?;
        let mut computed = match attended.expanded {
            Some([key, value]) => vec![query, key, value],
            None => vec![query, key],
        };
        computed.extend(attended.parts);
        computed.push(attended.output);
        Ok(computed)
    }

    /// The output for positions that come after those in `cache`.
    fn extend(&self, cache: &mut Cache) -> Result<Tensor> {
        let [query, key, value] = self.heads(cache.positions() as i64)?;
        let [key, value] = cache.extend(&key, &value, self.llama.window)?;
        attention::extend(&query, &key, &value, self.llama.window)
    }

    /// Query, key and value (sequences, heads, positions, head width), normed and turned; the first stands at position
    /// `first`.
    fn heads(&self, first: i64) -> Result<[Tensor; 3]> {
        let llama = &self.llama;
        let (sequences, positions) = (self.query.size()[0], self.query.size()[1]);
        let rope = Rope::new(llama, first..first + positions, self.query.kind(), self.query.device())?;
        let heads = |projected: &Tensor, norm: &Option<Tensor>| -> Result<Tensor> {
            let split = projected.f_view([sequences, positions, -1, llama.head_width as i64])?;
            let normed = match norm {
                Some(weight) => llama.norm(&split, weight)?,
                None => split,
            };
            Ok(normed.f_transpose(1, 2)?)
        };
        let query = rope.turn(&heads(&self.query, &self.query_norm)?)?;
        let key = rope.turn(&heads(&self.key, &self.key_norm)?)?;
        Ok([query, key, heads(&self.value, &None)?])
    }

    /// The same without the graph behind it.
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

impl Headed for Llama {
    fn normed<'a>(&self, parameters: &'a Parameters<'_>, input: &Tensor) -> Result<(Tensor, &'a Tensor)> {
        let weight = parameters.tied().unwrap_or_else(|| parameters.get("lm_head.weight"));
        Ok((self.norm(input, parameters.get("model.norm.weight"))?, weight))
    }

    fn sizes(&self) -> Sizes {
        Sizes { vocabulary: self.vocabulary, width: self.width, chunk: self.head_chunk }
    }
}

/// Rotary position embedding: pairs of elements of a head, one from each half, turned by an angle that grows with the position.
struct Rope {
    cosines: Tensor,
    sines: Tensor,
}

impl Rope {
    fn new(llama: &Llama, positions: Range<i64>, kind: Kind, device: Device) -> Result<Self> {
        let frequencies: Vec<f64> = (0..llama.head_width / 2)
            .map(|pair| llama.rope_base.powf(-2. * pair as f64 / llama.head_width as f64))
            .map(|frequency| llama.rope_scaling.map_or(frequency, |scaling| scaling.stretched(frequency)))
            .collect();
        // Angles in f32, as in the models' own code.
        let frequencies: Vec<f32> = frequencies.into_iter().map(|frequency| frequency as f32).collect();
        let frequencies = Tensor::f_from_slice(&frequencies)?.to_device(device);
        let positions = Tensor::f_arange_start(positions.start, positions.end, (Kind::Float, device))?;
        let angles = positions.f_outer(&frequencies)?;
        let angles = Tensor::f_cat(&[&angles, &angles], -1)?;
        Ok(Rope { cosines: angles.f_cos()?.to_kind(kind), sines: angles.f_sin()?.to_kind(kind) })
    }

    fn turn(&self, x: &Tensor) -> Result<Tensor> {
        let half = x.size()[3] / 2;
        let turned = Tensor::f_cat(&[x.f_narrow(3, half, half)?.f_neg()?, x.f_narrow(3, 0, half)?], -1)?;
        Ok(x.f_mul(&self.cosines)?.f_add(&turned.f_mul(&self.sines)?)?)
    }
}

impl Llama3Rope {
    fn stretched(self, frequency: f64) -> f64 {
        let wavelength = 2. * PI / frequency;
        let context = self.original_context as f64;
        if wavelength < context / self.high_frequency_factor {
            frequency
        } else if wavelength > context / self.low_frequency_factor {
            frequency / self.factor
        } else {
            let smooth = (context / wavelength - self.low_frequency_factor)
                / (self.high_frequency_factor - self.low_frequency_factor);
            (1. - smooth) * frequency / self.factor + smooth * frequency
        }
    }
}
