//! What leaves the device between its uses: what an update reads and writes, reduced gradients, and the inputs of recomputed units. The
//! parameters that are gathered are in `parameters`.

use super::Stage;
use super::places::{Gradients, KeptInput};
use crate::program::{Buffer, Instruction, Offload};

impl Stage<'_> {
    /// Waits until what updates have changed is stored of all but `left` units.
    pub(super) fn wait_store_updated(&mut self, left: usize) {
        while self.storing_updated.len() > left {
            let stored = self.storing_updated.pop_front();
            stored.into_iter().for_each(|unit| self.for_updated(unit, Instruction::WaitStore));
        }
    }

    /// Starts to fetch what the update of a unit needs, unless that is done.
    pub(super) fn fetch_for_update(&mut self, unit: usize) {
        if self.fetched.insert(unit) {
            // What the step before has changed may still be on its way.
            if let Some(index) = self.storing_updated.iter().position(|&storing| storing == unit) {
                self.wait_store_updated(self.storing_updated.len() - index - 1);
            }
            self.for_fetched(unit, Instruction::StartFetch);
        }
    }

    /// An instruction for each buffer that an update needs and that is on a tier.
    pub(super) fn for_fetched(&mut self, unit: usize, instruction: fn(Offload) -> Instruction) {
        self.for_optimizer(unit, instruction);
        if self.units[unit].update_reads_parameters {
            self.for_parameters(unit, instruction);
        }
        if self.gradients[unit] == Gradients::Stored {
            self.for_gradients(unit, instruction);
        }
    }

    /// An instruction for each buffer that an update changes and that is on a tier.
    pub(super) fn for_updated(&mut self, unit: usize, instruction: fn(Offload) -> Instruction) {
        self.for_optimizer(unit, instruction);
        self.for_parameters(unit, instruction);
    }

    /// An instruction for a unit's optimizer state, if it is on a tier.
    fn for_optimizer(&mut self, unit: usize, instruction: fn(Offload) -> Instruction) {
        if let Some(tier) = self.policy.optimizer_tier {
            self.push(instruction(Offload { unit, buffer: Buffer::Optimizer, tier }));
        }
    }

    /// An instruction for a unit's parameters, if they are on a tier.
    fn for_parameters(&mut self, unit: usize, instruction: fn(Offload) -> Instruction) {
        if let Some(tier) = self.policy.parameter_tier {
            self.push(instruction(Offload { unit, buffer: Buffer::Parameters, tier }));
        }
    }

    /// An instruction for a unit's gradients, if they are kept on a tier.
    pub(super) fn for_gradients(&mut self, unit: usize, instruction: fn(Offload) -> Instruction) {
        if let Some(tier) = self.policy.gradient_tier {
            self.push(instruction(Offload { unit, buffer: Buffer::Gradients, tier }));
        }
    }

    /// Starts to store the input of a unit, if it is kept on a tier. The one before is stored by then.
    pub(super) fn store_input(&mut self, unit: usize, micro_batch: usize) {
        if self.policy.activation_tier.is_some() {
            self.for_input((unit, micro_batch), Instruction::StartStore);
            self.wait_store_inputs();
            self.inputs.insert((unit, micro_batch), KeptInput::Storing);
        }
    }

    /// Waits until the input is stored that is being stored.
    pub(super) fn wait_store_inputs(&mut self) {
        let storing = self.inputs.iter().find(|(_, input)| **input == KeptInput::Storing);
        if let Some((&input, _)) = storing {
            self.for_input(input, Instruction::WaitStore);
            self.inputs.insert(input, KeptInput::Stored);
        }
    }

    /// Starts to fetch the input of a unit, if it is on a tier.
    pub(super) fn prefetch_input(&mut self, unit: usize, micro_batch: usize) {
        let input = (unit, micro_batch);
        if self.inputs.get(&input) == Some(&KeptInput::Storing) {
            self.wait_store_inputs();
        }
        if self.inputs.get(&input) == Some(&KeptInput::Stored) {
            self.for_input(input, Instruction::StartFetch);
            self.inputs.insert(input, KeptInput::Fetching);
        }
    }

    /// Fetches the input of a unit, if it is on a tier.
    pub(super) fn fetch_input(&mut self, unit: usize, micro_batch: usize) {
        self.prefetch_input(unit, micro_batch);
        if self.inputs.remove(&(unit, micro_batch)).is_some() {
            self.for_input((unit, micro_batch), Instruction::WaitFetch);
        }
    }

    /// An instruction for the input of a unit in a micro-batch, if it is kept on a tier.
    pub(super) fn for_input(&mut self, (unit, micro_batch): (usize, usize), instruction: fn(Offload) -> Instruction) {
        if let Some(tier) = self.policy.activation_tier {
            self.push(instruction(Offload { unit, buffer: Buffer::Activations { micro_batch }, tier }));
        }
    }

    /// Waits until a unit's gradients are reduced, and starts to store them. Those of the previous one are stored by then.
    pub(super) fn store_gradients(&mut self, unit: usize) {
        self.wait_reduce(unit);
        if self.reductions_left[unit] == 0 {
            self.push(Instruction::Norm(unit));
        }
        self.for_gradients(unit, Instruction::StartStore);
        self.gradients[unit] = Gradients::Stored;
        self.wait_store_gradients();
        self.storing = Some(unit);
    }

    /// Waits until the gradients are stored that are being stored.
    pub(super) fn wait_store_gradients(&mut self) {
        if let Some(unit) = self.storing.take() {
            self.for_gradients(unit, Instruction::WaitStore);
        }
    }

    /// Starts to fetch a unit's gradients, if they are stored: more will be added to them.
    pub(super) fn prefetch_gradients(&mut self, unit: usize) {
        if self.gradients[unit] == Gradients::Stored {
            if self.storing == Some(unit) {
                self.wait_store_gradients();
            }
            self.for_gradients(unit, Instruction::StartFetch);
            self.gradients[unit] = Gradients::Fetching;
        }
    }

    /// Fetches a unit's gradients, if they are stored.
    pub(super) fn fetch_gradients(&mut self, unit: usize) {
        self.prefetch_gradients(unit);
        if self.gradients[unit] == Gradients::Fetching {
            self.for_gradients(unit, Instruction::WaitFetch);
            self.gradients[unit] = Gradients::InMemory;
        }
    }
}
