//! Partitioned activations (ZeRO-R): with full activation checkpointing, the ranks that share a layer each keep their own rows of its
//! input, and gather the others before the layer is recomputed. With sequence parallelism, inputs are divided already.

use shardwise_model::Activations;

use crate::error::{Error, Result};
use crate::step::Trainer;
use crate::step_values::UnitPass;

impl Trainer {
    /// Keeps only this rank's rows of the input of a unit that is recomputed in the backward pass. `passes` are those of the
    /// micro-batch, by unit. Does nothing if no other rank has the same input.
    pub(crate) fn partition_input(&self, unit: usize, passes: &mut [Option<UnitPass>]) -> Result<()> {
        if self.parallel.size() == 1 || self.parallel.splits_sequence() {
            return Ok(());
        }
        let (earlier, later) = passes.split_at_mut(unit);
        let Some(pass) = &mut later[0] else { return Ok(()) };
        let Some(input) = &pass.input else { return Ok(()) };
        let kept = self.pass(unit, Activations::All).parallel.partition(input);
        let kept = kept.map_err(|error| Error::of_model(self.shards[unit].name(), error))?;
        // The unit before it is recomputed as well, and needs no output until then.
        if let Some(Some(previous)) = earlier.last_mut()
            && !previous.output.requires_grad()
        {
            previous.output = kept.shallow_clone();
        }
        pass.partitioned = Some(input.size());
        pass.input = Some(kept);
        Ok(())
    }

    /// Gathers the input that [`Trainer::partition_input`] has divided, if it has.
    pub(crate) fn restore_input(&self, unit: usize, pass: &mut UnitPass) -> Result<()> {
        if let (Some(shape), Some(part)) = (pass.partitioned.take(), &pass.input) {
            let restored = self.pass(unit, Activations::All).parallel.restore(part, &shape);
            let restored = restored.map_err(|error| Error::of_model(self.shards[unit].name(), error))?;
            pass.input = Some(restored.set_requires_grad(unit > self.first_trainable));
        }
        Ok(())
    }
}
