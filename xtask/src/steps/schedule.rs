//! When what happens in a step: the calls of `crates/train/src/step.rs`, in their order, with lengths that are made up.
//!
//! A pass computes, and waits for calls; calls run one after the other beside it. What is waited for, and when memory is lent
//! and given back, is as in the step and in `crates/zero`; `crates/train/tests/drawings.rs` compares the calls with those of a
//! real one. How long a thing takes is chosen so that it can be seen.

/// A unit of the model that is drawn.
pub(crate) struct Unit {
    /// As the trainer calls it.
    pub(crate) name: &'static str,
    /// As it is drawn.
    pub(crate) sign: &'static str,
    size: f64,
    forward: f64,
    backward: f64,
    activations: f64,
    /// Whether its backward pass reads the parameters' values.
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

/// Among how many ranks units are cut.
const RANKS: f64 = 4.;
const UNITS_IN_FLIGHT: usize = 1;
/// For each element: of parameters, gradients and AdamW's state, all in f32.
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

/// Something that takes its time.
pub(crate) struct Span<T> {
    pub(crate) what: T,
    pub(crate) unit: usize,
    pub(crate) begin: f64,
    pub(crate) end: f64,
}

/// What memory is held for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Holding {
    Optimizer,
    Parameters,
    Gradients,
    Activations,
}

pub(crate) const HOLDINGS: [Holding; 4] =
    [Holding::Optimizer, Holding::Parameters, Holding::Gradients, Holding::Activations];

/// A step that is drawn, between the two around it.
pub(crate) struct Step {
    pub(crate) stage: u8,
    pub(crate) computed: Vec<Span<Phase>>,
    pub(crate) calls: Vec<Span<Verb>>,
    /// Bytes more or fewer, and when. What is held between steps came long before.
    changes: Vec<(f64, Holding, f64)>,
    /// When it begins, and when the next one does.
    pub(crate) begin: f64,
    pub(crate) end: f64,
}

impl Step {
    /// The step of a stage, as it is after the first.
    pub(crate) fn of(stage: u8) -> Self {
        let mut clock = Clock::new(stage);
        clock.step();
        let begin = clock.now;
        clock.step();
        let end = clock.now;
        clock.step();
        Step { stage, computed: clock.computed, calls: clock.calls, changes: clock.changes, begin, end }
    }

    /// The calls that the step asks for, in that order.
    pub(crate) fn asked(&self) -> impl Iterator<Item = &Span<Verb>> {
        let per_step = self.calls.len() / 3;
        self.calls.iter().skip(per_step).take(per_step)
    }

    /// When memory changes, from a time to another.
    pub(crate) fn times(&self, from: f64, to: f64) -> Vec<f64> {
        let mut times: Vec<f64> = self.changes.iter().map(|change| change.0).filter(|&t| from < t && t < to).collect();
        times.push(from);
        times.push(to);
        times.sort_by(f64::total_cmp);
        times.dedup();
        times
    }

    /// Bytes that are held just after a time.
    pub(crate) fn held(&self, holding: Holding, time: f64) -> f64 {
        let until_then = |change: &&(f64, Holding, f64)| change.0 <= time && change.1 == holding;
        self.changes.iter().filter(until_then).map(|change| change.2).sum()
    }

    /// The bytes that are held between steps.
    pub(crate) fn kept(&self) -> f64 {
        HOLDINGS.iter().map(|&holding| self.held(holding, self.begin - 1e-6)).sum()
    }

    /// The most bytes that are held at once.
    pub(crate) fn peak(&self) -> f64 {
        let all = |time: f64| HOLDINGS.iter().map(|&holding| self.held(holding, time)).sum::<f64>();
        self.times(self.begin, self.end).into_iter().map(all).fold(0., f64::max)
    }
}

/// One rank, from call to call.
struct Clock {
    sliced: [bool; 3],
    now: f64,
    line_free: f64,
    /// When a unit's parameters are whole, once that is under way.
    whole: [Option<f64>; UNITS.len()],
    /// When its gradients are where they belong.
    reduced: [Option<f64>; UNITS.len()],
    computed: Vec<Span<Phase>>,
    calls: Vec<Span<Verb>>,
    changes: Vec<(f64, Holding, f64)>,
}

impl Clock {
    fn new(stage: u8) -> Self {
        let sliced = [stage >= 3, stage >= 2, stage >= 1];
        let all: f64 = UNITS.iter().map(|unit| unit.size).sum();
        let kept = [Holding::Parameters, Holding::Gradients, Holding::Optimizer].into_iter().enumerate();
        let changes =
            kept.map(|(index, holding)| (-1., holding, all * BYTES[index] / if sliced[index] { RANKS } else { 1. }));
        Clock {
            sliced,
            now: 0.,
            line_free: 0.,
            whole: [None; UNITS.len()],
            reduced: [None; UNITS.len()],
            computed: Vec::new(),
            calls: Vec::new(),
            changes: changes.collect(),
        }
    }

    fn step(&mut self) {
        for (index, unit) in UNITS.iter().enumerate() {
            self.gather(index);
            for next in index + 1..=index + UNITS_IN_FLIGHT {
                self.begin_gather(next);
            }
            self.changes.push((self.now, Holding::Activations, unit.activations));
            self.compute(Phase::Forward, index, unit.forward);
            if index + 1 < UNITS.len() {
                self.release(index);
            }
        }
        for (index, unit) in UNITS.iter().enumerate().rev() {
            if unit.reads {
                self.gather(index);
            }
            for next in (0..index).rev().take(UNITS_IN_FLIGHT).filter(|&next| UNITS[next].reads) {
                self.begin_gather(next);
            }
            self.lend_gradients(index);
            self.compute(Phase::Backward, index, unit.backward);
            self.changes.push((self.now, Holding::Activations, -unit.activations));
            if unit.reads {
                self.release(index);
            }
            self.begin_reduce(index);
            if index + UNITS_IN_FLIGHT < UNITS.len() {
                self.settle_reduce(index + UNITS_IN_FLIGHT);
            }
        }
        (0..UNITS.len()).for_each(|index| self.settle_reduce(index));
        for (index, unit) in UNITS.iter().enumerate() {
            let share = if self.sliced[2] { 1. } else { RANKS };
            self.compute(Phase::Update, index, UPDATE * unit.size * share);
            if self.sliced[2] && !self.sliced[0] {
                self.whole[index] = Some(self.call(Verb::AllGather, index));
            }
        }
    }

    fn compute(&mut self, what: Phase, unit: usize, takes: f64) {
        let begin = self.now;
        self.now += takes;
        self.computed.push(Span { what, unit, begin, end: self.now });
    }

    /// Asks for a call, and says when it will have ended.
    fn call(&mut self, what: Verb, unit: usize) -> f64 {
        let begin = self.now.max(self.line_free);
        let rounds = if what == Verb::AllReduce { 2. } else { 1. };
        self.line_free = begin + 0.95 * UNITS[unit].size * rounds;
        self.calls.push(Span { what, unit, begin, end: self.line_free });
        self.line_free
    }

    fn begin_gather(&mut self, index: usize) {
        if !self.sliced[0] || index >= UNITS.len() || self.whole[index].is_some() {
            return;
        }
        self.changes.push((self.now, Holding::Parameters, UNITS[index].size * BYTES[0]));
        self.whole[index] = Some(self.call(Verb::AllGather, index));
    }

    fn gather(&mut self, index: usize) {
        self.begin_gather(index);
        self.now = self.now.max(self.whole[index].unwrap_or_default());
    }

    fn release(&mut self, index: usize) {
        if self.sliced[0] {
            self.whole[index] = None;
            self.changes.push((self.now, Holding::Parameters, -UNITS[index].size * BYTES[0]));
        }
    }

    fn lend_gradients(&mut self, index: usize) {
        if self.sliced[1] {
            self.changes.push((self.now, Holding::Gradients, UNITS[index].size * BYTES[1]));
        }
    }

    fn begin_reduce(&mut self, index: usize) {
        let verb = if self.sliced[2] { Verb::ReduceScatter } else { Verb::AllReduce };
        self.reduced[index] = Some(self.call(verb, index));
    }

    fn settle_reduce(&mut self, index: usize) {
        if let Some(end) = self.reduced[index].take() {
            self.now = self.now.max(end);
            if self.sliced[1] {
                self.changes.push((self.now, Holding::Gradients, -UNITS[index].size * BYTES[1]));
            }
        }
    }
}
