//! The checker accepts every program that is built, and no program in which an instruction is missing, doubled or out of place.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use shardwise_plan::program::{
    ActivationCheckpointing, Codec, Instruction, Keep, Policy, Program, Programs, Rule, Sharding, Tier, UnitSpec,
    build, check,
};
use shardwise_plan::{Axis, Mesh};
use support::{
    Mutation, Random, drops_what_comes_later_anyway, issues, mutate, random_mutation, share_a_group,
    touch_different_state, without_positions,
};

/// One to twelve units, some of them frozen, at least one trainable, and the last one perhaps tied to the first.
fn random_units(random: &mut Random) -> Vec<UnitSpec> {
    let count = 1 + random.below(12);
    let mut units: Vec<UnitSpec> = (0..count)
        .map(|unit| {
            let trainable = if random.percent(25) { 0 } else { 1 + random.below(100) };
            let frozen = if random.percent(25) { 1 + random.below(100) } else { 0 };
            let reads = random.percent(if unit == 0 { 20 } else { 85 });
            let narrow_gradients = random.percent(50);
            let update_reads_parameters = random.percent(50);
            UnitSpec {
                frozen,
                narrow_gradients,
                update_reads_parameters,
                ..UnitSpec::new(&format!("unit.{unit}"), trainable, reads)
            }
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
    let update_in_forward = random.percent(30);
    Policy {
        sharding,
        prefetch: random.below(5),
        activation_checkpointing: checkpointing[random.below(3)],
        // As in training, which refuses it if gradients are not sharded.
        reduce_each_micro_batch: sharding.gradients && random.percent(40),
        micro_batches: 1 + random.below(4),
        update_in_backward: random.percent(30),
        update_in_forward,
        gather_codec: if sharding.parameters && random.percent(30) { Codec::Int8 } else { Codec::None },
        optimizer_tier: random.percent(30).then_some(Tier::Disk),
        parameter_tier: (sharding.parameters && !update_in_forward && random.percent(50)).then_some(Tier::Disk),
        gradient_tier: random.percent(30).then_some(Tier::Disk),
        activation_tier: random.percent(30).then_some(Tier::Disk),
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
    Programs { stages: vec![common.clone()], exceptions: BTreeMap::from([(rank, program.clone())]) }
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

#[test]
fn mutants_of_one_rank_are_rejected_or_equivalent() {
    let mut random = Random(2);
    let (mut rejected, mut swaps, mut left_to_others) = (BTreeMap::<Rule, usize>::new(), 0, 0);
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
                assert!(drops_what_comes_later_anyway(&program, mutation), "{}", context());
                left_to_others += 1;
            }
        }
    }
    println!("rejected: {rejected:?}; equivalent: {swaps} swaps, {left_to_others} left to later instructions");
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
        let is_merged_wait = drops_what_comes_later_anyway(&program, mutation);
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
            Instruction::StartFetch(_)
            | Instruction::WaitFetch(_)
            | Instruction::StartStore(_)
            | Instruction::WaitStore(_)
            | Instruction::Evict(_) => (),
            Instruction::Forward { micro_batch, .. } => {
                sequences[unit][0].push(Instruction::Forward { unit, micro_batch, keep: Keep::Nothing });
            }
            Instruction::StartGather { .. }
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
fn only_gradients_of_one_pass_travel_in_the_dtype_of_parameters() {
    let spec = |name, narrow_gradients| UnitSpec { narrow_gradients, ..UnitSpec::new(name, 10, true) };
    let units = [spec("embedding", false), spec("block.0", true), spec("head", true)];
    let mesh = Mesh::new(&[(Axis::Shard, 2)]).unwrap();
    let (none, narrow) = (Codec::None, Codec::ParamDtype);
    for (stage, micro_batches, each, expected) in [
        (3, 1, false, [none, narrow, narrow]),
        (2, 1, false, [none, narrow, narrow]),
        // Sums have more digits.
        (2, 2, false, [none; 3]),
        (2, 2, true, [none, narrow, narrow]),
        // Gradients that are not sharded are summed in place.
        (1, 1, false, [none; 3]),
    ] {
        let policy = Policy { reduce_each_micro_batch: each, ..Policy::stage(stage, micro_batches) };
        let program = build::train_step(&units, &policy);
        assert_eq!(program.gradient_codecs(3), expected, "stage {stage}, {micro_batches} micro-batches");
        for unit in (0..3).filter(|&unit| expected[unit] == none) {
            let mut wrong = program.clone();
            wrong.instructions.iter_mut().for_each(|instruction| match instruction {
                Instruction::StartReduce { unit: reduced, codec } if *reduced == unit => *codec = narrow,
                _ => (),
            });
            let violation = check(&Programs::uniform(wrong), &units, &policy, &mesh).unwrap_err();
            assert_eq!(violation.rule, Rule::Gradients, "{violation}");
        }
    }
}

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

    // A step that updates in the backward pass cannot be skipped, and its totals come last.
    let policy = Policy { update_in_backward: true, ..policy };
    let program = build::train_step(&units, &policy);
    let never = |instruction: &Instruction| !matches!(instruction, Instruction::Update(_));
    let mut without = program.clone();
    without.instructions.retain(never);
    let violation = check(&with_exception(&program, 2, &without), &units, &policy, &mesh).unwrap_err();
    assert_eq!((violation.rank, violation.rule), (2, Rule::Gradients));
    let mut late = without;
    late.instructions.extend([0, 1].map(Instruction::Update));
    let violation = check(&with_exception(&program, 2, &late), &units, &policy, &mesh).unwrap_err();
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
