//! Pipelines that are right are accepted, and others are rejected.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use std::collections::BTreeMap;

use shardwise_plan::pipeline::{Pipeline, PipelineSchedule};
use shardwise_plan::program::{
    ActivationCheckpointing, Collective, Instruction, Message, Policy, Program, Programs, Rule, UnitSpec, build, check,
    simulate,
};
use shardwise_plan::{Axis, Mesh};
use support::pipeline::{assert_close, blocks, costs, pipeline, tie, topology};
use support::{
    Mutation, Random, drops_what_comes_later_anyway, issues, mutate, random_mutation, share_a_group,
    touch_different_state, without_positions,
};

const STAGES: usize = 4;
const MICRO_BATCHES: usize = 8;

/// Four stages of two data-parallel ranks, which shard or replicate.
fn mesh(data_parallel: Axis) -> Mesh {
    Mesh::new(&[(Axis::Pipeline, STAGES), (data_parallel, 2)]).unwrap()
}

#[test]
fn pipelines_are_accepted_and_simulate_to_the_end() {
    let checkpointing =
        [ActivationCheckpointing::None, ActivationCheckpointing::Selective, ActivationCheckpointing::Full];
    for schedule in PipelineSchedule::BUILT_IN {
        for (stage, activation_checkpointing) in (0..4).flat_map(|stage| checkpointing.map(|kind| (stage, kind))) {
            for (frozen, is_tied) in [(0, false), (0, true), (1, true), (3, false)] {
                let mut units = blocks(8);
                if is_tied {
                    tie(&mut units);
                }
                units[..frozen].iter_mut().for_each(|unit| (unit.trainable, unit.frozen) = (0, 64));
                let policy = Policy { activation_checkpointing, ..Policy::stage(stage, MICRO_BATCHES) };
                for mesh in [mesh(Axis::Shard), mesh(Axis::Replicate)] {
                    let programs = pipeline(&units, &policy, STAGES, schedule.clone());
                    let checked = check(&programs, &units, &policy, &mesh);
                    assert_eq!(checked, Ok(()), "{schedule} stage {stage}, {frozen} frozen");
                    let exceptions = BTreeMap::from([(5, programs.stages[2].clone())]);
                    let with_exception = Programs { exceptions, ..programs.clone() };
                    assert_eq!(check(&with_exception, &units, &policy, &mesh), Ok(()));
                    let [alike, apart] = [&programs, &with_exception]
                        .map(|programs| simulate(programs, &units, &policy, &topology(mesh), &costs(&units)));
                    assert_close(alike.step_s, apart.step_s);
                    for program in &programs.stages {
                        assert_eq!(program.to_string().parse().as_ref(), Ok(program));
                    }
                }
            }
        }
    }
}

// ---- mutants --------------------------------------------------------------------------------------------------------

struct Case {
    units: Vec<UnitSpec>,
    policy: Policy,
    mesh: Mesh,
    /// The stage of each unit.
    stages: Vec<usize>,
    programs: Programs,
}

fn random_case(random: &mut Random) -> Case {
    let mut units = blocks(8 + random.below(3));
    let frozen = random.below(3);
    units[..frozen].iter_mut().for_each(|unit| (unit.trainable, unit.frozen) = (0, 64));
    if random.percent(50) {
        tie(&mut units);
    }
    let policy = Policy::stage(random.below(4) as u8, MICRO_BATCHES);
    let mesh = mesh([Axis::Shard, Axis::Replicate][random.below(2)]);
    let schedules = PipelineSchedule::BUILT_IN;
    let schedule = schedules[random.below(schedules.len())].clone();
    let pipeline = Pipeline::even(units.len(), STAGES, schedule).unwrap();
    let programs = build::pipeline_step(&units, &policy, &pipeline).unwrap();
    Case { stages: pipeline.stages_of_units(), units, policy, mesh, programs }
}

/// The messages that a program exchanges with each other stage, sent and received, each in order.
fn messages(program: &Program, case: &Case) -> BTreeMap<(bool, usize), Vec<Message>> {
    let mut messages = BTreeMap::<_, Vec<Message>>::new();
    for instruction in &program.instructions {
        let (sends, message) = match instruction {
            Instruction::Send(message) => (true, message),
            Instruction::StartReceive(message) => (false, message),
            _ => continue,
        };
        let other = if sends { message.receiving_unit(&case.units) } else { message.sending_unit(&case.units) };
        messages.entry((sends, case.stages[other.unwrap()])).or_default().push(*message);
    }
    messages
}

/// Asserts that a mutant does the same as its program. If all ranks of its stage have it, they may change the order of collectives.
fn assert_equivalent(case: &Case, program: &Program, mutant: &Program, mutation: Mutation, is_on_all_ranks: bool) {
    let Case { units, policy, mesh, .. } = case;
    let context = || format!("{mutation:?}\n{policy:?}\n{mesh}\n{program}");
    let [before, after] = [program, mutant].map(|program| issues(program, units, policy, mesh));
    let collectives = |issues: &[(usize, Collective)]| {
        let mut collectives = without_positions(issues);
        if is_on_all_ranks {
            collectives.sort_by_key(|collective| format!("{collective:?}"));
        }
        collectives
    };
    assert_eq!(collectives(&before), collectives(&after), "{}", context());
    assert_eq!(messages(program, case), messages(mutant, case), "{}", context());
    match mutation {
        Mutation::Swap(first, second) => {
            let (one, other) = (&program.instructions[first], &program.instructions[second]);
            assert!(touch_different_state(one, other, units), "{}", context());
            assert!(is_on_all_ranks || !share_a_group(&before, first, second), "{}", context());
        }
        _ => assert!(drops_what_comes_later_anyway(program, mutation), "{}", context()),
    }
}

#[test]
fn mutants_of_one_rank_are_rejected_or_equivalent() {
    let mut random = Random(11);
    let (mut rejected, mut accepted) = (BTreeMap::<Rule, usize>::new(), 0);
    for _ in 0..1000 {
        let case = random_case(&mut random);
        let rank = random.below(case.mesh.ranks());
        let program = case.programs.of(rank, &case.mesh);
        let mutation = random_mutation(&mut random, program);
        let mutant = mutate(program, mutation);
        let programs = Programs { exceptions: BTreeMap::from([(rank, mutant.clone())]), ..case.programs.clone() };
        match check(&programs, &case.units, &case.policy, &case.mesh) {
            Err(violation) => {
                *rejected.entry(violation.rule).or_default() += 1;
                assert_eq!(violation.rank, rank, "{violation}\n{mutation:?}\n{program}");
                let named = violation.position.map(|position| mutant.describe(&mutant.instructions[position]));
                assert_eq!(violation.instruction, named.unwrap_or_default(), "{violation}\n{mutation:?}\n{program}");
            }
            Ok(()) => {
                assert_equivalent(&case, program, &mutant, mutation, false);
                let simulated =
                    simulate(&programs, &case.units, &case.policy, &topology(case.mesh), &costs(&case.units));
                assert!(simulated.step_s > 0.);
                accepted += 1;
            }
        }
    }
    println!("rejected: {rejected:?}; equivalent: {accepted}");
    assert!(rejected.values().sum::<usize>() > 500, "most mutants are wrong: {rejected:?}");
}

#[test]
fn mutants_of_a_stage_are_rejected_or_equivalent() {
    let mut random = Random(12);
    let (mut rejected, mut accepted) = (BTreeMap::<Rule, usize>::new(), 0);
    for _ in 0..1000 {
        let case = random_case(&mut random);
        let stage = random.below(STAGES);
        let program = &case.programs.stages[stage];
        let mutation = random_mutation(&mut random, program);
        let mutant = mutate(program, mutation);
        let mut programs = case.programs.clone();
        programs.stages[stage] = mutant.clone();
        match check(&programs, &case.units, &case.policy, &case.mesh) {
            Err(violation) => {
                // If two stages contradict each other, either may be at fault.
                let found = case.mesh.coordinates(violation.rank).along(Axis::Pipeline);
                let meets_others = matches!(violation.rule, Rule::Messages | Rule::Deadlock | Rule::OneOrder);
                assert!(found == stage || meets_others, "{violation}\n{mutation:?} on stage {stage}\n{program}");
                *rejected.entry(violation.rule).or_default() += 1;
            }
            Ok(()) => {
                assert_equivalent(&case, program, &mutant, mutation, true);
                accepted += 1;
            }
        }
    }
    println!("rejected: {rejected:?}; equivalent: {accepted}");
    assert!(rejected.values().sum::<usize>() > 500, "most mutants are wrong: {rejected:?}");
}

#[test]
fn a_rank_or_stage_with_the_program_of_another_stage_is_rejected() {
    let mut random = Random(13);
    for _ in 0..200 {
        let Case { units, policy, mesh, programs, .. } = random_case(&mut random);
        let rank = random.below(mesh.ranks());
        let stage = mesh.coordinates(rank).along(Axis::Pipeline);
        let other = (stage + 1 + random.below(STAGES - 1)) % STAGES;
        let exceptions = BTreeMap::from([(rank, programs.stages[other].clone())]);
        let violation = check(&Programs { exceptions, ..programs.clone() }, &units, &policy, &mesh).unwrap_err();
        assert_eq!((violation.rank, violation.rule), (rank, Rule::Fit), "{violation}");
        let mut replaced = programs.clone();
        replaced.stages[stage] = programs.stages[other].clone();
        assert_eq!(check(&replaced, &units, &policy, &mesh).unwrap_err().rule, Rule::Fit);
    }
}

#[test]
fn stages_that_wait_for_each_other_are_found() {
    let units = blocks(2);
    let (policy, mesh) = (Policy::stage(0, 2), Mesh::new(&[(Axis::Pipeline, 2)]).unwrap());
    let programs = pipeline(&units, &policy, 2, PipelineSchedule::OneFOneB);
    // The first stage waits for the gradients of micro-batch 0 before it sends the activations of micro-batch 1, for which the
    // second stage waits before it computes them.
    let mut waits = programs.clone();
    let [first, second] = [0, 1].map(|stage| &programs.stages[stage].instructions);
    let find =
        |instructions: &[Instruction], wanted: Instruction| instructions.iter().position(|at| *at == wanted).unwrap();
    let send = find(first, Instruction::Send(Message::activations(0, 1)));
    let instruction = waits.stages[0].instructions.remove(send);
    let wait = find(&waits.stages[0].instructions, Instruction::WaitReceive(Message::gradients(0, 0)));
    waits.stages[0].instructions.insert(wait + 1, instruction);
    let wait = find(second, Instruction::WaitReceive(Message::activations(1, 1)));
    let instruction = waits.stages[1].instructions.remove(wait);
    let forward = find(&waits.stages[1].instructions, Instruction::Send(Message::gradients(1, 0)));
    waits.stages[1].instructions.insert(forward, instruction);
    let violation = check(&waits, &units, &policy, &mesh).unwrap_err();
    assert_eq!(violation.rule, Rule::Deadlock, "{violation}");
    assert!(violation.to_string().contains("wait-receive"), "{violation}");
}

/// Two stages that take turns: the first has units a and c, the second b and d.
const TURNS: [&str; 2] = [
    "forward a, send-activations a, start-receive-activations c, wait-receive-activations c, forward c, \
     send-activations c, start-receive-gradients c, wait-receive-gradients c, backward c, send-gradients c, \
     start-receive-gradients a, wait-receive-gradients a, backward a",
    "start-receive-activations b, wait-receive-activations b, forward b, send-activations b, \
     start-receive-activations d, wait-receive-activations d, forward d, backward d, send-gradients d, \
     start-receive-gradients b, wait-receive-gradients b, backward b, send-gradients b",
];

#[test]
fn stages_may_have_several_parts_of_the_model() {
    let units: Vec<UnitSpec> = ["a", "b", "c", "d"].map(|name| UnitSpec::new(name, 64, true)).to_vec();
    let (policy, mesh) = (Policy::stage(0, 1), Mesh::new(&[(Axis::Pipeline, 2)]).unwrap());
    let line = |line: &str| match line.strip_prefix("forward ") {
        Some(unit) => format!("forward {unit} micro-batch=0 keep=all\n"),
        None => format!("{line} micro-batch=0\n"),
    };
    // A replay: there are no gradients to reduce.
    let program = |text: &str| {
        let lines: String = text.split(", ").map(line).collect();
        format!("units a b c d\n{lines}").parse::<Program>().unwrap()
    };
    let programs = Programs::pipeline(TURNS.map(program).to_vec());
    assert_eq!(check(&programs, &units, &policy, &mesh), Ok(()));
    assert_close(simulate(&programs, &units, &policy, &topology(mesh), &costs(&units)).step_s, 4. * 3.);
    // The second stage expects b's gradients before it sends d's, on which they depend.
    let late = TURNS[1].replace("send-gradients d, ", "").replace("backward b, ", "backward b, send-gradients d, ");
    let programs = Programs::pipeline(vec![program(TURNS[0]), program(&late)]);
    let violation = check(&programs, &units, &policy, &mesh).unwrap_err();
    assert_eq!(violation.rule, Rule::Deadlock, "{violation}");
}
