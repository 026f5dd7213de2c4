//! Schedules of pipelines have the bubbles, activations and messages that their papers say, and none of them hangs.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use shardwise_plan::pipeline::{Action, Actions, Pipeline, PipelineSchedule, ScheduleError};
use shardwise_plan::program::{
    ActivationCheckpointing, Codec, Costs, Instruction, Lane, MemoryKind, Policy, Program, Programs, Rule,
    StepSimulation, Tier, UnitCost, UnitSpec, build, check, simulate,
};
use shardwise_plan::{Axis, Mesh};
use support::Random;
use support::pipeline::{assert_close, blocks, costs, pipeline, tie, topology};

fn mesh(stages: usize) -> Mesh {
    Mesh::new(&[(Axis::Pipeline, stages), (Axis::Shard, 2)]).unwrap()
}

fn count(programs: &Programs, is_counted: impl Fn(&Instruction) -> bool) -> usize {
    programs.stages.iter().flat_map(|program| &program.instructions).filter(|at| is_counted(at)).count()
}

// ---- no schedule hangs ----------------------------------------------------------------------------------------------

#[test]
fn every_schedule_works_for_any_number_of_stages_and_micro_batches() {
    let checkpointing =
        [ActivationCheckpointing::None, ActivationCheckpointing::Selective, ActivationCheckpointing::Full];
    let mut random = Random(3);
    for schedule in PipelineSchedule::BUILT_IN {
        for stages in [1, 2, 3, 4, 8, 16] {
            for micro_batches in [1, 2, 3, 5, 8, 16, 33] {
                let mut units = blocks(schedule.chunks(stages) + random.below(3));
                let frozen = random.below(units.len()) * random.below(2);
                units[..frozen].iter_mut().for_each(|unit| (unit.trainable, unit.frozen) = (0, 64));
                if random.percent(30) && units.len() > 1 {
                    tie(&mut units);
                }
                let stage = random.below(4) as u8;
                let update_in_forward = random.percent(30);
                let policy = Policy {
                    update_in_forward,
                    activation_checkpointing: checkpointing[random.below(3)],
                    prefetch: random.below(4),
                    optimizer_tier: random.percent(20).then_some(Tier::Disk),
                    parameter_tier: (stage == 3 && !update_in_forward && random.percent(40)).then_some(Tier::Disk),
                    update_in_backward: random.percent(20),
                    gather_codec: if stage == 3 && random.percent(30) { Codec::Int8 } else { Codec::None },
                    gradient_tier: random.percent(20).then_some(Tier::Disk),
                    activation_tier: random.percent(20).then_some(Tier::Disk),
                    ..Policy::stage(stage, micro_batches)
                };
                let pipeline = Pipeline::even(units.len(), stages, schedule.clone()).unwrap();
                let context = || format!("{schedule}, {stages} stages, {policy:?}, {frozen} frozen of {}", units.len());
                for build in [build::pipeline_step, build::pipeline_replay, build::pipeline_inference] {
                    let programs = build(&units, &policy, &pipeline).unwrap();
                    assert_eq!(check(&programs, &units, &policy, &mesh(stages)), Ok(()), "{}", context());
                    if stages * micro_batches <= 64 {
                        let step = simulate(&programs, &units, &policy, &topology(mesh(stages)), &costs(&units));
                        assert!(step.step_s > 0., "{}", context());
                    }
                }
            }
        }
    }
}

#[test]
fn the_largest_pipelines_do_not_hang() {
    for schedule in PipelineSchedule::BUILT_IN {
        let (stages, micro_batches) = (64, 512);
        let units = blocks(schedule.chunks(stages));
        let policy = Policy::stage(1, micro_batches);
        let programs = pipeline(&units, &policy, stages, schedule.clone());
        assert_eq!(check(&programs, &units, &policy, &mesh(stages)), Ok(()), "{schedule}");
    }
    // 63 of 512, and none.
    assert_close(bubble(&simulate_chunks(&PipelineSchedule::OneFOneB, 64, 512)), 63. / 512.);
    assert_close(bubble(&simulate_chunks(&PipelineSchedule::ZeroBubbleV, 64, 512)), 0.);
}

// ---- bubbles and memory ---------------------------------------------------------------------------------------------

/// Chunks of one unit whose three passes take 1 s each, and whose activations have 600 bytes. Links are free.
fn simulate_chunks(schedule: &PipelineSchedule, stages: usize, micro_batches: usize) -> StepSimulation {
    let units = blocks(schedule.chunks(stages));
    let policy = Policy::stage(0, micro_batches);
    let programs = pipeline(&units, &policy, stages, schedule.clone());
    let without_output = |unit: UnitCost| UnitCost { output_bytes: 0, ..unit };
    let costs = costs(&units);
    let costs = Costs { units: costs.units.into_iter().map(without_output).collect(), ..costs };
    simulate(&programs, &units, &policy, &topology(mesh(stages)), &costs)
}

/// The time that a stage waits between its first and its last pass, in proportion to its passes: the most of all stages. What a
/// stage waits before the first micro-batch reaches it, the stages before it wait at the end.
fn bubble(simulation: &StepSimulation) -> f64 {
    let of_stage = |timeline: &[shardwise_plan::program::Span]| {
        let passes: Vec<_> = timeline.iter().filter(|span| span.lane == Lane::Compute).collect();
        let busy_s: f64 = passes.iter().map(|span| span.end_s - span.start_s).sum();
        (passes[passes.len() - 1].end_s - passes[0].start_s - busy_s) / busy_s
    };
    simulation.programs.iter().map(|stage| of_stage(&stage.timeline)).fold(0., f64::max)
}

/// The most activations of any stage, in those that a stage keeps for one micro-batch.
fn activations(simulation: &StepSimulation, chunks_per_stage: usize) -> f64 {
    let peaks = simulation.programs.iter().map(|stage| stage.memory.kind_peak(MemoryKind::Activations).0);
    peaks.max().unwrap() as f64 / (600 * chunks_per_stage) as f64
}

#[test]
fn bubbles_and_activations_are_those_of_the_papers() {
    for stages in [2, 3, 4, 8, 16] {
        for rounds in [2, 3, 4] {
            let micro_batches = rounds * stages;
            let (p, m) = (stages as f64, micro_batches as f64);
            let mut expected = vec![
                (PipelineSchedule::GPipe, (p - 1.) / m, m / p),
                (PipelineSchedule::OneFOneB, (p - 1.) / m, 1.),
                (PipelineSchedule::ZeroBubbleH1, (p - 1.) / (3. * m), 1.),
                (PipelineSchedule::ZeroBubbleV, 0., 1.),
            ];
            for chunks_per_stage in [2, 3, 4] {
                let v = chunks_per_stage as f64;
                let interleaved = PipelineSchedule::Interleaved1F1B { chunks_per_stage };
                expected.push((interleaved, (p - 1.) / (v * m), 1. + (p - 1.) / (p * v)));
                let looped = PipelineSchedule::LoopedBreadthFirst { chunks_per_stage };
                expected.push((looped, (p - 1.) / (v * m), m / p));
            }
            for (schedule, expected_bubble, relative_to_1f1b) in expected {
                let simulation = simulate_chunks(&schedule, stages, micro_batches);
                let found = (bubble(&simulation), activations(&simulation, schedule.chunks(stages) / stages) / p);
                println!("{schedule} p={stages} m={micro_batches}: {found:?}");
                assert_close(found.0, expected_bubble);
                assert_close(found.1, relative_to_1f1b);
            }
        }
    }
}

// ---- work, gradients and messages -----------------------------------------------------------------------------------

#[test]
fn one_stage_does_the_work_of_a_step_without_a_pipeline() {
    let sorted = |program: &Program| {
        let mut lines: Vec<String> = program.to_string().lines().map(str::to_string).collect();
        lines.sort();
        lines
    };
    for stage in 0..4 {
        let mut units = blocks(5);
        // Otherwise the first unit stays gathered from one micro-batch to the next.
        units[0].backward_reads_parameters = false;
        tie(&mut units);
        let policy = Policy::stage(stage, 3);
        for schedule in ["gpipe", "1f1b"] {
            let programs = pipeline(&units, &policy, 1, schedule.parse().unwrap());
            let expected = build::train_step(&units, &policy);
            if stage < 3 {
                assert_eq!(sorted(&programs.stages[0]), sorted(&expected));
            }
            assert_eq!(count(&programs, |at| matches!(at, Instruction::StartReduce { .. })), 5);
        }
        let pipeline = Pipeline::one_stage(units.len()).unwrap();
        let step = build::pipeline_step(&units, &policy, &pipeline).unwrap();
        assert_eq!(sorted(&step.stages[0]), sorted(&build::train_step(&units, &policy)));
        let inference = build::pipeline_inference(&units, &policy, &pipeline).unwrap();
        assert_eq!(inference.stages, [build::inference(&units, &policy)]);
    }
}

#[test]
fn gradients_are_reduced_once_per_step_or_after_each_micro_batch() {
    for schedule in PipelineSchedule::BUILT_IN {
        for is_tied in [false, true] {
            let mut units = blocks(9);
            units[3] = UnitSpec { trainable: 0, frozen: 64, ..units[3].clone() };
            if is_tied {
                tie(&mut units);
            }
            let pipeline = Pipeline::even(units.len(), 4, schedule.clone()).unwrap();
            for reduce_each_micro_batch in [false, true] {
                let policy = Policy { reduce_each_micro_batch, ..Policy::stage(2, 6) };
                let programs = match build::pipeline_step(&units, &policy, &pipeline) {
                    Err(error @ ScheduleError::TiedChunks { .. }) => {
                        assert!(is_tied && reduce_each_micro_batch && schedule == PipelineSchedule::ZeroBubbleV);
                        assert!(
                            error.to_string().contains("block.8 uses its weight and is on the same stage"),
                            "{error}"
                        );
                        continue;
                    }
                    programs => programs.unwrap(),
                };
                assert_eq!(check(&programs, &units, &policy, &mesh(4)), Ok(()), "{schedule}");
                let reductions = count(&programs, |at| matches!(at, Instruction::StartReduce { .. }));
                assert_eq!(reductions, 8 * if reduce_each_micro_batch { 6 } else { 1 }, "{schedule}");
            }
        }
    }
}

/// The bytes of messages that all stages of a pipeline send.
fn message_bytes(programs: &Programs, units: &[UnitSpec], policy: &Policy) -> u64 {
    let simulation = simulate(programs, units, policy, &topology(mesh(programs.stages.len())), &costs(units));
    simulation.programs.iter().map(|stage| stage.traffic.step.message_bytes()).sum()
}

#[test]
fn messages_have_the_bytes_of_all_boundaries_there_and_back() {
    let micro_batches = 8;
    for schedule in PipelineSchedule::BUILT_IN {
        for frozen in [0, 1, 2, 5] {
            let mut units = blocks(8);
            units[..frozen].iter_mut().for_each(|unit| (unit.trainable, unit.frozen) = (0, 64));
            let policy = Policy::stage(1, micro_batches);
            let pipeline = Pipeline::even(8, 4, schedule.clone()).unwrap();
            let stages = pipeline.stages_of_units();
            let boundaries: Vec<usize> = (1..8).filter(|&unit| stages[unit - 1] != stages[unit]).collect();
            // The first trainable unit needs the gradient of its output, and no unit before it does.
            let back = boundaries.iter().filter(|&&boundary| boundary > frozen).count();
            let programs = build::pipeline_step(&units, &policy, &pipeline).unwrap();
            let expected = micro_batches * 32 * (boundaries.len() + back);
            assert_eq!(message_bytes(&programs, &units, &policy), expected as u64, "{schedule}, {frozen} frozen");
        }
    }
}

#[test]
fn tied_units_on_different_stages_exchange_the_parameter_and_its_gradient_once_per_step() {
    for (schedule, is_split) in
        [("1f1b", true), ("gpipe", true), ("zb-h1", true), ("looped-bfs", true), ("zb-v", false)]
    {
        for stage in 0..4 {
            let mut units = blocks(8);
            let policy = Policy::stage(stage, 6);
            let untied = pipeline(&units, &policy, 4, schedule.parse().unwrap());
            let before = message_bytes(&untied, &units, &policy);
            tie(&mut units);
            let programs = pipeline(&units, &policy, 4, schedule.parse().unwrap());
            // 64 elements of 4 bytes each way, unless the same stage has both units.
            let expected = if is_split { 2 * 64 * 4 } else { 0 };
            assert_eq!(message_bytes(&programs, &units, &policy) - before, expected, "{schedule} {stage}");
            // Not trained: nothing comes back.
            (units[0].trainable, units[0].frozen) = (0, 64);
            let programs = pipeline(&units, &policy, 4, schedule.parse().unwrap());
            assert_eq!(check(&programs, &units, &policy, &mesh(4)), Ok(()));
            let is_tied = |at: &Instruction| matches!(at, Instruction::Send(message) if message.payload.is_tied());
            assert_eq!(count(&programs, is_tied), usize::from(is_split));
            let inference = Pipeline::even(8, 4, schedule.parse().unwrap()).unwrap();
            let inference = build::pipeline_inference(&units, &policy, &inference).unwrap();
            assert_eq!(count(&inference, is_tied), usize::from(is_split));
        }
    }
}

#[test]
fn a_tied_step_reads_like_this() {
    let mut units = vec![
        UnitSpec { output_bytes: 32, ..UnitSpec::new("embedding", 64, false) },
        UnitSpec { output_bytes: 32, ..UnitSpec::new("block", 64, true) },
        UnitSpec::new("head", 8, true),
    ];
    tie(&mut units);
    let chunks = vec![0..1, 1..3];
    let pipeline = Pipeline::new(2, chunks, PipelineSchedule::OneFOneB).unwrap();
    let programs = build::pipeline_step(&units, &Policy::stage(3, 1), &pipeline).unwrap();
    let lines = |stage: usize| programs.stages[stage].to_string().lines().skip(1).collect::<Vec<_>>().join(", ");
    let first = "count-tokens, start-gather embedding, wait-gather embedding, send-tied-parameters embedding micro-batch=0, \
                 start-receive-tied-gradients embedding micro-batch=0, start-receive-gradients embedding micro-batch=0, \
                 forward embedding micro-batch=0 keep=all, release embedding, send-activations embedding micro-batch=0, \
                 wait-receive-gradients embedding micro-batch=0, backward embedding micro-batch=0, \
                 accumulate embedding micro-batch=0, wait-receive-tied-gradients embedding micro-batch=0, \
                 start-reduce embedding, wait-reduce embedding, norm embedding, reduce-totals, update embedding";
    let second = "count-tokens, start-receive-tied-parameters head micro-batch=0, \
                  start-receive-activations block micro-batch=0, start-gather block, \
                  wait-receive-activations block micro-batch=0, wait-gather block, start-gather head, \
                  forward block micro-batch=0 keep=all, release block, wait-receive-tied-parameters head micro-batch=0, \
                  wait-gather head, forward head micro-batch=0 keep=all, start-gather block, \
                  backward head micro-batch=0, release head, accumulate head micro-batch=0, \
                  send-tied-gradients head micro-batch=0, start-reduce head, wait-gather block, \
                  backward block micro-batch=0, send-gradients block micro-batch=0, release block, \
                  accumulate block micro-batch=0, start-reduce block, wait-reduce-scatter head, wait-reduce block, \
                  norm block, wait-reduce head, norm head, reduce-totals, update block, update head";
    assert_eq!([lines(0), lines(1)], [first, second]);
}

#[test]
fn a_stage_without_trainable_parameters_only_passes_on() {
    for schedule in PipelineSchedule::BUILT_IN {
        let mut units = blocks(8);
        units[..4].iter_mut().for_each(|unit| (unit.trainable, unit.frozen) = (0, 64));
        units[6] = UnitSpec { trainable: 0, frozen: 64, ..units[6].clone() };
        let policy = Policy::stage(3, 4);
        let programs = pipeline(&units, &policy, 4, schedule.clone());
        assert_eq!(check(&programs, &units, &policy, &mesh(4)), Ok(()), "{schedule}");
        let backward = |at: &Instruction| match at {
            Instruction::Backward { unit, .. } | Instruction::BackwardInput { unit, .. } => Some(*unit),
            _ => None,
        };
        assert_eq!(count(&programs, |at| backward(at).is_some_and(|unit| unit < 4)), 0);
        assert_eq!(count(&programs, |at| backward(at) == Some(6)), 4);
    }
}

// ---- text and errors ------------------------------------------------------------------------------------------------

#[test]
fn schedules_are_read_as_they_were_printed() {
    for schedule in PipelineSchedule::BUILT_IN {
        assert_eq!(schedule.to_string().parse(), Ok(schedule.clone()));
        for (stages, micro_batches) in [(2, 3), (4, 8), (5, 2)] {
            let pipeline = Pipeline::even(20, stages, schedule.clone()).unwrap();
            let actions = pipeline.actions(micro_batches).unwrap();
            assert_eq!(actions.to_string().parse(), Ok(actions.clone()));
            // A schedule from a file is built like the one that it was printed from.
            let custom = PipelineSchedule::Custom(actions.to_string().parse().unwrap());
            let custom = Pipeline::new(stages, pipeline.chunks.clone(), custom).unwrap();
            let (units, policy) = (blocks(20), Policy::stage(3, micro_batches));
            let [one, other] = [&pipeline, &custom].map(|pipeline| build::pipeline_step(&units, &policy, pipeline));
            assert_eq!(one, other);
        }
    }
}

#[test]
fn mistakes_in_a_file_are_named_with_line_and_cell() {
    let mistake = |text: &str| text.parse::<Actions>().unwrap_err().to_string();
    let why = "is not a chunk, one of F, B, I and W, and a micro-batch, such as 0F0";
    assert_eq!(mistake("0F0,0B0\n1F0,,1X0\n"), format!("line 2, cell 3: '1X0' {why}"));
    assert_eq!(mistake("0F0,F1"), format!("line 1, cell 2: 'F1' {why}"));
    assert_eq!(mistake("0F+1"), format!("line 1, cell 1: '0F+1' {why}"));
    assert_eq!(mistake("0F99999999999999999999"), format!("line 1, cell 1: '0F99999999999999999999' {why}"));
    let pauses: Actions = "0F0,,0B0\n,1F0,1B0\n".parse().unwrap();
    assert_eq!(pauses.stages[1], [Action::forward(1, 0), Action::backward(1, 0)]);
}

fn custom(text: &str) -> PipelineSchedule {
    PipelineSchedule::Custom(text.parse().unwrap())
}

#[test]
fn wrong_schedules_are_refused_by_the_checker() {
    let (units, policy) = (blocks(4), Policy::stage(1, 2));
    let rule = |text: &str| {
        let pipeline = Pipeline::even(4, 2, custom(text)).unwrap();
        let programs = build::pipeline_step(&units, &policy, &pipeline).unwrap();
        check(&programs, &units, &policy, &mesh(2)).map_err(|violation| violation.rule)
    };
    assert_eq!(rule("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"), Ok(()));
    // The first stage waits for a gradient that the second computes after the micro-batch that the first has not sent.
    assert_eq!(rule("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"), Err(Rule::Deadlock));
    assert_eq!(rule("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n"), Err(Rule::Gradients));
    assert_eq!(rule("0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n"), Err(Rule::Passes));
    assert_eq!(rule("0F0,0F1,0B0,0B1,0B1\n1F0,1B0,1F1,1B1\n"), Err(Rule::Passes));
    assert_eq!(rule("0F0,0F1,0B0,0B1\n1F0,1W0,1I0,1F1,1B1\n"), Err(Rule::Passes));
}

#[test]
fn pipelines_that_do_not_fit_are_refused_with_what_would() {
    let error = |units, stages, schedule| Pipeline::even(units, stages, schedule).unwrap_err().to_string();
    let few = "zb-v on 4 stages cuts the model into 8 chunks, but it has only 7 units; 3 stages would fit";
    assert_eq!(error(7, 4, PipelineSchedule::ZeroBubbleV), few);
    assert_eq!(error(7, 0, PipelineSchedule::GPipe), "a pipeline needs at least one stage");
    let none = PipelineSchedule::Interleaved1F1B { chunks_per_stage: 0 };
    assert_eq!(error(7, 2, none), "a pipeline needs at least one chunk per stage");
    let lines = "the schedule has 1 lines, but the pipeline has 2 stages; write one line per stage";
    assert_eq!(error(7, 2, custom("0F0,0B0")), lines);
    assert_eq!(error(7, 2, custom("0F0\n0B0")), "chunk 0 is on stages [0, 1]; a chunk is on one stage");
    let gap = "chunk 1 is on no stage; chunks are counted from 0 without gaps";
    assert_eq!(error(7, 2, custom("0F0\n2F0")), gap);
    let pipeline = Pipeline::even(4, 2, custom("0F0,0B0\n1F0,1B0")).unwrap();
    let more = "the schedule has 1 micro-batches, but the step has 2; set the number of micro-batches to 1";
    assert_eq!(pipeline.actions(2).unwrap_err().to_string(), more);
    assert!(
        "2f2b".parse::<PipelineSchedule>().unwrap_err().to_string().starts_with("there is no pipeline schedule '2f2b'")
    );
    let unlike = build::pipeline_step(&blocks(5), &Policy::stage(0, 1), &pipeline).unwrap_err();
    assert_eq!(unlike, ScheduleError::Units { chunks: 4, model: 5 });
    let chunks = vec![0..2, 3..4];
    let gap = Pipeline::new(2, chunks, PipelineSchedule::GPipe).unwrap_err();
    assert_eq!(gap.to_string(), "chunk 1 must start at unit 2 and have at least one unit, but it is 3..4");
}
