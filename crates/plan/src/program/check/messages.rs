//! [`Rule::Messages`]: what one rank sends, another receives.

use super::violation::{Problem, Rule, Violation};
use crate::mesh::{Axis, Mesh};
use crate::program::codec::Codec;
use crate::program::instruction::{Instruction, Message, Payload};
use crate::program::programs::Party;
use crate::program::{Program, UnitSpec};

/// A message as both of its ranks see it.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Matched {
    payload: Payload,
    sending_unit: usize,
    micro_batch: usize,
    codec: Codec,
}

/// A message, where it is sent or received, and how many calls of the world come before it.
struct Found {
    message: Matched,
    position: usize,
    world_calls: usize,
}

/// Compares the messages of each pair of ranks, in both directions: first of ranks with their own program, then of stages.
pub(super) fn check(
    parties: &[Party<'_>],
    stages: &[Option<usize>],
    units: &[UnitSpec],
    mesh: &Mesh,
) -> Result<(), Violation> {
    let per_stage = mesh.stride(Axis::Pipeline);
    let exception = |rank: usize| parties.iter().find(|party| party.is_exception && party.rank == rank);
    let common = |stage: usize| parties.iter().find(|party| !party.is_exception && party.stage == stage);
    for own in parties.iter().filter(|party| party.is_exception) {
        for stage in (0..mesh.size(Axis::Pipeline)).filter(|&stage| stage != own.stage) {
            let rank = own.rank % per_stage + stage * per_stage;
            if let Some(other) = exception(rank).or(common(stage)) {
                compare(own, &Party { rank, ..*other }, stages, units)?;
            }
        }
    }
    for own in parties.iter().filter(|party| !party.is_exception) {
        for stage in 0..own.stage {
            if let Some(other) = common(stage) {
                compare(own, other, stages, units)?;
            }
        }
    }
    Ok(())
}

/// Compares what two ranks send to each other, and reports differences as faults of the first.
fn compare(own: &Party<'_>, other: &Party<'_>, stages: &[Option<usize>], units: &[UnitSpec]) -> Result<(), Violation> {
    let sent = |from: &Party<'_>, to: &Party<'_>| find(from.program, stages, to.stage, |at| sent_message(at, units));
    let received =
        |from: &Party<'_>, to: &Party<'_>| find(to.program, stages, from.stage, |at| received_message(at, units));
    compare_lists(own, other, ["sends", "receives"], (sent(own, other), received(own, other)), units)?;
    compare_lists(own, other, ["receives", "sends"], (received(other, own), sent(other, own)), units)
}

fn compare_lists(
    own: &Party<'_>,
    other: &Party<'_>,
    [does, other_does]: [&str; 2],
    (own_list, other_list): (Vec<Found>, Vec<Found>),
    units: &[UnitSpec],
) -> Result<(), Violation> {
    let is_same =
        |(one, other): &(&Found, &Found)| one.message == other.message && one.world_calls == other.world_calls;
    let same = own_list.iter().zip(&other_list).take_while(is_same).count();
    let (describe, rank) = (|message: &Matched| describe(message, units), other.rank);
    let problem = match (own_list.get(same), other_list.get(same)) {
        (None, None) => return Ok(()),
        (Some(one), Some(two)) if one.message == two.message => {
            let message = describe(&one.message);
            let problem =
                format!("it {does} {message}, and rank {rank} {other_does} it between other calls of the world");
            Problem::at(one.position, Rule::OneOrder, problem)
        }
        (Some(one), Some(two)) => {
            let (one_text, two_text) = (describe(&one.message), describe(&two.message));
            let problem = format!("it {does} {one_text}, where rank {rank} {other_does} {two_text}");
            Problem::at(one.position, Rule::Messages, problem)
        }
        (Some(one), None) => {
            let problem = format!("it {does} {}, and rank {rank} does not", describe(&one.message));
            Problem::at(one.position, Rule::Messages, problem)
        }
        (None, Some(two)) => {
            let problem = format!("rank {rank} {other_does} {}, and it does not", describe(&two.message));
            Problem::missing(Rule::Messages, problem)
        }
    };
    Err(problem.on(own.rank, own.program))
}

/// The messages of a program that go to or come from a stage.
fn find(
    program: &Program,
    stages: &[Option<usize>],
    stage: usize,
    select: impl Fn(&Instruction) -> Option<(Matched, usize)>,
) -> Vec<Found> {
    let mut world_calls = 0;
    let mut found = Vec::new();
    for (position, instruction) in program.instructions.iter().enumerate() {
        world_calls += usize::from(matches!(instruction, Instruction::CountTokens | Instruction::ReduceTotals));
        if let Some((message, unit)) = select(instruction)
            && stages.get(unit) == Some(&Some(stage))
        {
            found.push(Found { message, position, world_calls });
        }
    }
    found
}

/// The message that an instruction sends, and the unit that receives it.
fn sent_message(instruction: &Instruction, units: &[UnitSpec]) -> Option<(Matched, usize)> {
    let Instruction::Send(message) = *instruction else { return None };
    Some((matched(&message, message.unit), message.receiving_unit(units)?))
}

/// The message that an instruction starts to receive, and the unit that sends it.
fn received_message(instruction: &Instruction, units: &[UnitSpec]) -> Option<(Matched, usize)> {
    let Instruction::StartReceive(message) = *instruction else { return None };
    let sending_unit = message.sending_unit(units)?;
    Some((matched(&message, sending_unit), sending_unit))
}

fn matched(message: &Message, sending_unit: usize) -> Matched {
    let Message { payload, micro_batch, codec, .. } = *message;
    Matched { payload, sending_unit, micro_batch, codec }
}

fn describe(message: &Matched, units: &[UnitSpec]) -> String {
    let Matched { payload, sending_unit, micro_batch, .. } = *message;
    let unit = units.get(sending_unit).map_or("?", |unit| unit.name.as_str());
    format!("the {} of {unit} in micro-batch {micro_batch}", payload.name())
}
