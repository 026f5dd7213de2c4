//! Bubbles, messages, cores, links and tiers cost what formulas say, also on many ranks.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use shardwise_plan::pipeline::PipelineSchedule;
use shardwise_plan::program::{
    ActivationCheckpointing, Buffer, Codec, CollectiveKind, Costs, GroupKind, InnerCollective, InnerCollectives,
    Instruction, LinkCost, MemoryKind, Offload, Policy, Program, Programs, Rule, Sent, SharedLink, Simulation, Tier,
    Topology, UnitCost, UnitSpec, build, check, simulate, simulate_rank, traffic,
};
use shardwise_plan::{Axis, Mesh};
use support::pipeline::{assert_close, blocks, costs, pipeline, topology};

const STAGES: usize = 4;
const MICRO_BATCHES: usize = 8;

fn four_stages() -> Mesh {
    Mesh::new(&[(Axis::Pipeline, STAGES), (Axis::Shard, 2)]).unwrap()
}

// ---- time -----------------------------------------------------------------------------------------------------------

#[test]
fn bubbles_are_those_of_the_formula() {
    for schedule in [PipelineSchedule::GPipe, PipelineSchedule::OneFOneB] {
        for (stages, micro_batches) in [(4, 8), (2, 2), (8, 8), (4, 32)] {
            let units = blocks(2 * stages);
            let policy = Policy::stage(0, micro_batches);
            let mesh = Mesh::new(&[(Axis::Pipeline, stages), (Axis::Shard, 2)]).unwrap();
            let programs = pipeline(&units, &policy, stages, schedule.clone());
            let simulation = simulate(&programs, &units, &policy, &topology(mesh), &costs(&units));
            let (p, m) = (stages as f64, micro_batches as f64);
            assert_close(simulation.step_s, (m + p - 1.) * 6.);
            for rank in &simulation.programs {
                assert_close(rank.waiting.bubble_s / rank.step_s, (p - 1.) / (m + p - 1.));
                assert_close(rank.waiting.total_s(), rank.waiting.bubble_s);
                let path_s: f64 = rank.critical_path.iter().map(|span| span.end_s - span.start_s).sum();
                assert_close(path_s, rank.step_s);
            }
            // The first micro-batch passes all stages before the first backward pass, so the critical path does, too.
            let ranks: BTreeSet<usize> = simulation.slowest().critical_path.iter().map(|span| span.rank).collect();
            assert_eq!(ranks.len(), stages);
        }
    }
}

#[test]
fn one_forward_one_backward_holds_the_activations_of_as_many_micro_batches_as_later_stages() {
    let (units, policy) = (blocks(STAGES), Policy::stage(0, MICRO_BATCHES));
    let peaks = |schedule| {
        let programs = pipeline(&units, &policy, STAGES, schedule);
        let simulation = simulate(&programs, &units, &policy, &topology(four_stages()), &costs(&units));
        let peak = |rank: &Simulation| rank.memory.kind_peak(MemoryKind::Activations).0;
        simulation.programs.iter().map(peak).collect::<Vec<_>>()
    };
    let own = |micro_batches: usize| micro_batches * 600;
    // Besides its own activations, a rank holds received ones, and gradients that it receives.
    let gpipe = peaks(PipelineSchedule::GPipe);
    assert!(gpipe.iter().all(|&peak| (own(8)..own(9)).contains(&peak)), "{gpipe:?}");
    let alternating = peaks(PipelineSchedule::OneFOneB);
    for (stage, peak) in alternating.iter().enumerate() {
        assert!((own(STAGES - stage)..own(STAGES - stage + 1)).contains(peak), "{alternating:?}");
    }
}

#[test]
fn messages_take_time_unless_they_are_hidden() {
    let (units, policy) = (blocks(2), Policy::stage(0, 1));
    let programs = pipeline(&units, &policy, 2, PipelineSchedule::GPipe);
    let link = SharedLink::unshared(LinkCost::new(0.5, 64.));
    let topology = Topology { between_hosts: link, ..topology(Mesh::new(&[(Axis::Pipeline, 2)]).unwrap()) };
    let step_s =
        |topology: &Topology, units: &[UnitSpec]| simulate(&programs, units, &policy, topology, &costs(units)).step_s;
    // One forward and one backward pass on each stage, and a message of 32 bytes each way; the totals of two ranks.
    let totals_s = 2. * 0.5;
    assert_close(step_s(&topology, &units), 6. + 2. * (0.5 + 0.5) + totals_s);
    // Within a host the link is free.
    assert_close(step_s(&Topology { ranks_per_host: 2, cores_per_host: 2, ..topology }, &units), 6.);
    // Half the bytes in bf16.
    let in_bf16 = |programs: &Programs| {
        let text = programs.stages.iter().map(|program| {
            let with_codec = |line: &str| match line.contains("activations") || line.contains("-gradients") {
                true => format!("{line} codec=bf16\n"),
                false => format!("{line}\n"),
            };
            program.to_string().lines().map(with_codec).collect::<String>().parse::<Program>().unwrap()
        });
        Programs::pipeline(text.collect())
    };
    let programs = in_bf16(&programs);
    assert_eq!(check(&programs, &units, &policy, &topology.mesh), Ok(()));
    let simulation = simulate(&programs, &units, &policy, &topology, &costs(&units));
    assert_close(simulation.step_s, 6. + 2. * (0.5 + 0.25) + totals_s);
    assert_eq!(simulation.programs.iter().map(|rank| rank.traffic.step.message_bytes()).collect::<Vec<_>>(), [16, 16]);
}

#[test]
fn scarce_cores_and_shared_links_slow_a_step_down() {
    let (units, policy) = (blocks(4), Policy { prefetch: 0, ..Policy::stage(3, 1) });
    let programs = Programs::uniform(build::train_step(&units, &policy));
    let mesh = Mesh::new(&[(Axis::Shard, 4)]).unwrap();
    let simulate = |topology: &Topology| simulate(&programs, &units, &policy, topology, &costs(&units)).step_s;
    let free = Topology { ranks_per_host: 4, cores_per_host: 8, threads_per_rank: 2, ..topology(mesh) };
    assert_close(simulate(&free), 12.);
    // Four ranks of two threads on two cores.
    let scarce = Topology { cores_per_host: 2, ..free };
    assert_close(scarce.slowdown(), 4.);
    assert_close(simulate(&scarce), 4. * 12.);
    // Nothing is hidden without prefetch, except reductions: seven all-gathers of 48 of 64 elements, and at the end a reduction.
    let gathers_s = |bytes_per_s: f64| 7. * 48. * 4. / bytes_per_s;
    let within = |ranks| SharedLink { cost: LinkCost::new(0., 192.), ranks };
    let unshared_s = simulate(&Topology { within_host: within(1), ..free });
    let shared_s = simulate(&Topology { within_host: within(4), ..free });
    assert_close(shared_s - 12., 4. * (unshared_s - 12.));
    assert!(unshared_s > 12. + gathers_s(192.), "{unshared_s}");
    // Two hosts of two ranks: the link between hosts counts.
    let between_hosts = SharedLink { cost: LinkCost::new(0., 192.), ranks: 2 };
    let hosts = Topology { ranks_per_host: 2, between_hosts, ..free };
    assert_close(simulate(&hosts) - 12., 2. * (unshared_s - 12.));
    // Communication takes CPU time only if no core is left for it.
    let copies = SharedLink::unshared(LinkCost { cpu_s_per_byte: 1e-3, ..LinkCost::FREE });
    let cpu_s = |cores_per_host| simulate(&Topology { within_host: copies, cores_per_host, ..free });
    assert_close(cpu_s(9), 12.);
    // Each pass pays for the all-gather before it, and each but the last for the reduction of the pass before.
    assert_close(cpu_s(8), 12. + (7. + 3.) * 48. * 4. * 1e-3);
}

// ---- inside units, and outside the device ---------------------------------------------------------------------------

#[test]
fn collectives_inside_units_are_counted_and_take_time() {
    let reduce = InnerCollective {
        group: GroupKind::Tensor,
        kind: CollectiveKind::AllReduce,
        bytes: 4096,
        row_bytes: 1,
        overlap: 0.,
        uneven: None,
    };
    let exchange = InnerCollective {
        group: GroupKind::Expert,
        kind: CollectiveKind::AllToAll,
        bytes: 800,
        row_bytes: 1,
        overlap: 0.,
        uneven: None,
    };
    let inner = InnerCollectives {
        forward: vec![reduce, exchange, exchange],
        recompute: vec![exchange],
        backward: vec![reduce, reduce],
    };
    let units: Vec<UnitSpec> = blocks(4).into_iter().map(|unit| UnitSpec { inner: inner.clone(), ..unit }).collect();
    let activation_checkpointing = ActivationCheckpointing::Full;
    let policy = Policy { activation_checkpointing, ..Policy::stage(0, 2) };
    let mesh = Mesh::new(&[(Axis::Pipeline, 2), (Axis::Shard, 2), (Axis::Expert, 4), (Axis::Tensor, 8)]).unwrap();
    let programs = pipeline(&units, &policy, 2, PipelineSchedule::OneFOneB);
    assert_eq!(check(&programs, &units, &policy, &mesh), Ok(()));
    let link = SharedLink::unshared(LinkCost::new(0.25, f64::INFINITY));
    let topology = Topology { between_hosts: link, ..topology(mesh) };
    let simulation = simulate(&programs, &units, &policy, &topology, &costs(&units));
    // The last unit is not recomputed.
    for (rank, recomputed) in simulation.programs.iter().zip([4, 2]) {
        let sent = &rank.traffic.step;
        // Two units per stage and two micro-batches. An all-reduce sends 7/8 of its bytes twice, an all-to-all 3/4 once.
        assert_eq!(sent.bytes(GroupKind::Tensor, CollectiveKind::AllReduce), 4 * 3 * 2 * 4096 * 7 / 8);
        assert_eq!(sent.bytes(GroupKind::Expert, CollectiveKind::AllToAll), (4 * 2 + recomputed) * 800 * 3 / 4);
        assert_close(rank.waiting.inner_s, (4. * 5. + recomputed as f64) * 0.25);
    }
}

#[test]
fn a_pass_computes_while_its_collectives_are_under_way() {
    let (policy, mesh) = (Policy::stage(0, 1), Mesh::new(&[(Axis::Tensor, 2)]).unwrap());
    let link = SharedLink::unshared(LinkCost::new(0.25, f64::INFINITY));
    let waiting_s = |overlaps: [f64; 2], splits_backward: bool| {
        let (group, kind) = (GroupKind::Tensor, CollectiveKind::AllReduce);
        let passes = overlaps
            .map(|overlap| InnerCollective { group, kind, bytes: 64, row_bytes: 1, overlap, uneven: None })
            .to_vec();
        let inner = InnerCollectives { forward: passes.clone(), recompute: Vec::new(), backward: passes };
        let units: Vec<UnitSpec> =
            blocks(1).into_iter().map(|unit| UnitSpec { inner: inner.clone(), ..unit }).collect();
        let mut programs = pipeline(&units, &policy, 1, PipelineSchedule::OneFOneB);
        if splits_backward {
            let text = programs.of(0, &mesh).to_string();
            let (whole, halves) = (
                "\nbackward block.0 micro-batch=0\n",
                "\nbackward-input block.0 micro-batch=0\nbackward-weight block.0 micro-batch=0\n",
            );
            assert!(text.contains(whole));
            programs = Programs::uniform(text.replace(whole, halves).parse().unwrap());
        }
        assert_eq!(check(&programs, &units, &policy, &mesh), Ok(()));
        let topology = Topology { between_hosts: link, ..topology(mesh) };
        simulate(&programs, &units, &policy, &topology, &costs(&units)).slowest().waiting.inner_s
    };
    // A forward pass takes 1 s, a backward pass 2 s, and a call 0.25 s.
    assert_close(waiting_s([0., 0.], false), 4. * 0.25);
    assert_close(waiting_s([0.1, 0.], false), (0.15 + 0.25) + (0.05 + 0.25));
    assert_close(waiting_s([0.5, 0.25], false), 0.);
    // The first half of a backward pass has nothing to compute meanwhile.
    assert_close(waiting_s([0.5, 0.25], true), 2. * 0.25);
}

#[test]
fn offloaded_buffers_are_fetched_before_they_are_used() {
    let policy = Policy { optimizer_tier: Some(Tier::Host), activation_tier: Some(Tier::Disk), ..Policy::stage(0, 1) };
    let (units, mesh) = (blocks(1), Mesh::new(&[(Axis::Shard, 2)]).unwrap());
    let text = "units block.0
count-tokens
start-fetch block.0 buffer=optimizer tier=host
forward block.0 micro-batch=0 keep=all
start-store block.0 buffer=activations micro-batch=0 tier=disk
wait-store block.0 buffer=activations micro-batch=0 tier=disk
start-fetch block.0 buffer=activations micro-batch=0 tier=disk
wait-fetch block.0 buffer=activations micro-batch=0 tier=disk
backward block.0 micro-batch=0
accumulate block.0 micro-batch=0
start-reduce block.0
wait-reduce block.0
norm block.0
reduce-totals
wait-fetch block.0 buffer=optimizer tier=host
update block.0
start-store block.0 buffer=optimizer tier=host
wait-store block.0 buffer=optimizer tier=host
";
    let program: Program = text.parse().unwrap();
    let problem = |program: &Program| check(&Programs::uniform(program.clone()), &units, &policy, &mesh).err();
    assert_eq!(problem(&program), None);
    let without = |line: &str| text.replace(line, "").parse::<Program>().unwrap();
    for line in text.lines().filter(|line| line.contains("tier=")) {
        let violation = problem(&without(&format!("{line}\n"))).unwrap();
        assert_eq!(violation.rule, Rule::Tiers, "{line}: {violation}");
    }
    let violation = problem(&without("wait-fetch block.0 buffer=optimizer tier=host\n")).unwrap();
    let expected = "(update block.0): the optimizer states of block.0 are being fetched, but must be on the device";
    assert!(violation.to_string().ends_with(expected), "{violation}");

    let [host, disk] = [LinkCost::new(0., 256.), LinkCost::new(0., 600.)];
    let costs = Costs { tiers: [host, disk], ..costs(&units) };
    let layout = topology(mesh).layout(0);
    let simulation = simulate_rank(&program, &units, &policy, &layout, &costs);
    // 64 × 8 bytes of optimizer state to and from the host at 256 bytes per second, the first copy hidden; 600 bytes of
    // activations to and from the disk. Copies go one at a time.
    assert_close(simulation.step_s, 3. + 2. + 1. + 1. + 1.);
    assert_close(simulation.waiting.copies_s, 2. + 1. + 1. + 1.);
    let during = |text: &str, kind| {
        let position = program.instructions.iter().position(|instruction| program.describe(instruction) == text);
        simulation.memory.during[position.unwrap()].bytes(kind)
    };
    assert_eq!(during("count-tokens", MemoryKind::Optimizer), 0);
    assert_eq!(during("update block.0", MemoryKind::Optimizer), 512);
    let fetch = Offload { unit: 0, buffer: Buffer::Activations { micro_batch: 0 }, tier: Tier::Disk };
    let fetch = program.describe(&Instruction::StartFetch(fetch));
    assert_eq!(during("forward block.0 micro-batch=0 keep=all", MemoryKind::Activations), 600);
    assert_eq!(during(&fetch, MemoryKind::Activations), 600);
}

#[test]
fn a_codec_changes_the_bytes_of_gathers_and_reductions() {
    let (units, policy) = (blocks(3), Policy::stage(3, 1));
    let mut program = build::train_step(&units, &policy);
    let layout = topology(Mesh::new(&[(Axis::Replicate, 2), (Axis::Shard, 4)]).unwrap()).layout(0);
    let before = traffic(&program, &units, &policy, &layout).step;
    for instruction in &mut program.instructions {
        match instruction {
            Instruction::StartGather { codec, .. } => *codec = Codec::Bf16,
            Instruction::StartReduce { codec, .. } => *codec = Codec::Int8,
            _ => (),
        }
    }
    let after = traffic(&program, &units, &policy, &layout).step;
    let bytes = |sent: &Sent| CollectiveKind::ALL.map(|kind| sent.kind_bytes(kind));
    let [gather, scatter, reduce, _] = bytes(&before);
    assert_eq!(bytes(&after), [gather / 2, scatter / 4, reduce / 4, 0]);
}

// ---- size -----------------------------------------------------------------------------------------------------------

/// The peak of this process's memory in KiB, if the system tells.
fn peak_kib() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.split_whitespace().next()?.parse().ok()
}

#[test]
fn a_405b_pipeline_on_16384_ranks_is_built_checked_and_simulated_in_seconds() {
    let start = Instant::now();
    let (stages, tensor, hidden, seq_len) = (16, 8, 16_384, 8192);
    let (intermediate, key_value, vocab) = (53_248, 1024, 128_256);
    let block = 2 * hidden * hidden + 2 * hidden * key_value + 3 * hidden * intermediate + 2 * hidden;
    let output_bytes = seq_len * hidden * 2;
    let reduce = InnerCollective {
        group: GroupKind::Tensor,
        kind: CollectiveKind::AllReduce,
        bytes: output_bytes,
        row_bytes: 1,
        overlap: 0.,
        uneven: None,
    };
    let passes = vec![reduce; 2];
    let inner = InnerCollectives { forward: passes.clone(), recompute: passes.clone(), backward: passes };
    // 126 blocks, the embedding and the head.
    let elements = std::iter::once(vocab * hidden).chain([block; 126]).chain([vocab * hidden + hidden]);
    let unit = |(index, elements): (usize, usize)| UnitSpec {
        output_bytes,
        inner: inner.clone(),
        ..UnitSpec::new(&format!("unit.{index}"), elements / tensor, index > 0)
    };
    let units: Vec<UnitSpec> = elements.enumerate().map(unit).collect();
    assert_eq!(units.iter().map(|unit| unit.trainable * tensor).sum::<usize>() / 1_000_000_000, 405);
    let cost = |unit: &UnitSpec| UnitCost {
        name: unit.name.clone(),
        forward_s: unit.trainable as f64 * seq_len as f64 * 2. / 4e14,
        backward_s: unit.trainable as f64 * seq_len as f64 * 4. / 4e14,
        update_s: unit.trainable as f64 / 128. / 1e11,
        norm_s: unit.trainable as f64 / 128. / 1e12,
        output_bytes,
        kept_bytes: 17 * output_bytes / tensor,
        ..UnitCost::default()
    };
    let costs = Costs { units: units.iter().map(cost).collect(), ..costs(&units) };
    let mesh = Mesh::new(&[(Axis::Pipeline, stages), (Axis::Shard, 128), (Axis::Tensor, tensor)]).unwrap();
    assert_eq!(mesh.ranks(), 16_384);
    let topology = Topology {
        ranks_per_host: 8,
        threads_per_rank: 0,
        within_host: SharedLink::unshared(LinkCost::new(1e-5, 4e11)),
        between_hosts: SharedLink::unshared(LinkCost::new(2e-5, 4e10)),
        parameter_bytes: 2,
        ..topology(mesh)
    };
    let activation_checkpointing = ActivationCheckpointing::Full;
    for (stage, schedule) in [(1, "1f1b"), (3, "1f1b"), (1, "interleaved-1f1b:4"), (1, "zb-v")] {
        let policy = Policy { activation_checkpointing, ..Policy::stage(stage, 32) };
        let programs = pipeline(&units, &policy, stages, schedule.parse::<PipelineSchedule>().unwrap());
        let (built, checking) = (start.elapsed(), Instant::now());
        assert_eq!(check(&programs, &units, &policy, &mesh), Ok(()));
        let (checked, simulating) = (checking.elapsed(), Instant::now());
        assert!(checked < Duration::from_secs(1), "{checked:?}");
        let simulation = simulate(&programs, &units, &policy, &topology, &costs);
        let (simulated, step_s) = (simulating.elapsed(), simulation.step_s);
        println!(
            "{schedule}, stage {stage}: {built:?}, checked in {checked:?}, simulated in {simulated:?}; a step of {step_s:.2} s"
        );
        let bubble = |rank: &Simulation| rank.waiting.bubble_s / rank.step_s;
        let expected = if schedule == "1f1b" { 0.2 } else { 0.05 };
        assert!(simulation.programs.len() == stages && simulation.programs.iter().all(|rank| bubble(rank) > expected));
    }
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    println!("peak: {:?} KiB", peak_kib());
    assert!(peak_kib().is_none_or(|kib| kib < 1 << 20), "{:?}", peak_kib());
}
