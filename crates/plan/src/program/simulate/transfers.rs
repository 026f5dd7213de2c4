//! The memory of received messages, and of buffers while they are on another tier.

use std::collections::{BTreeMap, BTreeSet};

use super::super::Program;
use super::super::costs::Costs;
use super::super::instruction::{Buffer, Instruction, Message, Offload, Payload};

/// What messages add to a rank's memory, and copies to other tiers take from it.
pub(super) struct Transfers {
    /// Received messages, by micro-batch, unit and payload, until the unit's backward pass.
    received: BTreeMap<(usize, usize, Payload), usize>,
    /// The bytes of buffers that are on another tier, by unit and buffer.
    stored: BTreeMap<(usize, Buffer), usize>,
}

impl Transfers {
    /// A buffer that a step fetches first is on its tier when the step starts. `bytes` is the size of a unit's buffer.
    pub(super) fn new(program: &Program, bytes: impl Fn(usize, Buffer) -> usize) -> Self {
        let mut seen = BTreeSet::new();
        let mut stored = BTreeMap::new();
        for instruction in &program.instructions {
            if let Instruction::StartFetch(offload)
            | Instruction::StartStore(offload)
            | Instruction::WaitStore(offload) = *instruction
            {
                let Offload { unit, buffer, .. } = offload;
                if seen.insert((unit, buffer)) && matches!(instruction, Instruction::StartFetch(_)) {
                    stored.insert((unit, buffer), bytes(unit, buffer));
                }
            }
        }
        Transfers { received: BTreeMap::new(), stored }
    }

    /// Allocates what an instruction receives, fetches or overwrites. `frozen_bytes` is the size of a unit's frozen parameters.
    pub(super) fn allocate(&mut self, instruction: &Instruction, costs: &Costs, frozen_bytes: impl Fn(usize) -> usize) {
        match *instruction {
            Instruction::StartReceive(Message { payload, unit, micro_batch, .. }) if !payload.is_tied() => {
                let producer = if payload == Payload::Activations { unit.saturating_sub(1) } else { unit };
                self.received.insert((micro_batch, unit, payload), costs.units[producer].output_bytes);
            }
            Instruction::StartFetch(Offload { unit, buffer, .. }) => {
                self.stored.remove(&(unit, buffer));
            }
            // It overwrites what was not fetched.
            Instruction::Update(unit) => {
                let stored = self.stored.entry((unit, Buffer::Parameters)).or_default();
                *stored = (*stored).min(frozen_bytes(unit));
            }
            _ => (),
        }
    }

    /// Frees what an instruction has stored, or is the last to need. `bytes` is the size of a unit's buffer.
    pub(super) fn free(
        &mut self,
        instruction: &Instruction,
        has_backward: bool,
        bytes: impl Fn(usize, Buffer) -> usize,
    ) {
        match *instruction {
            Instruction::WaitStore(Offload { unit, buffer, .. }) | Instruction::Evict(Offload { unit, buffer, .. }) => {
                self.stored.insert((unit, buffer), bytes(unit, buffer));
            }
            Instruction::Backward { unit, micro_batch } | Instruction::BackwardWeight { unit, micro_batch } => {
                self.forget(unit, micro_batch);
            }
            Instruction::Forward { unit, micro_batch, .. } if !has_backward => self.forget(unit, micro_batch),
            _ => (),
        }
    }

    fn forget(&mut self, unit: usize, micro_batch: usize) {
        for payload in [Payload::Activations, Payload::Gradients] {
            self.received.remove(&(micro_batch, unit, payload));
        }
    }

    /// Forgets gradients that were stored for an update, of units that were updated.
    pub(super) fn forget_gradients(&mut self, is_updated: impl Fn(usize) -> bool) {
        self.stored.retain(|&(unit, buffer), _| buffer != Buffer::Gradients || !is_updated(unit));
    }

    /// The bytes of received messages.
    pub(super) fn received_bytes(&self) -> usize {
        self.received.values().sum()
    }

    /// The bytes of buffers of one kind that are on another tier.
    pub(super) fn stored_bytes(&self, is_kind: impl Fn(&Buffer) -> bool) -> usize {
        self.stored.iter().filter(|((_, buffer), _)| is_kind(buffer)).map(|(_, bytes)| bytes).sum()
    }
}
