//! The output projection fused with the cross-entropy loss, one chunk of tokens at a time.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use shardwise_torch::autograd;
use shardwise_torch::tch::{Kind, Tensor};

use crate::{Footprint, Result};

/// A target that the loss ignores (PyTorch: `ignore_index`).
pub const IGNORED: i64 = -100;

/// The sum of the cross-entropies of all tokens. The logits are `hidden` (…, hidden size) times the transpose of `weight`
/// (vocab size, hidden size); `targets` (…) are the correct tokens, or [`IGNORED`].
///
/// The logits of a whole batch would be the largest tensor of a training step. Here only those of `chunk_tokens` tokens are in
/// memory at once, and the gradients are computed right away, in the forward pass. So only one backward pass through the result
/// is possible.
pub fn head_loss(hidden: &Tensor, weight: &Tensor, targets: &Tensor, chunk_tokens: usize) -> Result<Tensor> {
    // Ask views, not the tensors themselves: under `no_grad`, a view requires no gradient.
    let hidden = hidden.f_view([-1, weight.size()[1]])?;
    let wanted = Wanted { hidden: hidden.requires_grad(), weight: weight.f_view_as(weight)?.requires_grad() };
    let targets = targets.f_reshape(-1)?;
    let kind = weight.kind();
    // Computed in the forward pass, consumed in the backward pass.
    let grads = Arc::new(Mutex::new(None));
    let kept = grads.clone();
    let mut outputs = autograd::function(
        "head",
        &[&hidden, weight],
        |inputs| {
            let (loss, made) = chunked(inputs[0], inputs[1], &targets, chunk_tokens, wanted)?;
            *lock(&grads) = Some(made);
            Ok(autograd::Forward { outputs: vec![loss], saved: vec![] })
        },
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

/// Estimates the memory of a head with this loss.
pub(crate) fn footprint(
    tokens: usize,
    vocab_size: usize,
    hidden_size: usize,
    chunk_tokens: usize,
    element_bytes: usize,
) -> Footprint {
    // The size of f32, or of f64 if the model computes in it.
    let wide_bytes = element_bytes.max(4);
    // The logits of a chunk and their softmax.
    let logits = chunk_tokens.min(tokens) * vocab_size * 2 * wide_bytes;
    let weight = vocab_size * hidden_size;
    Footprint {
        // What the norm keeps, its output, the gradient of that, and the gradient of the weight.
        kept_bytes: tokens * 3 * hidden_size * element_bytes + weight * wide_bytes,
        output_bytes: 0,
        forward_temporary_bytes: logits,
        no_grad_temporary_bytes: logits + tokens * hidden_size * element_bytes,
        // The gradient of the weight is accumulated in the wide type, and converted at the end.
        temporary_bytes: if element_bytes == wide_bytes { 0 } else { weight * element_bytes },
        sparse_gradient_bytes: 0,
    }
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
) -> shardwise_torch::Result<(Tensor, [Option<Tensor>; 2])> {
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
        let index = target.f_clamp_min(0)?;
        let logits = part.f_matmul(&weight.f_transpose(0, 1)?)?.f_to_kind(wide)?;
        let mut probabilities = logits.f_log_softmax(1, wide)?;
        drop(logits);
        let chosen = probabilities.f_gather(1, &index, false)?.f_mul(&valid)?;
        loss = loss.f_sub(&chosen.f_sum(Kind::Double)?)?;
        if hidden_grad.is_some() || weight_grad.is_some() {
            // The gradient of the logits: the probability, minus one for the target.
            let mut grad = probabilities.f_exp_()?;
            let minus_one = Tensor::f_full([count, 1], -1., (wide, hidden.device()))?;
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
