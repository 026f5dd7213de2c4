//! A step of the drawn model: its program (`shardwise_plan::program`), simulated with durations chosen for legibility.
//!
//! What a rank computes, sends and holds comes from the simulation, so that a new instruction appears in the drawing without
//! further code. `crates/train/tests/drawings.rs` compares the calls with those of a real step.

use shardwise_plan::program::{
    Call, CallOp, Costs, GroupKind, Lane, Layout, LinkCost, MemoryKind, ModelParallel, Policy, Program, Simulation,
    Span, UnitCost, UnitSpec, build, calls, simulate_rank,
};

/// A unit of the drawn model.
struct Unit {
    /// Its name in the real model.
    name: &'static str,
    /// Its letter in the drawing.
    sign: &'static str,
    /// In elements of a block.
    size: f64,
    forward_s: f64,
    backward_s: f64,
    kept_bytes: usize,
    /// Whether its backward pass reads its parameters.
    reads: bool,
}

const fn block(name: &'static str, sign: &'static str) -> Unit {
    Unit { name, sign, size: 1., forward_s: 1.7, backward_s: 3.4, kept_bytes: 3000, reads: true }
}

const UNITS: [Unit; 5] = [
    Unit { name: "embedding", sign: "e", size: 1.2, forward_s: 0.8, backward_s: 0.9, kept_bytes: 500, reads: false },
    block("block.0", "0"),
    block("block.1", "1"),
    block("block.2", "2"),
    Unit { name: "head", sign: "h", size: 1.2, forward_s: 1.7, backward_s: 3., kept_bytes: 1500, reads: true },
];

/// The elements of a block.
const BLOCK: f64 = 1000.;
/// Four ranks shard the model, in f32.
const RANKS: Layout = Layout {
    shard: 4,
    replicate: 1,
    shard_rank: 0,
    replicate_rank: 0,
    parameter_bytes: 4,
    gradient_bytes: 4,
    model_parallel: ModelParallel::NONE,
};
/// The time to all-gather a block, and to update a quarter of it.
const GATHER_S: f64 = 0.95;
const UPDATE_S: f64 = 0.16;

/// Times that differ by less are the same.
const TICK_S: f64 = 1e-6;

/// The kinds of memory in the drawing, from the bottom. It leaves out what the pool keeps for the next unit, and the temporary
/// memory of a pass.
pub(crate) const MEMORY_KINDS: [MemoryKind; 5] = [
    MemoryKind::Optimizer,
    MemoryKind::Parameters,
    MemoryKind::Gradients,
    MemoryKind::Unsharded,
    MemoryKind::Activations,
];

/// A part of a step.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Forward,
    Backward,
    Update,
}

/// The drawn step, which is neither the first nor the last of a run.
pub(crate) struct Step {
    pub(crate) stage: u8,
    program: Program,
    simulation: Simulation,
    /// The calls in the order in which they are issued.
    pub(crate) calls: Vec<String>,
}

impl Step {
    /// Simulates a step of this stage.
    pub(crate) fn of(stage: u8) -> Self {
        let policy = Policy::stage(stage, 1);
        let specs = UNITS.map(|unit| UnitSpec::new(unit.name, (unit.size * BLOCK) as usize, unit.reads));
        let program = build::train_step(&specs, &policy);
        let simulation = simulate_rank(&program, &specs, &policy, &RANKS, &costs(stage));
        // A group of one rank has no calls.
        let is_made = |call: &Call| call.op == CallOp::Issue && RANKS.group_size(call.collective.group) > 1;
        let describe = |(_, call): (usize, Call)| {
            let unit = call.collective.unit.filter(|_| is_made(&call))?;
            Some(format!("{} {}", call.collective.kind.name(), UNITS[unit].name))
        };
        let calls = calls(&program, &specs, &policy).into_iter().filter_map(describe).collect();
        Step { stage, program, simulation, calls }
    }

    /// The time of the step.
    pub(crate) fn duration(&self) -> f64 {
        self.simulation.step_s
    }

    /// What is computed, in order.
    pub(crate) fn computed(&self) -> impl Iterator<Item = &Span> {
        self.simulation.timeline.iter().filter(|span| span.lane == Lane::Compute)
    }

    /// What is sent, or copied, in order.
    pub(crate) fn sent(&self) -> impl Iterator<Item = &Span> {
        self.simulation.timeline.iter().filter(|span| span.lane != Lane::Compute)
    }

    /// The phase of a span: the backward pass starts with the first instruction of that name.
    pub(crate) fn phase(&self, span: &Span) -> Phase {
        let is_backward = |span: &&Span| span.label.starts_with("backward");
        let backward = self.computed().find(is_backward).map_or(usize::MAX, |span| span.position);
        match span.position {
            position if position >= self.program.gradients().len() => Phase::Update,
            position if position >= backward => Phase::Backward,
            _ => Phase::Forward,
        }
    }

    /// The times at which memory may change, from the start to the end of the step.
    pub(crate) fn times(&self) -> Vec<f64> {
        let mut times = self.simulation.starts_s.clone();
        times.push(self.duration());
        times.dedup_by(|next, time| *next - *time < TICK_S);
        times
    }

    /// The bytes held just after a time: those of the last instruction that has started by then.
    pub(crate) fn held(&self, kind: MemoryKind, time: f64) -> f64 {
        let started = self.simulation.starts_s.partition_point(|&start| start < time + TICK_S);
        self.simulation.memory.during[started.saturating_sub(1)].bytes(kind) as f64
    }

    /// The bytes held between steps: those of the first instruction, which allocates nothing.
    pub(crate) fn kept(&self) -> f64 {
        MEMORY_KINDS.iter().map(|&kind| self.simulation.memory.during[0].bytes(kind) as f64).sum()
    }

    /// The peak of the bytes held.
    pub(crate) fn peak(&self) -> f64 {
        let all = |time: f64| MEMORY_KINDS.iter().map(|&kind| self.held(kind, time)).sum::<f64>();
        self.times().into_iter().map(all).fold(0., f64::max)
    }
}

/// The letter of a span's unit.
pub(crate) fn sign(span: &Span) -> &'static str {
    span.unit.map_or("", |unit| UNITS[unit].sign)
}

fn costs(stage: u8) -> Costs {
    // Without shards, each rank updates everything.
    let share = if stage == 0 { RANKS.shard as f64 } else { 1. };
    let unit = |unit: &Unit| UnitCost {
        name: unit.name.to_string(),
        forward_s: unit.forward_s,
        backward_s: unit.backward_s,
        update_s: UPDATE_S * unit.size * share,
        kept_bytes: unit.kept_bytes,
        ..UnitCost::default()
    };
    let sent_bytes = BLOCK * RANKS.parameter_bytes as f64 * (RANKS.shard - 1) as f64 / RANKS.shard as f64;
    Costs {
        units: UNITS.iter().map(unit).collect(),
        links: Costs::free_links_except(&[(GroupKind::Shard, LinkCost::new(0., sent_bytes / GATHER_S))]),
        tiers: [LinkCost::FREE; 2],
        // AdamW's state in f32.
        optimizer_element_bytes: 8,
    }
}
