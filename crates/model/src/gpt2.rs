//! GPT-2: LayerNorm, learned positions, GELU, biases, and a head that is always the embedding's matrix.

use shardwise_torch::tch::{Kind, Tensor};

use crate::documents::Documents;
use crate::head::{Head, Headed, Sizes};
use crate::recompute::computed_again;
use crate::{
    Activations, Batch, Cache, Error, Footprint, Init, Layer, Model, Parameter, Parameters, Result, Tied, Unit,
    attention,
};

/// The shape of a GPT-2.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpt2 {
    /// Token ids are below this.
    pub vocabulary: usize,
    /// The longest sequence.
    pub positions: usize,
    /// The width of the hidden states.
    pub width: usize,
    /// The number of blocks.
    pub blocks: usize,
    /// The number of heads, which divides the width.
    pub heads: usize,
    /// Added to the variance in the norms.
    pub norm_epsilon: f64,
    /// The standard deviation with which matrices begin.
    pub init_std: f64,
    /// Tokens whose logits exist at once.
    pub head_chunk: usize,
}

impl Gpt2 {
    /// A GPT-2 of the given size, with the constants of the published ones.
    pub fn new(vocabulary: usize, positions: usize, width: usize, blocks: usize, heads: usize) -> Self {
        Gpt2 { vocabulary, positions, width, blocks, heads, norm_epsilon: 1e-5, init_std: 0.02, head_chunk: 256 }
    }

    /// The model as a chain of units.
    pub fn model(&self) -> Result<Model> {
        if self.heads == 0 || !self.width.is_multiple_of(self.heads) {
            let problem = format!("{} does not divide the width of {}", self.heads, self.width);
            return Err(Error::Config { key: "heads", problem });
        }
        for (key, value) in
            [("vocabulary", self.vocabulary), ("positions", self.positions), ("head_chunk", self.head_chunk)]
        {
            if value == 0 {
                return Err(Error::Config { key, problem: "is 0, and must be at least 1".to_string() });
            }
        }
        let embedding = vec![
            Parameter::matrix("wte.weight".to_string(), [self.vocabulary, self.width], self.init_std),
            Parameter::matrix("wpe.weight".to_string(), [self.positions, self.width], self.init_std / 2.),
        ];
        let mut units = vec![Unit::new("embedding", embedding, Embedding(self.clone()))];
        for index in 0..self.blocks {
            units.push(Unit::new(format!("block.{index}"), self.block(index), Block(self.clone())));
        }
        let head = vec![
            Parameter::vector("ln_f.weight".to_string(), self.width, Init::Ones),
            Parameter::vector("ln_f.bias".to_string(), self.width, Init::Zeros),
        ];
        let tied = Some(Tied { unit: 0, parameter: 0 });
        units.push(Unit::new("head", head, Head(self.clone())).with_tied(tied));
        Model::new(units)
    }

    fn block(&self, index: usize) -> Vec<Parameter> {
        let width = self.width;
        // Residual branches begin smaller the more of them there are.
        let residual_std = self.init_std / (2. * self.blocks as f64).sqrt();
        let name = |ending: &str| format!("h.{index}.{ending}");
        let norm = |ending: &str| {
            [("weight", Init::Ones), ("bias", Init::Zeros)]
                .map(|(kind, init)| Parameter::vector(name(&format!("{ending}.{kind}")), width, init))
        };
        // Published GPT-2 checkpoints hold their matrices as (in, out).
        let linear = |ending: &str, into, out, std| {
            [
                Parameter::matrix(name(&format!("{ending}.weight")), [into, out], std),
                Parameter::vector(name(&format!("{ending}.bias")), out, Init::Zeros),
            ]
        };
        [
            norm("ln_1"),
            linear("attn.c_attn", width, 3 * width, self.init_std),
            linear("attn.c_proj", width, width, residual_std),
            norm("ln_2"),
            linear("mlp.c_fc", width, 4 * width, self.init_std),
            linear("mlp.c_proj", 4 * width, width, residual_std),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    fn norm(&self, parameters: &Parameters<'_>, name: &str) -> Norm {
        let get = |kind: &str| parameters.get(&format!("{name}.{kind}")).shallow_clone();
        Norm { width: self.width as i64, weight: get("weight"), bias: get("bias"), epsilon: self.norm_epsilon }
    }
}

struct Norm {
    width: i64,
    weight: Tensor,
    bias: Tensor,
    epsilon: f64,
}

impl Norm {
    fn of(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.f_layer_norm([self.width], Some(&self.weight), Some(&self.bias), self.epsilon, false)?)
    }

    /// The same without the graph behind it.
    fn detached(&self) -> Norm {
        Norm { weight: self.weight.detach(), bias: self.bias.detach(), ..*self }
    }
}

fn linear(parameters: &Parameters<'_>, x: &Tensor, name: &str) -> Result<Tensor> {
    let weight = parameters.get(&format!("{name}.weight")).f_transpose(0, 1)?;
    Ok(x.f_linear(&weight, Some(parameters.get(&format!("{name}.bias"))))?)
}

/// Query, key and value (sequences, heads, positions, head width) of what was projected together.
fn heads(projected: &Tensor, heads: usize) -> Result<[Tensor; 3]> {
    let (sequences, positions) = (projected.size()[0], projected.size()[1]);
    let all = projected.f_chunk(3, 2)?;
    let split = |joined: &Tensor| joined.f_view([sequences, positions, heads as i64, -1])?.f_transpose(1, 2);
    Ok([split(&all[0])?, split(&all[1])?, split(&all[2])?])
}

struct Embedding(Gpt2);

impl Layer for Embedding {
    fn forward(
        &self,
        parameters: &Parameters<'_>,
        _: Option<&Tensor>,
        batch: &Batch,
        _: Activations,
    ) -> Result<Tensor> {
        let places = match Documents::of(batch)? {
            Some(documents) => {
                self.check("documents", documents.longest())?;
                documents.places(batch.inputs.device())?
            }
            None => {
                self.check("sequences", batch.inputs.size()[1])?;
                Tensor::f_arange(batch.inputs.size()[1], (Kind::Int64, batch.inputs.device()))?
            }
        };
        lookup(parameters, &batch.inputs, &places)
    }

    fn extend(
        &self,
        parameters: &Parameters<'_>,
        _: Option<&Tensor>,
        tokens: &Tensor,
        cache: &mut Cache,
    ) -> Result<Tensor> {
        let first = cache.advance(tokens.size()[1]);
        let end = first + tokens.size()[1];
        self.check("sequences", end)?;
        lookup(parameters, tokens, &Tensor::f_arange_start(first, end, (Kind::Int64, tokens.device()))?)
    }

    fn positions(&self) -> Option<usize> {
        Some(self.0.positions)
    }

    fn footprint(&self, tokens: usize, _: usize, element_bytes: usize, _: Activations) -> Footprint {
        Footprint::of_output(tokens * self.0.width * element_bytes)
    }

    fn backward_reads_parameters(&self) -> bool {
        false
    }
}

impl Embedding {
    fn check(&self, what: &str, positions: i64) -> Result<()> {
        if positions > self.0.positions as i64 {
            let problem = format!("{what} have {positions} positions, and the model has {}", self.0.positions);
            return Err(Error::Config { key: "positions", problem });
        }
        Ok(())
    }
}

fn lookup(parameters: &Parameters<'_>, tokens: &Tensor, places: &Tensor) -> Result<Tensor> {
    let lookup = |name: &str, index: &Tensor| Tensor::f_embedding(parameters.get(name), index, -1, false, false);
    Ok(lookup("wte.weight", tokens)?.f_add(&lookup("wpe.weight", places)?)?)
}

struct Block(Gpt2);

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
        let normed = self.0.norm(parameters, "ln_1").of(x)?;
        let [query, key, value] = heads(&linear(parameters, &normed, "attn.c_attn")?, self.0.heads)?;
        let [key, value] = cache.extend(&key, &value, None)?;
        let joined = attention::extend(&query, &key, &value, None)?;
        let x = x.f_add(&linear(parameters, &joined, "attn.c_proj")?)?;
        Ok(x.f_add(&self.mlp(parameters, &x, Activations::Kept)?)?)
    }

    fn footprint(&self, tokens: usize, _: usize, element_bytes: usize, activations: Activations) -> Footprint {
        let width = self.0.width;
        // As autograd saves them: outputs of norms, residual and output; the projections and output of attention; the wide
        // layer before and after its activation.
        let kept = match activations {
            Activations::Kept => 4 * width + 4 * width + 8 * width,
            Activations::Few => 2 * width + 3 * width + 4 * width,
        };
        Footprint {
            kept_bytes: tokens * kept * element_bytes,
            output_bytes: tokens * width * element_bytes,
            passing_bytes: tokens * 18 * width * element_bytes,
        }
    }

    fn attention_flops(&self, positions: usize) -> f64 {
        attention::flops(self.0.width, positions, None)
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
        let number = self.0.heads;
        let norm = self.0.norm(parameters, "ln_1");
        let normed = norm.of(x)?;
        let projected = linear(parameters, &normed, "attn.c_attn")?;
        // The documents' outputs, if there are several, and last the output.
        let core = move |projected: &Tensor| -> Result<Vec<Tensor>> {
            let [query, key, value] = heads(projected, number)?;
            let attended = attention::causal(&query, &key, &value, None, documents.as_ref())?;
            Ok(attended.parts.into_iter().chain([attended.output]).collect())
        };
        let attended = core(&projected)?;
        let joined = attended.last().expect("attention has an output");
        let output = linear(parameters, joined, "attn.c_proj")?;
        if activations == Activations::Kept {
            return Ok(output);
        }
        let saved: Vec<&Tensor> = attended.iter().chain([&normed]).collect();
        let (x, norm, projected) = (x.detach(), norm.detached(), projected.detach());
        computed_again(output, &saved, move || {
            let mut again = core(&projected)?;
            again.push(norm.of(&x)?);
            Ok(again)
        })
    }

    fn mlp(&self, parameters: &Parameters<'_>, x: &Tensor, activations: Activations) -> Result<Tensor> {
        let norm = self.0.norm(parameters, "ln_2");
        let normed = norm.of(x)?;
        let wide = linear(parameters, &normed, "mlp.c_fc")?;
        let activated = wide.f_gelu("tanh")?;
        let output = linear(parameters, &activated, "mlp.c_proj")?;
        if activations == Activations::Kept {
            return Ok(output);
        }
        let (x, norm, wide) = (x.detach(), norm.detached(), wide.detach());
        computed_again(output, &[&activated, &normed], move || Ok(vec![wide.f_gelu("tanh")?, norm.of(&x)?]))
    }
}

impl Headed for Gpt2 {
    fn normed<'a>(&self, parameters: &'a Parameters<'_>, input: &Tensor) -> Result<(Tensor, &'a Tensor)> {
        let weight = parameters.tied().expect("GPT-2's head is the embedding's matrix");
        Ok((self.norm(parameters, "ln_f").of(input)?, weight))
    }

    fn sizes(&self) -> Sizes {
        Sizes { vocabulary: self.vocabulary, width: self.width, chunk: self.head_chunk }
    }
}
