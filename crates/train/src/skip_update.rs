//! A step whose loss or gradients are not finite: finding the value at fault, and skipping the update.

use shardwise_zero::ShardedUnit;

use crate::error::{Error, Result};
use crate::nonfinite::{NonFiniteValue, OnNonFinite};
use crate::report::Gradients;
use crate::step::Trainer;

impl Trainer {
    /// Discards the gradients of a step. Returns the value that was not finite, or fails if the options say so.
    pub(crate) fn skip_update(&mut self, gradients: &Gradients) -> Result<NonFiniteValue> {
        let step = gradients.step;
        if self.options.update_in_backward {
            let fault = self.first_non_finite_unit(gradients)?;
            return Err(Error::NonFiniteUpdate { step, fault });
        }
        let fault = self.first_non_finite(gradients.non_finite_output)?;
        self.discard_gradients();
        if self.options.on_nonfinite == OnNonFinite::Stop {
            return Err(Error::NonFinite { step, fault });
        }
        self.skipped += 1;
        let scale = self.loss_scaler.value();
        match self.loss_scaler.record_overflow() {
            true => Ok(fault),
            false => Err(Error::ScaleTooSmall { step, scale, fault }),
        }
    }

    /// The first unit whose output or gradients are not finite. The update has used the gradients up, and changed the parameters.
    fn first_non_finite_unit(&self, gradients: &Gradients) -> Result<NonFiniteValue> {
        if let Some((unit, rank)) = self.ranks.first_on_any_rank(gradients.non_finite_output)? {
            return Ok(NonFiniteValue::Output { unit: self.unit_name(unit).to_string(), rank, parameter: None });
        }
        let is_wrong = |norm: &f64| !norm.is_finite();
        Ok(match gradients.unit_norms.iter().rposition(is_wrong) {
            Some(unit) => NonFiniteValue::UnitNorm { unit: self.unit_name(unit).to_string() },
            None => NonFiniteValue::Loss,
        })
    }

    /// The first value on any rank that is not finite, in the order of the computation: outputs forward, gradients backward.
    fn first_non_finite(&self, own_output: Option<usize>) -> Result<NonFiniteValue> {
        if let Some((unit, rank)) = self.ranks.first_on_any_rank(own_output)? {
            let own = self.shards.get(unit).map(ShardedUnit::first_nonfinite_parameter).transpose()?.flatten();
            let parameter = self.ranks.first_on_any_rank(own)?;
            let parameter = match (parameter, self.model.units()[unit].tied()) {
                (Some((parameter, _)), _) => Some(self.parameter_name(unit, parameter)),
                // The unit may also compute with a tied parameter.
                (None, Some(tied)) => {
                    let owner = self.shards.get(tied.unit);
                    let is_finite = owner.map(|owner| owner.is_parameter_finite(tied.parameter)).transpose()?;
                    let own = (is_finite == Some(false)).then_some(tied.parameter);
                    let at_fault = self.ranks.first_on_any_rank(own)?;
                    at_fault.map(|(parameter, _)| self.parameter_name(tied.unit, parameter))
                }
                (None, None) => None,
            };
            return Ok(NonFiniteValue::Output { unit: self.unit_name(unit).to_string(), rank, parameter });
        }
        let last = self.shards.model_len() - 1;
        let mut own = None;
        for (unit, shard) in self.shards.iter().rev() {
            if shard.first_nonfinite_gradient()?.is_some() {
                own = Some(last - unit);
                break;
            }
        }
        let (from_last, _) =
            self.ranks.first_on_any_rank(own)?.expect("the norm is not finite, so some gradient is not");
        let unit = last - from_last;
        let own = self.shards.get(unit).map(ShardedUnit::first_nonfinite_gradient).transpose()?.flatten();
        let (parameter, _) = self.ranks.first_on_any_rank(own)?.expect("the unit has a gradient that is not finite");
        Ok(NonFiniteValue::Gradient {
            unit: self.unit_name(unit).to_string(),
            parameter: self.parameter_name(unit, parameter),
        })
    }

    fn parameter_name(&self, unit: usize, parameter: usize) -> String {
        self.model.units()[unit].parameters()[parameter].name.clone()
    }
}
