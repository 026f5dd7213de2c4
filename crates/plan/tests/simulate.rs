//! Traffic equals a closed formula; time and memory are what theory says.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::time::{Duration, Instant};

use shardwise_plan::Partition;
use shardwise_plan::program::{
    ActivationCheckpointing, CallOp, CollectiveKind, Costs, GroupKind, Instruction, Lane, Layout, LinkCost, MemoryKind,
    ModelParallel, Policy, Sent, Sharding, Simulation, Tier, UnitCost, UnitSpec, build, calls, simulate_rank, traffic,
};

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    fn flip(&mut self) -> bool {
        self.below(2) == 1
    }
}

/// A random model: an embedding, blocks and a head, which may be tied to the embedding. Some elements are frozen, but not all.
fn random_units(random: &mut Random) -> Vec<UnitSpec> {
    let count = 1 + random.below(9);
    let mut units: Vec<UnitSpec> = (0..count)
        .map(|index| UnitSpec {
            frozen: if random.below(3) == 0 { random.below(100) } else { 0 },
            ..UnitSpec::new(
                &format!("unit.{index}"),
                if random.below(4) == 0 { 0 } else { random.below(200) },
                index > 0 || random.flip(),
            )
        })
        .collect();
    if count > 1 && random.flip() {
        units[count - 1].tied = Some(0);
    }
    if units.iter().all(|unit| unit.trainable == 0) {
        units[random.below(count)].trainable = 7;
    }
    units
}

fn random_policy(random: &mut Random) -> Policy {
    let checkpointing =
        [ActivationCheckpointing::None, ActivationCheckpointing::Selective, ActivationCheckpointing::Full];
    Policy {
        prefetch: random.below(5),
        activation_checkpointing: checkpointing[random.below(3)],
        reduce_each_micro_batch: random.flip(),
        ..Policy::stage(random.below(4) as u8, 1 + random.below(4))
    }
}

fn random_layout(random: &mut Random) -> Layout {
    let (shard, replicate) = (1 + random.below(9), 1 + random.below(4));
    Layout {
        shard,
        replicate,
        shard_rank: random.below(shard),
        replicate_rank: random.below(replicate),
        parameter_bytes: 2 << random.below(2),
        gradient_bytes: 2 << random.below(2),
        model_parallel: ModelParallel::NONE,
    }
}

/// Bytes by [`CollectiveKind`].
type ByKind = [u64; CollectiveKind::ALL.len()];

/// The bytes that a rank sends in a step, and also in its update. Counts how often each unit is gathered and reduced without
/// looking at a program.
fn closed_formula(units: &[UnitSpec], policy: &Policy, layout: &Layout) -> [ByKind; 2] {
    let Sharding { optimizer, gradients, parameters } = policy.sharding;
    let (shard, replicate) = ((layout.shard, layout.shard_rank), (layout.replicate, layout.replicate_rank));
    let part_len = |(size, rank): (usize, usize), len| Partition::new(len, size).part_len(rank);
    let by_gather = |group: (usize, usize), len| part_len(group, len) * (group.0 - 1);
    let by_reduce_scatter = |group: (usize, usize), len: usize| len - part_len(group, len);
    let first_trainable = units.iter().position(|unit| unit.trainable > 0).unwrap();
    let reductions = if policy.reduce_each_micro_batch { policy.micro_batches } else { 1 };
    let [mut step, mut update] = [ByKind::default(); 2];
    for (index, unit) in units.iter().enumerate() {
        if parameters {
            let gathered = |unit: &UnitSpec| by_gather(shard, unit.trainable) + by_gather(shard, unit.frozen);
            let sent = gathered(unit) + unit.tied.map_or(0, |tied| gathered(&units[tied]));
            let again = index >= first_trainable && index + 1 < units.len() && unit.backward_reads_parameters;
            let times = policy.micro_batches * (1 + usize::from(again));
            step[CollectiveKind::AllGather as usize] += (times * sent * layout.parameter_bytes) as u64;
        } else if optimizer {
            let sent = by_gather(shard, unit.trainable);
            update[CollectiveKind::AllGather as usize] += (sent * layout.parameter_bytes) as u64;
        }
        let scattered = by_reduce_scatter(shard, unit.trainable);
        let (kind, sent, summed) = if gradients || optimizer {
            (CollectiveKind::ReduceScatter, scattered, part_len(shard, unit.trainable))
        } else {
            (CollectiveKind::AllReduce, scattered + by_gather(shard, unit.trainable), unit.trainable)
        };
        let between = by_reduce_scatter(replicate, summed) + by_gather(replicate, summed);
        step[kind as usize] += (reductions * sent * layout.gradient_bytes) as u64;
        step[CollectiveKind::AllReduce as usize] += (reductions * between * layout.gradient_bytes) as u64;
    }
    [step, update]
}

#[test]
fn traffic_equals_the_closed_formula() {
    let mut random = Random(18);
    for _ in 0..4000 {
        let (units, policy, layout) =
            (random_units(&mut random), random_policy(&mut random), random_layout(&mut random));
        let sent = traffic(&build::train_step(&units, &policy), &units, &policy, &layout);
        let by_kind = |sent: &Sent| CollectiveKind::ALL.map(|kind| sent.kind_bytes(kind));
        let expected = closed_formula(&units, &policy, &layout);
        assert_eq!([by_kind(&sent.step), by_kind(&sent.update)], expected, "{units:?} {policy:?} {layout:?}");
        assert_eq!(sent.step.group_bytes(GroupKind::World), 0);
        assert_eq!(sent.total_bytes(), expected.iter().flatten().sum::<u64>());
    }
}

#[test]
fn every_wait_follows_its_call() {
    let mut random = Random(4);
    for _ in 0..1000 {
        let (units, policy) = (random_units(&mut random), random_policy(&mut random));
        let calls = calls(&build::train_step(&units, &policy), &units, &policy);
        let gathers_updates = policy.sharding.optimizer && !policy.sharding.parameters;
        let mut waited = vec![false; calls.len()];
        for (index, (_, call)) in calls.iter().enumerate() {
            match call.op {
                CallOp::Issue => (),
                CallOp::Wait { issued: Some(issued) } => {
                    assert!(issued < index && !std::mem::replace(&mut waited[issued], true));
                    assert_eq!(calls[issued].1.op, CallOp::Issue);
                    assert_eq!(calls[issued].1.collective, call.collective);
                }
                CallOp::Wait { issued: None } => assert!(gathers_updates),
            }
        }
        // Only the all-gathers of the update are left to the next step.
        let left = calls.iter().zip(&waited).filter(|((_, call), waited)| call.op == CallOp::Issue && !**waited);
        let trainable = units.iter().filter(|unit| unit.trainable > 0).count();
        assert_eq!(left.count(), if gathers_updates { trainable } else { 0 });
    }
}

/// Equal blocks of 1000 elements, which take 1 s forward and 2 s backward.
fn blocks(count: usize) -> (Vec<UnitSpec>, Vec<UnitCost>) {
    let units: Vec<UnitSpec> = (0..count).map(|index| UnitSpec::new(&format!("block.{index}"), 1000, true)).collect();
    let cost = |unit: &UnitSpec| UnitCost {
        name: unit.name.clone(),
        forward_s: 1.,
        backward_s: 2.,
        update_s: 0.25,
        norm_s: 0.125,
        kept_bytes: 600,
        selective_bytes: 300,
        output_bytes: 100,
        temporary_bytes: 50,
        ..UnitCost::default()
    };
    let costs = units.iter().map(cost).collect();
    (units, costs)
}

/// Costs with free links, except that of the shard group.
fn costs_with(units: Vec<UnitCost>, shard: LinkCost) -> Costs {
    Costs {
        units,
        links: Costs::free_links_except(&[(GroupKind::Shard, shard)]),
        tiers: [LinkCost::FREE; 2],
        optimizer_element_bytes: 8,
    }
}

/// Four ranks, one replica, f32.
const FOUR: Layout = Layout {
    shard: 4,
    replicate: 1,
    shard_rank: 0,
    replicate_rank: 0,
    parameter_bytes: 4,
    gradient_bytes: 4,
    model_parallel: ModelParallel::NONE,
};

/// A link on which four ranks gather or reduce-scatter a block of 1000 f32 elements in this time: each sends 3000 bytes.
fn link_for(block_s: f64) -> LinkCost {
    LinkCost::new(0., 3000. / block_s)
}

fn simulate_blocks(count: usize, policy: &Policy, shard: LinkCost) -> Simulation {
    let (units, costs) = blocks(count);
    simulate_rank(&build::train_step(&units, policy), &units, policy, &FOUR, &costs_with(costs, shard))
}

#[track_caller]
fn assert_close(found: f64, expected: f64) {
    assert!((found - expected).abs() < 1e-9, "{found} is not {expected}");
}

#[test]
fn without_communication_a_step_takes_the_sum_of_its_computation() {
    for stage in 0..4 {
        for micro_batches in 1..4 {
            let policy = Policy::stage(stage, micro_batches);
            let simulation = simulate_blocks(6, &policy, LinkCost::FREE);
            assert_close(simulation.step_s, 6. * (3. * micro_batches as f64 + 0.25 + 0.125));
            assert_eq!(simulation.waiting.total_s(), 0.);
            assert_eq!(simulation.communication.hidden_share(), 1.);
            let full = Policy { activation_checkpointing: ActivationCheckpointing::Full, ..policy };
            // All but the last block are recomputed.
            let again = simulate_blocks(6, &full, LinkCost::FREE).step_s - simulation.step_s;
            assert_close(again, 5. * micro_batches as f64);
        }
    }
}

#[test]
fn with_prefetch_all_communication_but_the_ends_is_hidden() {
    let simulation = simulate_blocks(8, &Policy::stage(3, 1), link_for(0.5));
    // Nothing computes during the first all-gather and the last reduce-scatter.
    assert_close(simulation.waiting.gather_s, 0.5);
    assert_close(simulation.waiting.reduce_s, 0.5);
    assert_close(simulation.waiting.total_s(), 1.);
    assert_close(simulation.step_s, 8. * 3.375 + 1.);
    // 8 all-gathers forward, 7 backward, 8 reduce-scatters.
    assert_close(simulation.communication.total_s, 23. * 0.5);
    assert_close(simulation.communication.exposed_s, 1.);
    assert_close(simulation.communication.hidden_s, 22. * 0.5 - 0.5);
}

#[test]
fn without_prefetch_no_communication_is_hidden() {
    for micro_batches in [1, 3] {
        let policy = Policy { prefetch: 0, ..Policy::stage(3, micro_batches) };
        let simulation = simulate_blocks(8, &policy, link_for(0.5));
        let calls = (15 * micro_batches + 8) as f64;
        assert_close(simulation.communication.total_s, calls * 0.5);
        assert_close(simulation.communication.exposed_s, calls * 0.5);
        assert_close(simulation.communication.hidden_s, 0.);
        assert_close(simulation.step_s, 8. * (3. * micro_batches as f64 + 0.375) + calls * 0.5);
    }
}

#[test]
fn communication_that_takes_longer_than_computation_sets_the_pace() {
    // The lane of the shard group is busy from the start to the last reduction.
    let simulation = simulate_blocks(8, &Policy::stage(3, 1), link_for(10.));
    assert!(simulation.step_s > 23. * 10.);
    assert!(simulation.communication.hidden_share() < 0.2);
    let calls = simulation.critical_path.iter().filter(|span| span.lane == Lane::Group(GroupKind::Shard));
    assert!(calls.count() > 15);
}

#[test]
fn the_all_gathers_of_an_update_are_hidden_in_the_next_step() {
    for stage in [1, 2] {
        let simulation = simulate_blocks(8, &Policy::stage(stage, 1), link_for(0.5));
        // An update takes 0.25 s and its all-gather 0.5 s, so the last five end after the step. In the next step all of them end
        // before their block's forward pass.
        let carried: Vec<_> = simulation.timeline.iter().filter(|span| span.end_s > simulation.step_s).collect();
        assert_eq!(carried.len(), 5);
        assert_close(carried[4].end_s - simulation.step_s, 8. * 0.5 + 0.25 - 8. * 0.25);
        assert_close(simulation.waiting.gather_s, 0.);
        assert_close(simulation.waiting.total_s(), 0.5);
        assert_close(simulation.communication.total_s, 16. * 0.5);
    }
}

#[test]
fn the_critical_path_is_contiguous_and_as_long_as_the_step() {
    let mut random = Random(7);
    for _ in 0..500 {
        let (units, policy, layout) =
            (random_units(&mut random), random_policy(&mut random), random_layout(&mut random));
        let cost = |unit: &UnitSpec| UnitCost {
            name: unit.name.clone(),
            forward_s: random.below(100) as f64,
            backward_s: random.below(200) as f64,
            update_s: random.below(10) as f64,
            norm_s: random.below(3) as f64,
            ..UnitCost::default()
        };
        let costs = units.iter().map(cost).collect();
        let link = LinkCost::new(1., 10.);
        let (links, tiers) = ([link; GroupKind::ALL.len()], [LinkCost::FREE; 2]);
        let costs = Costs { units: costs, links, tiers, optimizer_element_bytes: 8 };
        let simulation = simulate_rank(&build::train_step(&units, &policy), &units, &policy, &layout, &costs);
        let mut now_s = 0.;
        for span in &simulation.critical_path {
            assert!((span.start_s - now_s).abs() < 1e-6, "{span:?} does not start at {now_s}");
            now_s = span.end_s;
        }
        assert!((simulation.step_s - now_s).abs() < 1e-6);
        // The compute lane computes or waits.
        let computing = simulation.timeline.iter().filter(|span| span.lane == Lane::Compute);
        let computing_s: f64 = computing.map(|span| span.end_s - span.start_s).sum();
        assert!((simulation.step_s - computing_s - simulation.waiting.total_s()).abs() < 1e-6);
        // Calls of a group run one at a time.
        for group in GroupKind::ALL {
            let mut free_s = 0.;
            for span in simulation.timeline.iter().filter(|span| span.lane == Lane::Group(group)) {
                assert!(span.start_s > free_s - 1e-6, "{span:?} starts before {free_s}");
                free_s = span.end_s;
            }
        }
    }
}

fn kind_bytes(simulation: &Simulation, kind: MemoryKind) -> usize {
    simulation.memory.kind_peak(kind).0
}

#[test]
fn each_stage_shards_more_memory() {
    let elements = 8 * 1000;
    let of_stage = |stage| simulate_blocks(8, &Policy::stage(stage, 1), LinkCost::FREE);
    let stages: Vec<Simulation> = (0..4).map(of_stage).collect();
    let bytes = |kind| stages.iter().map(|simulation| kind_bytes(simulation, kind)).collect::<Vec<_>>();
    let [all, sharded] = [elements * 4, elements];
    assert_eq!(bytes(MemoryKind::Optimizer), [2 * all, 2 * sharded, 2 * sharded, 2 * sharded]);
    assert_eq!(bytes(MemoryKind::Gradients), [all, all, sharded, sharded]);
    assert_eq!(bytes(MemoryKind::Parameters), [all, all, all, sharded]);
    assert_eq!(bytes(MemoryKind::Activations), [8 * 600; 4]);
    // With one block of prefetch, two blocks' gradients are unsharded at once. A block's parameters are released before its
    // gradients are accumulated, so only the next block's are added.
    assert_eq!(bytes(MemoryKind::Unsharded), [0, 0, 2 * 4000, 3 * 4000]);
    let totals: Vec<usize> = stages.iter().map(|simulation| simulation.memory.peak().total_bytes()).collect();
    assert!(totals.is_sorted_by(|a, b| a > b), "{totals:?}");
}

#[test]
fn the_peak_moves_with_what_dominates() {
    let peak_instruction = |kept_bytes: usize| {
        let (units, mut costs) = blocks(4);
        costs.iter_mut().for_each(|cost| cost.kept_bytes = kept_bytes);
        let policy = Policy::stage(0, 1);
        let program = build::train_step(&units, &policy);
        let costs = costs_with(costs, LinkCost::FREE);
        let simulation = simulate_rank(&program, &units, &policy, &FOUR, &costs);
        program.describe(&program.instructions[simulation.memory.peak_position])
    };
    // A block's gradients have 4000 bytes.
    assert_eq!(peak_instruction(10), "accumulate block.0 micro-batch=0");
    assert_eq!(peak_instruction(9000), "backward block.3 micro-batch=0");
}

#[test]
fn checkpointing_and_accumulation_change_memory() {
    let none = Policy::stage(2, 1);
    let activations = |activation_checkpointing| {
        let policy = Policy { activation_checkpointing, ..none };
        kind_bytes(&simulate_blocks(8, &policy, LinkCost::FREE), MemoryKind::Activations)
    };
    assert_eq!(activations(ActivationCheckpointing::None), 8 * 600);
    assert_eq!(activations(ActivationCheckpointing::Selective), 8 * 300);
    // The outputs of seven blocks, what one of them keeps when it is recomputed, and the gradient of its output.
    assert_eq!(activations(ActivationCheckpointing::Full), 7 * 100 + 600 + 100);
    // Gradients that are reduced once per step stay unsharded until then.
    let unsharded = |reduce_each_micro_batch| {
        let policy = Policy { reduce_each_micro_batch, ..Policy::stage(2, 2) };
        kind_bytes(&simulate_blocks(8, &policy, LinkCost::FREE), MemoryKind::Unsharded)
    };
    assert_eq!(unsharded(false), 8 * 4000);
    assert!(unsharded(true) < 8 * 4000);
}

#[test]
fn without_prefetch_the_pool_has_one_buffer() {
    let policy = Policy { prefetch: 0, ..Policy::stage(3, 1) };
    let simulation = simulate_blocks(8, &policy, LinkCost::FREE);
    // Parameters and gradients take turns.
    assert_eq!(kind_bytes(&simulation, MemoryKind::Unsharded), 4000);
    // The pool keeps its buffers, so its size is the same throughout the step.
    for memory in &simulation.memory.during {
        assert_eq!(memory.bytes(MemoryKind::Unsharded) + memory.bytes(MemoryKind::FreeInPool), 4000);
    }
}

#[test]
fn a_tied_gradient_exists_from_the_heads_backward_pass() {
    let (mut units, costs) = blocks(3);
    units[2].tied = Some(0);
    let policy = Policy::stage(0, 1);
    let program = build::train_step(&units, &policy);
    let simulation = simulate_rank(&program, &units, &policy, &FOUR, &costs_with(costs, LinkCost::FREE));
    let during = |text: &str| {
        let position = program.instructions.iter().position(|instruction| program.describe(instruction) == text);
        simulation.memory.during[position.unwrap()].bytes(MemoryKind::Gradients)
    };
    assert_eq!(during("accumulate block.2 micro-batch=0"), 2 * 4000);
    assert_eq!(during("accumulate block.1 micro-batch=0"), 3 * 4000);
    assert_eq!(during("update block.2"), 4000);
}

#[test]
fn costs_are_read_as_they_were_printed() {
    let (_, units) = blocks(2);
    let costs = costs_with(units, LinkCost::new(1.5e-5, 1.1e9 / 3.));
    let text = costs.to_string();
    assert_eq!(text.parse(), Ok(costs));
    assert_eq!(text.lines().count(), 1 + 3 + 2);
    let mistake = |text: &str| text.parse::<Costs>().unwrap_err().to_string();
    assert_eq!(mistake(&text.replace("norm_s", "nrm_s")), "line 5: norm_s=… is missing");
    assert_eq!(mistake(&text.replace("link shard", "link chard")), "line 3: there is no group 'chard'");
    assert_eq!(
        mistake(&text.replace("forward_s=1 ", "forward_s=-1 ")),
        "line 5: forward_s=-1 is not a number of at least 0"
    );
    assert_eq!(
        mistake(&text.replace("element_bytes=8", "element_bytes=8 states=2")),
        "line 1: states is unknown, or given twice"
    );
    assert_eq!(mistake("optimizer element_bytes=8"), "line 1: the line 'link world …' is missing");
}

/// The shape of a 405B model: 126 blocks, hidden size 16384, vocabulary 128256.
fn units_405b() -> Vec<UnitSpec> {
    let (hidden, intermediate, key_value, vocab) = (16_384, 53_248, 1024, 128_256);
    let block = 2 * hidden * hidden + 2 * hidden * key_value + 3 * hidden * intermediate + 2 * hidden;
    let blocks = (0..126).map(|index| UnitSpec::new(&format!("block.{index}"), block, true));
    let embedding = UnitSpec::new("embedding", vocab * hidden, false);
    let head = UnitSpec::new("head", vocab * hidden + hidden, true);
    std::iter::once(embedding).chain(blocks).chain([head]).collect()
}

#[test]
fn a_405b_step_on_16384_ranks_simulates_in_under_a_second() {
    let start = Instant::now();
    let units = units_405b();
    let elements: usize = units.iter().map(|unit| unit.trainable).sum();
    assert_eq!(elements / 1_000_000_000, 405);
    let cost = |unit: &UnitSpec| UnitCost {
        name: unit.name.clone(),
        forward_s: unit.trainable as f64 * 8192. * 2. / 4e14,
        backward_s: unit.trainable as f64 * 8192. * 4. / 4e14,
        update_s: unit.trainable as f64 / 512. / 1e11,
        norm_s: unit.trainable as f64 / 512. / 1e12,
        kept_bytes: 8192 * 16_384 * 34,
        selective_bytes: 8192 * 16_384 * 20,
        output_bytes: 8192 * 16_384 * 2,
        temporary_bytes: 8192 * 16_384 * 20,
        ..UnitCost::default()
    };
    let link = LinkCost::new(1e-4, 4e10);
    let (links, tiers) = ([link; GroupKind::ALL.len()], [LinkCost::FREE; 2]);
    let costs = Costs { units: units.iter().map(cost).collect(), links, tiers, optimizer_element_bytes: 12 };
    let policy = Policy { activation_checkpointing: ActivationCheckpointing::Full, ..Policy::stage(3, 4) };
    let program = build::train_step(&units, &policy);
    for (shard, replicate) in [(16_384, 1), (512, 32)] {
        let (parameter_bytes, gradient_bytes) = (2, 4);
        let layout = Layout { shard, replicate, parameter_bytes, gradient_bytes, ..FOUR };
        let simulation = simulate_rank(&program, &units, &policy, &layout, &costs);
        assert!(simulation.step_s > 1. && simulation.communication.hidden_share() > 0.5, "{}", simulation.step_s);
        assert!(simulation.memory.peak().bytes(MemoryKind::Parameters) <= 2 * elements / shard + 2 * units.len());
    }
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
}

#[test]
fn frozen_parameters_stay_on_the_disk_during_an_update() {
    let (trainable, frozen) = (100, 60);
    let unit = UnitSpec { frozen, update_reads_parameters: false, ..UnitSpec::new("unit", trainable, true) };
    let units = vec![unit; 3];
    let policy = Policy { parameter_tier: Some(Tier::Disk), ..Policy::stage(3, 1) };
    let layout = Layout { shard: 1, parameter_bytes: 2, ..FOUR };
    let links = [LinkCost::FREE; GroupKind::ALL.len()];
    let tier = LinkCost::new(0., 1.);
    let units_costs = units.iter().map(|unit| UnitCost { name: unit.name.clone(), ..UnitCost::default() }).collect();
    let costs = Costs { units: units_costs, links, tiers: [tier; 2], optimizer_element_bytes: 12 };
    let program = build::train_step(&units, &policy);
    let simulation = simulate_rank(&program, &units, &policy, &layout, &costs);
    let bytes_during = |searched| {
        let position = program.instructions.iter().position(|instruction| *instruction == searched).expect("no update");
        simulation.memory.during[position].bytes(MemoryKind::Parameters)
    };
    // The first update writes its unit's shard; the second also holds what is being stored.
    assert_eq!(bytes_during(Instruction::Update(0)), 2 * trainable);
    // Nothing else takes time: each shard is fetched for the forward and the backward pass, which the last unit has at once, and its
    // trainable part is stored.
    let read_bytes = 5 * 2 * (trainable + frozen);
    let written_bytes = 3 * 2 * trainable;
    assert_eq!(simulation.step_s, (read_bytes + written_bytes) as f64);
}

#[test]
fn what_a_step_leaves_to_store_takes_time_in_the_next_one() {
    let units: Vec<UnitSpec> = (0..6).map(|index| UnitSpec::new(&format!("unit.{index}"), 100, true)).collect();
    let layout = Layout { shard: 1, parameter_bytes: 2, ..FOUR };
    let (links, tiers) = ([LinkCost::FREE; GroupKind::ALL.len()], [LinkCost::new(0., 1.); 2]);
    let costs = || {
        let units = units.iter().map(|unit| UnitCost { name: unit.name.clone(), ..UnitCost::default() }).collect();
        Costs { units, links, tiers, optimizer_element_bytes: 12 }
    };
    for prefetch in 0..4 {
        for (update_in_backward, update_in_forward) in [(true, false), (false, true), (true, true)] {
            let optimizer_tier = Some(Tier::Disk);
            let policy =
                Policy { update_in_backward, update_in_forward, prefetch, optimizer_tier, ..Policy::stage(3, 1) };
            let program = build::train_step(&units, &policy);
            let simulation = simulate_rank(&program, &units, &policy, &layout, &costs());
            // Nothing else takes time: all states are read and written.
            let moved_bytes = 6 * 2 * 100 * 12;
            assert_eq!(simulation.step_s, f64::from(moved_bytes), "{policy:?}");
        }
    }
}
