//! The head's matrix and the loss together, a chunk of tokens at a time.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use shardwise_torch::autograd;
use shardwise_torch::tch::{Kind, Tensor};

use crate::{Footprint, Result};

/// A target that does not count.
pub const IGNORED: i64 = -100;

/// The sum of the cross-entropies of all tokens: `hidden` (…, width) times `weight` (vocabulary, width) are the logits, and
/// `targets` (…) the right answers, or [`IGNORED`].
///
/// The logits of a whole batch would be the largest tensor of a training step. Here those of `chunk` tokens exist at a time,
/// and their gradients are made at once, while they do. The graph behind the result can therefore be walked once.
pub fn head_loss(hidden: &Tensor, weight: &Tensor, targets: &Tensor, chunk: usize) -> Result<Tensor> {
    // A view records exactly where its source would be recorded, also under no_grad.
    let hidden = hidden.f_view([-1, weight.size()[1]])?;
    let wanted = Wanted { hidden: hidden.requires_grad(), weight: weight.f_view_as(weight)?.requires_grad() };
    let targets = targets.f_reshape(-1)?;
    let kind = weight.kind();
    // Made in the forward pass, used up in the backward pass.
    let grads = Arc::new(Mutex::new(None));
    let kept = grads.clone();
    let mut outputs = autograd::function(
        "head",
        &[&hidden, weight],
        |inputs| {
            let (loss, made) = chunked(inputs[0], inputs[1], &targets, chunk, wanted)?;
            *lock(&grads) = Some(made);
            Ok(autograd::Forward { outputs: vec![loss], saved: vec![] })
        },
        move |back| {
            let [hidden, weight] =
                lock(&kept).take().ok_or("the head's gradients have been used; its graph is walked once")?;
            let Some(factor) = &back.grads[0] else { return Ok(vec![None, None]) };
            // Scaled before the matrix's gradient is rounded: f16 has no room for what is small before.
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

/// What a head with this loss takes of memory.
pub(crate) fn footprint(
    tokens: usize,
    vocabulary: usize,
    width: usize,
    chunk: usize,
    element_bytes: usize,
) -> Footprint {
    let f32_bytes = 4;
    // The logits of a chunk, their softmax and its gradient, and once more in the elements' type.
    let logits = chunk.min(tokens) * vocabulary * (2 * f32_bytes + element_bytes);
    // The gradient of the matrix is added up in f32.
    let matrix = vocabulary * width * if element_bytes == f32_bytes { f32_bytes } else { f32_bytes + element_bytes };
    Footprint { kept_bytes: tokens * 4 * width * element_bytes, output_bytes: 0, passing_bytes: logits + matrix }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Clone, Copy)]
struct Wanted {
    hidden: bool,
    weight: bool,
}

/// By how much the gradient of hidden states is larger than it should be until it is scaled with the loss: in f16, most
/// probabilities of a large vocabulary would otherwise be too small to be told from zero.
fn headroom(kind: Kind) -> Option<f64> {
    (kind == Kind::Half).then_some(1024.)
}

/// The loss; the gradient of hidden states, times [`headroom`], and that of the weight in f32, where they are wanted.
fn chunked(
    hidden: &Tensor,
    weight: &Tensor,
    targets: &Tensor,
    chunk: usize,
    wanted: Wanted,
) -> shardwise_torch::Result<(Tensor, [Option<Tensor>; 2])> {
    let mut loss = Tensor::f_zeros([], (Kind::Double, hidden.device()))?;
    let hidden_grad = if wanted.hidden { Some(hidden.f_empty_like()?) } else { None };
    // Many small contributions: in f32 also where the weight is not.
    let mut weight_grad = match wanted.weight {
        true => Some(Tensor::f_zeros(weight.size(), (Kind::Float, weight.device()))?),
        false => None,
    };
    let tokens = hidden.size()[0];
    let mut start = 0;
    while start < tokens {
        let count = (chunk as i64).min(tokens - start);
        let part = hidden.f_narrow(0, start, count)?;
        let target = targets.f_narrow(0, start, count)?.f_unsqueeze(1)?;
        let valid = target.f_ne(IGNORED)?;
        let index = target.f_clamp_min(0)?;
        let logits = part.f_matmul(&weight.f_transpose(0, 1)?)?.f_to_kind(Kind::Float)?;
        let mut probabilities = logits.f_log_softmax(1, Kind::Float)?;
        drop(logits);
        let chosen = probabilities.f_gather(1, &index, false)?.f_mul(&valid)?;
        loss = loss.f_sub(&chosen.f_sum(Kind::Double)?)?;
        if hidden_grad.is_some() || weight_grad.is_some() {
            // What the loss would change by, were the logits larger: the probability, less one for the right answer.
            let mut grad = probabilities.f_exp_()?;
            let minus_one = Tensor::f_full([count, 1], -1., (Kind::Float, hidden.device()))?;
            let grad = grad.f_scatter_add_(1, &index, &minus_one)?.f_mul_(&valid)?;
            if let Some(hidden_grad) = &hidden_grad {
                let enlarged = headroom(weight.kind()).map(|headroom| grad.f_mul_scalar(headroom)).transpose()?;
                let narrow = enlarged.as_ref().unwrap_or(&grad).f_to_kind(weight.kind())?;
                hidden_grad.f_narrow(0, start, count)?.f_copy_(&narrow.f_matmul(weight)?)?;
            }
            if let Some(weight_grad) = &mut weight_grad {
                let _ = weight_grad.f_addmm_(&grad.f_transpose(0, 1)?, &part.f_to_kind(Kind::Float)?)?;
            }
        }
        start += count;
    }
    Ok((loss.f_to_kind(Kind::Float)?, [hidden_grad, weight_grad]))
}
