//! What a simulation reports of an execution.

use super::super::execution::{Activity, Execution, Lane as Executed, Wait, Work, WorkId};
use super::super::groups::GroupKind;
use super::super::instruction::Instruction;
use super::spans::{CommunicationTime, Lane, Span, WaitingTime};

/// An execution, and the rank that each of its parties stands for.
pub(super) struct Report<'a> {
    pub(super) execution: &'a Execution<'a>,
    pub(super) ranks: Vec<usize>,
}

impl Report<'_> {
    /// The work that led to the end of a party's step.
    pub(super) fn critical_path(&self, party: usize) -> Vec<Span> {
        let work = |id: WorkId| &self.execution.lanes[id.party].work[id.index];
        let path = std::iter::successors(self.lane(party).last, |&id| work(id).after);
        let mut path: Vec<Span> = path.filter_map(|id| self.span(id.party, work(id))).collect();
        path.reverse();
        path
    }

    /// All work of a party, by start.
    pub(super) fn timeline(&self, party: usize) -> Vec<Span> {
        let mut spans: Vec<Span> = self.lane(party).work.iter().filter_map(|work| self.span(party, work)).collect();
        spans.sort_by(|a, b| a.start_s.total_cmp(&b.start_s));
        spans
    }

    /// Work as a span, if it takes any time.
    fn span(&self, party: usize, work: &Work) -> Option<Span> {
        let Work { position, start_s, end_s, .. } = *work;
        let program = self.lane(party).program;
        let instruction = &program.instructions[position];
        let (lane, unit, label) = match &work.activity {
            Activity::Compute => (Lane::Compute, instruction.unit(), program.describe(instruction)),
            Activity::Copy(_) => (Lane::Copy, instruction.unit(), program.describe(instruction)),
            Activity::Send(_) | Activity::Receive(_) => {
                (Lane::Group(GroupKind::Pipeline), instruction.unit(), program.describe(instruction))
            }
            Activity::Call(collective) => {
                let label = match collective.unit.and_then(|unit| program.units.get(unit)) {
                    Some(unit) => format!("{} {unit}", collective.kind.name()),
                    None => program.describe(instruction),
                };
                (Lane::Group(collective.group), collective.unit, label)
            }
        };
        (end_s > start_s).then(|| Span { rank: self.ranks[party], lane, position, start_s, end_s, unit, label })
    }

    /// The communication of a party's units.
    pub(super) fn communication(&self, party: usize) -> CommunicationTime {
        let lane = self.lane(party);
        // What runs after the end of the step is part of the next, as what was left of the step before is part of this one.
        let in_step = |work: &Work| (work.start_s.min(lane.now_s), work.end_s.min(lane.now_s));
        let calls = merge(lane.work.iter().filter(|work| is_communication(&work.activity)).map(in_step));
        let computation = lane.work.iter().filter(|work| work.activity == Activity::Compute);
        let computation: Vec<Interval> = computation.map(|work| (work.start_s, work.end_s)).collect();
        let exposed = lane.waits.iter().filter(|wait| is_communication(&wait.activity));
        CommunicationTime {
            total_s: calls.iter().map(|(start_s, end_s)| end_s - start_s).sum(),
            hidden_s: overlap_s(&calls, &computation),
            exposed_s: exposed.map(|wait| wait.transfer_s).sum(),
        }
    }

    /// What a party waits for.
    pub(super) fn waiting(&self, party: usize) -> WaitingTime {
        let lane = self.lane(party);
        let mut waiting = WaitingTime::default();
        for Wait { position, activity, late_s, transfer_s } in &lane.waits {
            waiting.bubble_s += late_s;
            *cause_of(&mut waiting, &lane.program.instructions[*position], activity) += transfer_s;
        }
        waiting
    }

    fn lane(&self, party: usize) -> &Executed<'_> {
        &self.execution.lanes[party]
    }
}

fn is_communication(activity: &Activity) -> bool {
    match activity {
        Activity::Call(collective) => collective.unit.is_some(),
        Activity::Send(_) | Activity::Receive(_) => true,
        Activity::Compute | Activity::Copy(_) => false,
    }
}

fn cause_of<'a>(waiting: &'a mut WaitingTime, instruction: &Instruction, activity: &Activity) -> &'a mut f64 {
    match (activity, instruction) {
        (Activity::Copy(_), _) => &mut waiting.copies_s,
        (Activity::Send(_) | Activity::Receive(_), _) => &mut waiting.messages_s,
        (_, Instruction::CountTokens) => &mut waiting.count_tokens_s,
        (_, Instruction::ReduceTotals) => &mut waiting.reduce_totals_s,
        (_, Instruction::WaitReduceScatter(_)) => &mut waiting.reduce_scatter_s,
        (_, Instruction::WaitReduce(_)) => &mut waiting.reduce_s,
        (_, Instruction::WaitGather(_)) => &mut waiting.gather_s,
        _ => &mut waiting.inner_s,
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
