//! A timeline of a step: the instructions of its program (`crates/plan/src/program.rs`), with durations chosen for legibility.
//!
//! A pass computes and waits for calls, which run one at a time in the background. Waits and memory are as in the real step and in
//! `crates/zero`; `crates/train/tests/drawings.rs` compares the calls with those of a real step.

use shardwise_plan::program::{Instruction, Policy, Program, UnitSpec, build};

/// A unit of the drawn model.
pub(crate) struct Unit {
    /// Its name in the real model.
    pub(crate) name: &'static str,
    /// Its letter in the drawing.
    pub(crate) sign: &'static str,
    size: f64,
    forward: f64,
    backward: f64,
    activations: f64,
    /// Whether its backward pass reads its parameters.
    reads: bool,
}

const fn block(name: &'static str, sign: &'static str) -> Unit {
    Unit { name, sign, size: 1., forward: 1.7, backward: 3.4, activations: 3., reads: true }
}

pub(crate) const UNITS: [Unit; 5] = [
    Unit { name: "embedding", sign: "e", size: 1.2, forward: 0.8, backward: 0.9, activations: 0.5, reads: false },
    block("block.0", "0"),
    block("block.1", "1"),
    block("block.2", "2"),
    Unit { name: "head", sign: "h", size: 1.2, forward: 1.7, backward: 3., activations: 1.5, reads: true },
];

/// The number of ranks among which units are sharded.
const RANKS: f64 = 4.;
/// Bytes per element of parameters, gradients and AdamW's state, all in f32.
const BYTES: [f64; 3] = [4., 4., 8.];
const UPDATE: f64 = 0.16;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Forward,
    Backward,
    Update,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verb {
    AllGather,
    ReduceScatter,
    AllReduce,
}

impl Verb {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Verb::AllGather => "all-gather",
            Verb::ReduceScatter => "reduce-scatter",
            Verb::AllReduce => "all-reduce",
        }
    }
}

/// An interval of time.
pub(crate) struct Span<T> {
    pub(crate) what: T,
    pub(crate) unit: usize,
    pub(crate) start: f64,
    pub(crate) end: f64,
}

/// A kind of memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemoryKind {
    Optimizer,
    Parameters,
    Gradients,
    Activations,
}

pub(crate) const MEMORY_KINDS: [MemoryKind; 4] =
    [MemoryKind::Optimizer, MemoryKind::Parameters, MemoryKind::Gradients, MemoryKind::Activations];

/// The drawn step, with the step before and the step after it.
pub(crate) struct Step {
    pub(crate) stage: u8,
    pub(crate) computed: Vec<Span<Phase>>,
    pub(crate) calls: Vec<Span<Verb>>,
    /// The time, kind and size of every change in memory. Memory that is held between steps was allocated before the first step.
    changes: Vec<(f64, MemoryKind, f64)>,
    /// The start of the step, and that of the next one.
    pub(crate) start: f64,
    pub(crate) end: f64,
}

impl Step {
    /// Simulates a step of this stage that is neither the first nor the last of a run.
    pub(crate) fn of(stage: u8) -> Self {
        let specs = UNITS.map(|unit| UnitSpec::new(unit.name, 1, unit.reads));
        let program = build::train_step(&specs, &Policy::stage(stage, 1));
        let mut clock = Clock::new(stage);
        clock.step(&program);
        let start = clock.now;
        clock.step(&program);
        let end = clock.now;
        clock.step(&program);
        Step { stage, computed: clock.computed, calls: clock.calls, changes: clock.changes, start, end }
    }

    /// The calls that the step starts, in order.
    pub(crate) fn requested(&self) -> impl Iterator<Item = &Span<Verb>> {
        let per_step = self.calls.len() / 3;
        self.calls.iter().skip(per_step).take(per_step)
    }

    /// The times between `from` and `to` at which memory changes.
    pub(crate) fn times(&self, from: f64, to: f64) -> Vec<f64> {
        let mut times: Vec<f64> = self.changes.iter().map(|change| change.0).filter(|&t| from < t && t < to).collect();
        times.push(from);
        times.push(to);
        times.sort_by(f64::total_cmp);
        times.dedup();
        times
    }

    /// The bytes held just after a time.
    pub(crate) fn held(&self, kind: MemoryKind, time: f64) -> f64 {
        let until_then = |change: &&(f64, MemoryKind, f64)| change.0 <= time && change.1 == kind;
        self.changes.iter().filter(until_then).map(|change| change.2).sum()
    }

    /// The bytes held between steps.
    pub(crate) fn kept(&self) -> f64 {
        MEMORY_KINDS.iter().map(|&kind| self.held(kind, self.start - 1e-6)).sum()
    }

    /// The peak of the bytes held.
    pub(crate) fn peak(&self) -> f64 {
        let all = |time: f64| MEMORY_KINDS.iter().map(|&kind| self.held(kind, time)).sum::<f64>();
        self.times(self.start, self.end).into_iter().map(all).fold(0., f64::max)
    }
}

/// Simulates one rank.
struct Clock {
    sharded: [bool; 3],
    now: f64,
    line_free: f64,
    /// The time at which a unit's all-gather ends, once it is started.
    whole: [Option<f64>; UNITS.len()],
    /// The time at which the reduction of a unit's gradients ends, once it is started.
    reduced: [Option<f64>; UNITS.len()],
    computed: Vec<Span<Phase>>,
    calls: Vec<Span<Verb>>,
    changes: Vec<(f64, MemoryKind, f64)>,
}

impl Clock {
    fn new(stage: u8) -> Self {
        let sharded = [stage >= 3, stage >= 2, stage >= 1];
        let all: f64 = UNITS.iter().map(|unit| unit.size).sum();
        let kept = [MemoryKind::Parameters, MemoryKind::Gradients, MemoryKind::Optimizer].into_iter().enumerate();
        let changes =
            kept.map(|(index, kind)| (-1., kind, all * BYTES[index] / if sharded[index] { RANKS } else { 1. }));
        Clock {
            sharded,
            now: 0.,
            line_free: 0.,
            whole: [None; UNITS.len()],
            reduced: [None; UNITS.len()],
            computed: Vec::new(),
            calls: Vec::new(),
            changes: changes.collect(),
        }
    }

    fn step(&mut self, program: &Program) {
        program.instructions.iter().for_each(|instruction| self.execute(instruction));
    }

    fn execute(&mut self, instruction: &Instruction) {
        match *instruction {
            Instruction::StartGather(unit) => self.start_gather(unit),
            Instruction::WaitGather(unit) => self.now = self.now.max(self.whole[unit].unwrap_or_default()),
            Instruction::Release(unit) => self.release(unit),
            Instruction::Forward { unit, .. } => {
                self.changes.push((self.now, MemoryKind::Activations, UNITS[unit].activations));
                self.compute(Phase::Forward, unit, UNITS[unit].forward);
            }
            Instruction::Recompute { unit, .. } => self.compute(Phase::Forward, unit, UNITS[unit].forward),
            Instruction::Backward { unit, .. } => {
                self.allocate_gradients(unit);
                self.compute(Phase::Backward, unit, UNITS[unit].backward);
                self.changes.push((self.now, MemoryKind::Activations, -UNITS[unit].activations));
            }
            Instruction::StartReduce(unit) => self.start_reduce(unit),
            Instruction::WaitReduceScatter(unit) | Instruction::WaitReduce(unit) => self.wait_for_reduce(unit),
            Instruction::Update(unit) => {
                let share = if self.sharded[2] { 1. } else { RANKS };
                self.compute(Phase::Update, unit, UPDATE * UNITS[unit].size * share);
                if self.sharded[2] && !self.sharded[0] {
                    self.whole[unit] = Some(self.call(Verb::AllGather, unit));
                }
            }
            Instruction::CountTokens
            | Instruction::Accumulate { .. }
            | Instruction::Norm(_)
            | Instruction::ReduceTotals => (),
        }
    }

    fn compute(&mut self, what: Phase, unit: usize, takes: f64) {
        let start = self.now;
        self.now += takes;
        self.computed.push(Span { what, unit, start, end: self.now });
    }

    /// Starts a call, and returns the time at which it ends.
    fn call(&mut self, what: Verb, unit: usize) -> f64 {
        let start = self.now.max(self.line_free);
        let rounds = if what == Verb::AllReduce { 2. } else { 1. };
        self.line_free = start + 0.95 * UNITS[unit].size * rounds;
        self.calls.push(Span { what, unit, start, end: self.line_free });
        self.line_free
    }

    fn start_gather(&mut self, index: usize) {
        if !self.sharded[0] || index >= UNITS.len() || self.whole[index].is_some() {
            return;
        }
        self.changes.push((self.now, MemoryKind::Parameters, UNITS[index].size * BYTES[0]));
        self.whole[index] = Some(self.call(Verb::AllGather, index));
    }

    fn release(&mut self, index: usize) {
        if self.sharded[0] {
            self.whole[index] = None;
            self.changes.push((self.now, MemoryKind::Parameters, -UNITS[index].size * BYTES[0]));
        }
    }

    fn allocate_gradients(&mut self, index: usize) {
        if self.sharded[1] {
            self.changes.push((self.now, MemoryKind::Gradients, UNITS[index].size * BYTES[1]));
        }
    }

    fn start_reduce(&mut self, index: usize) {
        let verb = if self.sharded[2] { Verb::ReduceScatter } else { Verb::AllReduce };
        self.reduced[index] = Some(self.call(verb, index));
    }

    fn wait_for_reduce(&mut self, index: usize) {
        if let Some(end) = self.reduced[index].take() {
            self.now = self.now.max(end);
            if self.sharded[1] {
                self.changes.push((self.now, MemoryKind::Gradients, -UNITS[index].size * BYTES[1]));
            }
        }
    }
}
