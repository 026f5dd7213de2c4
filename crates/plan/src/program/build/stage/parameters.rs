//! Parameters on a tier: a rank's shard of a unit is fetched before each gather, and evicted after it.

use std::collections::BTreeMap;

use crate::program::{Buffer, Instruction, Offload, Tier};

/// Adds what gathers need to instructions in which actions start at `starts`. The next shard is fetched as soon as a gather has started,
/// so while units compute and others are gathered. Returns the new instructions, and where actions start in them.
pub(super) fn offload_parameters(
    instructions: &[Instruction],
    starts: &[usize],
    tier: Tier,
) -> (Vec<Instruction>, Vec<usize>) {
    let shard = |unit| Offload { unit, buffer: Buffer::Parameters, tier };
    let mut fetches = fetches_after(instructions);
    // Nothing comes before the tokens are counted.
    let first = usize::from(instructions.first() == Some(&Instruction::CountTokens));
    let (mut offloaded, mut moved_to) = (Vec::new(), Vec::new());
    for (position, &instruction) in instructions.iter().enumerate() {
        if position == first {
            offloaded.extend(fetches.remove(&None).map(|unit| Instruction::StartFetch(shard(unit))));
        }
        moved_to.push(offloaded.len());
        if let Instruction::StartGather { unit, .. } = instruction {
            offloaded.push(Instruction::WaitFetch(shard(unit)));
        }
        offloaded.push(instruction);
        if let Instruction::WaitGather(unit) = instruction {
            offloaded.push(Instruction::Evict(shard(unit)));
        }
        offloaded.extend(fetches.remove(&Some(position)).map(|unit| Instruction::StartFetch(shard(unit))));
    }
    moved_to.push(offloaded.len());
    (offloaded, starts.iter().map(|&start| moved_to[start]).collect())
}

/// The units to fetch, by the position of the instruction after which their fetch starts: the gather before theirs or, if that is the
/// gather of the same unit, the wait for it. `None` is the start of the program.
fn fetches_after(instructions: &[Instruction]) -> BTreeMap<Option<usize>, usize> {
    let mut fetches = BTreeMap::new();
    let mut before = None;
    for (position, instruction) in instructions.iter().enumerate() {
        if let Instruction::StartGather { unit, .. } = *instruction {
            let is_end = |earlier: &usize| instructions[*earlier] == Instruction::WaitGather(unit);
            let own_end = (0..position).rev().find(is_end);
            fetches.insert(before.max(own_end), unit);
            before = Some(position);
        }
    }
    fetches
}
