//! The time of a step: a lane for computation, and one for each group.

use super::super::collectives::{Call, CallOp, Collective, GroupKind};
use super::super::costs::Costs;
use super::super::traffic::Layout;
use super::super::{Instruction, Program};
use super::spans::{CommunicationTime, Lane, Span, WaitingTime};

/// Executes a program whose calls are `calls`. `unfinished` are calls of the step before, in the order of their lanes.
pub(super) fn run<'a>(
    program: &'a Program,
    calls: &[(usize, Call)],
    layout: &Layout,
    costs: &Costs,
    unfinished: &[Unfinished],
) -> Run<'a> {
    let mut run = Run {
        program,
        now_s: 0.,
        last: None,
        ends: [LaneEnd::default(); GroupKind::ALL.len()],
        work: Vec::new(),
        waiting: WaitingTime::default(),
        exposed_s: 0.,
    };
    for call in unfinished {
        run.resume(call);
    }
    // The work of each call that issues a collective.
    let mut issued_work = vec![None; calls.len()];
    let mut next = 0;
    for (position, instruction) in program.instructions.iter().enumerate() {
        // An update computes, then issues its all-gather. No other instruction does both.
        run.compute(position, compute_s(instruction, costs));
        while let Some((_, call)) = calls.get(next).filter(|(at, _)| *at == position) {
            match call.op {
                CallOp::Issue => {
                    let duration_s = call_s(&call.collective, layout, costs);
                    issued_work[next] = Some(run.issue(position, call.collective, duration_s));
                }
                CallOp::Wait { issued: Some(issued) } => run.wait(instruction, &call.collective, issued_work[issued]),
                CallOp::Wait { issued: None } => {
                    let work = run.find_unfinished(&call.collective, unfinished.len());
                    run.wait(instruction, &call.collective, work);
                }
            }
            next += 1;
        }
    }
    run
}

fn compute_s(instruction: &Instruction, costs: &Costs) -> f64 {
    match *instruction {
        Instruction::Forward { unit, .. } | Instruction::Recompute { unit, .. } => costs.units[unit].forward_s,
        Instruction::Backward { unit, .. } => costs.units[unit].backward_s,
        Instruction::Norm(unit) => costs.units[unit].norm_s,
        Instruction::Update(unit) => costs.units[unit].update_s,
        Instruction::CountTokens
        | Instruction::StartGather(_)
        | Instruction::WaitGather(_)
        | Instruction::Release(_)
        | Instruction::Accumulate { .. }
        | Instruction::StartReduce(_)
        | Instruction::WaitReduceScatter(_)
        | Instruction::WaitReduce(_)
        | Instruction::ReduceTotals => 0.,
    }
}

fn call_s(collective: &Collective, layout: &Layout, costs: &Costs) -> f64 {
    match layout.group_size(collective.group) {
        1 => 0.,
        _ => costs.link(collective.group).duration_s(layout.most_sent_bytes(collective)),
    }
}

/// A call that still runs at the end of a step. Times are since then.
pub(super) struct Unfinished {
    position: usize,
    collective: Collective,
    end_s: f64,
}

/// A program in execution, or after it.
pub(super) struct Run<'a> {
    program: &'a Program,
    /// The time of the compute lane.
    now_s: f64,
    /// The index of the work at whose end the compute lane arrived at `now_s`.
    last: Option<usize>,
    ends: [LaneEnd; GroupKind::ALL.len()],
    work: Vec<Work>,
    waiting: WaitingTime,
    exposed_s: f64,
}

/// When a group's lane is free again, and the index of its last work.
#[derive(Clone, Copy, Default)]
struct LaneEnd {
    free_s: f64,
    last: Option<usize>,
}

struct Work {
    /// The collective, if it is a call.
    collective: Option<Collective>,
    position: usize,
    start_s: f64,
    end_s: f64,
    /// The index of the work whose end let it start.
    after: Option<usize>,
}

impl Run<'_> {
    fn resume(&mut self, call: &Unfinished) {
        let Unfinished { position, collective, end_s } = *call;
        let lane = &mut self.ends[collective.group as usize];
        let (start_s, after) = (lane.free_s, lane.last);
        *lane = LaneEnd { free_s: end_s, last: Some(self.work.len()) };
        self.work.push(Work { collective: Some(collective), position, start_s, end_s, after });
    }

    /// Finds a call of the step before. They are the first `count` works.
    fn find_unfinished(&self, collective: &Collective, count: usize) -> Option<usize> {
        self.work[..count].iter().position(|work| work.collective.as_ref() == Some(collective))
    }

    fn compute(&mut self, position: usize, duration_s: f64) {
        if duration_s > 0. {
            let (start_s, after) = (self.now_s, self.last);
            self.now_s += duration_s;
            self.last = Some(self.work.len());
            self.work.push(Work { collective: None, position, start_s, end_s: self.now_s, after });
        }
    }

    /// Issues a call. Returns the index of its work.
    fn issue(&mut self, position: usize, collective: Collective, duration_s: f64) -> usize {
        let lane = &mut self.ends[collective.group as usize];
        let (start_s, after) =
            if lane.free_s > self.now_s { (lane.free_s, lane.last) } else { (self.now_s, self.last) };
        let (index, end_s) = (self.work.len(), start_s + duration_s);
        *lane = LaneEnd { free_s: end_s, last: Some(index) };
        self.work.push(Work { collective: Some(collective), position, start_s, end_s, after });
        index
    }

    /// Waits for a call. One that has no work ended in the step before.
    fn wait(&mut self, instruction: &Instruction, collective: &Collective, work: Option<usize>) {
        let Some(work) = work else { return };
        let waited_s = self.work[work].end_s - self.now_s;
        if waited_s <= 0. {
            return;
        }
        self.now_s = self.work[work].end_s;
        self.last = Some(work);
        if collective.unit.is_some() {
            self.exposed_s += waited_s;
        }
        let cause_s = match instruction {
            Instruction::CountTokens => &mut self.waiting.count_tokens_s,
            Instruction::ReduceTotals => &mut self.waiting.reduce_totals_s,
            Instruction::WaitReduceScatter(_) => &mut self.waiting.reduce_scatter_s,
            Instruction::WaitReduce(_) => &mut self.waiting.reduce_s,
            _ => &mut self.waiting.gather_s,
        };
        *cause_s += waited_s;
    }

    /// The calls that still run at the end, in the order of their lanes.
    pub(super) fn unfinished(&self) -> Vec<Unfinished> {
        let unfinished = |work: &Work| {
            let end_s = work.end_s - self.now_s;
            let collective = work.collective.filter(|_| end_s > 0.)?;
            Some(Unfinished { position: work.position, collective, end_s })
        };
        self.work.iter().filter_map(unfinished).collect()
    }

    pub(super) fn step_s(&self) -> f64 {
        self.now_s
    }

    pub(super) fn waiting(&self) -> WaitingTime {
        self.waiting
    }

    pub(super) fn critical_path(&self) -> Vec<Span> {
        let before = |&index: &usize| self.work[index].after;
        let mut path: Vec<Span> =
            std::iter::successors(self.last, before).filter_map(|index| self.span(&self.work[index])).collect();
        path.reverse();
        path
    }

    pub(super) fn timeline(&self) -> Vec<Span> {
        let mut spans: Vec<Span> = self.work.iter().filter_map(|work| self.span(work)).collect();
        spans.sort_by(|a, b| a.start_s.total_cmp(&b.start_s));
        spans
    }

    /// Work as a span, if it takes any time.
    fn span(&self, work: &Work) -> Option<Span> {
        let Work { position, start_s, end_s, .. } = *work;
        let instruction = &self.program.instructions[position];
        let (lane, label) = match &work.collective {
            None => (Lane::Compute, self.program.describe(instruction)),
            Some(collective) => {
                let unit = collective.unit.and_then(|unit| self.program.units.get(unit));
                let label = match unit {
                    Some(unit) => format!("{} {unit}", collective.kind.name()),
                    None => self.program.describe(instruction),
                };
                (Lane::Group(collective.group), label)
            }
        };
        (end_s > start_s).then_some(Span { lane, position, start_s, end_s, label })
    }

    pub(super) fn communication(&self) -> CommunicationTime {
        let of_unit = |work: &&Work| work.collective.is_some_and(|collective| collective.unit.is_some());
        // What runs after the end of the step is part of the next, as what was left of the step before is part of this one.
        let in_step = |work: &Work| (work.start_s.min(self.now_s), work.end_s.min(self.now_s));
        let calls = merge(self.work.iter().filter(of_unit).map(in_step));
        let computation = self.work.iter().filter(|work| work.collective.is_none());
        let computation: Vec<Interval> = computation.map(|work| (work.start_s, work.end_s)).collect();
        CommunicationTime {
            total_s: calls.iter().map(|(start_s, end_s)| end_s - start_s).sum(),
            hidden_s: overlap_s(&calls, &computation),
            exposed_s: self.exposed_s,
        }
    }
}

/// A start and an end.
type Interval = (f64, f64);

/// Merges intervals that overlap or touch.
fn merge(intervals: impl Iterator<Item = Interval>) -> Vec<Interval> {
    let mut intervals: Vec<Interval> = intervals.collect();
    intervals.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut merged: Vec<Interval> = Vec::new();
    for (start_s, end_s) in intervals {
        match merged.last_mut() {
            Some(last) if start_s <= last.1 => last.1 = last.1.max(end_s),
            _ => merged.push((start_s, end_s)),
        }
    }
    merged
}

/// The time that is in both of two lists of intervals. Those of a list are in order and do not overlap.
fn overlap_s(a: &[Interval], b: &[Interval]) -> f64 {
    let (mut a, mut b) = (a, b);
    let mut total_s = 0.;
    while let ([first, rest_of_a @ ..], [second, rest_of_b @ ..]) = (a, b) {
        total_s += (first.1.min(second.1) - first.0.max(second.0)).max(0.);
        if first.1 < second.1 {
            a = rest_of_a;
        } else {
            b = rest_of_b;
        }
    }
    total_s
}
