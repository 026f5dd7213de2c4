//! What is checked, and what is reported.

use std::fmt;

use crate::program::Program;

/// What every step must obey.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Rule {
    /// A program names the units of the model that are on its stage, and belongs to a rank of the mesh.
    Fit,
    /// Parameters are whole when they are computed with, sharded when their shard is updated and at the end of a step at stage 3,
    /// and neither gathered nor released twice.
    UnitStates,
    /// Every micro-batch passes every unit once forward, and once backward down to the first trainable unit, with the activations
    /// that the backward pass needs. What a neighboring stage needs is sent, and what comes from one is received, before it is used.
    Passes,
    /// Gradients are added in the order of micro-batches, reduced as often as the policy says, and complete before the norm, the
    /// totals and the update, which all ranks make or skip together.
    Gradients,
    /// Buffers are on the device when they are used, and at the end of a step where they were at its start.
    Tiers,
    /// A program with totals counts its tokens first.
    Counts,
    /// All ranks of a group issue the same collectives in the same order.
    Collectives,
    /// A rank receives the messages that another sends it, in the same order.
    Messages,
    /// No rank waits forever.
    Deadlock,
    /// Ranks that are connected by groups issue the calls of all their groups in one order, and messages between the same calls of
    /// the world.
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
