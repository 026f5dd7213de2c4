//! What the rules of single ranks need to know besides the program.

use crate::program::instruction::unit_tied_to;
use crate::program::{Instruction, Keep, Policy, Program, UnitSpec};

/// What a program is checked against.
pub(super) struct Scope<'a> {
    pub(super) units: &'a [UnitSpec],
    pub(super) policy: &'a Policy,
    pub(super) purpose: Purpose,
    /// The stage of each unit.
    pub(super) stages: &'a [Option<usize>],
    /// The stage of the program.
    pub(super) stage: usize,
}

impl Scope<'_> {
    /// Whether a unit is on the program's stage.
    pub(super) fn has(&self, unit: usize) -> bool {
        self.stages.get(unit) == Some(&Some(self.stage))
    }

    /// The units on the program's stage, in the model's order.
    pub(super) fn own(&self) -> impl Iterator<Item = usize> {
        (0..self.units.len()).filter(|&unit| self.has(unit))
    }

    /// The first unit of the model with trainable parameters, where the backward pass ends.
    pub(super) fn first_trainable(&self) -> usize {
        self.units.iter().position(|unit| unit.trainable > 0).unwrap_or(self.units.len())
    }

    /// The unit that a unit is tied to, if it is on the program's stage.
    pub(super) fn tied_here(&self, unit: usize) -> Option<usize> {
        self.units[unit].tied.filter(|&owner| self.has(owner))
    }

    /// The unit that a unit is tied to, if it is on another stage.
    pub(super) fn tied_elsewhere(&self, unit: usize) -> Option<usize> {
        self.units[unit].tied.filter(|&owner| !self.has(owner))
    }

    /// The unit of another stage that is tied to a unit of this one.
    pub(super) fn tied_elsewhere_to(&self, owner: usize) -> Option<usize> {
        unit_tied_to(self.units, owner).filter(|&tied| !self.has(tied))
    }

    /// Whether the step before has left the update of a unit to this program.
    pub(super) fn has_deferred_update(&self, unit: usize) -> bool {
        let is_trained = self.has(unit) && self.units[unit].trainable > 0;
        self.purpose == Purpose::Training && is_trained && self.policy.defers_update(unit)
    }

    pub(super) fn name(&self, unit: usize) -> &str {
        &self.units[unit].name
    }
}

/// What a program is for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Purpose {
    /// Forward passes only.
    Inference,
    /// Forward and backward passes only.
    Replay,
    /// Forward and backward passes, and the reduction of gradients.
    Training,
}

impl Purpose {
    pub(super) fn of(program: &Program) -> Self {
        let is_training = |instruction: &Instruction| {
            matches!(
                instruction,
                Instruction::Accumulate { .. }
                    | Instruction::StartReduce { .. }
                    | Instruction::WaitReduceScatter(_)
                    | Instruction::WaitReduce(_)
                    | Instruction::Norm(_)
                    | Instruction::ReduceTotals
                    | Instruction::Update(_)
            )
        };
        let is_replay = |instruction: &Instruction| match instruction {
            Instruction::Recompute { .. }
            | Instruction::Backward { .. }
            | Instruction::BackwardInput { .. }
            | Instruction::BackwardWeight { .. } => true,
            Instruction::Forward { keep, .. } => *keep != Keep::Nothing,
            _ => false,
        };
        match &program.instructions {
            instructions if instructions.iter().any(is_training) => Purpose::Training,
            instructions if instructions.iter().any(is_replay) => Purpose::Replay,
            _ => Purpose::Inference,
        }
    }
}
