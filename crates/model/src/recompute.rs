//! Activations that are given back after the forward pass and computed again in the backward pass.
//!
//! Autograd saves what its backward pass will read. Among that are tensors that cost much memory and little work: outputs of
//! norms, of the attention kernel, of activation functions. Here their memory is taken out in place, as that of released
//! parameters is, and put back when the backward pass arrives. Autograd notices nothing, so the bits are the same, and no
//! linear layer is computed twice.

use std::sync::{Mutex, PoisonError};

use shardwise_torch::tch::{Tensor, no_grad};
use shardwise_torch::{autograd, storage};

use crate::Result;

/// What is kept of a unit's forward pass for its backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activations {
    /// What autograd wants, but for what is made again at once.
    Kept,
    /// What linear layers have put out; norms, attention and activation functions are computed again.
    Few,
}

/// `output`, behind which the memory of `saved` is given back until the backward pass comes to it. Then `again` computes them
/// again, in the same order. Nothing else may read them in between, and none of them may share memory with what `again` reads.
pub(crate) fn computed_again(
    output: Tensor,
    saved: &[&Tensor],
    again: impl FnOnce() -> Result<Vec<Tensor>> + Send + 'static,
) -> Result<Tensor> {
    if !output.requires_grad() {
        return Ok(output);
    }
    let mut taken = Vec::new();
    for tensor in saved {
        // Several may be views of one storage.
        let alone = !storage::is_taken(tensor)?;
        if alone {
            drop(storage::take(tensor, "this activation is computed again in the backward pass")?);
        }
        taken.push(alone.then(|| tensor.detach()));
    }
    // Let go of when it has been used: what is put back then belongs to the graph alone, and goes as the graph is walked.
    let rest = Mutex::new(Some((taken, again)));
    let mut outputs = autograd::function(
        "activations that are computed again",
        &[&output],
        |inputs| Ok(autograd::Forward { outputs: vec![inputs[0].f_detach()?], saved: vec![] }),
        move |back| {
            let rest = rest.lock().unwrap_or_else(PoisonError::into_inner).take();
            let (taken, again) = rest.ok_or("activations are computed again once; their graph is walked once")?;
            for (old, new) in taken.iter().zip(no_grad(again)?) {
                if let Some(old) = old {
                    storage::put(old, storage::take(&new, "this activation has moved")?)?;
                }
            }
            Ok(back.grads)
        },
    )?;
    Ok(outputs.remove(0))
}
