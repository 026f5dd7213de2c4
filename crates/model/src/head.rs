//! The last unit of a language model: the final norm, the output projection (`lm_head`), and the loss.

use shardwise_plan::program::InnerCollectives;
use shardwise_torch::tch::Tensor;

use crate::loss::{self, parallel_head_loss};
use crate::{Batch, Cache, Footprint, Layer, Parameters, Pass, PassShape, Result, TensorParallel};

/// The head of a model, with its loss.
pub(crate) struct Head<M>(pub(crate) M);

/// The parts of a head that depend on the model.
pub(crate) trait LmHead: Send {
    /// Returns the input after the final norm, and the weight of the output projection.
    fn final_norm_and_weight<'a>(&self, parameters: &'a Parameters<'_>, input: &Tensor)
    -> Result<(Tensor, &'a Tensor)>;

    /// The names of the final norm's parameters.
    fn norm_names(&self) -> &'static [&'static str];

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
    fn logits_of(&self, parameters: &Parameters<'_>, input: &Tensor, parallel: &TensorParallel) -> Result<Tensor> {
        let (normed, weight) = self.0.final_norm_and_weight(parameters, input)?;
        parallel.join_features(&normed.f_linear(weight, None::<&Tensor>)?, self.0.sizes().vocab_size)
    }
}

impl<M: LmHead> Layer for Head<M> {
    fn forward(
        &self,
        parameters: &Parameters<'_>,
        input: Option<&Tensor>,
        batch: &Batch,
        pass: &Pass,
    ) -> Result<Tensor> {
        let (normed, weight) = self.0.final_norm_and_weight(parameters, input.expect("the head has an input"))?;
        let Sizes { vocab_size, chunk_tokens, .. } = self.0.sizes();
        parallel_head_loss(&normed, weight, &batch.targets, vocab_size, chunk_tokens, &pass.parallel)
    }

    fn extend(
        &self,
        parameters: &Parameters<'_>,
        input: Option<&Tensor>,
        tokens: &Tensor,
        cache: &mut Cache,
        pass: &Pass,
    ) -> Result<Tensor> {
        let positions = tokens.size()[1];
        cache.advance(positions);
        let last = input.expect("the head has an input").f_select(1, positions - 1)?;
        self.logits_of(parameters, &last, &pass.parallel)
    }

    fn logits(&self, parameters: &Parameters<'_>, input: &Tensor, parallel: &TensorParallel) -> Result<Option<Tensor>> {
        self.logits_of(parameters, input, parallel).map(Some)
    }

    fn gradients_are_dense(&self) -> bool {
        true
    }

    fn forward_computes_gradients(&self) -> bool {
        true
    }

    fn footprint(&self, shape: &PassShape) -> Footprint {
        let Sizes { vocab_size, hidden_size, chunk_tokens } = self.0.sizes();
        loss::footprint(shape, vocab_size, hidden_size, chunk_tokens)
    }

    fn collectives(&self, shape: &PassShape, is_trained: &dyn Fn(&str) -> bool) -> InnerCollectives {
        let Sizes { hidden_size, chunk_tokens, .. } = self.0.sizes();
        let hidden_has_grad = shape.input_has_grad || self.0.norm_names().iter().any(|name| is_trained(name));
        loss::collectives(shape, hidden_has_grad, hidden_size, chunk_tokens)
    }
}
