//! Adding up the gradients of micro-batches, also of a parameter that two units share.

use shardwise_torch::kind_of;
use shardwise_torch::tch::{TchError, Tensor, no_grad};

use crate::error::{Error, Result};
use crate::step::Trainer;
use crate::step_values::StepValues;

impl Trainer {
    /// Adds the gradients of a unit's backward pass to those of earlier micro-batches.
    pub(crate) fn accumulate(&mut self, unit: usize, step: &mut StepValues<'_>) -> Result<()> {
        for (owner, parameter, grad) in std::mem::take(&mut step.grads) {
            match owner != unit && self.sums_tied_shares_apart() {
                true => self.add_to_tied_sum(owner, parameter, &grad, step)?,
                false => self.shards[owner].add_gradient(parameter, &grad)?,
            }
        }
        Ok(())
    }

    /// Whether the shares of a tied parameter's gradient are summed apart. In a pipeline they always are, because its stages finish
    /// them at different times.
    pub(crate) fn sums_tied_shares_apart(&self) -> bool {
        self.options.sum_tied_shares_apart || self.ranks.pipeline.size() > 1
    }

    /// Adds to the share of a tied parameter's gradient that does not come from its owner.
    pub(crate) fn add_to_tied_sum(
        &self,
        owner: usize,
        parameter: usize,
        grad: &Tensor,
        step: &mut StepValues<'_>,
    ) -> Result<()> {
        let kind = kind_of(self.options.precision.reduce_dtype);
        let added = no_grad(|| match step.tied_sums.get_mut(&(owner, parameter)) {
            Some(sum) => sum.f_add_(grad).map(drop),
            None => {
                let mut sum = Tensor::f_zeros(grad.size(), (kind, grad.device()))?;
                // That of a lookup is sparse, and cannot be copied.
                if grad.is_sparse() {
                    drop(sum.f_add_(grad)?)
                } else {
                    sum.f_copy_(grad)?
                }
                step.tied_sums.insert((owner, parameter), sum);
                Ok(())
            }
        });
        added.map_err(|error: TchError| {
            Error::of_model(self.unit_name(owner), shardwise_model::Error::Torch(error.into()))
        })
    }

    /// Starts to reduce the gradients of a unit, with the shares of others.
    pub(crate) fn start_reduce(&mut self, unit: usize, step: &mut StepValues<'_>) -> Result<()> {
        self.add_tied_sum(unit, step)?;
        Ok(self.shards[unit].start_reduce()?)
    }

    /// Adds that share to the gradient of its owner, just before it is reduced.
    fn add_tied_sum(&mut self, owner: usize, step: &mut StepValues<'_>) -> Result<()> {
        let parameters: Vec<usize> =
            step.tied_sums.range((owner, 0)..(owner + 1, 0)).map(|((_, parameter), _)| *parameter).collect();
        for parameter in parameters {
            if let Some(sum) = step.tied_sums.remove(&(owner, parameter)) {
                self.shards[owner].add_gradient(parameter, &sum)?;
            }
        }
        Ok(())
    }
}
