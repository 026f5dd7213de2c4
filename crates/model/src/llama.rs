//! The Llama family: Llama 2 and 3, Mistral and Mixtral, Qwen 2 and 3.

use std::sync::Arc;

use shardwise_plan::program::{InnerCollectives, Place};
use shardwise_plan::{ExpertParameters, LlamaConfig, MoeConfig, ParameterShape, Partition};
use shardwise_torch::tch::Tensor;

use crate::activation_checkpointing::recompute_in_backward;
use crate::documents::Documents;
use crate::experts::{Dispatch, ExpertWeights};
use crate::feed_forward_costs::FeedForwardMemory;
use crate::head::{Head, LmHead, Sizes};
use crate::pass::{AttentionShape, ExpertShape, Inside, Region, RegionWeights};
use crate::rotary::{Positions, RotaryTables};
use crate::router::{attach_loss, count_tokens, drop_beyond_capacity, route};
use crate::sequence_chunks::{ChunkedBlock, Results, check_not_shared, chunk_rows, compute_in_chunks};
use crate::tensor_parallel::{as_rows, rows_of};
use crate::unit::embed;
use crate::{
    Activations, Batch, Cache, ContextBatch, ContextParallel, Error, Footprint, Init, Layer, Linear, Parameter,
    Parameters, Pass, PassShape, Result, TensorParallel, Tied, Unit, attention,
};

/// Builds a unit of the model from its parameters. All blocks of a model share its rotary tables.
pub(crate) fn unit(
    config: &LlamaConfig,
    name: &str,
    parameters: &[ParameterShape],
    rotary: &Arc<RotaryTables>,
) -> Unit {
    let parameters = parameters.iter().map(|parameter| with_init(config, parameter)).collect();
    match name {
        "embedding" => Unit::new(name, parameters, Embedding(config.clone())),
        "head" => {
            let tied = config.tie_word_embeddings.then_some(Tied { unit: 0, parameter: 0 });
            Unit::new(name, parameters, Head(config.clone())).with_tied(tied)
        }
        _ => Unit::new(name, parameters, Block { config: config.clone(), rotary: rotary.clone() }),
    }
}

/// Declares a parameter with its initial values: matrices are random, norms are 1 and biases 0.
fn with_init(config: &LlamaConfig, parameter: &ParameterShape) -> Parameter {
    let init = match (parameter.shape.len(), parameter.name.ends_with(".bias")) {
        (1, true) => Init::Zeros,
        (1, false) => Init::Ones,
        _ => Init::Normal { std: config.initializer_range },
    };
    let declared = Parameter::new(parameter.name.as_str(), &parameter.shape, init).placed(parameter.placement);
    match &config.moe {
        Some(moe) if parameter.is_per_expert => declared.per_expert(moe.active_share()),
        _ => declared,
    }
}

fn rms_norm(config: &LlamaConfig, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    Ok(x.f_rms_norm([weight.size()[0]], Some(weight), config.rms_norm_eps)?)
}

struct Embedding(LlamaConfig);

impl Embedding {
    fn look_up(&self, parameters: &Parameters<'_>, tokens: &Tensor, parallel: &TensorParallel) -> Result<Tensor> {
        embed(parameters.get("embed_tokens.weight"), tokens, self.0.vocab_size, parallel)
    }
}

impl Layer for Embedding {
    fn forward(&self, parameters: &Parameters<'_>, _: Option<&Tensor>, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        self.look_up(parameters, &batch.inputs, &pass.parallel)
    }

    fn extend(
        &self,
        parameters: &Parameters<'_>,
        _: Option<&Tensor>,
        tokens: &Tensor,
        cache: &mut Cache,
        pass: &Pass,
    ) -> Result<Tensor> {
        cache.advance(tokens.size()[1]);
        self.look_up(parameters, tokens, &pass.parallel)
    }

    fn output_shape(&self, batch: &Batch, parallel: &TensorParallel) -> Option<Vec<i64>> {
        Some(parallel.shape_outside(&batch.inputs, self.0.hidden_size))
    }

    fn footprint(&self, shape: &PassShape) -> Footprint {
        Footprint::of_embedding(shape, self.0.vocab_size, self.0.hidden_size)
    }

    fn collectives(&self, shape: &PassShape, is_trained: &dyn Fn(&str) -> bool) -> InnerCollectives {
        shape.collectives_of_embedding(is_trained("embed_tokens.weight"), self.0.hidden_size)
    }

    fn backward_reads_parameters(&self) -> bool {
        false
    }
}

#[derive(Clone)]
struct Block {
    config: LlamaConfig,
    rotary: Arc<RotaryTables>,
}

impl Layer for Block {
    fn forward(
        &self,
        parameters: &Parameters<'_>,
        input: Option<&Tensor>,
        batch: &Batch,
        pass: &Pass,
    ) -> Result<Tensor> {
        let x = input.expect("a block has an input");
        if let Some(chunk) = chunk_rows(self.config.block_chunk_tokens, batch) {
            return self.forward_in_chunks(parameters, x, batch, pass, chunk);
        }
        let x = x.f_add(&self.attend(parameters, x, batch, pass)?)?;
        Ok(x.f_add(&self.feed_forward(parameters, &x, batch.inputs.numel(), Some(batch), pass)?)?)
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
        let normed = rms_norm(&self.config, x, parameters.get("input_layernorm.weight"))?;
        let (_, projected) = parallel.column_parallel(&normed, tokens.numel(), projections(parameters))?;
        let joined = self.core(parameters, projected, None, parallel).extend(cache)?;
        let x = x.f_add(&parallel.row_parallel(&joined, &parameters.layer("self_attn.o_proj.weight", None))?)?;
        Ok(x.f_add(&self.feed_forward(parameters, &x, tokens.numel(), None, pass)?)?)
    }

    fn num_experts(&self) -> usize {
        self.config.moe.as_ref().map_or(0, |moe| moe.num_experts)
    }

    fn router_bias_update_rate(&self) -> f64 {
        self.config.moe.as_ref().map_or(0., |moe| moe.router.router_bias_update_rate)
    }

    fn check_tensor_parallel(&self, ranks: usize) -> Result<()> {
        check_not_shared(self.config.block_chunk_tokens, ranks)?;
        Ok(self.config.check_norm_not_shared(ranks)?)
    }

    fn output_shape(&self, batch: &Batch, parallel: &TensorParallel) -> Option<Vec<i64>> {
        Some(parallel.shape_outside(&batch.inputs, self.config.hidden_size))
    }

    fn gradients_are_dense(&self) -> bool {
        true
    }

    fn footprint(&self, shape: &PassShape) -> Footprint {
        if let Some(chunk) = self.config.block_chunk_tokens.filter(|&chunk| chunk < shape.tokens) {
            return self.footprint_in_chunks(shape, chunk);
        }
        let LlamaConfig { hidden_size, head_dim, .. } = self.config;
        let &PassShape { tokens, element_bytes, activations, .. } = shape;
        let feed_forward = FeedForwardMemory::new(&self.config, shape);
        let attention = self.attention_shape(shape);
        // Projected keys, which are not repeated yet.
        let key_heads =
            attention.query_heads.div_ceil(self.config.num_attention_heads / self.config.num_key_value_heads);
        let (query, key) = (attention.query_heads * head_dim, key_heads * head_dim);
        let element = |count: usize| tokens * count * element_bytes;
        let own_element = |count: usize| shape.own_tokens() * count * element_bytes;
        // A norm computes in f32 or f64. It keeps its input divided by the root of the mean square and, if the input is narrower, a
        // converted copy of it, too.
        let (is_wide, in_wide) = (element_bytes >= 4, shape.own_tokens() * hidden_size * element_bytes.max(4));
        let norm = if is_wide { in_wide } else { 2 * in_wide };
        // With a split sequence, the outputs of norms are gathered, and not kept.
        let normed = |count: usize| if shape.splits_sequence { 0 } else { element(count * hidden_size) };
        let gathered = if shape.splits_sequence { element(hidden_size) } else { 0 };
        let is_divided = shape.context.size() > 1;
        let repeated_key = if shape.uses_flash_attention || is_divided { key } else { query };
        let context = shape.context_memory(&attention);
        let mask = self.mask_elements(shape);
        // What the second half keeps is not there yet while the forward pass attends, and not any more while the backward pass does.
        let second_half =
            feed_forward.kept + own_element(hidden_size) + if activations == Activations::All { normed(1) } else { 0 };
        let attended = if is_divided { context.forward + element(2 * query + 2 * key) } else { 0 };
        // The input of the second norm is kept in the type in which the norm computes, unless something else needs it.
        let kept = match activations {
            // The outputs of norms, the residual and the output; query, key, value and output of attention.
            Activations::All => {
                normed(2)
                    + own_element(if is_wide { 2 } else { 1 } * hidden_size)
                    + element(2 * query + 2 * repeated_key)
            }
            Activations::Selective => {
                own_element(2 * hidden_size) + element(query + 2 * key) + if is_divided { element(query) } else { 0 }
            }
        };
        Footprint {
            kept_bytes: kept + feed_forward.kept + context.kept + 2 * norm + mask * (1 + element_bytes),
            output_bytes: own_element(hidden_size),
            forward_temporary_bytes: feed_forward.forward.max(context.forward.saturating_sub(second_half)) + gathered,
            no_grad_temporary_bytes: element(hidden_size)
                + own_element(2 * hidden_size)
                + feed_forward.no_grad.max(attended),
            temporary_bytes: feed_forward.backward.max(context.backward.saturating_sub(second_half))
                + feed_forward.gradient
                + mask * element_bytes.max(4)
                + gathered,
            sparse_gradient_bytes: 0,
        }
    }

    fn collectives(&self, shape: &PassShape, is_trained: &dyn Fn(&str) -> bool) -> InnerCollectives {
        let any = |endings: &[&str]| endings.iter().any(|ending| is_trained(ending));
        let LlamaConfig { hidden_size, head_dim, .. } = self.config;
        let [queries, keys] = [self.config.num_attention_heads, self.config.num_key_value_heads]
            .map(|heads| heads * head_dim * hidden_size);
        let weights = |weights: &[(&str, usize)]| RegionWeights::new(weights, is_trained);
        let projections = [("q_proj.weight", queries), ("k_proj.weight", keys), ("v_proj.weight", keys)];
        let of_heads = ["q_proj.bias", "k_proj.bias", "v_proj.bias", "q_norm.weight", "k_norm.weight"];
        let [first, last] = [weights(&projections), weights(&[("o_proj.weight", queries)])];
        let attention = Region {
            trains_before: is_trained("input_layernorm.weight"),
            trains_inside: first.trained + last.trained > 0 || any(&of_heads),
            trains_after: false,
            inside: Inside::Attention(self.attention_shape(shape)),
            trains_before_inside: first.trained > 0 || any(&of_heads),
            first,
            last,
            in_pieces: true,
        };
        shape.collectives_of_regions(&[attention, self.feed_forward_region(is_trained)], hidden_size)
    }

    fn attention_flops(&self, positions: usize) -> f64 {
        attention::flops(self.config.num_attention_heads * self.config.head_dim, positions, self.config.sliding_window)
    }
}

impl Block {
    fn footprint_in_chunks(&self, shape: &PassShape, chunk: usize) -> Footprint {
        let LlamaConfig { hidden_size, intermediate_size, .. } = self.config;
        let attention = self.attention_shape(shape);
        let [query, key] = [attention.query_heads, attention.key_heads].map(|heads| heads * attention.head_dim);
        let repeats_keys = !shape.uses_flash_attention && shape.context.size() == 1;
        let block = ChunkedBlock {
            hidden: hidden_size,
            query,
            key,
            kept_key: if repeats_keys { query } else { key },
            parameters: [hidden_size * (query + 2 * key), hidden_size * query + 3 * hidden_size * intermediate_size],
        };
        let plain = Block { config: LlamaConfig { sliding_window: None, ..self.config.clone() }, ..self.clone() };
        let mask = self.mask_elements(shape) * (1 + shape.element_bytes);
        block.footprint(shape, &plain.footprint(&shape.chunk(chunk)), &shape.context_memory(&attention), mask)
    }

    /// A sliding window needs a mask of positions by positions, first of booleans and then of floats.
    fn mask_elements(&self, shape: &PassShape) -> usize {
        let needs_mask = self.config.sliding_window.is_some_and(|window| window < shape.positions)
            && !shape.uses_flash_attention
            && shape.context.size() == 1;
        if needs_mask { shape.positions * shape.positions } else { 0 }
    }

    fn attention_shape(&self, shape: &PassShape) -> AttentionShape {
        let [query_heads, key_heads] = own_heads(&self.config, shape.tensor);
        AttentionShape {
            query_heads,
            key_heads,
            head_dim: self.config.head_dim,
            window: self.config.sliding_window,
            flops: self.attention_flops(shape.positions),
        }
    }

    fn feed_forward_region(&self, is_trained: &dyn Fn(&str) -> bool) -> Region {
        let mlp = ["mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"];
        let (names, others, active) = match &self.config.moe {
            None => (mlp, vec![], self.config.intermediate_size),
            Some(moe) => {
                let ExpertParameters { router, gate_proj, up_proj, down_proj } = moe.names.parameters();
                let active = moe.num_experts_per_tok + moe.n_shared_experts;
                let shared = ["gate_proj", "up_proj", "down_proj"].map(|name| format!("shared_experts.{name}.weight"));
                let others = shared.into_iter().chain([router.to_string()]).collect();
                ([gate_proj, up_proj, down_proj], others, active * moe.moe_intermediate_size)
            }
        };
        let weights = |names: &[&'static str]| {
            let weights: Vec<_> = names.iter().map(|&name| (name, self.config.hidden_size * active)).collect();
            RegionWeights::new(&weights, is_trained)
        };
        let [first, last] = [weights(&names[..2]), weights(&names[2..])];
        let inside = match &self.config.moe {
            None => Inside::Nothing,
            Some(moe) => Inside::Experts(ExpertShape {
                experts: moe.num_experts,
                per_token: moe.num_experts_per_tok,
                hidden: self.config.hidden_size,
                shared_elements: 3 * self.config.hidden_size * moe.shared_intermediate_size(),
                first_elements: first.trained / active * moe.num_experts_per_tok * moe.moe_intermediate_size,
            }),
        };
        Region {
            trains_before: is_trained("post_attention_layernorm.weight"),
            trains_inside: first.trained + last.trained > 0 || others.iter().any(|other| is_trained(other)),
            trains_after: false,
            inside,
            // The gradient of the router comes through the experts.
            trains_before_inside: self.config.moe.as_ref().is_some_and(|moe| is_trained(moe.names.parameters().router)),
            first,
            last,
            in_pieces: others.is_empty(),
        }
    }

    fn attend(&self, parameters: &Parameters<'_>, x: &Tensor, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        let (rows, parallel) = (batch.inputs.numel(), &pass.parallel);
        let norm = parameters.get("input_layernorm.weight");
        let normed = rms_norm(&self.config, x, norm)?;
        let (entered, [query, key, value]) = parallel.column_parallel(&normed, rows, projections(parameters))?;
        let in_sequences = |rows: Tensor| rows.f_view([batch.inputs.size()[0], batch.inputs.size()[1], -1]);
        let projected = [in_sequences(query)?, in_sequences(key)?, in_sequences(value)?];
        let core = self.core(parameters, projected, batch.documents.clone(), parallel).with_context(batch, pass);
        let attended = core.attend()?;
        let joined = attended.last().expect("attention has an output");
        let output = parallel.row_parallel(joined, &parameters.layer("self_attn.o_proj.weight", None))?;
        let is_selective = pass.activations == Activations::Selective;
        if !is_selective && !pass.gathers_again() {
            return Ok(output);
        }
        // To attend again, ranks that divide sequences would have to send their keys again.
        let frees_core = is_selective && batch.context.is_none();
        let freed = if frees_core { &attended[..] } else { &[] };
        let saved: Vec<&Tensor> = freed.iter().chain([&entered]).collect();
        // Its projections are kept only to attend again.
        let core = frees_core.then(|| core.detached());
        let (config, x, norm, parallel) = (self.config.clone(), x.detach(), norm.detach(), parallel.clone());
        recompute_in_backward(output, &saved, move || {
            let mut recomputed = core.as_ref().map(Core::attend).transpose()?.unwrap_or_default();
            recomputed.push(parallel.gather_rows(&rms_norm(&config, &x, &norm)?, rows)?);
            Ok(recomputed)
        })
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
        let is_before = |name: &str| {
            name.contains(".input_layernorm.") || name.contains(".self_attn.") && !name.contains(".o_proj.")
        };
        let config = self.config.clone();
        let before = parameters.select(is_before);
        let projected = compute_in_chunks(chunk, &[x], before, Results::Read, move |rows, parameters| {
            let normed = rms_norm(&config, &rows[0], parameters.get("input_layernorm.weight"))?;
            let [query, key, value] = projections(parameters);
            let normalize = |projected: Tensor, norm: &str| match parameters.find(norm) {
                Some(weight) => normalize_heads(&config, &projected, weight),
                None => Ok(projected),
            };
            Ok([
                normalize(query.apply(&normed)?, "self_attn.q_norm.weight")?,
                normalize(key.apply(&normed)?, "self_attn.k_norm.weight")?,
                value.apply(&normed)?,
            ])
        })?;
        let core = self.core(parameters, projected, batch.documents.clone(), &pass.parallel).with_context(batch, pass);
        // They are normalized already.
        let core = Core { query_norm: None, key_norm: None, ..core };
        let attended = core.attend()?;
        let joined = attended.last().expect("attention has an output");
        // To attend again, ranks that divide sequences would have to send their keys again.
        let frees_core = pass.activations == Activations::Selective && batch.context.is_none();
        let core = frees_core.then(|| core.detached());
        let block = self.clone();
        let after = parameters.select(|name| !is_before(name));
        let results = if pass.keeps_gathered { Results::Unread } else { Results::Read };
        let [output] = compute_in_chunks(chunk, &[x, joined], after, results, move |rows, parameters| {
            let x = rows[0].f_add(&parameters.linear(&rows[1], "self_attn.o_proj.weight", None)?)?;
            let mlp = block.mlp(parameters, &x, rows_of(&x), &Pass::new(Activations::All))?;
            Ok([x.f_add(&mlp)?])
        })?;
        match core {
            Some(core) => recompute_in_backward(output, &attended.iter().collect::<Vec<_>>(), move || core.attend()),
            None => Ok(output),
        }
    }

    fn core(
        &self,
        parameters: &Parameters<'_>,
        [query, key, value]: [Tensor; 3],
        documents: Option<Documents>,
        parallel: &TensorParallel,
    ) -> Core {
        Core {
            config: self.config.clone(),
            rotary: self.rotary.clone(),
            documents,
            query,
            key,
            value,
            query_norm: parameters.find("self_attn.q_norm.weight").map(Tensor::shallow_clone),
            key_norm: parameters.find("self_attn.k_norm.weight").map(Tensor::shallow_clone),
            key_of_query: key_of_query(&self.config, Place { size: parallel.size(), index: parallel.rank() }),
            context: None,
        }
    }

    /// The second half of a block, whose input has `rows` rows on all ranks together: an MLP, or experts. Without a batch, the losses of
    /// a router are not computed.
    fn feed_forward(
        &self,
        parameters: &Parameters<'_>,
        x: &Tensor,
        rows: usize,
        batch: Option<&Batch>,
        pass: &Pass,
    ) -> Result<Tensor> {
        match &self.config.moe {
            Some(moe) => self.mixture(moe, parameters, x, rows, batch, pass),
            None => self.mlp(parameters, x, rows, pass),
        }
    }

    /// The MLP of a block, with its norm.
    fn mlp(&self, parameters: &Parameters<'_>, x: &Tensor, rows: usize, pass: &Pass) -> Result<Tensor> {
        let norm = parameters.get("post_attention_layernorm.weight");
        let normed = rms_norm(&self.config, x, norm)?;
        gated_mlp(parameters, "mlp", &normed, rows, pass, Some(self.restore_entered(x, norm, rows, pass)))
    }

    /// The experts of a block, with their norm.
    fn mixture(
        &self,
        moe: &MoeConfig,
        parameters: &Parameters<'_>,
        x: &Tensor,
        rows: usize,
        batch: Option<&Batch>,
        pass: &Pass,
    ) -> Result<Tensor> {
        let is_divided = batch.is_some_and(|batch| batch.context.is_some());
        let fail = |key, problem: &str| Err(Error::Config { key, problem: problem.to_string() });
        if moe.router.has_loss() && is_divided {
            let problem = "the balance loss of a sequence cannot be computed where ranks divide sequences";
            return fail("router_aux_loss_coef", problem);
        }
        if moe.capacity_factor.is_some() && is_divided {
            return fail(
                "capacity_factor",
                "an expert's tokens of a sequence cannot be counted where ranks divide sequences",
            );
        }
        let ExpertParameters { router, gate_proj, up_proj, down_proj } = moe.names.parameters();
        let norm = parameters.get("post_attention_layernorm.weight");
        let entered = pass.parallel.enter(&rms_norm(&self.config, x, norm)?, rows)?;
        let tokens = as_rows(&entered)?;
        let routing = route(moe, &tokens, parameters.get(router), pass.expert_bias.as_ref(), batch)?;
        let positions = batch.filter(|_| pass.drops_tokens).map(|batch| batch.inputs.size()[1]);
        let kept =
            positions.map(|positions| drop_beyond_capacity(moe, &routing.experts, positions)).transpose()?.flatten();
        let dispatch = Dispatch::new(kept.as_ref().unwrap_or(&routing.experts), moe.num_experts, &pass.experts)?;
        // Ranks that share the layer have the same tokens.
        if let Some(tokens) = pass.expert_tokens.as_ref().filter(|_| pass.parallel.rank() == 0) {
            match kept {
                Some(_) => tokens.add(&count_tokens(&routing.experts, moe.num_experts)?, dispatch.counts()),
                None => tokens.add(dispatch.counts(), dispatch.counts()),
            }
        }
        let weight = |name: &str| (parameters.get(name), parameters.deferral(name));
        let experts =
            ExpertWeights { gate_proj: weight(gate_proj), up_proj: weight(up_proj), down_proj: weight(down_proj) };
        // The shared experts compute while tokens travel. They are inside of the region already.
        let inside = Pass { parallel: TensorParallel::none(), ..pass.clone() };
        let shared = || match moe.n_shared_experts {
            0 => Ok(None),
            _ => gated_mlp(parameters, "mlp.shared_experts", &tokens, rows, &inside, None).map(Some),
        };
        let weights = routing.weights.f_to_kind(x.kind())?;
        let (mut output, shared) = experts.apply(&tokens, &weights, &dispatch, shared)?;
        if let Some(shared) = shared {
            output = output.f_add(&shared)?;
        }
        // Ranks that share the layer sum the gradients of the router, so its own loss counts on one of them.
        let loss = routing.loss.filter(|_| pass.parallel.rank() == 0);
        let output = attach_loss(output, loss, pass.loss_weight)?;
        let output = pass.parallel.leave(&output)?.f_view(&x.size()[..])?;
        if pass.activations == Activations::Selective || pass.gathers_again() {
            let restore = self.restore_entered(x, norm, rows, pass);
            return recompute_in_backward(output, &[&entered], move || Ok(vec![restore()?]));
        }
        Ok(output)
    }

    /// Computes again what enters the second half of a block, on all ranks.
    fn restore_entered(&self, x: &Tensor, norm: &Tensor, rows: usize, pass: &Pass) -> Restore {
        let (config, x, norm, parallel) = (self.config.clone(), x.detach(), norm.detach(), pass.parallel.clone());
        Box::new(move || parallel.gather_rows(&rms_norm(&config, &x, &norm)?, rows))
    }
}

/// Computes an activation again.
type Restore = Box<dyn FnOnce() -> Result<Tensor> + Send>;

/// A gated MLP whose parameters' names start with `prefix`. Its normalized input has `rows` rows on all ranks together; if `restore` can
/// compute it again, it may be freed.
fn gated_mlp(
    parameters: &Parameters<'_>,
    prefix: &str,
    normed: &Tensor,
    rows: usize,
    pass: &Pass,
    restore: Option<Restore>,
) -> Result<Tensor> {
    let layer = |name: &str| parameters.layer(&format!("{prefix}.{name}.weight"), None);
    let (entered, [gate, up]) = pass.parallel.column_parallel(normed, rows, [layer("gate_proj"), layer("up_proj")])?;
    let opened = gate.f_silu()?;
    let gated = opened.f_mul(&up)?;
    let output = pass.parallel.row_parallel(&gated, &layer("down_proj"))?;
    // Recomputing the activated gate is one elementwise operation; keeping it takes an eighth of the memory of a block's
    // activations. If `up` needs no gradient, autograd does not save it.
    let mut saved: Vec<&Tensor> = Vec::new();
    let is_selective = pass.activations == Activations::Selective;
    let frees_opened = is_selective || up.requires_grad();
    let restore = restore.filter(|_| is_selective || pass.gathers_again());
    if frees_opened {
        saved.push(&opened);
    }
    if is_selective {
        saved.push(&gated);
    }
    if restore.is_some() {
        saved.push(&entered);
    }
    if saved.is_empty() {
        return Ok(output);
    }
    let (gate, up) = (gate.detach(), up.detach());
    recompute_in_backward(output, &saved, move || {
        let mut recomputed = Vec::new();
        if frees_opened {
            recomputed.push(gate.f_silu()?);
        }
        if is_selective {
            recomputed.push(recomputed[0].f_mul(&up)?);
        }
        if let Some(restore) = restore {
            recomputed.push(restore()?);
        }
        Ok(recomputed)
    })
}

/// The projections of query, key and value.
fn projections<'a>(parameters: &'a Parameters<'_>) -> [Linear<'a>; 3] {
    ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
        .map(|name| parameters.layer(&format!("{name}.weight"), parameters.find(&format!("{name}.bias"))))
}

/// The key head of each of this rank's query heads, among the rank's key heads; `None` if each key head belongs to the same number
/// of consecutive query heads.
fn key_of_query(config: &LlamaConfig, tensor: Place) -> Option<Vec<i64>> {
    let (heads, shared_by) = (config.num_attention_heads, config.num_attention_heads / config.num_key_value_heads);
    let own = Partition::new(heads, tensor.size).range(tensor.index);
    let first = own.start / shared_by;
    let is_regular = own.start.is_multiple_of(shared_by) && own.end.is_multiple_of(shared_by)
        || own.end.div_ceil(shared_by) - first == 1;
    (!is_regular).then(|| own.map(|head| (head / shared_by - first) as i64).collect())
}

/// The number of query heads of a rank at this place among those that share the layer, and of the key heads that it attends to. Keys
/// are repeated if they are not evenly grouped.
fn own_heads(config: &LlamaConfig, tensor: Place) -> [usize; 2] {
    let queries = Partition::new(config.num_attention_heads, tensor.size).part_len(tensor.index);
    let shared_by = config.num_attention_heads / config.num_key_value_heads;
    let keys = if key_of_query(config, tensor).is_some() { queries } else { queries.div_ceil(shared_by) };
    [queries, keys]
}

/// Normalizes as many features together as `weight` has: those of a head, or of all of them.
fn normalize_heads(config: &LlamaConfig, projected: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let mut shape = projected.size();
    shape.pop();
    shape.extend([-1, weight.size()[0]]);
    Ok(rms_norm(config, &projected.f_view(&shape[..])?, weight)?.f_view_as(projected)?)
}

/// Attention between the input projections and the output projection (Megatron: core attention).
struct Core {
    config: LlamaConfig,
    rotary: Arc<RotaryTables>,
    documents: Option<Documents>,
    /// The projected query (sequences, positions, heads × head dim). Key and value have the same layout.
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_norm: Option<Tensor>,
    key_norm: Option<Tensor>,
    /// The key head of each query head, if they are not evenly grouped.
    key_of_query: Option<Vec<i64>>,
    /// The ranks that divide the sequences, if several do, and which positions this rank has.
    context: Option<(ContextParallel, ContextBatch)>,
}

impl Core {
    /// The same for a batch whose sequences may be divided among ranks.
    fn with_context(mut self, batch: &Batch, pass: &Pass) -> Core {
        self.context = batch.context.clone().map(|batch| (pass.context.clone(), batch));
        self
    }

    /// Returns everything that attention computes: the query and key that the kernel gets; the value, if it was copied; the
    /// output of each document, if they were computed one by one; and last the whole output.
    fn attend(&self) -> Result<Vec<Tensor>> {
        let [query, key, value] = self.heads(0)?;
        if let Some((parallel, batch)) = &self.context {
            return Ok(vec![parallel.attend(&query, &key, &value, self.config.sliding_window, batch)?]);
        }
        let documents = self.documents.as_ref();
        let attended = attention::causal(&query, &key, &value, self.config.sliding_window, documents)?;
        let mut computed = match attended.expanded {
            Some([key, value]) => vec![query, key, value],
            None if self.key_of_query.is_some() => vec![query, key, value],
            None => vec![query, key],
        };
        computed.extend(attended.parts);
        computed.push(attended.output);
        Ok(computed)
    }

    /// Returns the output for positions that come after those in `cache`.
    fn extend(&self, cache: &mut Cache) -> Result<Tensor> {
        let [query, key, value] = self.heads(cache.positions() as i64)?;
        let [key, value] = cache.extend(&key, &value, self.config.sliding_window)?;
        attention::extend(&query, &key, &value, self.config.sliding_window)
    }

    /// Query, key and value (sequences, heads, positions, head dim), normalized and rotated. The first position is `first`.
    fn heads(&self, first: i64) -> Result<[Tensor; 3]> {
        let config = &self.config;
        let (sequences, positions) = (self.query.size()[0], self.query.size()[1]);
        let (kind, device) = (self.query.kind(), self.query.device());
        let at = match &self.context {
            Some((_, batch)) => Positions::Of {
                positions: batch.positions_in_sequence().clone(),
                per_sequence: positions as usize,
                sequence_len: batch.sequence_len(),
            },
            None => Positions::Range(first..first + positions),
        };
        let rope = self.rotary.get(config, at, kind, device)?;
        let heads = |projected: &Tensor, norm: &Option<Tensor>| -> Result<Tensor> {
            let normed = match norm {
                Some(weight) => normalize_heads(config, projected, weight)?,
                None => projected.shallow_clone(),
            };
            Ok(normed.f_view([sequences, positions, -1, config.head_dim as i64])?.f_transpose(1, 2)?)
        };
        let query = rope.rotate(&heads(&self.query, &self.query_norm)?)?;
        let key = rope.rotate(&heads(&self.key, &self.key_norm)?)?;
        let value = heads(&self.value, &None)?;
        let Some(key_of_query) = &self.key_of_query else { return Ok([query, key, value]) };
        let index = Tensor::f_from_slice(key_of_query)?.f_to_device(key.device())?;
        Ok([query, key.f_index_select(1, &index)?, value.f_index_select(1, &index)?])
    }

    /// Returns a copy that is detached from the autograd graph.
    fn detached(&self) -> Core {
        let detach = |norm: &Option<Tensor>| norm.as_ref().map(Tensor::detach);
        Core {
            config: self.config.clone(),
            rotary: self.rotary.clone(),
            documents: self.documents.clone(),
            query: self.query.detach(),
            key: self.key.detach(),
            value: self.value.detach(),
            query_norm: detach(&self.query_norm),
            key_norm: detach(&self.key_norm),
            key_of_query: self.key_of_query.clone(),
            // Attention between ranks is not computed again.
            context: None,
        }
    }
}

impl LmHead for LlamaConfig {
    fn final_norm_and_weight<'a>(
        &self,
        parameters: &'a Parameters<'_>,
        input: &Tensor,
    ) -> Result<(Tensor, &'a Tensor)> {
        let weight = parameters.tied().unwrap_or_else(|| parameters.get("lm_head.weight"));
        Ok((rms_norm(self, input, parameters.get("model.norm.weight"))?, weight))
    }

    fn norm_names(&self) -> &'static [&'static str] {
        &["model.norm.weight"]
    }

    fn sizes(&self) -> Sizes {
        Sizes { vocab_size: self.vocab_size, hidden_size: self.hidden_size, chunk_tokens: self.loss_chunk_tokens }
    }
}
