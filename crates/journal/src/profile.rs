//! What a trace says: the time of a step by unit and kind, and how much of the communication is hidden.
//!
//! It is sums over spans and nothing else, so anyone who adds up the file finds the same. What is to be done about it is not said
//! here.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::spans::{Kind, Span, Thread, Trace};

/// Where the time of a step goes. Times are seconds per step, as the mean of all traced steps and ranks unless something else is
/// said.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Profile {
    /// How many steps were traced.
    pub steps: u64,
    /// How many ranks are in the trace.
    pub ranks: usize,
    /// A step: all that the thread that trains did.
    pub step_s: f64,
    /// What it did, by kind; the sum is `step_s`.
    pub kinds: Vec<KindTime>,
    /// The same by unit, and the kinds that have none.
    pub units: Vec<UnitTime>,
    /// Communication of units.
    pub communication: Communication,
    /// The same by verb.
    pub verbs: Vec<VerbRate>,
    /// Who made others wait.
    pub by_rank: Vec<RankTime>,
}

/// A kind of work of the thread that trains, or what it waited for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct KindTime {
    /// As in `forward`, or `wait gather`.
    pub kind: String,
    /// The mean of all ranks.
    pub mean_s: f64,
    /// The most of any.
    pub most_s: f64,
    /// Which rank that was.
    pub most_rank: usize,
}

/// What a unit took of the thread that trains.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct UnitTime {
    /// Its name.
    pub unit: String,
    /// Its output.
    pub forward_s: f64,
    /// The same again, for the backward pass.
    pub recompute_s: f64,
    /// Its gradients.
    pub backward_s: f64,
    /// Its update.
    pub optimizer_s: f64,
    /// Handing its parameters and gradients over, and taking them back.
    pub handing_s: f64,
    /// Standing still until its parameters are there.
    pub wait_gather_s: f64,
    /// Standing still until its gradients are sent.
    pub wait_reduce_s: f64,
}

impl UnitTime {
    /// All of it.
    pub fn total_s(&self) -> f64 {
        self.forward_s
            + self.recompute_s
            + self.backward_s
            + self.optimizer_s
            + self.handing_s
            + self.wait_gather_s
            + self.wait_reduce_s
    }

    fn add(&mut self, span: &Span, seconds: f64) {
        let waits_for = span.call.as_ref().map(|call| call.kind);
        let place = match (span.kind, waits_for) {
            (Kind::Forward, _) => &mut self.forward_s,
            (Kind::Again, _) => &mut self.recompute_s,
            (Kind::Backward, _) => &mut self.backward_s,
            (Kind::Optimizer, _) => &mut self.optimizer_s,
            (Kind::Wait, Some(Kind::Reduce)) => &mut self.wait_reduce_s,
            (Kind::Wait, _) => &mut self.wait_gather_s,
            _ => &mut self.handing_s,
        };
        *place += seconds;
    }
}

/// Communication of units: gathers and reductions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Communication {
    /// For how long any was under way.
    pub total_s: f64,
    /// For how much of that the thread that trains was at work.
    pub hidden_s: f64,
    /// For how much it stood still.
    pub exposed_s: f64,
    /// Of that, while a rank had not come to the call yet.
    pub late_s: f64,
    /// What a rank has sent.
    pub sent_bytes: u64,
}

impl Communication {
    /// The part that is hidden; 1 where there is none to hide.
    pub fn hidden_share(&self) -> f64 {
        if self.total_s > 0. { self.hidden_s / self.total_s } else { 1. }
    }

    /// Time for which ranks stood still although all had come: that the link took.
    pub fn link_s(&self) -> f64 {
        (self.exposed_s - self.late_s).max(0.)
    }
}

/// What a verb has carried for units.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VerbRate {
    /// `all-gather`, …
    pub verb: String,
    /// Calls of a rank in a step.
    pub calls: f64,
    /// What a rank sends in a step.
    pub sent_bytes: f64,
    /// How long that took, each call from when the last rank had come.
    pub moving_s: f64,
}

impl VerbRate {
    /// What a rank sent in a second of that.
    pub fn bytes_per_s(&self) -> f64 {
        if self.moving_s > 0. { self.sent_bytes / self.moving_s } else { 0. }
    }
}

/// A rank's time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankTime {
    /// The rank.
    pub rank: usize,
    /// Its host.
    pub host: String,
    /// For how long it was at work beside reading tokens, in the step in which that was the least: what disturbs a step disturbs few of them.
    pub busy_s: f64,
    /// For how long it read tokens, in the step in which that was the least.
    pub data_s: f64,
    /// For how long others stood still because it was the last to come.
    pub others_waited_s: f64,
}

impl Profile {
    /// Of a trace.
    pub fn of(trace: &Trace) -> Self {
        let mut ranks: Vec<usize> = trace.ranks.iter().map(|(rank, _)| *rank).collect();
        ranks.sort_unstable();
        ranks.dedup();
        let steps = trace.about.steps.max(1);
        // From nanoseconds of all ranks and steps to seconds of one.
        let mean = 1e-9 / steps as f64 / ranks.len().max(1) as f64;
        let training: Vec<&Span> = trace.spans.iter().filter(|span| span.thread == Thread::Training).collect();
        let seconds = |span: &&&Span| span.length_ns as f64 * mean;
        let last_starts = last_starts(trace);
        let mut profile = Profile {
            steps,
            ranks: ranks.len(),
            step_s: training.iter().map(|span| seconds(&span)).sum(),
            kinds: kinds(&training, &ranks, steps),
            units: units(&training, mean),
            verbs: verbs(trace, &last_starts, mean),
            by_rank: ranks.iter().map(|&rank| rank_time(trace, rank)).collect(),
            communication: Communication::default(),
        };
        for &rank in &ranks {
            profile.add_communication(trace, rank, &last_starts, mean);
        }
        let sent: f64 = profile.verbs.iter().map(|verb| verb.sent_bytes).sum();
        profile.communication.sent_bytes = sent as u64;
        profile.blame(&training, &last_starts, steps);
        profile
    }

    /// The mean time of a kind.
    pub fn kind_s(&self, kind: &str) -> f64 {
        self.kinds.iter().find(|time| time.kind == kind).map_or(0., |time| time.mean_s)
    }

    fn add_communication(&mut self, trace: &Trace, rank: usize, last: &LastStarts<'_>, mean: f64) {
        let of_units = |span: &&Span| {
            let kind = span.call.as_ref().map(|call| call.kind);
            span.rank == rank && matches!(kind, Some(Kind::Gather | Kind::Reduce))
        };
        let moving = |span: &&Span| span.thread == Thread::Communication;
        let under_way = union(trace.spans.iter().filter(of_units).filter(moving).map(interval).collect());
        let stood: Vec<&Span> =
            trace.spans.iter().filter(of_units).filter(|span| span.thread == Thread::Training).collect();
        let waits = union(stood.iter().filter(|span| span.kind == Kind::Wait).map(|span| interval(span)).collect());
        let total = length(&under_way);
        let exposed = length(&waits);
        let late: f64 = stood.iter().map(|span| late_ns(span, last) as f64).sum();
        let communication = &mut self.communication;
        communication.total_s += total as f64 * mean;
        communication.hidden_s += (total - common(&under_way, &waits)) as f64 * mean;
        communication.exposed_s += exposed as f64 * mean;
        communication.late_s += late * mean;
    }

    /// Charges waits for a rank that was late to that rank.
    fn blame(&mut self, training: &[&Span], last: &LastStarts<'_>, steps: u64) {
        for span in training.iter().filter(|span| span.kind == Kind::Wait) {
            let Some((_, late)) = key(span).and_then(|key| last.get(&key)) else { continue };
            if let Some(rank) = self.by_rank.iter_mut().find(|rank| rank.rank == *late && *late != span.rank) {
                rank.others_waited_s += late_ns(span, last) as f64 * 1e-9 / steps as f64;
            }
        }
    }
}

fn kinds(training: &[&Span], ranks: &[usize], steps: u64) -> Vec<KindTime> {
    let mut times = BTreeMap::<(Kind, Option<Kind>), BTreeMap<usize, f64>>::new();
    for span in training {
        let waits_for = span.call.as_ref().filter(|_| span.kind == Kind::Wait).map(|call| call.kind);
        let of_rank = times.entry((span.kind, waits_for)).or_default();
        *of_rank.entry(span.rank).or_default() += span.length_ns as f64 * 1e-9 / steps as f64;
    }
    let time = |((kind, waits_for), of_rank): ((Kind, Option<Kind>), BTreeMap<usize, f64>)| {
        let most = of_rank.iter().max_by(|a, b| a.1.total_cmp(b.1)).map_or((0, 0.), |(rank, most)| (*rank, *most));
        KindTime {
            kind: waits_for.map_or(kind.name().to_string(), |of| format!("{} {}", kind.name(), of.name())),
            mean_s: of_rank.values().sum::<f64>() / ranks.len().max(1) as f64,
            most_s: most.1,
            most_rank: most.0,
        }
    };
    times.into_iter().map(time).collect()
}

/// In the order in which they first compute.
fn units(training: &[&Span], mean: f64) -> Vec<UnitTime> {
    let mut units: Vec<UnitTime> = Vec::new();
    let mut places = BTreeMap::<&str, usize>::new();
    let is_of_unit = |span: &&&Span| {
        let waits_for = span.call.as_ref().map(|call| call.kind);
        !matches!(span.kind, Kind::Agree | Kind::Data | Kind::Evaluation | Kind::Save | Kind::Between)
            && waits_for != Some(Kind::Agree)
    };
    for span in training.iter().filter(is_of_unit) {
        let Some(name) = span.unit.as_deref() else { continue };
        let place = *places.entry(name).or_insert_with(|| {
            units.push(UnitTime { unit: name.to_string(), ..UnitTime::default() });
            units.len() - 1
        });
        units[place].add(span, span.length_ns as f64 * mean);
    }
    units
}

fn verbs(trace: &Trace, last: &LastStarts<'_>, mean: f64) -> Vec<VerbRate> {
    let mut rates = BTreeMap::<&str, VerbRate>::new();
    // Their mean is per step and rank, in seconds; that of counts is not in nanoseconds.
    let count = mean * 1e9;
    for span in trace.spans.iter().filter(|span| span.thread == Thread::Communication) {
        let Some(call) = span.call.as_ref().filter(|call| matches!(call.kind, Kind::Gather | Kind::Reduce)) else {
            continue;
        };
        let rate =
            rates.entry(&call.verb).or_insert_with(|| VerbRate { verb: call.verb.clone(), ..VerbRate::default() });
        rate.calls += count;
        rate.sent_bytes += call.sent_bytes as f64 * count;
        let began = key(span).and_then(|key| last.get(&key)).map_or(span.start_ns, |(start, _)| *start);
        rate.moving_s += span.end_ns().saturating_sub(began.max(span.start_ns)).max(0) as f64 * mean;
    }
    rates.into_values().collect()
}

fn rank_time(trace: &Trace, rank: usize) -> RankTime {
    let mut steps = BTreeMap::<u64, [f64; 2]>::new();
    for span in trace.spans.iter().filter(|span| span.rank == rank && span.thread == Thread::Training) {
        let [busy, data] = steps.entry(span.step).or_default();
        let seconds = span.length_ns as f64 * 1e-9;
        match span.kind {
            Kind::Wait => (),
            Kind::Data => *data += seconds,
            _ => *busy += seconds,
        }
    }
    let least = |index: usize| steps.values().map(|times| times[index]).min_by(f64::total_cmp).unwrap_or(0.);
    RankTime {
        rank,
        host: trace.ranks.iter().find(|(known, _)| *known == rank).map_or(String::new(), |(_, of)| of.host.clone()),
        busy_s: least(0),
        data_s: least(1),
        others_waited_s: 0.,
    }
}

/// For each call the time at which the last rank came to it, and which rank that was.
type LastStarts<'a> = BTreeMap<(&'a str, u64), (i64, usize)>;

fn last_starts(trace: &Trace) -> LastStarts<'_> {
    let mut last = LastStarts::new();
    for span in trace.spans.iter().filter(|span| span.thread == Thread::Communication) {
        let Some(key) = key(span) else { continue };
        let known = last.entry(key).or_insert((span.start_ns, span.rank));
        *known = (*known).max((span.start_ns, span.rank));
    }
    last
}

/// Calls of one group and number are one; groups are told apart by the ranks in their names.
fn key(span: &Span) -> Option<(&str, u64)> {
    span.call.as_ref().map(|call| (call.group.as_str(), call.number))
}

/// The part of a wait that was over before the last rank came to the call.
fn late_ns(span: &Span, last: &LastStarts<'_>) -> i64 {
    let Some((start, _)) = key(span).and_then(|key| last.get(&key)).filter(|_| span.kind == Kind::Wait) else {
        return 0;
    };
    (*start).min(span.end_ns()).saturating_sub(span.start_ns).max(0)
}

fn interval(span: &Span) -> (i64, i64) {
    (span.start_ns, span.end_ns())
}

/// The same times, in order and without those that are in several.
fn union(mut intervals: Vec<(i64, i64)>) -> Vec<(i64, i64)> {
    intervals.sort_unstable();
    let mut union: Vec<(i64, i64)> = Vec::new();
    for (start, end) in intervals {
        match union.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => union.push((start, end)),
        }
    }
    union
}

fn length(union: &[(i64, i64)]) -> i64 {
    union.iter().map(|(start, end)| end - start).sum()
}

/// How long both last at once.
fn common(a: &[(i64, i64)], b: &[(i64, i64)]) -> i64 {
    let (mut a, mut b) = (a.iter().peekable(), b.iter().peekable());
    let mut sum = 0;
    while let (Some(left), Some(right)) = (a.peek(), b.peek()) {
        sum += (left.1.min(right.1) - left.0.max(right.0)).max(0);
        let _ = if left.1 <= right.1 { a.next() } else { b.next() };
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spans::{About, RankAbout, SpanCall};

    const MS: i64 = 1_000_000;

    fn span(rank: usize, thread: Thread, kind: Kind, from_to: (i64, i64), call: Option<(Kind, u64)>) -> Span {
        let call = call.map(|(kind, number)| SpanCall {
            kind,
            group: "shard 0-1".to_string(),
            number,
            verb: "all-gather".to_string(),
            sent_bytes: 1000,
        });
        let (start_ns, length_ns) = (from_to.0 * MS, ((from_to.1 - from_to.0) * MS) as u64);
        Span { rank, thread, kind, step: 1, unit: Some("block.0".to_string()), start_ns, length_ns, call }
    }

    /// Rank 1 comes to a gather 4 ms after rank 0, which works on for 3 of them. The gather then takes 6.
    fn late() -> Trace {
        use Thread::{Communication, Training};
        let gather = Some((Kind::Gather, 1));
        let spans = vec![
            span(0, Training, Kind::Forward, (0, 5), None),
            span(0, Training, Kind::Wait, (5, 12), gather),
            span(0, Training, Kind::Backward, (12, 20), None),
            span(0, Communication, Kind::Gather, (2, 12), gather),
            span(1, Training, Kind::Forward, (0, 6), None),
            span(1, Training, Kind::Wait, (6, 12), gather),
            span(1, Training, Kind::Backward, (12, 20), None),
            span(1, Communication, Kind::Gather, (6, 12), gather),
        ];
        let ranks = vec![(0, RankAbout::default()), (1, RankAbout::default())];
        Trace { about: About { steps: 1, ..About::default() }, ranks, spans }
    }

    fn near(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-9, "{a} and {b}");
    }

    #[test]
    fn a_late_rank_and_a_slow_link_are_told_apart() {
        let profile = Profile::of(&late());
        near(profile.step_s, 0.020);
        near(profile.kind_s("wait gather"), 0.0065);
        let communication = profile.communication;
        near(communication.total_s, 0.008);
        near(communication.exposed_s, 0.0065);
        near(communication.hidden_s, 0.0015);
        near(communication.late_s, 0.0005);
        near(profile.verbs[0].moving_s, 0.006);
        near(profile.verbs[0].bytes_per_s(), 1000. / 0.006);
        near(profile.by_rank[1].others_waited_s, 0.001);
        near(profile.by_rank[0].others_waited_s, 0.);
        near(profile.units.iter().map(UnitTime::total_s).sum(), profile.step_s);
        near(profile.kinds.iter().map(|kind| kind.mean_s).sum(), profile.step_s);
    }

    #[test]
    fn times_in_common_are_counted_once() {
        let a = union(vec![(0, 4), (2, 6), (10, 12)]);
        assert_eq!((a.as_slice(), length(&a)), (&[(0, 6), (10, 12)][..], 8));
        assert_eq!(common(&a, &[(5, 11)]), 2);
        assert_eq!(common(&a, &[]), 0);
    }
}
