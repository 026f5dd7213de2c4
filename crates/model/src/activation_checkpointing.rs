//! Selective activation checkpointing: activations that are freed after the forward pass and recomputed in the backward pass.
//!
//! Autograd saves every tensor that the backward pass will read. Some of them take a lot of memory but little work to compute:
//! the outputs of norms, of the attention kernel and of activation functions. Here their storage is taken away in place, like
//! that of released parameters, and put back when the backward pass reaches them. Autograd does not notice, so the results are
//! the same bit for bit, and no linear layer is computed twice.

use std::sync::{Mutex, PoisonError};

use shardwise_plan::program::ActivationCheckpointing;
use shardwise_torch::tch::{Tensor, no_grad};
use shardwise_torch::{autograd, storage};

use crate::Result;

/// The activations that a unit keeps from its forward pass for its backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activations {
    /// Everything that autograd saves, except for what is cheap to recompute.
    All,
    /// The outputs of linear layers. Norms, attention and activation functions are recomputed.
    Selective,
}

impl From<ActivationCheckpointing> for Activations {
    /// What the forward pass keeps of a unit that is not recomputed as a whole.
    fn from(checkpointing: ActivationCheckpointing) -> Self {
        match checkpointing {
            ActivationCheckpointing::None | ActivationCheckpointing::Full => Activations::All,
            ActivationCheckpointing::Selective => Activations::Selective,
        }
    }
}

/// Frees the memory of `saved` until the backward pass reaches `output`, and returns `output`. Then `recompute` computes the
/// tensors of `saved` again, in the same order. Nothing else may read them in between, and none of them may share memory with
/// the inputs of `recompute`.
pub(crate) fn recompute_in_backward(
    output: Tensor,
    saved: &[&Tensor],
    recompute: impl FnOnce() -> Result<Vec<Tensor>> + Send + 'static,
) -> Result<Tensor> {
    if !output.requires_grad() {
        return Ok(output);
    }
    let mut taken = Vec::new();
    for tensor in saved {
        // Several may be views of one storage.
        let alone = !storage::is_taken(tensor)?;
        if alone {
            drop(storage::take(tensor, "this activation is recomputed in the backward pass")?);
        }
        taken.push(alone.then(|| tensor.detach()));
    }
    // Dropped once it has been used, so that only the graph owns the recomputed tensors, and the backward pass frees them as it
    // proceeds.
    let rest = Mutex::new(Some((taken, recompute)));
    let mut outputs = autograd::function(
        "recomputed activations",
        &[&output],
        |inputs| Ok(autograd::Forward { outputs: vec![inputs[0].f_detach()?], saved: vec![] }),
        move |back| {
            let rest = rest.lock().unwrap_or_else(PoisonError::into_inner).take();
            let (taken, recompute) =
                rest.ok_or("activations are recomputed once; their graph can be walked only once")?;
            let recomputed = no_grad(recompute)?;
            if recomputed.len() != taken.len() {
                return Err("the recomputation chose other kernels than the first pass".into());
            }
            for (old, new) in taken.iter().zip(recomputed) {
                if let Some(old) = old {
                    storage::put(old, storage::take(&new, "this activation has moved")?)?;
                }
            }
            Ok(back.grads)
        },
    )?;
    Ok(outputs.remove(0))
}
