//! How long the work of a step takes on the ranks that are simulated.

use super::super::Program;
use super::super::collectives::Collective;
use super::super::costs::{Costs, LinkCost};
use super::super::execution::Durations;
use super::super::instruction::{Buffer, Instruction, Keep, Message, Offload};
use super::super::policy::{Policy, UnitSpec};
use super::super::traffic::Layout;
use super::memory::{buffer_bytes, frozen_bytes};

/// What a rank computes and sends with.
pub(super) struct Machine {
    pub(super) layout: Layout,
    pub(super) costs: Costs,
    /// The factor by which computation is slower than the costs say.
    slowdown: f64,
    /// What the forward pass of each unit keeps.
    keeps: Vec<Keep>,
}

impl Machine {
    pub(super) fn new(program: &Program, layout: Layout, costs: Costs, slowdown: f64) -> Self {
        let mut keeps = vec![Keep::Nothing; program.units.len()];
        for instruction in &program.instructions {
            if let Instruction::Forward { unit, keep, .. } = *instruction {
                keeps[unit] = keep;
            }
        }
        Machine { layout, costs, slowdown, keeps }
    }
}

/// The machines of all ranks that are simulated, and the links between any two.
pub(super) struct Machines<'a, L> {
    pub(super) units: &'a [UnitSpec],
    pub(super) policy: &'a Policy,
    pub(super) machines: &'a [Machine],
    pub(super) message_links: L,
}

impl<L: Fn(usize, usize) -> LinkCost> Durations for Machines<'_, L> {
    fn compute_s(&self, party: usize, instruction: &Instruction) -> f64 {
        let Machine { costs, slowdown, .. } = &self.machines[party];
        let cost = |unit: usize| &costs.units[unit];
        let duration_s = match *instruction {
            Instruction::Forward { unit, .. } | Instruction::Recompute { unit, .. } => cost(unit).forward_s,
            Instruction::Backward { unit, .. } => cost(unit).backward_s,
            // The two halves have about as many operations.
            Instruction::BackwardInput { unit, .. } | Instruction::BackwardWeight { unit, .. } => {
                cost(unit).backward_s / 2.
            }
            Instruction::Norm(unit) => cost(unit).norm_s,
            Instruction::Update(unit) => cost(unit).update_s,
            _ => 0.,
        };
        duration_s * slowdown
    }

    fn call_s(&self, party: usize, collective: &Collective) -> f64 {
        let Machine { layout, costs, .. } = &self.machines[party];
        match layout.group_size(collective.group) {
            1 => 0.,
            _ => costs.link(collective.group).duration_s(layout.most_sent_bytes(collective)),
        }
    }

    fn call_cpu_s(&self, party: usize, collective: &Collective) -> f64 {
        let Machine { layout, costs, .. } = &self.machines[party];
        costs.link(collective.group).cpu_s_per_byte * layout.sent_bytes(collective) as f64
    }

    fn message_s(&self, from: usize, to: usize, sent: &Message) -> f64 {
        let bytes = self.machines[from].layout.message_bytes(sent, true, self.units);
        (self.message_links)(from, to).duration_s(bytes)
    }

    fn fetch_s(&self, party: usize, offload: &Offload) -> f64 {
        self.copy_s(party, offload, 0)
    }

    fn store_s(&self, party: usize, offload: &Offload) -> f64 {
        // Frozen parameters were stored before the first step.
        let frozen_bytes = match offload.buffer {
            Buffer::Parameters => frozen_bytes(&self.units[offload.unit], self.policy, &self.machines[party].layout),
            _ => 0,
        };
        self.copy_s(party, offload, frozen_bytes)
    }
}

impl<L: Fn(usize, usize) -> LinkCost> Machines<'_, L> {
    /// The time in which a buffer is copied, except for some of its bytes.
    fn copy_s(&self, party: usize, offload: &Offload, left_out_bytes: usize) -> f64 {
        let Machine { layout, costs, keeps, .. } = &self.machines[party];
        let cost = &costs.units[offload.unit];
        let bytes = match (offload.buffer, keeps[offload.unit]) {
            (Buffer::Activations { .. }, Keep::All) => cost.kept_bytes,
            (Buffer::Activations { .. }, Keep::Selective) => cost.selective_bytes,
            // The output of the unit before it.
            (Buffer::Activations { .. }, Keep::Input | Keep::Nothing) => {
                offload.unit.checked_sub(1).map_or(0, |previous| costs.units[previous].output_bytes)
            }
            (buffer, _) => buffer_bytes(&self.units[offload.unit], buffer, self.policy, layout, costs),
        };
        costs.tiers[offload.tier as usize].duration_s(bytes - left_out_bytes)
    }
}
