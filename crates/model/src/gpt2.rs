//! GPT-2: LayerNorm, learned positions, GELU, biases, and a head that shares the embedding's matrix.

use shardwise_plan::{Gpt2Config, ParameterShape};
use shardwise_torch::tch::{Kind, Tensor};

use crate::activation_checkpointing::recompute_in_backward;
use crate::documents::Documents;
use crate::head::{Head, LmHead, Sizes};
use crate::unit::embed;
use crate::{
    Activations, Batch, Cache, Error, Footprint, Init, Layer, Parameter, Parameters, Result, Tied, Unit, attention,
};

/// Builds a unit of the model from its parameters.
pub(crate) fn unit(config: &Gpt2Config, name: &str, parameters: &[ParameterShape]) -> Unit {
    let parameters = parameters.iter().map(|parameter| with_init(config, parameter)).collect();
    match name {
        "embedding" => Unit::new(name, parameters, Embedding(config.clone())),
        "head" => Unit::new(name, parameters, Head(config.clone())).with_tied(Some(Tied { unit: 0, parameter: 0 })),
        _ => Unit::new(name, parameters, Block(config.clone())),
    }
}

/// Declares a parameter with its initial values: matrices are random, norms are 1 and biases 0.
fn with_init(config: &Gpt2Config, parameter: &ParameterShape) -> Parameter {
    let name = parameter.name.as_str();
    let init = match parameter.shape.len() {
        1 if name.ends_with(".bias") => Init::Zeros,
        1 => Init::Ones,
        _ if name == "wpe.weight" => Init::Normal { std: config.initializer_range / 2. },
        // The more residual branches there are, the smaller their initial weights.
        _ if name.ends_with(".c_proj.weight") => {
            Init::Normal { std: config.initializer_range / (2. * config.n_layer as f64).sqrt() }
        }
        _ => Init::Normal { std: config.initializer_range },
    };
    Parameter::new(name, &parameter.shape, init)
}

struct Norm {
    width: i64,
    weight: Tensor,
    bias: Tensor,
    epsilon: f64,
}

impl Norm {
    fn new(config: &Gpt2Config, parameters: &Parameters<'_>, name: &str) -> Norm {
        let get = |kind: &str| parameters.get(&format!("{name}.{kind}")).shallow_clone();
        let (weight, bias) = (get("weight"), get("bias"));
        Norm { width: config.n_embd as i64, weight, bias, epsilon: config.layer_norm_epsilon }
    }

    fn of(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.f_layer_norm([self.width], Some(&self.weight), Some(&self.bias), self.epsilon, false)?)
    }

    /// Returns a copy that is detached from the autograd graph.
    fn detached(&self) -> Norm {
        Norm { weight: self.weight.detach(), bias: self.bias.detach(), ..*self }
    }
}

fn linear(parameters: &Parameters<'_>, x: &Tensor, name: &str) -> Result<Tensor> {
    let weight = parameters.get(&format!("{name}.weight")).f_transpose(0, 1)?;
    Ok(x.f_linear(&weight, Some(parameters.get(&format!("{name}.bias"))))?)
}

/// Splits a joint projection into query, key and value (sequences, heads, positions, head dim).
fn heads(projected: &Tensor, heads: usize) -> Result<[Tensor; 3]> {
    let (sequences, positions) = (projected.size()[0], projected.size()[1]);
    let all = projected.f_chunk(3, 2)?;
    let split = |joined: &Tensor| joined.f_view([sequences, positions, heads as i64, -1])?.f_transpose(1, 2);
    Ok([split(&all[0])?, split(&all[1])?, split(&all[2])?])
}

struct Embedding(Gpt2Config);

impl Layer for Embedding {
    fn forward(
        &self,
        parameters: &Parameters<'_>,
        _: Option<&Tensor>,
        batch: &Batch,
        _: Activations,
    ) -> Result<Tensor> {
        let positions = match Documents::of(batch)? {
            Some(documents) => {
                self.check("documents", documents.longest())?;
                documents.positions(batch.inputs.device())?
            }
            None => {
                self.check("sequences", batch.inputs.size()[1])?;
                Tensor::f_arange(batch.inputs.size()[1], (Kind::Int64, batch.inputs.device()))?
            }
        };
        lookup(parameters, &batch.inputs, &positions)
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

    fn max_positions(&self) -> Option<usize> {
        Some(self.0.n_positions)
    }

    fn footprint(&self, tokens: usize, _: usize, element_bytes: usize, _: Activations) -> Footprint {
        Footprint::of_output(tokens * self.0.n_embd * element_bytes)
    }

    fn backward_reads_parameters(&self) -> bool {
        false
    }
}

impl Embedding {
    fn check(&self, what: &str, positions: i64) -> Result<()> {
        if positions > self.0.n_positions as i64 {
            let problem = format!("{what} have {positions} positions, and the model has {}", self.0.n_positions);
            return Err(Error::Config { key: "n_positions", problem });
        }
        Ok(())
    }
}

fn lookup(parameters: &Parameters<'_>, tokens: &Tensor, positions: &Tensor) -> Result<Tensor> {
    let position = Tensor::f_embedding(parameters.get("wpe.weight"), positions, -1, false, false)?;
    Ok(embed(parameters.get("wte.weight"), tokens)?.f_add(&position)?)
}

struct Block(Gpt2Config);

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
        let normed = Norm::new(&self.0, parameters, "ln_1").of(x)?;
        let [query, key, value] = heads(&linear(parameters, &normed, "attn.c_attn")?, self.0.n_head)?;
        let [key, value] = cache.extend(&key, &value, None)?;
        let joined = attention::extend(&query, &key, &value, None)?;
        let x = x.f_add(&linear(parameters, &joined, "attn.c_proj")?)?;
        Ok(x.f_add(&self.mlp(parameters, &x, Activations::All)?)?)
    }

    fn footprint(&self, tokens: usize, _: usize, element_bytes: usize, activations: Activations) -> Footprint {
        let width = self.0.n_embd;
        // What autograd saves: the outputs of norms, the residual and the output; the projections and output of attention; the
        // MLP's hidden layer before and after its activation.
        let kept = match activations {
            Activations::All => 4 * width + 4 * width + 8 * width,
            Activations::Selective => 2 * width + 3 * width + 4 * width,
        };
        Footprint {
            kept_bytes: tokens * kept * element_bytes,
            output_bytes: tokens * width * element_bytes,
            temporary_bytes: tokens * 18 * width * element_bytes,
        }
    }

    fn attention_flops(&self, positions: usize) -> f64 {
        attention::flops(self.0.n_embd, positions, None)
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
        let number = self.0.n_head;
        let norm = Norm::new(&self.0, parameters, "ln_1");
        let normed = norm.of(x)?;
        let projected = linear(parameters, &normed, "attn.c_attn")?;
        // Returns the output of each document, if sequences are packed, and last the whole output.
        let core = move |projected: &Tensor| -> Result<Vec<Tensor>> {
            let [query, key, value] = heads(projected, number)?;
            let attended = attention::causal(&query, &key, &value, None, documents.as_ref())?;
            Ok(attended.parts.into_iter().chain([attended.output]).collect())
        };
        let attended = core(&projected)?;
        let joined = attended.last().expect("attention has an output");
        let output = linear(parameters, joined, "attn.c_proj")?;
        if activations == Activations::All {
            return Ok(output);
        }
        let saved: Vec<&Tensor> = attended.iter().chain([&normed]).collect();
        let (x, norm, projected) = (x.detach(), norm.detached(), projected.detach());
        recompute_in_backward(output, &saved, move || {
            let mut recomputed = core(&projected)?;
            recomputed.push(norm.of(&x)?);
            Ok(recomputed)
        })
    }

    fn mlp(&self, parameters: &Parameters<'_>, x: &Tensor, activations: Activations) -> Result<Tensor> {
        let norm = Norm::new(&self.0, parameters, "ln_2");
        let normed = norm.of(x)?;
        let wide = linear(parameters, &normed, "mlp.c_fc")?;
        let activated = wide.f_gelu("tanh")?;
        let output = linear(parameters, &activated, "mlp.c_proj")?;
        if activations == Activations::All {
            return Ok(output);
        }
        let (x, norm, wide) = (x.detach(), norm.detached(), wide.detach());
        recompute_in_backward(output, &[&activated, &normed], move || Ok(vec![wide.f_gelu("tanh")?, norm.of(&x)?]))
    }
}

impl LmHead for Gpt2Config {
    fn final_norm_and_weight<'a>(
        &self,
        parameters: &'a Parameters<'_>,
        input: &Tensor,
    ) -> Result<(Tensor, &'a Tensor)> {
        let weight = parameters.tied().expect("GPT-2's head is the embedding's matrix");
        Ok((Norm::new(self, parameters, "ln_f").of(input)?, weight))
    }

    fn sizes(&self) -> Sizes {
        Sizes { vocab_size: self.vocab_size, hidden_size: self.n_embd, chunk_tokens: self.loss_chunk_tokens }
    }
}
