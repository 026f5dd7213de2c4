//! The profile of a trace: the time of a step by unit and kind, and how much of the communication is hidden.
//!
//! All figures are sums over spans, so anyone who adds up the spans of a trace file gets the same. Advice on what to change comes
//! from `shardwise-train`.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::spans::{Kind, Span, SpanCall, Thread, Trace};

/// Where the time of a step goes. Times are seconds per step, averaged over all traced steps and ranks unless stated otherwise.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Profile {
    /// The number of traced steps.
    pub steps: u64,
    /// The number of ranks in the trace.
    pub ranks: usize,
    /// The duration of a step: all time of the training thread.
    pub step_s: f64,
    /// The time of the training thread by kind; the sum is `step_s`.
    pub kinds: Vec<KindTime>,
    /// The time of the training thread by unit.
    pub units: Vec<UnitTime>,
    /// The communication of units.
    pub communication: Communication,
    /// The communication of units by the axes of its groups. Calls of different groups can be in progress at the same time, so these times
    /// do not add up to those of `communication`.
    #[serde(default)]
    pub groups: Vec<GroupCommunication>,
    /// The communication of units by verb.
    pub verbs: Vec<VerbRate>,
    /// The time of each rank, and how long it made others wait.
    pub by_rank: Vec<RankTime>,
}

/// The time of the training thread for one kind of work, or of waiting.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct KindTime {
    /// `forward`, or `wait gather`.
    pub kind: String,
    /// The mean over all ranks.
    pub mean_s: f64,
    /// The maximum over all ranks.
    pub most_s: f64,
    /// The rank with that maximum.
    pub most_rank: usize,
}

/// The time of the training thread for one unit.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct UnitTime {
    /// The unit's name.
    pub unit: String,
    /// The forward pass.
    pub forward_s: f64,
    /// Recomputing activations for the backward pass.
    pub recompute_s: f64,
    /// The backward pass.
    pub backward_s: f64,
    /// The update.
    pub optimizer_s: f64,
    /// Waiting for its optimizer state to be fetched from a disk, or stored there.
    #[serde(default)]
    pub offload_s: f64,
    /// Copying parameters and gradients into and out of communication.
    pub copy_s: f64,
    /// Waiting for its parameters.
    pub wait_gather_s: f64,
    /// Waiting for its gradients to be reduced.
    pub wait_reduce_s: f64,
}

impl UnitTime {
    /// Returns the sum of all its times.
    pub fn total_s(&self) -> f64 {
        self.forward_s
            + self.recompute_s
            + self.backward_s
            + self.optimizer_s
            + self.offload_s
            + self.copy_s
            + self.wait_gather_s
            + self.wait_reduce_s
    }

    fn add(&mut self, span: &Span, seconds: f64) {
        let waits_for = span.call.as_ref().map(|call| call.kind);
        let time = match (span.kind, waits_for) {
            (Kind::Forward, _) => &mut self.forward_s,
            (Kind::Recompute, _) => &mut self.recompute_s,
            (Kind::Backward, _) => &mut self.backward_s,
            (Kind::Optimizer, _) => &mut self.optimizer_s,
            (Kind::Fetch | Kind::Store, _) => &mut self.offload_s,
            (Kind::Wait, Some(Kind::Reduce)) => &mut self.wait_reduce_s,
            (Kind::Wait, _) => &mut self.wait_gather_s,
            _ => &mut self.copy_s,
        };
        *time += seconds;
    }
}

/// The communication of units: all-gathers and reductions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Communication {
    /// The time during which any call was in progress.
    pub total_s: f64,
    /// The part of `total_s` during which the training thread computed.
    pub hidden_s: f64,
    /// The time during which the training thread waited.
    pub exposed_s: f64,
    /// The part of `exposed_s` before the last rank had entered the call.
    pub late_s: f64,
    /// The bytes that a rank sent.
    pub sent_bytes: u64,
}

impl Communication {
    /// Returns the fraction of the communication time that overlaps with computation, or 1 if there is no communication.
    pub fn hidden_share(&self) -> f64 {
        if self.total_s > 0. { self.hidden_s / self.total_s } else { 1. }
    }

    /// Returns the waiting time after all ranks had entered their calls, which the link is responsible for.
    pub fn link_s(&self) -> f64 {
        (self.exposed_s - self.late_s).max(0.)
    }
}

/// The communication of units along some axes of the mesh.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GroupCommunication {
    /// The axes, as in the names of groups: `shard`, `ring`.
    pub axes: String,
    /// The communication of these groups.
    #[serde(flatten)]
    pub communication: Communication,
}

/// The traffic of units by one verb.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VerbRate {
    /// `all-gather`, …
    pub verb: String,
    /// Calls per rank and step.
    pub calls: f64,
    /// Bytes sent per rank and step.
    pub sent_bytes: f64,
    /// The duration of the calls, each counted from when the last rank entered it.
    pub moving_s: f64,
}

impl VerbRate {
    /// Returns the bytes that a rank sends per second during the calls.
    pub fn bytes_per_s(&self) -> f64 {
        if self.moving_s > 0. { self.sent_bytes / self.moving_s } else { 0. }
    }
}

/// The time of one rank.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankTime {
    /// The rank's number.
    pub rank: usize,
    /// Its host.
    pub host: String,
    /// The time for which it worked, without reading data, in the step where that was shortest: disturbances affect only a few steps.
    pub busy_s: f64,
    /// The time for which it read data, in the step where that was shortest.
    pub data_s: f64,
    /// The time for which other ranks waited because it was the last to enter a call.
    pub others_waited_s: f64,
}

impl Profile {
    /// Computes the profile of a trace.
    pub fn from_trace(trace: &Trace) -> Self {
        let mut ranks: Vec<usize> = trace.ranks.iter().map(|(rank, _)| *rank).collect();
        ranks.sort_unstable();
        ranks.dedup();
        let steps = trace.info.steps.max(1);
        // Converts nanoseconds over all ranks and steps to seconds per rank and step.
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
            communication: communication(trace, &ranks, |_| true, &last_starts, mean),
            groups: groups(trace, &ranks, &last_starts, mean),
        };
        profile.charge_waits(&training, &last_starts, steps);
        profile
    }

    /// Returns the mean time of a kind.
    pub fn kind_s(&self, kind: &str) -> f64 {
        self.kinds.iter().find(|time| time.kind == kind).map_or(0., |time| time.mean_s)
    }

    /// Charges the time that ranks waited for a late rank to that rank.
    fn charge_waits(&mut self, training: &[&Span], last: &LastStarts<'_>, steps: u64) {
        for span in training.iter().filter(|span| span.kind == Kind::Wait) {
            let Some((_, late)) = key(span).and_then(|key| last.get(&key)) else { continue };
            if let Some(rank) = self.by_rank.iter_mut().find(|rank| rank.rank == *late && *late != span.rank) {
                rank.others_waited_s += late_ns(span, last) as f64 * 1e-9 / steps as f64;
            }
        }
    }
}

/// The communication of units in some groups.
fn communication(
    trace: &Trace,
    ranks: &[usize],
    is_in_group: impl Fn(&SpanCall) -> bool,
    last: &LastStarts<'_>,
    mean: f64,
) -> Communication {
    let of_units = |span: &&Span| {
        let call = span.call.as_ref();
        call.is_some_and(|call| matches!(call.kind, Kind::Gather | Kind::Reduce) && is_in_group(call))
    };
    let spans: Vec<&Span> = trace.spans.iter().filter(of_units).collect();
    let mut sum = Communication::default();
    let mut sent = 0.;
    for &rank in ranks {
        let on_thread = |thread| spans.iter().filter(move |span| span.rank == rank && span.thread == thread);
        let in_progress = union(on_thread(Thread::Communication).map(|span| interval(span)).collect());
        let waiting = || on_thread(Thread::Training).filter(|span| span.kind == Kind::Wait);
        let waits = union(waiting().map(|span| interval(span)).collect());
        let late: f64 = waiting().map(|span| late_ns(span, last) as f64).sum();
        let (total, exposed) = (length(&in_progress), length(&waits));
        sum.total_s += total as f64 * mean;
        sum.hidden_s += (total - common(&in_progress, &waits)) as f64 * mean;
        sum.exposed_s += exposed as f64 * mean;
        sum.late_s += late * mean;
        let calls = on_thread(Thread::Communication).filter_map(|span| span.call.as_ref());
        sent += calls.map(|call| call.sent_bytes as f64).sum::<f64>() * mean * 1e9;
    }
    sum.sent_bytes = sent as u64;
    sum
}

/// The communication of units by the axes of its groups, in the order of their names.
fn groups(trace: &Trace, ranks: &[usize], last: &LastStarts<'_>, mean: f64) -> Vec<GroupCommunication> {
    let calls = trace.spans.iter().filter_map(|span| span.call.as_ref());
    let of_units = calls.filter(|call| matches!(call.kind, Kind::Gather | Kind::Reduce));
    let axes: BTreeSet<&str> = of_units.map(axes_of).collect();
    let of_axes = |axes: &str| communication(trace, ranks, |call| axes_of(call) == axes, last, mean);
    axes.into_iter().map(|axes| GroupCommunication { axes: axes.to_string(), communication: of_axes(axes) }).collect()
}

/// The axes of a group, whose name ends with its ranks: `ring 0-1`.
fn axes_of(call: &SpanCall) -> &str {
    call.group.rsplit_once(' ').map_or(call.group.as_str(), |(axes, _)| axes)
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

/// The times of the units, in the order in which they first compute.
fn units(training: &[&Span], mean: f64) -> Vec<UnitTime> {
    let mut units: Vec<UnitTime> = Vec::new();
    let mut indices = BTreeMap::<&str, usize>::new();
    let is_of_unit = |span: &&&Span| {
        let waits_for = span.call.as_ref().map(|call| call.kind);
        !matches!(span.kind, Kind::Agree | Kind::Data | Kind::Evaluation | Kind::Save | Kind::Between)
            && waits_for != Some(Kind::Agree)
    };
    for span in training.iter().filter(is_of_unit) {
        let Some(name) = span.unit.as_deref() else { continue };
        let index = *indices.entry(name).or_insert_with(|| {
            units.push(UnitTime { unit: name.to_string(), ..UnitTime::default() });
            units.len() - 1
        });
        units[index].add(span, span.length_ns as f64 * mean);
    }
    units
}

fn verbs(trace: &Trace, last: &LastStarts<'_>, mean: f64) -> Vec<VerbRate> {
    let mut rates = BTreeMap::<&str, VerbRate>::new();
    // `mean` also converts nanoseconds to seconds, which counts do not need.
    let count = mean * 1e9;
    for span in trace.spans.iter().filter(|span| span.thread == Thread::Communication) {
        let Some(call) = span.call.as_ref().filter(|call| matches!(call.kind, Kind::Gather | Kind::Reduce)) else {
            continue;
        };
        let rate =
            rates.entry(&call.verb).or_insert_with(|| VerbRate { verb: call.verb.clone(), ..VerbRate::default() });
        rate.calls += count;
        rate.sent_bytes += call.sent_bytes as f64 * count;
        let start = key(span).and_then(|key| last.get(&key)).map_or(span.start_ns, |(start, _)| *start);
        rate.moving_s += span.end_ns().saturating_sub(start.max(span.start_ns)).max(0) as f64 * mean;
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

/// For each call, the time at which the last rank entered it, and that rank.
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

/// Identifies a call across ranks. The names of groups contain their ranks, so they are unique.
fn key(span: &Span) -> Option<(&str, u64)> {
    span.call.as_ref().map(|call| (call.group.as_str(), call.number))
}

/// The part of a wait that passed before the last rank entered the call.
fn late_ns(span: &Span, last: &LastStarts<'_>) -> i64 {
    let Some((start, _)) = key(span).and_then(|key| last.get(&key)).filter(|_| span.kind == Kind::Wait) else {
        return 0;
    };
    (*start).min(span.end_ns()).saturating_sub(span.start_ns).max(0)
}

fn interval(span: &Span) -> (i64, i64) {
    (span.start_ns, span.end_ns())
}

/// The union of intervals, in order and without overlap.
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

/// The length of the intersection of two unions.
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
    use crate::spans::{TraceInfo, TraceRank};

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

    /// Rank 1 enters a gather 4 ms after rank 0, which computes for 3 of them. The gather then takes 6.
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
        let ranks = vec![(0, TraceRank::default()), (1, TraceRank::default())];
        Trace { info: TraceInfo { steps: 1, ..TraceInfo::default() }, ranks, spans }
    }

    fn near(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-9, "{a} and {b}");
    }

    #[test]
    fn a_late_rank_and_a_slow_link_are_told_apart() {
        let profile = Profile::from_trace(&late());
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
    fn each_group_has_its_own_communication() {
        let mut trace = late();
        // A call of another group, in which both ranks wait from beginning to end.
        for rank in [0, 1] {
            for thread in [Thread::Training, Thread::Communication] {
                let kind = if thread == Thread::Training { Kind::Wait } else { Kind::Reduce };
                let mut span = span(rank, thread, kind, (20, 24), Some((Kind::Reduce, 1)));
                span.call.as_mut().unwrap().group = "ring 0-1".to_string();
                trace.spans.push(span);
            }
        }
        let profile = Profile::from_trace(&trace);
        let [ring, shard] = &profile.groups[..] else { panic!("{:?}", profile.groups) };
        assert_eq!((ring.axes.as_str(), shard.axes.as_str()), ("ring", "shard"));
        near(ring.communication.total_s, 0.004);
        near(ring.communication.hidden_s, 0.);
        near(shard.communication.hidden_s, 0.0015);
        near(profile.communication.total_s, 0.012);
        assert_eq!((ring.communication.sent_bytes, profile.communication.sent_bytes), (1000, 2000));
    }

    #[test]
    fn overlapping_times_are_counted_once() {
        let a = union(vec![(0, 4), (2, 6), (10, 12)]);
        assert_eq!((a.as_slice(), length(&a)), (&[(0, 6), (10, 12)][..], 8));
        assert_eq!(common(&a, &[(5, 11)]), 2);
        assert_eq!(common(&a, &[]), 0);
    }
}
