//! The output projection fused with the cross-entropy loss, one chunk of tokens at a time.

use std::sync::{Mutex, MutexGuard, PoisonError};

use shardwise_plan::Partition;
use shardwise_plan::program::{CollectiveKind, GroupKind, InnerCollective, InnerCollectives};
use shardwise_torch::autograd;
use shardwise_torch::tch::{Kind, Tensor, no_grad};

use crate::{Error, Footprint, PassShape, Result, TensorParallel};

/// A target that the loss ignores (PyTorch: `ignore_index`).
pub const IGNORED: i64 = -100;

/// The sum of the cross-entropies of all tokens. The logits are `hidden` (…, hidden size) times the transpose of `weight`
/// (vocab size, hidden size); `targets` (…) are the correct tokens, or [`IGNORED`].
///
/// The logits of a whole batch would be the largest tensor of a training step. Here only those of `chunk_tokens` tokens are in
/// memory at once, and the gradients are computed right away, in the forward pass. So only one backward pass through the result
/// is possible.
pub fn head_loss(hidden: &Tensor, weight: &Tensor, targets: &Tensor, chunk_tokens: usize) -> Result<Tensor> {
    let vocab_size = weight.size()[0] as usize;
    parallel_head_loss(hidden, weight, targets, vocab_size, chunk_tokens, &TensorParallel::none())
}

/// Like [`head_loss`], with `weight` divided by rows among the ranks that share the head. All of them get the same loss. They
/// exchange three numbers per token, and no logits.
pub(crate) fn parallel_head_loss(
    hidden: &Tensor,
    weight: &Tensor,
    targets: &Tensor,
    vocab_size: usize,
    chunk_tokens: usize,
    parallel: &TensorParallel,
) -> Result<Tensor> {
    // Ask views, not the tensors themselves: under `no_grad`, a view requires no gradient.
    let shape = hidden.size();
    let wanted =
        Wanted { hidden: hidden.f_view_as(hidden)?.requires_grad(), weight: weight.f_view_as(weight)?.requires_grad() };
    let targets = targets.f_reshape(-1)?;
    let kind = weight.kind();
    let rows =
        no_grad(|| parallel.gather_rows(hidden, targets.numel())?.f_view([-1, weight.size()[1]]).map_err(Error::from))?;
    let own = Partition::new(vocab_size, parallel.size()).range(parallel.rank());
    let vocabulary = Vocabulary { first: own.start as i64, parallel };
    let (loss, [hidden_grad, weight_grad]) =
        no_grad(|| chunked(&rows, weight, &targets, chunk_tokens, wanted, &vocabulary))?;
    drop(rows);
    // Every rank has the part of the gradient that comes from its own part of the vocabulary.
    let hidden_grad = hidden_grad.map(|grad| no_grad(|| parallel.sum(&grad)?.f_view(&shape[..]).map_err(Error::from)));
    // Consumed in the backward pass.
    let kept = Mutex::new(Some([hidden_grad.transpose()?, weight_grad]));
    let mut outputs = autograd::function(
        "head",
        &[hidden, weight],
        |_| Ok(autograd::Forward { outputs: vec![loss], saved: vec![] }),
        move |back| {
            let [hidden, weight] =
                lock(&kept).take().ok_or("the head's gradients have been used; its graph can be walked only once")?;
            let Some(factor) = &back.grads[0] else { return Ok(vec![None, None]) };
            // Scale the weight's gradient before it is rounded: unscaled values would underflow in f16.
            let hidden_factor = match headroom(kind) {
                Some(headroom) => factor.f_div_scalar(headroom)?,
                None => factor.shallow_clone(),
            };
            let hidden = hidden.map(|mut grad| grad.f_mul_(&hidden_factor)).transpose()?;
            let weight = weight.map(|mut grad| grad.f_mul_(factor)?.f_to_kind(kind)).transpose()?;
            Ok(vec![hidden, weight])
        },
    )?;
    Ok(outputs.remove(0))
}

/// This rank's part of the vocabulary.
struct Vocabulary<'a> {
    /// Its first token.
    first: i64,
    parallel: &'a TensorParallel,
}

/// Estimates the memory of a head with this loss.
pub(crate) fn footprint(shape: &PassShape, vocab_size: usize, hidden_size: usize, chunk_tokens: usize) -> Footprint {
    let &PassShape { tokens, element_bytes, .. } = shape;
    let vocab_size = shape.part_of(vocab_size);
    // The size of f32, or of f64 if the model computes in it.
    let wide_bytes = element_bytes.max(4);
    // The logits of a chunk and their softmax.
    let logits = chunk_tokens.min(tokens) * vocab_size * 2 * wide_bytes;
    let weight = vocab_size * hidden_size;
    let own = shape.own_tokens() * hidden_size * element_bytes;
    // With a split sequence, the gathered output of the norm and its gradient.
    let gathered = if shape.splits_sequence { 2 * tokens * hidden_size * element_bytes } else { 0 };
    Footprint {
        // What the norm keeps, its output, the gradient of that, and the gradient of the weight.
        kept_bytes: 3 * own + weight * wide_bytes,
        output_bytes: 0,
        forward_temporary_bytes: logits + gathered,
        no_grad_temporary_bytes: logits + own + gathered / 2,
        // The gradient of the weight is accumulated in the wide type, and converted at the end.
        temporary_bytes: if element_bytes == wide_bytes { 0 } else { weight * element_bytes },
        sparse_gradient_bytes: 0,
    }
}

/// The collectives of a head with this loss: it gathers the hidden states, exchanges three numbers per token, and sums the gradient
/// of the hidden states right away.
pub(crate) fn collectives(
    shape: &PassShape,
    hidden_has_grad: bool,
    hidden_size: usize,
    chunk_tokens: usize,
) -> InnerCollectives {
    let wide_bytes = shape.element_bytes.max(4);
    let exchange = |start: usize| {
        let row_bytes = 3 * chunk_tokens.min(shape.tokens - start) * wide_bytes;
        let (group, kind) = (GroupKind::Tensor, CollectiveKind::AllGather);
        InnerCollective { group, kind, bytes: shape.tensor.size * row_bytes, row_bytes, overlap: 0., uneven: None }
    };
    let exchanges = (0..shape.tokens).step_by(chunk_tokens).map(exchange).filter(|_| shape.tensor.size > 1);
    let sum = shape.leave(hidden_size).filter(|_| hidden_has_grad);
    let forward: Vec<InnerCollective> = shape.enter(hidden_size).into_iter().chain(exchanges).chain(sum).collect();
    InnerCollectives { recompute: forward.clone(), forward, backward: Vec::new() }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Clone, Copy)]
struct Wanted {
    hidden: bool,
    weight: bool,
}

/// A factor on the gradient of the hidden states, which the backward pass divides out again. Without it, most probabilities of
/// a large vocabulary would underflow to zero in f16.
fn headroom(kind: Kind) -> Option<f64> {
    (kind == Kind::Half).then_some(1024.)
}

/// The type in which logits and sums are computed: f32, or f64 if the model computes in it.
fn wide(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}

/// Returns the loss and, if wanted, the gradients of the hidden states (times [`headroom`]) and of the weight. All but the gradient
/// of the hidden states are in the [`wide`] type.
fn chunked(
    hidden: &Tensor,
    weight: &Tensor,
    targets: &Tensor,
    chunk_tokens: usize,
    wanted: Wanted,
    vocabulary: &Vocabulary<'_>,
) -> Result<(Tensor, [Option<Tensor>; 2])> {
    let wide = wide(weight.kind());
    let mut loss = Tensor::f_zeros([], (Kind::Double, hidden.device()))?;
    let hidden_grad = if wanted.hidden { Some(hidden.f_empty_like()?) } else { None };
    // A sum of many small terms, so in f32 even if the weight is narrower.
    let mut weight_grad = match wanted.weight {
        true => Some(Tensor::f_zeros(weight.size(), (wide, weight.device()))?),
        false => None,
    };
    let tokens = hidden.size()[0];
    let mut start = 0;
    while start < tokens {
        let count = (chunk_tokens as i64).min(tokens - start);
        let part = hidden.f_narrow(0, start, count)?;
        let target = targets.f_narrow(0, start, count)?.f_unsqueeze(1)?;
        let valid = target.f_ne(IGNORED)?;
        let logits = part.f_matmul(&weight.f_transpose(0, 1)?)?.f_to_kind(wide)?;
        let Scored { mut log_probabilities, chosen, index, is_own } = vocabulary.score(logits, &target)?;
        loss = loss.f_sub(&chosen.f_mul(&valid)?.f_sum(Kind::Double)?)?;
        if hidden_grad.is_some() || weight_grad.is_some() {
            // The gradient of the logits: the probability, minus one for the target.
            let mut grad = log_probabilities.f_exp_()?;
            let minus_one = match is_own {
                Some(is_own) => is_own.f_to_kind(wide)?.f_neg()?,
                None => Tensor::f_full([count, 1], -1., (wide, hidden.device()))?,
            };
            let grad = grad.f_scatter_add_(1, &index, &minus_one)?.f_mul_(&valid)?;
            if let Some(hidden_grad) = &hidden_grad {
                let enlarged = headroom(weight.kind()).map(|headroom| grad.f_mul_scalar(headroom)).transpose()?;
                let narrow = enlarged.as_ref().unwrap_or(&grad).f_to_kind(weight.kind())?;
                hidden_grad.f_narrow(0, start, count)?.f_copy_(&narrow.f_matmul(weight)?)?;
            }
            if let Some(weight_grad) = &mut weight_grad {
                let _ = weight_grad.f_addmm_(&grad.f_transpose(0, 1)?, &part.f_to_kind(wide)?)?;
            }
        }
        start += count;
    }
    Ok((loss.f_to_kind(wide)?, [hidden_grad, weight_grad]))
}

/// The probabilities of a chunk of tokens.
struct Scored {
    /// The log-probabilities of this rank's part of the vocabulary.
    log_probabilities: Tensor,
    /// The log-probability of each target, on whichever rank it is.
    chosen: Tensor,
    /// The index of each target in this rank's part of the vocabulary; 0 if it is on another rank.
    index: Tensor,
    /// Whether each target is on this rank, if there are several.
    is_own: Option<Tensor>,
}

impl Vocabulary<'_> {
    /// The probabilities of all tokens of this rank's part of the vocabulary, and of the targets.
    fn score(&self, mut logits: Tensor, target: &Tensor) -> Result<Scored> {
        if self.parallel.size() == 1 {
            let index = target.f_clamp_min(0)?;
            let log_probabilities = logits.f_log_softmax(1, logits.kind())?;
            let chosen = log_probabilities.f_gather(1, &index, false)?;
            return Ok(Scored { log_probabilities, chosen, index, is_own: None });
        }
        let (count, own) = (logits.size()[0], logits.size()[1]);
        let local = target.f_sub_scalar(self.first)?;
        let is_own = local.f_ge(0)?.f_logical_and(&local.f_lt(own)?)?;
        let index = local.f_masked_fill(&is_own.f_logical_not()?, 0)?;
        let picked = logits.f_gather(1, &index, false)?.f_mul(&is_own)?;
        let largest = logits.f_amax([1i64], true)?;
        let sum = logits.f_sub(&largest)?.f_exp_()?.f_sum_dim_intlist([1i64].as_slice(), true, logits.kind())?;
        // Every rank's largest logit, the sum of its exponentials relative to it, and its targets' logits.
        let all = self.parallel.stack(&Tensor::f_cat(&[&largest, &sum, &picked], 1)?)?.f_view([-1, count, 3])?;
        let column = |index: i64| all.f_narrow(2, index, 1);
        let largest = column(0)?.f_amax([0i64], false)?;
        let scaled = column(1)?.f_mul(&column(0)?.f_sub(&largest)?.f_exp()?)?;
        let normalizer = scaled.f_sum_dim_intlist([0i64].as_slice(), false, logits.kind())?.f_log()?.f_add(&largest)?;
        let chosen = column(2)?.f_sum_dim_intlist([0i64].as_slice(), false, logits.kind())?.f_sub(&normalizer)?;
        let log_probabilities = logits.f_sub_(&normalizer)?;
        Ok(Scored { log_probabilities, chosen, index, is_own: Some(is_own) })
    }
}
