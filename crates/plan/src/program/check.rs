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
mod violation;

pub use violation::{Programs, Rule, Violation};

use super::policy::{Policy, UnitSpec};
use super::{Instruction, Program};
use crate::mesh::Mesh;
use violation::Problem;

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
