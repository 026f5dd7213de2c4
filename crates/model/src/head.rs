//! The last unit of a language model: the final norm, the output projection (`lm_head`), and the loss.

use shardwise_torch::tch::Tensor;

use crate::loss::{self, head_loss};
use crate::{Activations, Batch, Cache, Footprint, Layer, Parameters, Result};

/// The head of a model, with its loss.
pub(crate) struct Head<M>(pub(crate) M);

/// The parts of a head that depend on the model.
pub(crate) trait LmHead: Send {
    /// Returns the input after the final norm, and the weight of the output projection.
    fn final_norm_and_weight<'a>(&self, parameters: &'a Parameters<'_>, input: &Tensor)
    -> Result<(Tensor, &'a Tensor)>;

    fn sizes(&self) -> Sizes;
}

/// The sizes of a head.
pub(crate) struct Sizes {
    pub(crate) vocab_size: usize,
    pub(crate) hidden_size: usize,
    /// The number of tokens whose logits are in memory at once.
    pub(crate) chunk_tokens: usize,
}

impl<M: LmHead> Head<M> {
    fn logits_of(&self, parameters: &Parameters<'_>, input: &Tensor) -> Result<Tensor> {
        let (normed, weight) = self.0.final_norm_and_weight(parameters, input)?;
        Ok(normed.f_linear(weight, None::<&Tensor>)?)
    }
}

impl<M: LmHead> Layer for Head<M> {
    fn forward(
        &self,
        parameters: &Parameters<'_>,
        input: Option<&Tensor>,
        batch: &Batch,
        _: Activations,
    ) -> Result<Tensor> {
        let (normed, weight) = self.0.final_norm_and_weight(parameters, input.expect("the head has an input"))?;
        head_loss(&normed, weight, &batch.targets, self.0.sizes().chunk_tokens)
    }

    fn extend(
        &self,
        parameters: &Parameters<'_>,
        input: Option<&Tensor>,
        tokens: &Tensor,
        cache: &mut Cache,
    ) -> Result<Tensor> {
        let positions = tokens.size()[1];
        cache.advance(positions);
        self.logits_of(parameters, &input.expect("the head has an input").f_select(1, positions - 1)?)
    }

    fn logits(&self, parameters: &Parameters<'_>, input: &Tensor) -> Result<Option<Tensor>> {
        self.logits_of(parameters, input).map(Some)
    }

    fn footprint(&self, tokens: usize, _: usize, element_bytes: usize, _: Activations) -> Footprint {
        let Sizes { vocab_size, hidden_size, chunk_tokens } = self.0.sizes();
        loss::footprint(tokens, vocab_size, hidden_size, chunk_tokens, element_bytes)
    }
}
