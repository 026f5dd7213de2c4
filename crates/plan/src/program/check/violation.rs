//! What is checked, and what is reported.

use std::collections::BTreeMap;
use std::fmt;

use crate::program::{Instruction, Keep, Program, UnitSpec};

/// The programs of all ranks of a mesh. Ranks that differ only in their data share one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Programs {
    /// The program of every rank that is not in `exceptions`.
    pub common: Program,
    /// The programs of ranks that have their own.
    pub exceptions: BTreeMap<usize, Program>,
}

impl Programs {
    /// The same program on all ranks.
    pub fn uniform(program: Program) -> Self {
        Programs { common: program, exceptions: BTreeMap::new() }
    }

    /// The program of a rank.
    pub fn of(&self, rank: usize) -> &Program {
        self.exceptions.get(&rank).unwrap_or(&self.common)
    }
}

/// What every step must obey.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Rule {
    /// A program names the units of the model, and belongs to a rank of the mesh.
    Fit,
    /// Parameters are whole when they are computed with, sharded when their shard is updated and at the end of a step at stage 3,
    /// and neither gathered nor released twice.
    UnitStates,
    /// Every micro-batch passes every unit once forward, and once backward down to the first trainable unit, with the activations
    /// that the backward pass needs.
    Passes,
    /// Gradients are added in the order of micro-batches, reduced as often as the policy says, and complete before the norm, the
    /// totals and the update, which all ranks make or skip together.
    Gradients,
    /// A program with totals counts its tokens first.
    Counts,
    /// All ranks of a group issue the same collectives in the same order.
    Collectives,
    /// No rank waits forever.
    Deadlock,
    /// Ranks that are connected by groups issue the calls of all their groups in one order.
    OneOrder,
}

/// A rule that a program breaks, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The rank at fault: the lowest one, if several have the program.
    pub rank: usize,
    /// The index of the instruction; `None` if one is missing.
    pub position: Option<usize>,
    /// The instruction as text; empty if one is missing.
    pub instruction: String,
    /// The rule.
    pub rule: Rule,
    /// What is wrong.
    pub problem: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.position {
            Some(position) => {
                write!(f, "rank {}, instruction {position} ({}): {}", self.rank, self.instruction, self.problem)
            }
            None => write!(f, "rank {}: {}", self.rank, self.problem),
        }
    }
}

impl std::error::Error for Violation {}

/// A violation by a program, before it is known whose program it is.
pub(super) struct Problem {
    pub(super) position: Option<usize>,
    pub(super) rule: Rule,
    pub(super) problem: String,
}

impl Problem {
    pub(super) fn at(position: usize, rule: Rule, problem: String) -> Self {
        Problem { position: Some(position), rule, problem }
    }

    /// An instruction is missing.
    pub(super) fn missing(rule: Rule, problem: String) -> Self {
        Problem { position: None, rule, problem }
    }

    pub(super) fn on(self, rank: usize, program: &Program) -> Violation {
        let instruction = self.position.and_then(|position| program.instructions.get(position));
        let instruction = instruction.map(|instruction| program.describe(instruction)).unwrap_or_default();
        Violation { rank, position: self.position, instruction, rule: self.rule, problem: self.problem }
    }
}

/// What a program is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Forward and backward passes, and the reduction of gradients.
    Training,
    /// Forward and backward passes only.
    Replay,
    /// Forward passes only.
    Inference,
}

impl Purpose {
    pub(super) fn of(program: &Program) -> Self {
        let is_training = |instruction: &Instruction| {
            matches!(
                instruction,
                Instruction::Accumulate { .. }
                    | Instruction::StartReduce(_)
                    | Instruction::WaitReduceScatter(_)
                    | Instruction::WaitReduce(_)
                    | Instruction::Norm(_)
                    | Instruction::ReduceTotals
                    | Instruction::Update(_)
            )
        };
        let is_replay = |instruction: &Instruction| match instruction {
            Instruction::Recompute { .. } | Instruction::Backward { .. } => true,
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

/// The first unit with trainable parameters, where the backward pass ends.
pub(super) fn first_trainable(units: &[UnitSpec]) -> usize {
    units.iter().position(|unit| unit.trainable > 0).unwrap_or(units.len())
}
