//! Traces of a few steps on all ranks, on one clock, in one file.
//!
//! While steps are traced, a rank records every change of its position ([`PositionTracker`]) and keeps a record of all of its
//! calls ([`shardwise_comm::FlightRecorder::keep_all`]). Nothing else is measured, and tracing costs nothing when it is off.
//! Afterwards each rank builds spans and sends them to rank 0, which writes them to a file. Of thousands of ranks only the first
//! few are traced, plus those that were requested.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{File, create_dir_all, rename};
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use shardwise_comm::{Call, Entry, Group, RecordedCalls, Verb};
use shardwise_journal::spans::{Kind, Span, SpanCall, Thread, TraceInfo, TraceRank, TraceWriter, events};

use crate::error::Result;
use crate::host;
use crate::phase::Phase;
use crate::position::{Mark, Marks, PositionTracker};
use crate::requests::{PlannedTrace, Requests, StepRange, TRACED_STEPS_MAX};

/// The number of ranks traced by default, and the maximum.
const RANKS_BY_DEFAULT: usize = 16;
const RANKS_MAX: usize = 64;

/// How many times a rank asks rank 0 for the time. The answer with the shortest round trip is used.
const CLOCK_ROUNDS: usize = 16;

/// The size of the messages that carry a rank's spans.
const PIECE_BYTES: usize = 1 << 20;

/// A finished trace.
#[derive(Clone, Debug, PartialEq)]
pub struct WrittenTrace {
    /// The first traced step.
    pub first_step: u64,
    /// The number of traced steps.
    pub steps: u64,
    /// The file, or why it could not be written. Such a failure does not end the run.
    pub path: std::result::Result<PathBuf, String>,
}

impl fmt::Display for WrittenTrace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let last = self.first_step + self.steps.saturating_sub(1);
        match &self.path {
            Ok(path) => {
                write!(f, "traced steps {} to {last}: {} (opens in ui.perfetto.dev)", self.first_step, path.display())
            }
            Err(why) => {
                write!(f, "steps {} to {last} were traced, but the trace could not be written: {why}", self.first_step)
            }
        }
    }
}

/// Traces a run's steps.
pub(crate) struct Tracer {
    world: Arc<Group>,
    position: Arc<PositionTracker>,
    /// The largest number of steps that any rank was asked to trace, as of the last step.
    requested: u64,
    planned: PlannedTrace,
    folder: PathBuf,
    active: Option<ActiveTrace>,
}

struct ActiveTrace {
    /// The start of each step.
    steps: Vec<(u64, Instant)>,
    last_step: u64,
    /// Present if this rank is traced.
    clock: Option<Clock>,
}

impl Tracer {
    pub(crate) fn new(
        world: &Arc<Group>,
        position: &Arc<PositionTracker>,
        requests: &Requests,
        folder: PathBuf,
    ) -> Self {
        Tracer {
            world: world.clone(),
            position: position.clone(),
            requested: 0,
            planned: requests.planned_trace.clone(),
            folder,
            active: None,
        }
    }

    /// Requests a trace of this many steps; 0 requests none. All ranks request the same.
    pub(crate) fn request(&mut self, steps: u64) {
        self.requested = steps;
    }

    /// Starts a trace before a step, if one was requested.
    pub(crate) fn before_step(&mut self, step: u64) -> Result<()> {
        if self.active.is_none() {
            let planned = self.planned.steps.as_ref().filter(|StepRange(steps)| steps.contains(&step));
            let last = planned.map(|StepRange(steps)| *steps.end());
            let requested = std::mem::take(&mut self.requested).min(TRACED_STEPS_MAX);
            if let Some(last) = last.or((requested > 0).then(|| step + requested - 1)) {
                self.start(last)?;
            }
        }
        self.active.iter_mut().for_each(|trace| trace.steps.push((step, Instant::now())));
        Ok(())
    }

    /// Ends the trace after its last step, or after the run's last step. All ranks return the path of the file, which rank 0 writes.
    pub(crate) fn after_step(&mut self, step: u64, is_last: bool) -> Result<Option<WrittenTrace>> {
        match self.active.take() {
            Some(trace) if is_last || trace.last_step <= step => self.end(trace).map(Some),
            other => {
                self.active = other;
                Ok(None)
            }
        }
    }

    fn ranks(&self) -> BTreeSet<usize> {
        let requested = self.planned.ranks.iter().copied().filter(|rank| *rank < self.world.size());
        (0..RANKS_BY_DEFAULT.min(self.world.size())).chain(requested).take(RANKS_MAX).collect()
    }

    fn start(&mut self, last_step: u64) -> Result<()> {
        let ranks = self.ranks();
        let clock = match ranks.contains(&self.world.rank()) {
            true => Some(Clock::synchronize(&self.world, &ranks)?),
            false => None,
        };
        if clock.is_some() {
            self.world.flight_recorder().keep_all();
            self.position.start_trace();
        }
        self.active = Some(ActiveTrace { steps: Vec::new(), last_step, clock });
        Ok(())
    }

    fn end(&mut self, trace: ActiveTrace) -> Result<WrittenTrace> {
        let ended = Instant::now();
        let first_step = trace.steps.first().map_or(trace.last_step, |(step, _)| *step);
        let steps = trace.steps.len() as u64;
        let rank = self.world.rank();
        let own = trace.clock.map_or_else(Vec::new, |clock| {
            let began = trace.steps.first().map_or(ended, |(_, began)| *began);
            let record = self.world.flight_recorder();
            let kept = record.take_kept(began.saturating_duration_since(record.epoch()));
            let marks = self.position.end_trace();
            let info = TraceRank {
                host: host::name(),
                clock_offset_us: clock.offset_ns as f64 / 1e3,
                clock_uncertainty_us: clock.uncertainty_ns as f64 / 1e3,
                dropped: kept.dropped + marks.dropped,
            };
            let builder = SpanBuilder {
                rank,
                units: self.position.units(),
                steps: &trace.steps,
                ended,
                epoch: record.epoch(),
                clock,
            };
            events(rank, &info, &builder.spans(&marks, &kept))
        });
        let name = format!("trace-step-{first_step:06}.json");
        let info =
            TraceInfo { version: env!("CARGO_PKG_VERSION").to_string(), first_step, steps, ranks: self.world.size() };
        let path = match rank {
            0 => self.write(&self.folder.join(name), &info, own)?,
            _ => {
                self.send(own)?;
                Ok(self.folder.join(name))
            }
        };
        Ok(WrittenTrace { first_step, steps, path })
    }

    /// Writes rank 0's events, then those of the other ranks. Receives all events even if they cannot be written.
    fn write(&self, path: &Path, info: &TraceInfo, own: Vec<u8>) -> Result<std::result::Result<PathBuf, String>> {
        let mut file = TraceFile::create(path, info);
        file.add(&own);
        drop(own);
        for rank in self.ranks().into_iter().filter(|rank| *rank != 0) {
            let mut left = self.world.receive("trace", rank, vec![0i64]).wait()?[0] as usize;
            while left > 0 {
                let piece = self.world.receive("trace", rank, vec![0u8; left.min(PIECE_BYTES)]).wait()?;
                file.add(&piece);
                left -= piece.len();
            }
        }
        Ok(file.end())
    }

    fn send(&self, own: Vec<u8>) -> Result<()> {
        if !self.ranks().contains(&self.world.rank()) {
            return Ok(());
        }
        self.world.send("trace", 0, vec![own.len() as i64]).wait()?;
        for piece in own.chunks(PIECE_BYTES) {
            self.world.send("trace", 0, piece.to_vec()).wait()?;
        }
        Ok(())
    }
}

/// A file that is renamed into place when it is complete.
struct TraceFile {
    path: PathBuf,
    writer: std::io::Result<TraceWriter<BufWriter<File>>>,
}

impl TraceFile {
    fn create(path: &Path, info: &TraceInfo) -> Self {
        let path = path.to_path_buf();
        let file = path.parent().map_or(Ok(()), create_dir_all).and_then(|()| File::create(partial(&path)));
        let writer = file.and_then(|file| TraceWriter::new(BufWriter::new(file), info));
        TraceFile { path, writer }
    }

    fn add(&mut self, events: &[u8]) {
        let added = self.writer.as_mut().map_or(Ok(()), |writer| writer.add(events));
        if let Err(error) = added {
            self.writer = Err(error);
        }
    }

    fn end(self) -> std::result::Result<PathBuf, String> {
        let ended = self.writer.and_then(TraceWriter::finish).and_then(|()| rename(partial(&self.path), &self.path));
        ended.map_err(|error| format!("{}: {error}", self.path.display())).map(|()| self.path)
    }
}

fn partial(path: &Path) -> PathBuf {
    path.with_extension("json.part")
}

/// Converts this rank's times to rank 0's clock.
#[derive(Clone, Copy, Debug)]
struct Clock {
    /// The same moment as an `Instant` and on the system's monotonic clock, in nanoseconds.
    anchor: (Instant, i64),
    /// How far rank 0's clock is ahead of this rank's.
    offset_ns: i64,
    /// The uncertainty of the offset.
    uncertainty_ns: i64,
    /// The start of the trace on rank 0's clock.
    origin_ns: i64,
}

impl Clock {
    /// Synchronizes with rank 0, one rank after the other.
    fn synchronize(world: &Group, ranks: &BTreeSet<usize>) -> Result<Self> {
        let anchor = (Instant::now(), monotonic_ns());
        let own_boot = boot();
        if world.rank() == 0 {
            for &rank in ranks.iter().filter(|&&rank| rank != 0) {
                for _ in 0..CLOCK_ROUNDS {
                    world.receive("clock", rank, vec![0i64]).wait()?;
                    world.send("clock", rank, vec![monotonic_ns(), anchor.1, own_boot]).wait()?;
                }
            }
            return Ok(Clock { anchor, offset_ns: 0, uncertainty_ns: 0, origin_ns: anchor.1 });
        }
        let mut clock = Clock { anchor, offset_ns: 0, uncertainty_ns: i64::MAX, origin_ns: 0 };
        let mut is_same_machine = false;
        for _ in 0..CLOCK_ROUNDS {
            let sent_at = monotonic_ns();
            world.send("clock", 0, vec![0i64]).wait()?;
            let answer = world.receive("clock", 0, vec![0i64; 3]).wait()?;
            let took = monotonic_ns() - sent_at;
            if took / 2 < clock.uncertainty_ns {
                (clock.offset_ns, clock.uncertainty_ns) = (answer[0] - (sent_at + took / 2), took / 2);
            }
            clock.origin_ns = answer[1];
            is_same_machine = answer[2] == own_boot;
        }
        // Ranks on the same machine share a clock, unless the measurement contradicts that.
        if is_same_machine && clock.offset_ns.abs() <= clock.uncertainty_ns {
            (clock.offset_ns, clock.uncertainty_ns) = (0, 0);
        }
        Ok(clock)
    }

    /// The time since the start of the trace, in nanoseconds.
    fn at(&self, moment: Instant) -> i64 {
        let after = moment.saturating_duration_since(self.anchor.0).as_nanos() as i64;
        let before = self.anchor.0.saturating_duration_since(moment).as_nanos() as i64;
        self.anchor.1 + after - before + self.offset_ns - self.origin_ns
    }
}

fn monotonic_ns() -> i64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec * 1_000_000_000 + now.tv_nsec
}

/// Identifies the machine and its current boot; ranks with the same value share a monotonic clock.
fn boot() -> i64 {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    host::hash_text(&id)
}

/// Builds the spans of a rank.
struct SpanBuilder<'a> {
    rank: usize,
    units: &'a [String],
    steps: &'a [(u64, Instant)],
    ended: Instant,
    /// The origin of the flight recorder's times.
    epoch: Instant,
    clock: Clock,
}

impl SpanBuilder<'_> {
    /// This rank's spans, from the start of the first step to the end of the last.
    fn spans(&self, marks: &Marks, kept: &RecordedCalls) -> Vec<Span> {
        let mut spans = Vec::new();
        let mut waits: Vec<(Instant, Instant, &Entry)> = kept.entries.iter().filter_map(|e| self.wait(e)).collect();
        waits.sort_by_key(|(from, ..)| *from);
        let mut waits = waits.into_iter().peekable();
        for (index, mark) in marks.training.iter().enumerate() {
            let until = marks.training.get(index + 1).map_or(self.ended, |next| next.at);
            let mut from = mark.at;
            while let Some((began, ended, entry)) = waits.next_if(|(began, ..)| *began < until) {
                let (began, ended) = (began.max(from), ended.min(until));
                if began < ended {
                    self.add(&mut spans, from, began, |span| self.fill_phase(mark, span));
                    self.add(&mut spans, began, ended, |span| {
                        self.fill_call(&entry.call, span);
                        span.kind = Kind::Wait;
                    });
                    from = ended;
                }
            }
            self.add(&mut spans, from, until, |span| self.fill_phase(mark, span));
        }
        for entry in &kept.entries {
            let Some(started) = entry.started else { continue };
            let ended = entry.ended.map_or(self.ended, |ended| self.epoch + ended);
            self.add(&mut spans, self.epoch + started, ended, |span| {
                self.fill_call(&entry.call, span);
                span.thread = Thread::Communication;
            });
        }
        for (_, from, to) in &marks.background {
            self.add(&mut spans, *from, *to, |span| (span.thread, span.kind) = (Thread::Saving, Kind::Save));
        }
        spans
    }

    fn wait<'e>(&self, entry: &'e Entry) -> Option<(Instant, Instant, &'e Entry)> {
        let (waited, went_on) = (entry.waited?, self.epoch + entry.wait_ended?);
        Some((went_on.checked_sub(waited)?, went_on, entry))
    }

    /// Adds the part of a span that lies within the trace, if there is one.
    fn add(&self, spans: &mut Vec<Span>, from: Instant, to: Instant, fill: impl FnOnce(&mut Span)) {
        let Some((_, began)) = self.steps.first() else { return };
        let (from, to) = (from.max(*began), to.min(self.ended));
        let length = to.saturating_duration_since(from);
        if length == Duration::ZERO {
            return;
        }
        let before = self.steps.partition_point(|(_, began)| *began <= from).max(1) - 1;
        let mut span = Span {
            rank: self.rank,
            thread: Thread::Training,
            kind: Kind::Between,
            step: self.steps[before].0,
            unit: None,
            start_ns: self.clock.at(from),
            length_ns: length.as_nanos() as u64,
            call: None,
        };
        fill(&mut span);
        spans.push(span);
    }

    fn fill_phase(&self, mark: &Mark, span: &mut Span) {
        span.kind = match mark.phase {
            Phase::Data => Kind::Data,
            Phase::Gather => Kind::Gather,
            Phase::Forward => Kind::Forward,
            Phase::Recompute => Kind::Recompute,
            Phase::Backward => Kind::Backward,
            Phase::Reduce => Kind::Reduce,
            Phase::Fetch => Kind::Fetch,
            Phase::Optimizer => Kind::Optimizer,
            Phase::Store => Kind::Store,
            Phase::Evaluation => Kind::Evaluation,
            Phase::Save | Phase::SaveBefore | Phase::SaveInside | Phase::SaveAfter => Kind::Save,
            Phase::Start | Phase::Between | Phase::End => Kind::Between,
        };
        span.unit = (mark.unit as usize).checked_sub(1).and_then(|unit| self.units.get(unit).cloned());
    }

    fn fill_call(&self, call: &Call, span: &mut Span) {
        let is_of_unit = self.units.iter().any(|unit| **unit == *call.label);
        let kind = match call.verb {
            // What context parallelism exchanges is mostly keys, which other ranks have.
            Verb::AllGather | Verb::AllToAll if is_of_unit => Kind::Gather,
            Verb::ReduceScatter | Verb::AllReduce if is_of_unit => Kind::Reduce,
            _ => Kind::Agree,
        };
        span.kind = kind;
        span.unit = Some(call.label.to_string());
        span.call = Some(SpanCall {
            kind,
            // A group's messages run concurrently with its collectives.
            group: match call.verb.is_collective() {
                true => call.group.to_string(),
                false => format!("{} messages", call.group),
            },
            number: call.number,
            verb: call.verb.to_string(),
            sent_bytes: (call.elements_sent * call.dtype.bytes()) as u64,
        });
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use shardwise_comm::CallStatus;
    use shardwise_plan::Dtype;

    use super::*;

    fn entry(label: &str, times: [u64; 5]) -> Entry {
        let [queued, started, ended, waited, wait_ended] = times.map(Duration::from_millis);
        Entry {
            call: Call {
                verb: Verb::AllGather,
                label: label.into(),
                group: "shard 0-1".into(),
                number: 1,
                elements: 1000,
                dtype: Dtype::Bf16,
                elements_sent: 500,
            },
            queued,
            started: Some(started),
            ended: Some(ended),
            is_awaited: true,
            waited: Some(waited),
            wait_ended: Some(wait_ended),
            status: CallStatus::Done,
            waits_for: Vec::new(),
        }
    }

    #[test]
    fn phases_are_split_where_the_rank_waited() {
        let epoch = Instant::now();
        let at = |ms: u64| epoch + Duration::from_millis(ms);
        let mark = |ms: u64, phase, unit| Mark { at: at(ms), phase, unit };
        let marks = Marks {
            training: vec![mark(0, Phase::Between, 0), mark(12, Phase::Gather, 1), mark(20, Phase::Forward, 1)],
            ..Marks::default()
        };
        // The rank started to wait for the first call before the trace, and that call ends at 11 ms.
        let kept = RecordedCalls {
            entries: vec![entry("loss", [1, 2, 11, 3, 11]), entry("block.0", [5, 11, 18, 5, 18])],
            dropped: 0,
        };
        let builder = SpanBuilder {
            rank: 1,
            units: &["block.0".to_string()],
            steps: &[(7, at(10)), (8, at(19))],
            ended: at(30),
            epoch,
            clock: Clock { anchor: (epoch, 0), offset_ns: 0, uncertainty_ns: 0, origin_ns: 0 },
        };
        let spans = builder.spans(&marks, &kept);
        let summary: Vec<(String, i64, u64, u64)> = spans
            .iter()
            .map(|span| (span.name(), span.start_ns / 1_000_000, span.length_ns / 1_000_000, span.step))
            .collect();
        let summary: Vec<(&str, i64, u64, u64)> =
            summary.iter().map(|(name, a, b, c)| (name.as_str(), *a, *b, *c)).collect();
        assert_eq!(
            summary,
            [
                ("wait agree loss", 10, 1, 7),
                ("between", 11, 1, 7),
                ("gather block.0", 12, 1, 7),
                ("wait gather block.0", 13, 5, 7),
                ("gather block.0", 18, 2, 7),
                ("forward block.0", 20, 10, 8),
                ("agree loss", 10, 1, 7),
                ("gather block.0", 11, 7, 7),
            ]
        );
        assert_eq!(spans[7].call.as_ref().unwrap().sent_bytes, 1000);
    }

    #[test]
    fn step_ranges_are_parsed() {
        assert_eq!("10..12".parse(), Ok(StepRange(10..=12)));
        assert_eq!("3".parse(), Ok(StepRange(3..=3)));
        for wrong in ["", "0", "5..3", "1..101", "a..b", "1..", "99999999999999999999"] {
            assert!(wrong.parse::<StepRange>().is_err(), "{wrong}");
        }
    }
}
