//! Checks the programs of all ranks before anything starts.
//!
//! [`check`] establishes that a step cannot hang, compute with parameters that are not there, or lose a gradient. It knows the
//! rules that every program obeys, not how [`build`](super::build) orders a step, so it also judges programs that were written or
//! edited by hand. It looks at order only: not at memory, time or values.
//!
//! # Note: why programs that pass cannot deadlock
//! Ranks that share a program agree with each other, so one rank stands for all of them, and a run of these few without time
//! ([`execution`](super::execution)) shows whether all get to the end. That does not depend on how long things take: an issue and a
//! send never block, and a wait ends once the other ranks have issued, sent or started to receive, in orders that do not depend
//! on time. So the run without time gets exactly as far as every run with time.

mod gradients;
mod messages;
mod passes;
mod ranks;
mod scope;
mod tied;
mod tiers;
mod unit_states;
mod violation;

pub use violation::{Rule, Violation};

use super::policy::{Policy, UnitSpec};
use super::programs::{Party, Programs};
use super::{Instruction, Program};
use crate::mesh::{Axis, Mesh};
use scope::{Purpose, Scope};
use violation::Problem;

/// Checks the programs of all ranks of a mesh, and returns the first violation.
///
/// The cost grows with the number of different programs, not with the number of ranks.
pub fn check(programs: &Programs, units: &[UnitSpec], policy: &Policy, mesh: &Mesh) -> Result<(), Violation> {
    check_mesh(programs, mesh)?;
    let parties = programs.parties(mesh);
    for party in &parties {
        check_names(party.program, units).map_err(|problem| problem.on(party.rank, party.program))?;
    }
    check_stages(programs, units, mesh)?;
    let stages = programs.stages_of_units(units.len());
    let purpose = programs.stages.iter().map(Purpose::of).max().unwrap_or(Purpose::Inference);
    for Party { rank, stage, program, .. } in &parties {
        let scope = Scope { units, policy, purpose, stages: &stages, stage: *stage };
        check_program(program, &scope).map_err(|problem| problem.on(*rank, program))?;
    }
    ranks::check(&parties, &stages, units, policy, mesh)
}

/// Every stage of the mesh has a program, and every exception is a rank of the mesh.
fn check_mesh(programs: &Programs, mesh: &Mesh) -> Result<(), Violation> {
    let (found, expected) = (programs.stages.len(), mesh.size(Axis::Pipeline));
    if found != expected {
        let problem = format!("there are programs for {found} stages, but the mesh has {expected}");
        let empty = Program { units: Vec::new(), instructions: Vec::new() };
        return Err(Problem::missing(Rule::Fit, problem).on(0, &empty));
    }
    match programs.exceptions.iter().find(|(rank, _)| **rank >= mesh.ranks()) {
        Some((&rank, program)) => {
            let problem = format!("the mesh has {} ranks", mesh.ranks());
            Err(Problem::missing(Rule::Fit, problem).on(rank, program))
        }
        None => Ok(()),
    }
}

/// Every unit is on one stage. If tied units are on different stages, there are two of them.
fn check_stages(programs: &Programs, units: &[UnitSpec], mesh: &Mesh) -> Result<(), Violation> {
    let stages = programs.stages_of_units(units.len());
    let on_stage = |stage: usize, problem: Problem| {
        let (rank, program) = (stage * mesh.stride(Axis::Pipeline), &programs.stages[stage]);
        Err(problem.on(rank, program))
    };
    for (unit, spec) in units.iter().enumerate() {
        let names_unit =
            |program: &Program| program.instructions.iter().position(|instruction| instruction.unit() == Some(unit));
        let Some(stage) = stages[unit] else {
            let last = programs
                .stages
                .iter()
                .enumerate()
                .rev()
                .find_map(|(stage, program)| Some((stage, names_unit(program)?)));
            return match last {
                Some((stage, position)) => {
                    let problem = format!("{} is also on an earlier stage", spec.name);
                    on_stage(stage, Problem::at(position, Rule::Fit, problem))
                }
                None => on_stage(0, Problem::missing(Rule::Fit, format!("{} is on no stage", spec.name))),
            };
        };
        let is_shared = |owner: &usize| units.iter().filter(|unit| unit.tied == Some(*owner)).count() > 1;
        if let Some(owner) = spec.tied.filter(|&owner| stages[owner] != Some(stage)).filter(is_shared) {
            let problem = format!("{} is tied to {} of another stage, and not alone", spec.name, units[owner].name);
            return on_stage(stage, Problem::missing(Rule::Fit, problem));
        }
    }
    Ok(())
}

/// The rules that concern one rank.
fn check_program(program: &Program, scope: &Scope<'_>) -> Result<(), Problem> {
    let is_elsewhere = |instruction: &Instruction| instruction.unit().is_some_and(|unit| !scope.has(unit));
    if let Some(position) = program.instructions.iter().position(is_elsewhere) {
        return Err(Problem::at(position, Rule::Fit, "its unit is on another stage".to_string()));
    }
    unit_states::check(program, scope)?;
    passes::check(program, scope)?;
    gradients::check(program, scope)?;
    tied::check(program, scope)?;
    tiers::check(program, scope)?;
    check_counts(program)
}

/// A program names the units of the model, and no others.
fn check_names(program: &Program, units: &[UnitSpec]) -> Result<(), Problem> {
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
