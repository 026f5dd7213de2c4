//! [`Rule::UnitStates`]: where the parameters of each unit are.

use super::scope::{Purpose, Scope};
use super::violation::{Problem, Rule};
use crate::program::{Buffer, Codec, Instruction, Message, Offload, Payload, Program, UnitSpec};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Parameters {
    Sharded,
    Gathering,
    Whole,
}

impl Parameters {
    fn name(self) -> &'static str {
        match self {
            Parameters::Sharded => "sharded",
            Parameters::Gathering => "being gathered",
            Parameters::Whole => "whole",
        }
    }
}

struct Unit<'a> {
    spec: &'a UnitSpec,
    parameters: Parameters,
    /// The last instruction that changed `parameters`.
    changed_at: Option<usize>,
}

pub(super) fn check(program: &Program, scope: &Scope<'_>) -> Result<(), Problem> {
    let policy = scope.policy;
    let unit_at_start = |(unit, spec)| Unit { spec, parameters: at_start(unit, scope), changed_at: None };
    let mut units: Vec<Unit<'_>> = scope.units.iter().enumerate().map(unit_at_start).collect();
    for (position, instruction) in program.instructions.iter().enumerate() {
        let change = apply(&units, instruction, scope);
        let change = change.map_err(|problem| Problem::at(position, Rule::UnitStates, problem))?;
        if let Some((unit, parameters)) = change {
            units[unit].parameters = parameters;
            units[unit].changed_at = Some(position);
        }
    }
    let is_left = |unit: &&Unit<'_>| policy.sharding.parameters && unit.parameters != Parameters::Sharded;
    match units.iter().find(is_left) {
        Some(unit) => {
            let problem = format!("the parameters of {} are not released before the end of the step", unit.spec.name);
            Err(Problem { position: unit.changed_at, rule: Rule::UnitStates, problem })
        }
        None => Ok(()),
    }
}

fn at_start(unit: usize, scope: &Scope<'_>) -> Parameters {
    let sharding = scope.policy.sharding;
    match sharding.parameters {
        true => Parameters::Sharded,
        false if scope.has_deferred_update(unit) => Parameters::Whole,
        // The update before this step may still be gathering.
        false if sharding.optimizer && scope.units[unit].trainable > 0 => Parameters::Gathering,
        false => Parameters::Whole,
    }
}

/// A unit, and where its parameters are after an instruction.
type Change = Option<(usize, Parameters)>;

fn apply(units: &[Unit<'_>], instruction: &Instruction, scope: &Scope<'_>) -> Result<Change, String> {
    let policy = scope.policy;
    match *instruction {
        Instruction::StartGather { unit, codec } => {
            expect(units, unit, Parameters::Sharded)?;
            let expected = if scope.purpose == Purpose::Inference { Codec::None } else { policy.gather_codec };
            if codec != expected {
                return Err("it is gathered in another encoding than the policy says".to_string());
            }
            Ok(Some((unit, Parameters::Gathering)))
        }
        Instruction::WaitGather(unit) => {
            expect(units, unit, Parameters::Gathering)?;
            Ok(Some((unit, Parameters::Whole)))
        }
        // The gather reads the shard.
        Instruction::StartStore(Offload { unit, buffer: Buffer::Parameters, .. })
        | Instruction::Evict(Offload { unit, buffer: Buffer::Parameters, .. })
            if units[unit].parameters == Parameters::Gathering =>
        {
            Err(format!("the parameters of {} are being gathered", units[unit].spec.name))
        }
        Instruction::Release(_) if !policy.sharding.parameters => {
            Err("parameters that are not sharded cannot be released".to_string())
        }
        Instruction::Release(unit) => {
            expect(units, unit, Parameters::Whole)?;
            Ok(Some((unit, Parameters::Sharded)))
        }
        Instruction::Forward { unit, .. } | Instruction::Recompute { unit, .. } => expect_readable(units, unit, scope),
        // The gradients of parameters depend on activations only.
        Instruction::Backward { unit, .. } | Instruction::BackwardInput { unit, .. }
            if units[unit].spec.backward_reads_parameters =>
        {
            expect_readable(units, unit, scope)
        }
        Instruction::Send(Message { payload: Payload::TiedParameters, unit, .. }) => {
            expect(units, unit, Parameters::Whole)?;
            Ok(None)
        }
        Instruction::Update(unit) if policy.sharding.parameters => {
            expect(units, unit, Parameters::Sharded)?;
            Ok(None)
        }
        Instruction::Update(unit) => {
            expect(units, unit, Parameters::Whole)?;
            let is_gathered = policy.sharding.optimizer && units[unit].spec.trainable > 0;
            Ok(is_gathered.then_some((unit, Parameters::Gathering)))
        }
        _ => Ok(None),
    }
}

/// A pass reads the parameters of its unit and of the one it is tied to. Another stage sends them if it has that unit.
fn expect_readable(units: &[Unit<'_>], unit: usize, scope: &Scope<'_>) -> Result<Change, String> {
    scope.tied_here(unit).into_iter().chain([unit]).try_for_each(|unit| expect(units, unit, Parameters::Whole))?;
    Ok(None)
}

fn expect(units: &[Unit<'_>], unit: usize, expected: Parameters) -> Result<(), String> {
    let Unit { spec, parameters, .. } = &units[unit];
    match *parameters == expected {
        true => Ok(()),
        false => {
            Err(format!("the parameters of {} are {}, but must be {}", spec.name, parameters.name(), expected.name()))
        }
    }
}
