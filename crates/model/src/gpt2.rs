//! GPT-2: LayerNorm, learned positions, GELU, biases, and a head that shares the embedding's matrix.

use shardwise_plan::program::InnerCollectives;
use shardwise_plan::{Gpt2Config, ParameterShape};
use shardwise_torch::tch::{Kind, Tensor};

use crate::activation_checkpointing::recompute_in_backward;
use crate::head::{Head, LmHead, Sizes};
use crate::pass::{AttentionShape, Inside, Region, RegionWeights};
use crate::sequence_chunks::{ChunkedBlock, Results, check_not_shared, chunk_rows, compute_in_chunks};
use crate::tensor_parallel::rows_of;
use crate::unit::embed;
use crate::{
    Activations, Batch, Cache, Error, Footprint, Init, Layer, Linear, Parameter, Parameters, Pass, PassShape, Result,
    TensorParallel, Tied, Unit, attention,
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
    Parameter::new(name, &parameter.shape, init).placed(parameter.placement)
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

/// A matrix and its bias.
fn layer<'a>(parameters: &'a Parameters<'_>, name: &str) -> Linear<'a> {
    parameters.layer_transposed(&format!("{name}.weight"), Some(parameters.get(&format!("{name}.bias"))))
}

/// A matrix by rows, with which a tensor-parallel region ends, and its bias, which is added once.
fn row_linear(parameters: &Parameters<'_>, x: &Tensor, name: &str, parallel: &TensorParallel) -> Result<Tensor> {
    let layer = layer(parameters, name);
    if parallel.size() == 1 {
        return layer.apply(x);
    }
    let summed = parallel.row_parallel(x, &Linear { bias: None, ..layer })?;
    Ok(summed.f_add(parameters.get(&format!("{name}.bias")))?)
}

/// Splits a joint projection into query, key and value (sequences, heads, positions, head dim).
fn heads(projected: &Tensor, head_dim: usize) -> Result<[Tensor; 3]> {
    let (sequences, positions) = (projected.size()[0], projected.size()[1]);
    let all = projected.f_chunk(3, 2)?;
    let split = |joined: &Tensor| joined.f_view([sequences, positions, -1, head_dim as i64])?.f_transpose(1, 2);
    Ok([split(&all[0])?, split(&all[1])?, split(&all[2])?])
}

struct Embedding(Gpt2Config);

impl Layer for Embedding {
    fn forward(&self, parameters: &Parameters<'_>, _: Option<&Tensor>, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        let positions = match (&batch.documents, &batch.context) {
            (_, Some(context)) => {
                self.check("documents", context.longest_document() as i64)?;
                context.positions_in_document()?.f_to_device(batch.inputs.device())?
            }
            (Some(documents), None) => {
                self.check("documents", documents.longest())?;
                documents.positions()?
            }
            (None, None) => {
                self.check("sequences", batch.inputs.size()[1])?;
                Tensor::f_arange(batch.inputs.size()[1], (Kind::Int64, batch.inputs.device()))?
            }
        };
        self.look_up(parameters, &batch.inputs, &positions, &pass.parallel)
    }

    fn extend(
        &self,
        parameters: &Parameters<'_>,
        _: Option<&Tensor>,
        tokens: &Tensor,
        cache: &mut Cache,
        pass: &Pass,
    ) -> Result<Tensor> {
        let first = cache.advance(tokens.size()[1]);
        let end = first + tokens.size()[1];
        self.check("sequences", end)?;
        let positions = Tensor::f_arange_start(first, end, (Kind::Int64, tokens.device()))?;
        self.look_up(parameters, tokens, &positions, &pass.parallel)
    }

    fn max_positions(&self) -> Option<usize> {
        Some(self.0.n_positions)
    }

    fn output_shape(&self, batch: &Batch, parallel: &TensorParallel) -> Option<Vec<i64>> {
        Some(parallel.shape_outside(&batch.inputs, self.0.n_embd))
    }

    fn footprint(&self, shape: &PassShape) -> Footprint {
        let embedding = Footprint::of_embedding(shape, self.0.vocab_size, self.0.n_embd);
        // The tokens' part of the sum.
        let temporary = embedding.forward_temporary_bytes.max(embedding.output_bytes);
        Footprint { forward_temporary_bytes: temporary, no_grad_temporary_bytes: temporary, ..embedding }
    }

    fn collectives(&self, shape: &PassShape, is_trained: &dyn Fn(&str) -> bool) -> InnerCollectives {
        shape.collectives_of_embedding(is_trained("wte.weight"), self.0.n_embd)
    }

    fn backward_reads_parameters(&self) -> bool {
        false
    }
}

impl Embedding {
    /// The sum of the embeddings of tokens and of their positions, which may be those of one sequence.
    fn look_up(
        &self,
        parameters: &Parameters<'_>,
        tokens: &Tensor,
        positions: &Tensor,
        parallel: &TensorParallel,
    ) -> Result<Tensor> {
        let positions = match parallel.splits_sequence() {
            true => {
                let own = parallel.own_rows(tokens.numel());
                let all = positions.f_expand_as(tokens)?.f_reshape(-1)?;
                all.f_narrow(0, own.start as i64, own.len() as i64)?
            }
            false => positions.shallow_clone(),
        };
        let position = Tensor::f_embedding(parameters.get("wpe.weight"), &positions, -1, false, false)?;
        Ok(embed(parameters.get("wte.weight"), tokens, self.0.vocab_size, parallel)?.f_add(&position)?)
    }

    fn check(&self, what: &str, positions: i64) -> Result<()> {
        if positions > self.0.n_positions as i64 {
            let problem = format!("{what} have {positions} positions, and the model has {}", self.0.n_positions);
            return Err(Error::Config { key: "n_positions", problem });
        }
        Ok(())
    }
}

#[derive(Clone)]
struct Block(Gpt2Config);

impl Layer for Block {
    fn forward(
        &self,
        parameters: &Parameters<'_>,
        input: Option<&Tensor>,
        batch: &Batch,
        pass: &Pass,
    ) -> Result<Tensor> {
        let x = input.expect("a block has an input");
        if let Some(chunk) = chunk_rows(self.0.block_chunk_tokens, batch) {
            return self.forward_in_chunks(parameters, x, batch, pass, chunk);
        }
        let x = x.f_add(&self.attend(parameters, x, batch, pass)?)?;
        Ok(x.f_add(&self.mlp(parameters, &x, batch.inputs.numel(), pass)?)?)
    }

    fn extend(
        &self,
        parameters: &Parameters<'_>,
        input: Option<&Tensor>,
        tokens: &Tensor,
        cache: &mut Cache,
        pass: &Pass,
    ) -> Result<Tensor> {
        let (x, parallel) = (input.expect("a block has an input"), &pass.parallel);
        let normed = Norm::new(&self.0, parameters, "ln_1").of(x)?;
        let c_attn = [layer(parameters, "attn.c_attn")];
        let (_, [projected]) = parallel.column_parallel(&normed, tokens.numel(), c_attn)?;
        let [query, key, value] = heads(&projected, self.head_dim())?;
        let [key, value] = cache.extend(&key, &value, None)?;
        let joined = attention::extend(&query, &key, &value, None)?;
        let x = x.f_add(&row_linear(parameters, &joined, "attn.c_proj", parallel)?)?;
        Ok(x.f_add(&self.mlp(parameters, &x, tokens.numel(), pass)?)?)
    }

    fn check_tensor_parallel(&self, ranks: usize) -> Result<()> {
        check_not_shared(self.0.block_chunk_tokens, ranks)
    }

    fn output_shape(&self, batch: &Batch, parallel: &TensorParallel) -> Option<Vec<i64>> {
        Some(parallel.shape_outside(&batch.inputs, self.0.n_embd))
    }

    fn gradients_are_dense(&self) -> bool {
        true
    }

    fn footprint(&self, shape: &PassShape) -> Footprint {
        let &PassShape { tokens, element_bytes, .. } = shape;
        let width = self.0.n_embd;
        if let Some(chunk) = self.0.block_chunk_tokens.filter(|&chunk| chunk < tokens) {
            let parameters = [3 * width * width, 9 * width * width];
            let block = ChunkedBlock { hidden: width, query: width, key: width, kept_key: width, parameters };
            let context = shape.context_memory(&self.attention_shape(shape));
            return block.footprint(shape, &self.footprint(&shape.chunk(chunk)), &context, 0);
        }
        let (attention, hidden) = (shape.part_of(self.0.n_head) * self.head_dim(), shape.part_of(4 * width));
        let element = |count: usize| tokens * count * element_bytes;
        let own_element = |count: usize| shape.own_tokens() * count * element_bytes;
        // With a split sequence, the outputs of norms are gathered, and not kept.
        let normed = if shape.splits_sequence { 0 } else { element(2 * width) };
        let gathered = if shape.splits_sequence { element(width) } else { 0 };
        let (is_divided, context) = (shape.context.size() > 1, shape.context_memory(&self.attention_shape(shape)));
        // What the MLP keeps is not there yet while the forward pass attends, and not any more while the backward pass does.
        let of_mlp = match shape.activations {
            Activations::All => normed / 2 + element(2 * hidden) + own_element(width),
            Activations::Selective => element(hidden) + own_element(width),
        };
        let attended = if is_divided { context.forward + element(4 * attention) } else { 0 };
        // The gradient of `mlp.c_proj`, the first that the backward pass computes.
        let c_proj = hidden * width * element_bytes;
        let (kept, forward, backward) = match shape.activations {
            // The outputs of norms, the residual and the output; the projections and output of attention; the MLP's hidden layer
            // before and after its activation.
            Activations::All => {
                (normed + own_element(2 * width) + element(4 * attention + 2 * hidden), element(width), element(hidden))
            }
            Activations::Selective => (
                own_element(2 * width)
                    + element(3 * attention + hidden)
                    + if is_divided { element(attention) } else { 0 },
                element(2 * width + hidden),
                element(width + 2 * hidden),
            ),
        };
        Footprint {
            kept_bytes: kept + context.kept,
            output_bytes: own_element(width),
            forward_temporary_bytes: forward.max(context.forward.saturating_sub(of_mlp)) + gathered,
            no_grad_temporary_bytes: element(3 * width) + element(2 * hidden).max(attended),
            temporary_bytes: backward.max(context.backward.saturating_sub(of_mlp)) + c_proj + gathered,
            sparse_gradient_bytes: 0,
        }
    }

    fn collectives(&self, shape: &PassShape, is_trained: &dyn Fn(&str) -> bool) -> InnerCollectives {
        let any = |endings: &[&str]| endings.iter().any(|ending| is_trained(ending));
        let (width, hidden) = (self.0.n_embd, 4 * self.0.n_embd);
        let weight = |name: &str, elements: usize| RegionWeights::new(&[(name, elements)], is_trained);
        let attention = Region {
            trains_before: any(&["ln_1.weight", "ln_1.bias"]),
            trains_inside: any(&["c_attn.weight", "c_attn.bias", "attn.c_proj.weight"]),
            trains_after: is_trained("attn.c_proj.bias"),
            inside: Inside::Attention(self.attention_shape(shape)),
            trains_before_inside: any(&["c_attn.weight", "c_attn.bias"]),
            first: weight("c_attn.weight", 3 * width * width),
            last: weight("attn.c_proj.weight", width * width),
            in_pieces: true,
        };
        let mlp = Region {
            trains_before: any(&["ln_2.weight", "ln_2.bias"]),
            trains_inside: any(&["c_fc.weight", "c_fc.bias", "mlp.c_proj.weight"]),
            trains_after: is_trained("mlp.c_proj.bias"),
            inside: Inside::Nothing,
            trains_before_inside: false,
            first: weight("c_fc.weight", width * hidden),
            last: weight("mlp.c_proj.weight", width * hidden),
            in_pieces: true,
        };
        shape.collectives_of_regions(&[attention, mlp], width)
    }

    fn attention_flops(&self, positions: usize) -> f64 {
        attention::flops(self.0.n_embd, positions, None)
    }
}

impl Block {
    fn head_dim(&self) -> usize {
        self.0.n_embd / self.0.n_head
    }

    fn attention_shape(&self, shape: &PassShape) -> AttentionShape {
        let heads = shape.part_of(self.0.n_head);
        let flops = self.attention_flops(shape.positions);
        AttentionShape { query_heads: heads, key_heads: heads, head_dim: self.head_dim(), window: None, flops }
    }

    fn attend(&self, parameters: &Parameters<'_>, x: &Tensor, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        let rows = batch.inputs.numel();
        let norm = Norm::new(&self.0, parameters, "ln_1");
        let normed = norm.of(x)?;
        let c_attn = [layer(parameters, "attn.c_attn")];
        let (entered, [projected]) = pass.parallel.column_parallel(&normed, rows, c_attn)?;
        let projected = projected.f_view([batch.inputs.size()[0], batch.inputs.size()[1], -1])?;
        let core = self.core(batch, pass);
        let attended = core(&projected)?;
        let joined = attended.last().expect("attention has an output");
        let output = row_linear(parameters, joined, "attn.c_proj", &pass.parallel)?;
        let is_selective = pass.activations == Activations::Selective;
        if !is_selective && !pass.gathers_again() {
            return Ok(output);
        }
        // To attend again, ranks that divide sequences would have to send their keys again.
        let frees_core = is_selective && batch.context.is_none();
        let freed = if frees_core { &attended[..] } else { &[] };
        let saved: Vec<&Tensor> = freed.iter().chain([&entered]).collect();
        let (x, norm, projected, parallel) = (x.detach(), norm.detached(), projected.detach(), pass.parallel.clone());
        recompute_in_backward(output, &saved, move || {
            let mut recomputed = if frees_core { core(&projected)? } else { Vec::new() };
            recomputed.push(parallel.gather_rows(&norm.of(&x)?, rows)?);
            Ok(recomputed)
        })
    }

    /// Attention from the joint projection to its output: returns the output of each document, if they were computed one by one, and last
    /// the whole output.
    fn core(&self, batch: &Batch, pass: &Pass) -> impl Fn(&Tensor) -> Result<Vec<Tensor>> + Send + use<> {
        let (head_dim, documents) = (self.head_dim(), batch.documents.clone());
        let context = batch.context.clone().map(|batch| (pass.context.clone(), batch));
        move |projected| {
            let [query, key, value] = heads(projected, head_dim)?;
            if let Some((parallel, batch)) = &context {
                return Ok(vec![parallel.attend(&query, &key, &value, None, batch)?]);
            }
            let attended = attention::causal(&query, &key, &value, None, documents.as_ref())?;
            Ok(attended.parts.into_iter().chain([attended.output]).collect())
        }
    }

    /// The forward pass, in which everything but attention is computed in chunks of tokens.
    fn forward_in_chunks(
        &self,
        parameters: &Parameters<'_>,
        x: &Tensor,
        batch: &Batch,
        pass: &Pass,
        chunk: usize,
    ) -> Result<Tensor> {
        let is_before = |name: &str| name.contains(".ln_1.") || name.contains(".attn.c_attn.");
        let config = self.0.clone();
        let before = parameters.select(is_before);
        let [projected] = compute_in_chunks(chunk, &[x], before, Results::Read, move |rows, parameters| {
            let normed = Norm::new(&config, parameters, "ln_1").of(&rows[0])?;
            Ok([layer(parameters, "attn.c_attn").apply(&normed)?])
        })?;
        let core = self.core(batch, pass);
        let attended = core(&projected)?;
        let joined = attended.last().expect("attention has an output");
        // To attend again, ranks that divide sequences would have to send their keys again.
        let frees_core = pass.activations == Activations::Selective && batch.context.is_none();
        let projected = frees_core.then(|| projected.detach());
        let block = self.clone();
        let after = parameters.select(|name| !is_before(name));
        let results = if pass.keeps_gathered { Results::Unread } else { Results::Read };
        let [output] = compute_in_chunks(chunk, &[x, joined], after, results, move |rows, parameters| {
            let x = rows[0].f_add(&layer(parameters, "attn.c_proj").apply(&rows[1])?)?;
            let mlp = block.mlp(parameters, &x, rows_of(&x), &Pass::new(Activations::All))?;
            Ok([x.f_add(&mlp)?])
        })?;
        match projected {
            Some(projected) => {
                recompute_in_backward(output, &attended.iter().collect::<Vec<_>>(), move || core(&projected))
            }
            None => Ok(output),
        }
    }

    /// The MLP of a block, whose input has `rows` rows on all ranks together.
    fn mlp(&self, parameters: &Parameters<'_>, x: &Tensor, rows: usize, pass: &Pass) -> Result<Tensor> {
        let norm = Norm::new(&self.0, parameters, "ln_2");
        let normed = norm.of(x)?;
        let (entered, [wide]) = pass.parallel.column_parallel(&normed, rows, [layer(parameters, "mlp.c_fc")])?;
        let activated = wide.f_gelu("tanh")?;
        let output = row_linear(parameters, &activated, "mlp.c_proj", &pass.parallel)?;
        let is_selective = pass.activations == Activations::Selective;
        if !is_selective && !pass.gathers_again() {
            return Ok(output);
        }
        let freed = is_selective.then_some(&activated);
        let saved: Vec<&Tensor> = freed.into_iter().chain([&entered]).collect();
        let (x, norm, wide, parallel) = (x.detach(), norm.detached(), wide.detach(), pass.parallel.clone());
        recompute_in_backward(output, &saved, move || {
            let mut recomputed = if is_selective { vec![wide.f_gelu("tanh")?] } else { Vec::new() };
            recomputed.push(parallel.gather_rows(&norm.of(&x)?, rows)?);
            Ok(recomputed)
        })
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

    fn norm_names(&self) -> &'static [&'static str] {
        &["ln_f.weight", "ln_f.bias"]
    }

    fn sizes(&self) -> Sizes {
        Sizes { vocab_size: self.vocab_size, hidden_size: self.n_embd, chunk_tokens: self.loss_chunk_tokens }
    }
}
