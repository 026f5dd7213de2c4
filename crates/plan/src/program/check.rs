//! Checks the programs of all ranks before anything starts.
//!
//! [`check`] establishes that a step cannot hang, compute with parameters that are not there, or lose a gradient. It knows the
//! rules that every program obeys, not how [`build`](super::build) orders a step, so it also judges programs that were written or
//! edited by hand. It looks at order only: not at memory, time or values.
//!
//! # Note: why programs that pass cannot deadlock
//! A rank waits only for calls that it has issued itself. Suppose that ranks are blocked for good. One waits for a call that
//! another rank has not issued, because that one waits for an earlier call in the order that both share ([`Rule::OneOrder`]),
//! which a third has not issued, and so on. The calls get earlier and earlier, but there is a first one. If all ranks have the
//! same program, they share the order trivially, so one pass over the program is enough for any number of ranks.

mod gradients;
mod passes;
mod ranks;
mod unit_states;

use std::collections::BTreeMap;
use std::fmt;

use super::policy::{Policy, UnitSpec};
use super::{Instruction, Keep, Program};
use crate::mesh::Mesh;

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

/// Checks the programs of all ranks of a mesh, and returns the first violation.
///
/// The cost grows with the number of different programs, not with the number of ranks. Only a rank with its own program adds the
/// ranks of its groups.
pub fn check(programs: &Programs, units: &[UnitSpec], policy: &Policy, mesh: &Mesh) -> Result<(), Violation> {
    let common_rank = (0..mesh.ranks()).find(|rank| !programs.exceptions.contains_key(rank));
    let exceptions = programs.exceptions.iter().map(|(&rank, program)| (rank, program));
    for (rank, program) in common_rank.map(|rank| (rank, &programs.common)).into_iter().chain(exceptions) {
        check_program(program, units, policy).map_err(|problem| problem.on(rank, program))?;
        if rank >= mesh.ranks() {
            let problem = format!("the mesh has {} ranks", mesh.ranks());
            return Err(Problem::missing(Rule::Fit, problem).on(rank, program));
        }
    }
    match programs.exceptions.is_empty() {
        true => Ok(()),
        false => ranks::check(programs, units, policy, mesh),
    }
}

/// The rules that concern one rank.
fn check_program(program: &Program, units: &[UnitSpec], policy: &Policy) -> Result<(), Problem> {
    check_fit(program, units)?;
    unit_states::check(program, units, policy)?;
    passes::check(program, units, policy)?;
    gradients::check(program, units, policy)?;
    check_counts(program)
}

fn check_fit(program: &Program, units: &[UnitSpec]) -> Result<(), Problem> {
    let misfit = |problem: String| Err(Problem::missing(Rule::Fit, problem));
    if !program.units.iter().eq(units.iter().map(|unit| &unit.name)) {
        return misfit("its units are not those of the model".to_string());
    }
    if let Some(unit) = units.iter().find(|unit| unit.tied.is_some_and(|tied| tied >= units.len())) {
        return misfit(format!("{} is tied to a unit that does not exist", unit.name));
    }
    let unknown = |instruction: &Instruction| instruction.unit().is_some_and(|unit| unit >= units.len());
    match program.instructions.iter().position(unknown) {
        Some(position) => Err(Problem::at(position, Rule::Fit, "there is no such unit".to_string())),
        None => Ok(()),
    }
}

fn check_counts(program: &Program) -> Result<(), Problem> {
    let is_count = |instruction: &Instruction| *instruction == Instruction::CountTokens;
    let counts_first = program.instructions.first().is_some_and(is_count);
    if let Some(position) = program.instructions.iter().skip(1).position(is_count) {
        let problem = "tokens are counted once, at the start".to_string();
        return Err(Problem::at(position + 1, Rule::Counts, problem));
    }
    match program.instructions.iter().position(|instruction| *instruction == Instruction::ReduceTotals) {
        Some(position) if !counts_first => {
            let problem = "the totals need the number of tokens; count them at the start".to_string();
            Err(Problem::at(position, Rule::Counts, problem))
        }
        _ => Ok(()),
    }
}

/// A violation by a program, before it is known whose program it is.
struct Problem {
    position: Option<usize>,
    rule: Rule,
    problem: String,
}

impl Problem {
    fn at(position: usize, rule: Rule, problem: String) -> Self {
        Problem { position: Some(position), rule, problem }
    }

    /// An instruction is missing.
    fn missing(rule: Rule, problem: String) -> Self {
        Problem { position: None, rule, problem }
    }

    fn on(self, rank: usize, program: &Program) -> Violation {
        let instruction = self.position.and_then(|position| program.instructions.get(position));
        let instruction = instruction.map(|instruction| program.describe(instruction)).unwrap_or_default();
        Violation { rank, position: self.position, instruction, rule: self.rule, problem: self.problem }
    }
}

/// What a program is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// Forward and backward passes, and the reduction of gradients.
    Training,
    /// Forward and backward passes only.
    Replay,
    /// Forward passes only.
    Inference,
}

impl Purpose {
    fn of(program: &Program) -> Self {
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
fn first_trainable(units: &[UnitSpec]) -> usize {
    units.iter().position(|unit| unit.trainable > 0).unwrap_or(units.len())
}
