//! Partitions into pipeline stages are as fast as the best of all partitions, and found quickly.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use std::time::{Duration, Instant};

use shardwise_plan::pipeline_partition::{
    Constraints, CostModel, GradientReduction, LinkLevel, PartitionError, PlannedStage, Replication, StageCut,
    StagePlan, StateBytes, UnitProfile, Workers, partition_stages,
};
use support::Random;
use support::pipedream::{PROFILES, condense, parse_profile, read_profile};

const GRID: Replication = Replication::Grid { stages: None };
const GIGABIT_BYTES_PER_S: f64 = 1.25e8;
const NVLINK_BYTES_PER_S: f64 = 3e11;

/// Adam in f32 without ZeRO, gradients reduced as in PipeDream, unlimited memory.
fn constraints(replication: Replication) -> Constraints {
    Constraints {
        replication,
        reduction: GradientReduction::EachRound,
        state: StateBytes { replicated: 4., sharded: 0. },
        memory_bytes_max: None,
    }
}

/// Hosts with NVLink, and 10 Gbit/s between them.
fn nvlink_hosts(count: usize, workers_per_host: usize) -> Workers {
    Workers::on_hosts(count, workers_per_host, NVLINK_BYTES_PER_S, 10. * GIGABIT_BYTES_PER_S)
}

fn unit(compute_s: f64, output_bytes: usize, parameter_bytes: usize, kept_bytes: usize) -> UnitProfile {
    let (forward_s, backward_s) = (compute_s / 3., compute_s * 2. / 3.);
    UnitProfile { name: "unit".to_string(), forward_s, backward_s, output_bytes, parameter_bytes, kept_bytes }
}

// ---- exhaustive search ----------------------------------------------------------------------------------------------

/// The least maximum over the stages of a plan, over all plans; infinite if there is none.
fn search_exhaustively(model: &CostModel, replication: Replication, value: &dyn Fn(&PlannedStage) -> f64) -> f64 {
    let mut search = Exhaustive::new(model, value);
    match replication {
        Replication::Uneven => {
            let replicas: Vec<usize> = (1..=model.replicas_max()).collect();
            search.extend(&replicas, None, search.units, 0, 0.);
        }
        Replication::Grid { stages } => {
            for count in (1..=model.workers()).filter(|&count| stages.is_none_or(|stages| stages == count)) {
                let replicas = model.workers() / count;
                if count * replicas == model.workers() && replicas <= model.replicas_max() {
                    search.extend(&[replicas], Some(count), search.units, 0, 0.);
                }
            }
        }
    }
    search.best
}

struct Exhaustive {
    units: usize,
    workers: usize,
    /// The values of all stages, by their first unit, the first unit after them, replicas and workers after them.
    values: Vec<f64>,
    best: f64,
}

impl Exhaustive {
    fn new(model: &CostModel, value: &dyn Fn(&PlannedStage) -> f64) -> Self {
        let (units, workers) = (model.units(), model.workers());
        let values = vec![f64::NAN; units * (units + 1) * (workers + 1) * workers];
        let mut search = Exhaustive { units, workers, values, best: f64::INFINITY };
        for (start, end) in (0..units).flat_map(|start| (start + 1..=units).map(move |end| (start, end))) {
            for replicas in 1..=workers {
                for workers_after in 0..=workers - replicas {
                    let stage = model.stage(&StageCut { units: start..end, replicas, workers_after });
                    let index = search.index(start, end, replicas, workers_after);
                    search.values[index] = value(&stage);
                }
            }
        }
        search
    }

    fn index(&self, start: usize, end: usize, replicas: usize, workers_after: usize) -> usize {
        ((start * (self.units + 1) + end) * (self.workers + 1) + replicas) * self.workers + workers_after
    }

    /// Tries every stage that can come before unit `end`. A plan that is not better than the best one so far is abandoned.
    fn extend(&mut self, replicas: &[usize], stages: Option<usize>, end: usize, workers_after: usize, value: f64) {
        if end == 0 && stages.is_none_or(|left| left == 0) {
            self.best = value;
        }
        if stages == Some(0) {
            return;
        }
        let workers_left = self.workers - workers_after;
        for start in 0..end {
            for &replicas_here in replicas.iter().take_while(|&&count| count <= workers_left) {
                let value = value.max(self.values[self.index(start, end, replicas_here, workers_after)]);
                if value < self.best {
                    let stages = stages.map(|left| left - 1);
                    self.extend(replicas, stages, start, workers_after + replicas_here, value);
                }
            }
        }
    }
}

/// Compares with exhaustive search: the bottleneck if there is a plan, and otherwise the memory that is needed.
fn compare(units: &[UnitProfile], workers: &Workers, constraints: &Constraints) -> Result<StagePlan, PartitionError> {
    let model = CostModel::new(units, workers, constraints).unwrap();
    let limit_bytes = constraints.memory_bytes_max.unwrap_or(usize::MAX);
    let time_s = |stage: &PlannedStage| if stage.memory_bytes <= limit_bytes { stage.time_s() } else { f64::INFINITY };
    let best_s = search_exhaustively(&model, constraints.replication, &time_s);
    let result = partition_stages(units, workers, constraints);
    match &result {
        Ok(plan) => {
            assert_eq!(plan.bottleneck_s, best_s, "{constraints:?} {workers:?} {units:?}\n{plan}");
            assert_is_valid(plan, &model, constraints);
        }
        Err(PartitionError::Memory { needed_bytes, .. }) => {
            assert_eq!(best_s, f64::INFINITY, "{constraints:?} {workers:?} {units:?}");
            let memory = |stage: &PlannedStage| stage.memory_bytes as f64;
            let needed = search_exhaustively(&model, constraints.replication, &memory);
            assert_eq!(*needed_bytes as f64, needed, "{constraints:?} {workers:?} {units:?}");
        }
        Err(error) => panic!("{error}"),
    }
    result
}

/// Checks that the plan has every unit once, no more workers than there are, and the costs of the model.
fn assert_is_valid(plan: &StagePlan, model: &CostModel, constraints: &Constraints) {
    let mut workers_after: usize = plan.stages.iter().map(|stage| stage.replicas).sum();
    assert_eq!(workers_after + plan.idle_workers(), model.workers());
    let mut start = 0;
    for stage in &plan.stages {
        assert_eq!(stage.units.start, start);
        (start, workers_after) = (stage.units.end, workers_after - stage.replicas);
        let cut = StageCut { units: stage.units.clone(), replicas: stage.replicas, workers_after };
        assert_eq!(*stage, model.stage(&cut));
        assert!(constraints.memory_bytes_max.is_none_or(|limit| stage.memory_bytes <= limit));
    }
    assert_eq!(start, model.units());
    if let Replication::Grid { stages } = constraints.replication {
        assert!(plan.is_runnable && stages.is_none_or(|stages| stages == plan.stages.len()), "{plan}");
    }
}

/// Compares without a memory limit, with one halfway to the least that is possible, with that, and with one byte less.
fn compare_at_limits(units: &[UnitProfile], workers: &Workers, constraints: &Constraints) -> StagePlan {
    let unlimited = compare(units, workers, &Constraints { memory_bytes_max: None, ..*constraints }).unwrap();
    let at = |limit: usize| compare(units, workers, &Constraints { memory_bytes_max: Some(limit), ..*constraints });
    let needed = match partition_stages(units, workers, &Constraints { memory_bytes_max: Some(0), ..*constraints }) {
        Err(PartitionError::Memory { needed_bytes, .. }) => needed_bytes,
        other => panic!("{other:?}"),
    };
    let halfway = at(usize::midpoint(needed, unlimited.memory_bytes())).unwrap();
    let least = at(needed).unwrap();
    assert!(unlimited.bottleneck_s <= halfway.bottleneck_s && halfway.bottleneck_s <= least.bottleneck_s);
    let error = at(needed - 1).unwrap_err();
    assert!(matches!(error, PartitionError::Memory { needed_bytes, .. } if needed_bytes == needed), "{error}");
    unlimited
}

// ---- published profiles ---------------------------------------------------------------------------------------------

fn compare_published(unit_count: usize, workers: &[Workers]) {
    let start = Instant::now();
    for name in PROFILES {
        let units = condense(&read_profile(name), unit_count);
        for workers in workers {
            for reduction in [GradientReduction::EachRound, GradientReduction::EachStep { micro_batches: 32 }] {
                let constraints = |replication| Constraints { reduction, ..constraints(replication) };
                let grid = compare_at_limits(&units, workers, &constraints(GRID));
                let uneven = compare_at_limits(&units, workers, &constraints(Replication::Uneven));
                assert!(uneven.bottleneck_s <= grid.bottleneck_s, "{grid}{uneven}");
            }
        }
        println!("{name}: {:?}", start.elapsed());
    }
}

#[test]
#[ignore = "needs PipeDream's published profiles; run by cargo xtask show pipeline/partition"]
fn published_profiles_in_20_units_on_4_workers_are_cut_as_well_as_possible() {
    compare_published(
        20,
        &[
            Workers::on_one_network(4, GIGABIT_BYTES_PER_S),
            Workers::on_one_network(4, 10. * GIGABIT_BYTES_PER_S),
            nvlink_hosts(4, 4),
            nvlink_hosts(4, 2),
        ],
    );
}

#[test]
#[ignore = "needs PipeDream's published profiles; run by cargo xtask show pipeline/partition"]
fn published_profiles_in_12_units_on_16_workers_are_cut_as_well_as_possible() {
    compare_published(
        12,
        &[
            Workers::on_one_network(16, GIGABIT_BYTES_PER_S),
            Workers::on_one_network(16, 10. * GIGABIT_BYTES_PER_S),
            nvlink_hosts(16, 4),
            nvlink_hosts(16, 8),
        ],
    );
}

#[test]
#[ignore = "needs PipeDream's published profiles; run by cargo xtask show pipeline/partition"]
fn vgg16_is_cut_as_pipedream_runs_it_on_16_workers() {
    // In msr-fiddle/pipedream, runtime/image_classification/models/vgg16/gpus=16: the convolutions on 15 workers, the rest on one.
    let units = read_profile("vgg16");
    let workers = Workers::on_one_network(16, 10. * GIGABIT_BYTES_PER_S);
    let plan = partition_stages(&units, &workers, &constraints(Replication::Uneven)).unwrap();
    println!("{plan}");
    assert_eq!(plan.stages.iter().map(|stage| stage.replicas).collect::<Vec<_>>(), [15, 1]);
    let (convolutions, rest) = units.split_at(plan.stages[0].units.end);
    assert!(!convolutions.iter().any(|unit| unit.name.starts_with("Linear")));
    assert!(!rest.iter().any(|unit| unit.name.starts_with("Conv2d")));
    assert!(!plan.is_runnable);
}

#[test]
fn a_profile_with_branches_becomes_a_chain() {
    let costs = |bytes: &str| {
        format!("forward_compute_time=1.5, backward_compute_time=2.5, activation_size={bytes}, parameter_size=7.000")
    };
    let text = [
        format!("node4 -- Add(inplace) -- {}", costs("1000.0")),
        format!("node1 -- Input0 -- {}", costs("5.0")),
        format!("node3 -- LSTM(2, 1) -- {}", costs("[100.0; 20.0]")),
        format!("node2 -- Conv2d(3, 4) -- {}", costs("10.0")),
        format!("node5 -- Linear(1, 2) -- {}", costs("1.0")),
        "\tnode4 -- node5\n\tnode2 -- node3\n\tnode2 -- node4\n\tnode3 -- node4\n\tnode1 -- node2".to_string(),
    ];
    let units = parse_profile(&text.join("\n"));
    assert_eq!(units.iter().map(|unit| &unit.name[..3]).collect::<Vec<_>>(), ["Con", "LST", "Add", "Lin"]);
    assert_eq!(units.iter().map(|unit| unit.output_bytes).collect::<Vec<_>>(), [10, 10 + 120, 1000, 0]);
    assert_eq!(units.iter().map(|unit| unit.kept_bytes).collect::<Vec<_>>(), [10, 120, 1000, 1]);
    assert!(
        units.iter().all(|unit| unit.forward_s == 1.5e-3 && unit.backward_s == 2.5e-3 && unit.parameter_bytes == 7)
    );
    let merged = condense(&units, 2);
    assert_eq!(merged.iter().map(|unit| unit.output_bytes).collect::<Vec<_>>(), [130, 0]);
    assert_eq!(
        merged.iter().map(|unit| (unit.parameter_bytes, unit.kept_bytes)).collect::<Vec<_>>(),
        [(14, 130), (14, 1001)]
    );
}

// ---- the cost model -------------------------------------------------------------------------------------------------

/// Four units of 12 s and 120 bytes of parameters, of which 60, 600 and 6000 bytes are sent and 5 are kept.
fn four_units() -> Vec<UnitProfile> {
    [60, 600, 6000, 60_000].map(|output_bytes| unit(12., output_bytes, 120, 5)).to_vec()
}

/// Hosts of four workers with 10 bytes/s, and 1 byte/s between them.
fn slow_hosts(count: usize) -> Workers {
    Workers::on_hosts(count, 4, 10., 1.)
}

fn stage_of(constraints: &Constraints, units: std::ops::Range<usize>, replicas: usize, after: usize) -> PlannedStage {
    let model = CostModel::new(&four_units(), &slow_hosts(8), constraints).unwrap();
    model.stage(&StageCut { units, replicas, workers_after: after })
}

#[test]
fn a_stage_costs_what_the_formulas_say() {
    let each_step = |micro_batches| GradientReduction::EachStep { micro_batches };
    let uneven = constraints(Replication::Uneven);
    let two = stage_of(&uneven, 1..3, 2, 3);
    assert_eq!(two.compute_s, 2. * 12. / 2.);
    // Two replicas exchange half of 240 bytes twice, within a host, every two micro-batches.
    assert_eq!(two.reduce_s, 240. / 10. / 2.);
    // The output is larger than the input, and its gradient comes back.
    assert_eq!(two.transfer_s, 2. * 6000. / 2. / 10.);
    assert_eq!(two.time_s(), two.transfer_s);
    // Five workers in all from here on, two of them here.
    assert_eq!((two.in_flight, two.memory_bytes), (3, 4 * 240 + 3 * 10));
    let last = stage_of(&uneven, 3..4, 2, 0);
    assert_eq!((last.transfer_s, last.in_flight), (2. * 6000. / 2. / 10., 1));
    assert_eq!(stage_of(&uneven, 0..4, 1, 0).time_s(), 4. * 12.);
    let first = stage_of(&uneven, 0..1, 2, 2);
    assert_eq!((first.compute_s, first.reduce_s, first.transfer_s), (6., 6., 6.));
    assert_eq!(first.time_s(), 12.);

    // Once per step, however many replicas there are. Of five micro-batches, a replica has at most three.
    let stepwise = Constraints { reduction: each_step(5), ..uneven };
    assert_eq!(stage_of(&stepwise, 1..3, 2, 3).reduce_s, 240. / 10. / 5.);
    assert_eq!(stage_of(&stepwise, 1..3, 2, 6).in_flight, 3);
    assert_eq!(stage_of(&uneven, 1..3, 2, 6).in_flight, 4);

    // Four replicas fill a host, so that their messages leave it. Five are on two hosts.
    let [three, four, five] = [3, 4, 5].map(|replicas| stage_of(&stepwise, 2..3, replicas, 0));
    assert_eq!((three.transfer_s, four.transfer_s), (2. * 6000. / 3. / 10., 2. * 6000. / 4. / 1.));
    assert_eq!((four.reduce_s, five.reduce_s), (2. * 3. / 4. * 120. / 10. / 5., 2. * 4. / 5. * 120. / 1. / 5.));

    // ZeRO stage 1: of four bytes, a replica holds two, and its share of two.
    let zero = Constraints { state: StateBytes { replicated: 2., sharded: 2. }, ..uneven };
    assert_eq!(stage_of(&zero, 0..1, 4, 0).memory_bytes, 2 * 120 + 2 * 120 / 4 + 5);
}

#[test]
fn stages_of_a_grid_are_where_the_mesh_has_them() {
    let grid = constraints(GRID);
    // Four stages of two on hosts of four: only the second boundary is between hosts.
    let stages = [0, 1, 2, 3].map(|stage| stage_of(&grid, stage..stage + 1, 2, 6 - 2 * stage));
    assert_eq!(stages.each_ref().map(|stage| stage.transfer_s), [6., 600., 600., 600.]);
    assert_eq!(stages.each_ref().map(|stage| stage.in_flight), [4, 3, 2, 1]);
    assert!(stages.iter().all(|stage| stage.reduce_s == 120. / 10. / 2.));
    // Two stages of four: each fills a host.
    assert_eq!(stage_of(&grid, 0..2, 4, 4).transfer_s, 2. * 600. / 4.);
    assert_eq!(stage_of(&grid, 0..2, 4, 4).reduce_s, 2. * 3. / 4. * 240. / 10. / 4.);
    // Two stages of three on six workers: the second is on both hosts, and reduces at the rate between them.
    let model = CostModel::new(&four_units(), &slow_hosts(6), &grid).unwrap();
    let reduce_s = |after| model.stage(&StageCut { units: 0..2, replicas: 3, workers_after: after }).reduce_s;
    assert_eq!((reduce_s(3), reduce_s(0)), (2. * 2. / 3. * 240. / 10. / 3., 2. * 2. / 3. * 240. / 1. / 3.));
}

#[test]
fn a_plan_prints_as_a_table() {
    let workers = slow_hosts(8);
    let grid = partition_stages(&four_units(), &workers, &constraints(Replication::Grid { stages: Some(2) })).unwrap();
    let table = "2 stages on 8 workers, 30.000 s per micro-batch
stage      units  replicas  in flight     compute      reduce    transfer      memory
    0        0-0         4          2     3.000 s     4.500 s    30.000 s       490 B
    1        1-3         4          1     9.000 s    13.500 s    30.000 s     1.46 kB
";
    assert_eq!(grid.to_string(), table);
}

// ---- errors ---------------------------------------------------------------------------------------------------------

#[test]
fn an_error_says_what_to_change() {
    let error = |units: &[UnitProfile], workers: &Workers, constraints: &Constraints| {
        partition_stages(units, workers, constraints).unwrap_err().to_string()
    };
    let (units, workers, grid) = (four_units(), slow_hosts(12), constraints(GRID));
    let stages = |stages| constraints(Replication::Grid { stages: Some(stages) });
    let few = Constraints { reduction: GradientReduction::EachStep { micro_batches: 2 }, ..grid };
    assert_eq!(error(&[], &workers, &grid), "the profile has no units");
    assert!(error(&[unit(f64::NAN, 0, 0, 0)], &workers, &grid).contains("times of 'unit' must be finite"));
    assert!(error(&units, &Workers::on_one_network(0, 1.), &grid).contains("at least one worker"));
    assert!(error(&units, &Workers::on_one_network(2, 0.), &grid).contains("level 0 does not"));
    assert!(error(&units, &Workers { count: 13, ..workers.clone() }, &grid).contains("all 13"));
    let links = workers.links.iter().rev().copied().collect();
    assert!(error(&units, &Workers { count: 12, links }, &grid).contains("level 1 does not"));
    let state = StateBytes { replicated: -1., sharded: 0. };
    assert!(error(&units, &workers, &Constraints { state, ..grid }).contains("state"));
    assert_eq!(error(&units, &workers, &stages(5)), "12 workers do not divide into 5 stages; use a divisor of 12");
    assert_eq!(error(&units, &workers, &stages(6)), "4 units cannot form 6 stages; use at most 4");
    assert_eq!(
        error(&units, &workers, &few),
        "2 micro-batches are too few for 3 replicas; use at least 3, or more stages"
    );
}

#[test]
fn an_error_says_how_much_memory_would_be_enough() {
    let (units, workers) = (four_units(), slow_hosts(4));
    let limited = |replication, limit| Constraints { memory_bytes_max: Some(limit), ..constraints(replication) };
    // Four stages of one: the first holds 480 bytes of state, and four micro-batches of 5 bytes.
    for replication in [GRID, Replication::Uneven, Replication::Grid { stages: Some(4) }] {
        let error = partition_stages(&units, &workers, &limited(replication, 499)).unwrap_err().to_string();
        assert!(
            error.starts_with("no partition fits in 499 B per worker: the one that needs least needs 500 B; "),
            "{error}"
        );
        assert_eq!(partition_stages(&units, &workers, &limited(replication, 500)).unwrap().memory_bytes(), 500);
    }
    let error = partition_stages(&units, &workers, &limited(Replication::Grid { stages: Some(2) }, 499)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "no partition fits in 499 B per worker: the one that needs least needs 980 B; shard more state, checkpoint \
         activations, or use smaller micro-batches, or another number of stages than 2"
    );
}

// ---- random profiles ------------------------------------------------------------------------------------------------

#[test]
fn random_profiles_are_cut_as_well_as_possible() {
    let mut random = Random(20);
    for _ in 0..400 {
        // Computation, messages or reductions may dominate.
        let [output_scale, parameter_scale] = [0; 2].map(|_| [1, 10, 100][random.below(3)]);
        let units: Vec<UnitProfile> = (0..1 + random.below(8))
            .map(|_| {
                let compute_s = random.below(100) as f64 / 10.;
                let (output_bytes, parameter_bytes) = (random.below(50), random.below(50));
                unit(compute_s, output_scale * output_bytes, parameter_scale * parameter_bytes, random.below(50))
            })
            .collect();
        let count = 1 + random.below(10);
        let within = LinkLevel { workers: 1 + random.below(8), bytes_per_s: 1. + random.below(100) as f64 };
        let between = LinkLevel { workers: count.max(8), bytes_per_s: 1. + random.below(10) as f64 };
        let workers = Workers { count, links: vec![within, between] };
        let reduction = match random.below(3) {
            0 => GradientReduction::EachRound,
            1 => GradientReduction::EachStep { micro_batches: count + random.below(8) },
            _ => GradientReduction::EachStep { micro_batches: 1000 },
        };
        let state = StateBytes { replicated: 1. + random.below(4) as f64, sharded: random.below(3) as f64 };
        for replication in [GRID, Replication::Uneven] {
            let constraints = Constraints { replication, reduction, state, memory_bytes_max: Some(random.below(1000)) };
            let _ = compare(&units, &workers, &constraints);
            compare(&units, &workers, &Constraints { memory_bytes_max: None, ..constraints }).unwrap();
        }
        for stages in (1..=units.len().min(count)).filter(|&stages| count.is_multiple_of(stages)) {
            let replication = Replication::Grid { stages: Some(stages) };
            let constraints = Constraints { replication, reduction, state, memory_bytes_max: Some(random.below(1000)) };
            let _ = compare(&units, &workers, &constraints);
        }
    }
}

// ---- speed ----------------------------------------------------------------------------------------------------------

/// The time that this thread has computed. The search has one thread, so on a free core this is the time that passes; other tests
/// and other users of the machine do not add to it.
fn thread_cpu_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(text.split_whitespace().next().unwrap().parse().unwrap())
}

#[test]
fn units_200_on_1024_workers_take_less_than_a_second() {
    let mut random = Random(1024);
    let units: Vec<UnitProfile> = (0..200)
        .map(|_| {
            let compute_s = 1e-3 + random.below(1000) as f64 * 1e-5;
            unit(compute_s, random.below(100_000_000), random.below(1_000_000_000), random.below(1_000_000_000))
        })
        .collect();
    let workers = nvlink_hosts(1024, 8);
    for reduction in [GradientReduction::EachRound, GradientReduction::EachStep { micro_batches: 4096 }] {
        for replication in [GRID, Replication::Uneven] {
            for memory_bytes_max in [None, Some(80_000_000_000), Some(16_000_000_000), Some(1_000_000_000)] {
                let constraints = Constraints { reduction, memory_bytes_max, ..constraints(replication) };
                let attempt = |_| {
                    let start = thread_cpu_time();
                    let result = partition_stages(&units, &workers, &constraints);
                    let took = thread_cpu_time() - start;
                    let outcome = result.map_or_else(|error| error.to_string(), |plan| plan.to_string());
                    println!("{reduction:?}, {replication:?}: {took:?}, {}", outcome.lines().next().unwrap());
                    took
                };
                // Busy neighbors also slow down the core itself.
                assert!(
                    (0..3).map(attempt).any(|took| took < Duration::from_secs(1)),
                    "took a second or more, three times"
                );
            }
        }
    }
}
