//! The last unit of a chain: a norm, the matrix of the vocabulary, and the loss.

use shardwise_torch::tch::Tensor;

use crate::loss::{self, head_loss};
use crate::{Activations, Batch, Cache, Footprint, Layer, Parameters, Result};

/// The head of a model.
pub(crate) struct Head<M>(pub(crate) M);

/// What models' heads differ in.
pub(crate) trait Headed: Send {
    /// The head's input, normed, and its matrix.
    fn normed<'a>(&self, parameters: &'a Parameters<'_>, input: &Tensor) -> Result<(Tensor, &'a Tensor)>;

    /// How large it is.
    fn sizes(&self) -> Sizes;
}

/// The sizes of a head.
pub(crate) struct Sizes {
    pub(crate) vocabulary: usize,
    pub(crate) width: usize,
    /// The tokens whose logits exist at a time.
    pub(crate) chunk: usize,
}

impl<M: Headed> Head<M> {
    fn logits_of(&self, parameters: &Parameters<'_>, input: &Tensor) -> Result<Tensor> {
        let (normed, weight) = self.0.normed(parameters, input)?;
        Ok(normed.f_linear(weight, None::<&Tensor>)?)
    }
}

impl<M: Headed> Layer for Head<M> {
    fn forward(
        &self,
        parameters: &Parameters<'_>,
        input: Option<&Tensor>,
        batch: &Batch,
        _: Activations,
    ) -> Result<Tensor> {
        let (normed, weight) = self.0.normed(parameters, input.expect("the head has an input"))?;
        head_loss(&normed, weight, &batch.targets, self.0.sizes().chunk)
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
        let Sizes { vocabulary, width, chunk } = self.0.sizes();
        loss::footprint(tokens, vocabulary, width, chunk, element_bytes)
    }
}
