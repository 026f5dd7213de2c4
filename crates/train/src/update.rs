//! Updates of units, and those that wait for the next step.
//!
//! With [`Options::update_in_forward`], [`Trainer::apply_update`] decides how units are updated, and the next step updates each of them just
//! before its forward pass: while other units compute, and without anything that could still change the decision. So whoever reads parameters
//! or optimizer state between two steps finishes the update first.
//!
//! [`Options::update_in_forward`]: crate::Options::update_in_forward

use shardwise_plan::program::{Buffer, Program};

use crate::error::Result;
use crate::report::Gradients;
use crate::step::Trainer;
use crate::step_values::{BeforeUpdate, StepValues, Update};

impl Trainer {
    /// Whether units wait for the next step to be updated.
    pub fn has_deferred_update(&self) -> bool {
        self.deferred.is_some()
    }

    /// Updates the units that wait for the next step, if there are any. All ranks call it together. Evaluations, generation and
    /// [`Trainer::checkpoint_tensors`] do it themselves; call it before reading parameters or optimizer state otherwise. Fails if someone
    /// holds a [`TensorLease`](crate::TensorLease).
    pub fn finish_update(&mut self) -> Result<()> {
        if self.deferred.is_some() {
            self.check_no_leases()?;
        }
        self.finish_update_with(&mut |_, _| Ok(()))
    }

    /// Like [`Trainer::finish_update`], for whoever reads the trainer's tensors in the meantime: `before` is called as by
    /// [`Trainer::apply_update_with`].
    pub fn finish_update_with(&mut self, before: &mut BeforeUpdate<'_>) -> Result<()> {
        if self.deferred.is_none() {
            return Ok(());
        }
        self.unless_broken(|trainer| {
            let deferred = trainer.deferred.take().expect("an update is left");
            let program = deferred.program.only_deferred_updates(&trainer.options.policy(1));
            let mut values = StepValues::new(&[], trainer.shards.model_len(), 1.);
            values.deferred_update = Some(deferred);
            values.before_update = Some(before);
            trainer.execute(&program.instructions, &mut values)?;
            // A custom program may leave stores to the next step.
            trainer.shards_mut().try_for_each(|shard| Ok(shard.finish_store(Buffer::Optimizer)?))
        })
    }

    /// Executes the first half of a step, and with it the updates that the step before has left, if it has left any.
    pub(crate) fn execute_passes(&mut self, program: &Program, values: &mut StepValues<'_>) -> Result<()> {
        values.deferred_update = self.deferred.take();
        let is_left = values.deferred_update.is_some() || !self.options.update_in_forward;
        let executed = match is_left {
            true => self.execute(program.gradients(), values),
            false => {
                let policy = self.options.policy(values.micro_batches.len());
                self.execute(program.without_deferred_updates(&policy).gradients(), values)
            }
        };
        if executed.as_ref().is_err_and(|error| error.leaves_trainer_unchanged()) {
            self.deferred = values.deferred_update.take();
        }
        executed
    }

    /// Updates a unit, once nobody reads its tensors.
    pub(crate) fn update_unit(&mut self, unit: usize, step: &mut StepValues<'_>) -> Result<()> {
        let before = step.before_update.as_mut().expect("an update follows a call");
        let released = before(&mut self.shards[unit], unit).and_then(|()| self.check_no_lease(unit));
        // Units before this one have been updated.
        released.inspect_err(|error| self.mark_broken(error))?;
        let deferred = step.deferred_update.as_ref().filter(|_| self.defers_update(unit)).map(|left| &left.update);
        let Update { optimizer, factor } = deferred.or(step.update.as_ref()).expect("an update has an optimizer");
        Ok(self.shards[unit].update(optimizer, *factor)?)
    }

    /// How units are updated in a step.
    pub(crate) fn update_of(&self, step: u64, factor: f64) -> Update {
        let scheduled = self.options.schedule.at(step);
        Update { optimizer: self.options.optimizer.with_lr(scheduled.lr, scheduled.momentum), factor }
    }

    /// Changes what an update changes besides parameters and optimizer state.
    pub(crate) fn record_update(&mut self, gradients: &Gradients) -> Result<()> {
        self.expert_biases.update(&self.model, &gradients.expert_tokens)?;
        self.loss_scaler.record_finite_step();
        self.updates += 1;
        Ok(())
    }

    /// Fails if someone holds a lease on a unit that is updated.
    pub(crate) fn check_no_leases(&self) -> Result<()> {
        self.own_trainable_units().try_for_each(|unit| self.check_no_lease(unit))
    }

    /// Whether the update of a unit waits for the next step.
    fn defers_update(&self, unit: usize) -> bool {
        self.options.policy(1).defers_update(unit)
    }
}
