//! The losses and norms of a step on a device.
//!
//! A device works on what the host has queued, and the host waits for it only to read a value. So all values of a step are read at
//! once, when everything is queued. On the CPU there is nothing to wait for, and they are read as soon as they exist.

use shardwise_model::{Activations, Batch};
use shardwise_torch::tch::{Device, Kind, TchError, Tensor};

use crate::error::{Error, Result};
use crate::step::Trainer;
use crate::step_values::{StepValues, Unread, is_finite};

impl Trainer {
    /// Adds the sum of squares of a unit's gradients.
    pub(crate) fn add_squares(&self, unit: usize, step: &mut StepValues<'_>) -> Result<()> {
        match self.options.device {
            Device::Cpu => step.squares[unit] = self.shards[unit].grad_norm_squared()?,
            _ => {
                let squares = self.shards[unit].grad_norm_squared_on_device()?;
                step.unread.extend(squares.map(|squares| (Unread::Squares(unit), squares)));
            }
        }
        Ok(())
    }

    /// Waits for the device, and reads the values of a step.
    pub(crate) fn read_values(&self, step: &mut StepValues<'_>) -> Result<()> {
        if step.unread.is_empty() {
            return Ok(());
        }
        let (meanings, tensors): (Vec<Unread>, Vec<Tensor>) = std::mem::take(&mut step.unread).into_iter().unzip();
        let values =
            read_all(&tensors).map_err(|error| Error::of_model("head", shardwise_model::Error::Torch(error.into())))?;
        for (meaning, value) in meanings.into_iter().zip(values) {
            match meaning {
                Unread::Loss => step.loss += value,
                // An update in the backward pass has used the gradients up.
                Unread::Squares(unit) if value.is_finite() || self.options.update_in_backward => {
                    step.squares[unit] = value;
                }
                // Perhaps only the sum in f32 is too large.
                Unread::Squares(unit) => step.squares[unit] = self.shards[unit].grad_norm_squared()?,
            }
        }
        Ok(())
    }

    /// The first unit of this rank whose output is not finite. The outputs of the step have been freed, so this computes them again.
    /// All ranks call it together.
    pub(crate) fn find_non_finite_output(&mut self, micro_batches: &[Batch]) -> Result<Option<usize>> {
        let parallel = self.parallel.clone();
        let mut found = None;
        for batch in micro_batches {
            let batch = batch.to_device(self.options.device);
            self.forward_no_grad(&batch, &parallel, |trainer, unit, input| {
                let output = trainer.compute(unit, input, &batch, &trainer.pass(unit, Activations::All))?;
                if found.is_none() && !is_finite(&output) {
                    found = Some(unit);
                }
                Ok(output)
            })?;
        }
        Ok(found)
    }
}

/// The values of tensors of one element each, in one copy.
fn read_all(tensors: &[Tensor]) -> std::result::Result<Vec<f64>, TchError> {
    let rows = tensors
        .iter()
        .map(|tensor| tensor.f_to_kind(Kind::Double)?.f_view([1]))
        .collect::<std::result::Result<Vec<_>, _>>()?;
    Vec::try_from(Tensor::f_cat(&rows, 0)?)
}
