//! Random programs' mutants, and what makes one equivalent to its program.

#![allow(dead_code, clippy::unwrap_used, reason = "each file of tests uses a part of it")]

pub(crate) mod pipedream;
pub(crate) mod pipeline;

use std::collections::BTreeSet;

use shardwise_plan::Mesh;
use shardwise_plan::program::{
    Buffer, CallOp, Collective, GroupKind, Instruction, Message, Offload, Payload, Policy, Program, UnitSpec, calls,
};

/// SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number less than `bound`.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.bits() % bound as u64) as usize
    }

    pub(crate) fn percent(&mut self, chance: usize) -> bool {
        self.below(100) < chance
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutation {
    /// Swaps the instructions at two positions.
    Swap(usize, usize),
    Drop(usize),
    Double(usize),
}

/// A mutation that changes the program.
pub(crate) fn random_mutation(random: &mut Random, program: &Program) -> Mutation {
    let instructions = &program.instructions;
    loop {
        let first = random.below(instructions.len());
        let second = if random.percent(50) { first + 1 } else { first + random.below(instructions.len()) };
        match random.below(4) {
            0 => return Mutation::Drop(first),
            1 => return Mutation::Double(first),
            _ if second < instructions.len() && instructions[first] != instructions[second] => {
                return Mutation::Swap(first, second);
            }
            _ => (),
        }
    }
}

pub(crate) fn mutate(program: &Program, mutation: Mutation) -> Program {
    let mut mutant = program.clone();
    match mutation {
        Mutation::Swap(first, second) => mutant.instructions.swap(first, second),
        Mutation::Drop(position) => {
            mutant.instructions.remove(position);
        }
        Mutation::Double(position) => mutant.instructions.insert(position, program.instructions[position]),
    }
    mutant
}

/// What an instruction reads or changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Resource {
    Parameters(usize),
    /// This rank's shard of the parameters.
    Shard(usize),
    /// Accumulated ones.
    Gradients(usize),
    /// Reduced gradients.
    Reduced(usize),
    Optimizer(usize),
    /// Of a unit and a micro-batch.
    Activations(usize, usize),
    /// The input that a unit keeps in a micro-batch.
    Input(usize, usize),
    /// The gradient of a unit's input in a micro-batch.
    InputGradient(usize, usize),
    /// A message of a unit and a micro-batch.
    Received(Payload, usize, usize),
    Totals,
}

/// What an instruction reads and what it changes.
fn resources(instruction: &Instruction, units: &[UnitSpec]) -> (BTreeSet<Resource>, BTreeSet<Resource>) {
    let with_tied = |unit: usize, resource: fn(usize) -> Resource| -> Vec<Resource> {
        units[unit].tied.into_iter().chain([unit]).map(resource).collect()
    };
    let reads_for_backward = |unit: usize| match units[unit].backward_reads_parameters {
        true => with_tied(unit, Resource::Parameters),
        false => vec![],
    };
    let (reads, changes) = match *instruction {
        Instruction::CountTokens | Instruction::ReduceTotals => (vec![], vec![Resource::Totals]),
        Instruction::StartGather { unit, .. } | Instruction::WaitGather(unit) | Instruction::Release(unit) => {
            (vec![], vec![Resource::Parameters(unit)])
        }
        Instruction::Forward { unit, micro_batch, .. } | Instruction::Recompute { unit, micro_batch } => {
            let mut reads = with_tied(unit, Resource::Parameters);
            reads.push(Resource::Received(Payload::Activations, unit, micro_batch));
            reads.push(Resource::Received(Payload::TiedParameters, unit, 0));
            (reads, vec![Resource::Activations(unit, micro_batch), Resource::Input(unit, micro_batch)])
        }
        Instruction::Backward { unit, micro_batch } => {
            let mut reads = reads_for_backward(unit);
            reads.push(Resource::Received(Payload::Gradients, unit, micro_batch));
            reads.push(Resource::InputGradient(unit + 1, micro_batch));
            let mut changes = with_tied(unit, Resource::Gradients);
            changes.push(Resource::Activations(unit, micro_batch));
            changes.push(Resource::Input(unit, micro_batch));
            changes.push(Resource::InputGradient(unit, micro_batch));
            (reads, changes)
        }
        Instruction::BackwardInput { unit, micro_batch } => {
            let mut reads = reads_for_backward(unit);
            reads.push(Resource::Received(Payload::Gradients, unit, micro_batch));
            reads.push(Resource::InputGradient(unit + 1, micro_batch));
            reads.push(Resource::Activations(unit, micro_batch));
            reads.push(Resource::Input(unit, micro_batch));
            (reads, vec![Resource::InputGradient(unit, micro_batch)])
        }
        Instruction::BackwardWeight { unit, micro_batch } => {
            let mut changes = with_tied(unit, Resource::Gradients);
            changes.push(Resource::Activations(unit, micro_batch));
            changes.push(Resource::Input(unit, micro_batch));
            (vec![Resource::InputGradient(unit, micro_batch)], changes)
        }
        Instruction::Accumulate { unit, .. } => (vec![], with_tied(unit, Resource::Gradients)),
        Instruction::Send(Message { payload, unit, micro_batch, .. }) => match payload {
            Payload::Activations => (vec![Resource::Activations(unit, micro_batch)], vec![]),
            Payload::Gradients => (vec![Resource::InputGradient(unit, micro_batch)], vec![]),
            Payload::TiedParameters => (vec![Resource::Parameters(unit)], vec![]),
            Payload::TiedGradients => (vec![], units[unit].tied.into_iter().map(Resource::Gradients).collect()),
        },
        Instruction::StartReceive(Message { payload, unit, micro_batch, .. }) => {
            (vec![], vec![Resource::Received(payload, unit, micro_batch)])
        }
        Instruction::WaitReceive(Message { payload, unit, micro_batch, .. }) => {
            let received = Resource::Received(payload, unit, micro_batch);
            match payload {
                Payload::TiedGradients => (vec![], vec![received, Resource::Gradients(unit)]),
                _ => (vec![], vec![received]),
            }
        }
        Instruction::StartReduce { unit, .. }
        | Instruction::WaitReduceScatter(unit)
        | Instruction::WaitReduce(unit) => (vec![], vec![Resource::Gradients(unit), Resource::Reduced(unit)]),
        Instruction::Norm(unit) => (vec![Resource::Gradients(unit), Resource::Reduced(unit), Resource::Totals], vec![]),
        Instruction::Update(unit) => {
            let resources = [Resource::Gradients, Resource::Reduced, Resource::Optimizer];
            let changes = [Resource::Parameters, Resource::Shard].into_iter().chain(resources);
            (vec![Resource::Totals], changes.map(|resource| resource(unit)).collect())
        }
        Instruction::StartFetch(Offload { unit, buffer, .. })
        | Instruction::WaitFetch(Offload { unit, buffer, .. })
        | Instruction::StartStore(Offload { unit, buffer, .. })
        | Instruction::WaitStore(Offload { unit, buffer, .. })
        | Instruction::Evict(Offload { unit, buffer, .. }) => match buffer {
            Buffer::Optimizer => (vec![], vec![Resource::Optimizer(unit)]),
            Buffer::Gradients => (vec![], vec![Resource::Reduced(unit)]),
            Buffer::Activations { micro_batch } => (vec![], vec![Resource::Input(unit, micro_batch)]),
            Buffer::Parameters => (vec![], vec![Resource::Shard(unit)]),
        },
    };
    (reads.into_iter().collect(), changes.into_iter().collect())
}

/// Whether no instruction changes what the other reads or changes.
pub(crate) fn touch_different_state(one: &Instruction, other: &Instruction, units: &[UnitSpec]) -> bool {
    let (one_reads, one_changes) = resources(one, units);
    let (other_reads, other_changes) = resources(other, units);
    one_changes.is_disjoint(&other_changes)
        && one_changes.is_disjoint(&other_reads)
        && one_reads.is_disjoint(&other_changes)
}

/// The collectives that a program issues in groups of at least two ranks, with the positions of their instructions.
pub(crate) fn issues(program: &Program, units: &[UnitSpec], policy: &Policy, mesh: &Mesh) -> Vec<(usize, Collective)> {
    let is_shared = |group: GroupKind| group.ranks(mesh, 0).len() > 1;
    let issued = calls(program, units, policy).into_iter().filter(|(_, call)| call.op == CallOp::Issue);
    issued.map(|(position, call)| (position, call.collective)).filter(|(_, call)| is_shared(call.group)).collect()
}

/// Whether two instructions call collectives in one group.
pub(crate) fn share_a_group(issues: &[(usize, Collective)], first: usize, second: usize) -> bool {
    let groups = |position: usize| -> BTreeSet<GroupKind> {
        issues.iter().filter(|(at, _)| *at == position).map(|(_, collective)| collective.group).collect()
    };
    !groups(first).is_disjoint(&groups(second))
}

pub(crate) fn without_positions(issues: &[(usize, Collective)]) -> Vec<Collective> {
    issues.iter().map(|(_, collective)| *collective).collect()
}

/// A wait-reduce without a wait-reduce-scatter before it does the work of both.
pub(crate) fn drops_what_comes_later_anyway(program: &Program, mutation: Mutation) -> bool {
    match mutation {
        Mutation::Drop(position) => {
            matches!(program.instructions[position], Instruction::WaitReduceScatter(_) | Instruction::Evict(_))
        }
        _ => false,
    }
}
