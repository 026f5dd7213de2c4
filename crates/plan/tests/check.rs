//! The checker accepts every program that is built, and no program in which an instruction is missing, doubled or out of place.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use shardwise_plan::program::{
    ActivationCheckpointing, CallOp, Collective, GroupKind, Instruction, Keep, Policy, Program, Programs, Rule,
    Sharding, UnitSpec, build, calls, check,
};
use shardwise_plan::{Axis, Mesh};

/// SplitMix64.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number less than `bound`.
    fn below(&mut self, bound: usize) -> usize {
        (self.bits() % bound as u64) as usize
    }

    fn percent(&mut self, chance: usize) -> bool {
        self.below(100) < chance
    }
}

/// One to twelve units, some of them frozen, at least one trainable, and the last one perhaps tied to the first.
fn random_units(random: &mut Random) -> Vec<UnitSpec> {
    let count = 1 + random.below(12);
    let mut units: Vec<UnitSpec> = (0..count)
        .map(|unit| {
            let trainable = if random.percent(25) { 0 } else { 1 + random.below(100) };
            let frozen = if random.percent(25) { 1 + random.below(100) } else { 0 };
            let reads = random.percent(if unit == 0 { 20 } else { 85 });
            UnitSpec { frozen, ..UnitSpec::new(&format!("unit.{unit}"), trainable, reads) }
        })
        .collect();
    if units.iter().all(|unit| unit.trainable == 0) {
        let trainable = random.below(count);
        units[trainable].trainable = 1 + random.below(100);
    }
    if count > 1 && random.percent(50) {
        units[count - 1].tied = Some(0);
    }
    units
}

fn random_policy(random: &mut Random) -> Policy {
    let sharding = Sharding::stage(random.below(4) as u8).unwrap();
    let checkpointing =
        [ActivationCheckpointing::None, ActivationCheckpointing::Selective, ActivationCheckpointing::Full];
    Policy {
        sharding,
        prefetch: random.below(5),
        activation_checkpointing: checkpointing[random.below(3)],
        // As in training, which refuses it if gradients are not sharded.
        reduce_each_micro_batch: sharding.gradients && random.percent(40),
        micro_batches: 1 + random.below(4),
    }
}

/// Up to 64 ranks, in shard groups of at least `shard_min`.
fn random_mesh(random: &mut Random, shard_min: usize) -> Mesh {
    let replicate = 1 + random.below(4);
    let shard = shard_min + random.below(17 - shard_min);
    Mesh::new(&[(Axis::Replicate, replicate), (Axis::Shard, shard)]).unwrap()
}

type Build = fn(&[UnitSpec], &Policy) -> Program;
const BUILDS: [Build; 3] = [build::train_step, build::replay, build::inference];

/// The common program, and another one on one rank.
fn with_exception(common: &Program, rank: usize, program: &Program) -> Programs {
    Programs { common: common.clone(), exceptions: BTreeMap::from([(rank, program.clone())]) }
}

#[test]
fn every_program_that_is_built_is_accepted() {
    let mut random = Random(1);
    for _ in 0..1000 {
        let (units, policy, mesh) =
            (random_units(&mut random), random_policy(&mut random), random_mesh(&mut random, 1));
        for build in BUILDS {
            let program = build(&units, &policy);
            let rank = random.below(mesh.ranks());
            for programs in [Programs::uniform(program.clone()), with_exception(&program, rank, &program)] {
                let checked = check(&programs, &units, &policy, &mesh);
                assert_eq!(checked, Ok(()), "{units:?}\n{policy:?}\n{mesh}\n{program}");
            }
        }
    }
}

// ---- mutants --------------------------------------------------------------------------------------------------------

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mutation {
    /// Swaps the instructions at two positions.
    Swap(usize, usize),
    Drop(usize),
    Double(usize),
}

/// A mutation that changes the program.
fn random_mutation(random: &mut Random, program: &Program) -> Mutation {
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

fn mutate(program: &Program, mutation: Mutation) -> Program {
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
    Gradients(usize),
    /// Of a unit and a micro-batch.
    Activations(usize, usize),
    Totals,
}

/// What an instruction reads and what it changes.
fn resources(instruction: &Instruction, units: &[UnitSpec]) -> (BTreeSet<Resource>, BTreeSet<Resource>) {
    let with_tied = |unit: usize, resource: fn(usize) -> Resource| -> Vec<Resource> {
        units[unit].tied.into_iter().chain([unit]).map(resource).collect()
    };
    let (reads, changes) = match *instruction {
        Instruction::CountTokens | Instruction::ReduceTotals => (vec![], vec![Resource::Totals]),
        Instruction::StartGather(unit) | Instruction::WaitGather(unit) | Instruction::Release(unit) => {
            (vec![], vec![Resource::Parameters(unit)])
        }
        Instruction::Forward { unit, micro_batch, .. } | Instruction::Recompute { unit, micro_batch } => {
            (with_tied(unit, Resource::Parameters), vec![Resource::Activations(unit, micro_batch)])
        }
        Instruction::Backward { unit, micro_batch } => {
            let reads = match units[unit].backward_reads_parameters {
                true => with_tied(unit, Resource::Parameters),
                false => vec![],
            };
            let mut changes = with_tied(unit, Resource::Gradients);
            changes.push(Resource::Activations(unit, micro_batch));
            (reads, changes)
        }
        Instruction::Accumulate { unit, .. } => (vec![], with_tied(unit, Resource::Gradients)),
        Instruction::StartReduce(unit) | Instruction::WaitReduceScatter(unit) | Instruction::WaitReduce(unit) => {
            (vec![], vec![Resource::Gradients(unit)])
        }
        Instruction::Norm(unit) => (vec![Resource::Gradients(unit), Resource::Totals], vec![]),
        Instruction::Update(unit) => {
            (vec![Resource::Totals], vec![Resource::Parameters(unit), Resource::Gradients(unit)])
        }
    };
    (reads.into_iter().collect(), changes.into_iter().collect())
}

/// Whether no instruction changes what the other reads or changes.
fn touch_different_state(one: &Instruction, other: &Instruction, units: &[UnitSpec]) -> bool {
    let (one_reads, one_changes) = resources(one, units);
    let (other_reads, other_changes) = resources(other, units);
    one_changes.is_disjoint(&other_changes)
        && one_changes.is_disjoint(&other_reads)
        && one_reads.is_disjoint(&other_changes)
}

/// The collectives that a program issues in groups of at least two ranks, with the positions of their instructions.
fn issues(program: &Program, units: &[UnitSpec], policy: &Policy, mesh: &Mesh) -> Vec<(usize, Collective)> {
    let is_shared = |group: GroupKind| match group {
        GroupKind::World => mesh.ranks() > 1,
        GroupKind::Shard => mesh.size(Axis::Shard) > 1,
        GroupKind::Replicate => mesh.size(Axis::Replicate) > 1,
    };
    let issued = calls(program, units, policy).into_iter().filter(|(_, call)| call.op == CallOp::Issue);
    issued.map(|(position, call)| (position, call.collective)).filter(|(_, call)| is_shared(call.group)).collect()
}

/// Whether two instructions call collectives in one group.
fn share_a_group(issues: &[(usize, Collective)], first: usize, second: usize) -> bool {
    let groups = |position: usize| -> BTreeSet<GroupKind> {
        issues.iter().filter(|(at, _)| *at == position).map(|(_, collective)| collective.group).collect()
    };
    !groups(first).is_disjoint(&groups(second))
}

fn without_positions(issues: &[(usize, Collective)]) -> Vec<Collective> {
    issues.iter().map(|(_, collective)| *collective).collect()
}

/// A wait-reduce without a wait-reduce-scatter before it does the work of both.
fn drops_a_wait_that_the_next_one_includes(program: &Program, mutation: Mutation) -> bool {
    match mutation {
        Mutation::Drop(position) => matches!(program.instructions[position], Instruction::WaitReduceScatter(_)),
        _ => false,
    }
}

#[test]
fn mutants_of_one_rank_are_rejected_or_equivalent() {
    let mut random = Random(2);
    let (mut rejected, mut swaps, mut merged_waits) = (BTreeMap::<Rule, usize>::new(), 0, 0);
    for index in 0..1000 {
        let (units, policy) = (random_units(&mut random), random_policy(&mut random));
        let mesh = random_mesh(&mut random, 2);
        let program = BUILDS[if index % 4 < 3 { 0 } else { 1 + random.below(2) }](&units, &policy);
        let mutation = random_mutation(&mut random, &program);
        let mutant = mutate(&program, mutation);
        let rank = random.below(mesh.ranks());
        let context = || format!("{mutation:?} on rank {rank}\n{units:?}\n{policy:?}\n{mesh}\n{program}");
        if let Err(violation) = check(&with_exception(&program, rank, &mutant), &units, &policy, &mesh) {
            *rejected.entry(violation.rule).or_default() += 1;
            assert_eq!(violation.rank, rank, "{violation}\n{}", context());
            let named = violation.position.map(|position| mutant.describe(&mutant.instructions[position]));
            assert_eq!(violation.instruction, named.unwrap_or_default(), "{violation}\n{}", context());
            continue;
        }
        let (before, after) = (issues(&program, &units, &policy, &mesh), issues(&mutant, &units, &policy, &mesh));
        assert_eq!(without_positions(&before), without_positions(&after), "{}", context());
        match mutation {
            Mutation::Swap(first, second) => {
                let (one, other) = (&program.instructions[first], &program.instructions[second]);
                assert!(touch_different_state(one, other, &units), "{}", context());
                assert!(!share_a_group(&before, first, second), "{}", context());
                swaps += 1;
            }
            _ => {
                assert!(drops_a_wait_that_the_next_one_includes(&program, mutation), "{}", context());
                merged_waits += 1;
            }
        }
    }
    println!("rejected: {rejected:?}; equivalent: {swaps} swaps, {merged_waits} merged waits");
    assert!(rejected.values().sum::<usize>() > 500, "most mutants are wrong: {rejected:?}");
}

#[test]
fn mutants_of_all_ranks_are_rejected_or_equivalent() {
    let mut random = Random(3);
    let (mut rejected, mut accepted) = (0, 0);
    for _ in 0..1000 {
        let (units, policy) = (random_units(&mut random), random_policy(&mut random));
        let mesh = random_mesh(&mut random, 1);
        let program = BUILDS[random.below(3)](&units, &policy);
        let mutation = random_mutation(&mut random, &program);
        let mutant = mutate(&program, mutation);
        let context = || format!("{mutation:?}\n{units:?}\n{policy:?}\n{mesh}\n{program}");
        if let Err(violation) = check(&Programs::uniform(mutant), &units, &policy, &mesh) {
            assert_eq!(violation.rank, 0, "{violation}\n{}", context());
            rejected += 1;
            continue;
        }
        accepted += 1;
        let is_skipped_step = match mutation {
            Mutation::Swap(first, second) => {
                let (one, other) = (&program.instructions[first], &program.instructions[second]);
                assert!(touch_different_state(one, other, &units), "{}", context());
                continue;
            }
            // The only update.
            Mutation::Drop(position) => {
                matches!(program.instructions[position], Instruction::Update(_)) && program.update().len() == 1
            }
            Mutation::Double(_) => false,
        };
        let is_merged_wait = drops_a_wait_that_the_next_one_includes(&program, mutation);
        assert!(is_skipped_step || is_merged_wait, "{}", context());
    }
    println!("rejected: {rejected}; equivalent: {accepted}");
    assert!(rejected > 500, "most mutants are wrong");
}

/// What a program does with each unit's parameters and gradients, except what a policy may choose without an effect: activation
/// checkpointing, and when to wait.
fn sequences(program: &Program, units: usize) -> Vec<[Vec<Instruction>; 2]> {
    let mut sequences = vec![[Vec::new(), Vec::new()]; units];
    for &instruction in &program.instructions {
        let Some(unit) = instruction.unit() else { continue };
        match instruction {
            Instruction::Recompute { .. } | Instruction::WaitReduceScatter(_) => (),
            Instruction::Forward { micro_batch, .. } => {
                sequences[unit][0].push(Instruction::Forward { unit, micro_batch, keep: Keep::Nothing });
            }
            Instruction::StartGather(_)
            | Instruction::WaitGather(_)
            | Instruction::Release(_)
            | Instruction::Backward { .. } => sequences[unit][0].push(instruction),
            _ => sequences[unit][1].push(instruction),
        }
    }
    sequences
}

#[test]
fn a_rank_with_the_program_of_another_policy_is_rejected_or_equivalent() {
    let mut random = Random(4);
    let (mut rejected, mut accepted) = (0, 0);
    while rejected + accepted < 300 {
        let (units, policy, other) =
            (random_units(&mut random), random_policy(&mut random), random_policy(&mut random));
        let mesh = random_mesh(&mut random, 2);
        let (program, mutant) = (build::train_step(&units, &policy), build::train_step(&units, &other));
        if program == mutant {
            continue;
        }
        let rank = random.below(mesh.ranks());
        let context = || format!("rank {rank}\n{units:?}\n{policy:?}\n{other:?}\n{mesh}\n{program}\n{mutant}");
        match check(&with_exception(&program, rank, &mutant), &units, &policy, &mesh) {
            Err(violation) => {
                assert_eq!(violation.rank, rank, "{violation}\n{}", context());
                rejected += 1;
            }
            Ok(()) => {
                let [before, after] = [&program, &mutant].map(|program| issues(program, &units, &policy, &mesh));
                assert_eq!(without_positions(&before), without_positions(&after), "{}", context());
                assert_eq!(sequences(&program, units.len()), sequences(&mutant, units.len()), "{}", context());
                accepted += 1;
            }
        }
    }
    println!("rejected: {rejected}; equivalent: {accepted}");
    assert!(rejected > 150, "most policies differ");
}

// ---- messages and size ------------------------------------------------------------------------------------------------

#[test]
fn violations_name_rank_instruction_and_rule() {
    let units = [UnitSpec::new("embedding", 64, false), UnitSpec::new("head", 64, true)];
    let (policy, mesh) = (Policy::stage(3, 1), Mesh::new(&[(Axis::Shard, 4)]).unwrap());
    let program = build::train_step(&units, &policy);
    let release = program.instructions.iter().position(|at| *at == Instruction::Release(0)).unwrap();
    let mutant = mutate(&program, Mutation::Double(release));
    let violation = check(&with_exception(&program, 3, &mutant), &units, &policy, &mesh).unwrap_err();
    let place = format!("rank 3, instruction {} (release embedding)", release + 1);
    let text = format!("{place}: the parameters of embedding are sharded, but must be whole");
    assert_eq!((violation.to_string(), violation.rule), (text, Rule::UnitStates));

    let violation = check(&with_exception(&program, 4, &program), &units, &policy, &mesh).unwrap_err();
    assert_eq!((violation.to_string().as_str(), violation.rule), ("rank 4: the mesh has 4 ranks", Rule::Fit));
}

#[test]
fn a_skipped_step_ends_with_the_totals_on_all_ranks() {
    let units = [UnitSpec::new("embedding", 64, false), UnitSpec::new("head", 64, true)];
    let (policy, mesh) = (Policy::stage(3, 1), Mesh::new(&[(Axis::Shard, 4)]).unwrap());
    let program = build::train_step(&units, &policy);
    let skipped = Program { units: program.units.clone(), instructions: program.gradients().to_vec() };
    assert_eq!(check(&Programs::uniform(skipped.clone()), &units, &policy, &mesh), Ok(()));
    let violation = check(&with_exception(&program, 2, &skipped), &units, &policy, &mesh).unwrap_err();
    assert_eq!((violation.rank, violation.rule), (2, Rule::Gradients));
}

/// The shapes of Llama 3.1 405B, as units.
fn units_of_405b() -> Vec<UnitSpec> {
    let (hidden, intermediate, vocab, key_value, blocks) = (16_384, 53_248, 128_256, 1024, 126);
    let block = 2 * hidden * hidden + 2 * hidden * key_value + 3 * hidden * intermediate + 2 * hidden;
    let mut units = vec![UnitSpec::new("embedding", vocab * hidden, false)];
    units.extend((0..blocks).map(|index| UnitSpec::new(&format!("block.{index}"), block, true)));
    units.push(UnitSpec::new("head", vocab * hidden + hidden, true));
    units
}

#[test]
fn a_step_of_16384_ranks_is_built_and_checked_in_under_a_second() {
    let units = units_of_405b();
    let elements: usize = units.iter().map(|unit| unit.trainable).sum();
    assert_eq!(elements / 1_000_000_000, 405);
    let mesh = Mesh::new(&[(Axis::Replicate, 8), (Axis::Shard, 2048)]).unwrap();
    assert_eq!(mesh.ranks(), 16_384);
    let policy = Policy { activation_checkpointing: ActivationCheckpointing::Full, ..Policy::stage(3, 8) };
    let start = Instant::now();
    let program = build::train_step(&units, &policy);
    assert_eq!(check(&Programs::uniform(program), &units, &policy, &mesh), Ok(()));
    let took = start.elapsed();
    assert!(took < Duration::from_secs(1), "{took:?}");
}
