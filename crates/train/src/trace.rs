//! Traces: what every rank did in a few steps, on one clock, in one file.
//!
//! While steps are traced, a rank writes down every place that it comes to ([`Position`]) and forgets no call
//! ([`shardwise_comm::Record::keep`]); nothing else is measured, and nothing at all where no step is traced. Afterwards one rank after
//! the other makes spans of that and sends them to the first, which writes them to a file. Of thousands of ranks only the first
//! few are traced, and those that were asked for.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{File, create_dir_all, rename};
use std::io::BufWriter;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use shardwise_comm::{Call, Entry, Group, Kept, Verb};
use shardwise_journal::spans::{About, Kind, RankAbout, Span, SpanCall, Thread, TraceWriter, events};
use shardwise_model::init::mixed;

use crate::host;
use crate::position::{Mark, Marks, Phase, Position};
use crate::{Asked, Ranks, Result, Trainer};

/// How many ranks are traced without being asked for, and how many at most.
const RANKS_TRACED: usize = 16;
const RANKS_TRACED_MAX: usize = 64;

/// The most steps of one trace.
const STEPS_MAX: u64 = 100;

/// How often a rank asks the first one for the time; the quickest answer counts.
const CLOCK_ROUNDS: usize = 16;

/// How much of a rank's spans travels at once.
const PIECE_BYTES: usize = 1 << 20;

/// Steps that are to be traced from the start of a run on.
#[derive(Clone, Debug, Default)]
pub struct PlannedTrace {
    /// Which.
    pub steps: Option<TracedSteps>,
    /// Ranks to be traced beside the first.
    pub ranks: Vec<usize>,
}

impl PlannedTrace {
    /// What there is to say if a run that makes these steps makes none of those.
    pub(crate) fn why_not(&self, first_step: u64, last_step: u64) -> Option<String> {
        let TracedSteps(steps) = self.steps.as_ref()?;
        let (first, last) = (steps.start(), steps.end());
        match (*last < first_step, *first > last_step) {
            (true, _) => Some(format!("steps {first} to {last} are past, and are not traced now")),
            (false, true) => Some(format!("steps {first} to {last} are not traced: run.steps is {last_step}")),
            (false, false) => None,
        }
    }
}

/// The first and the last step: `10..12`, or `10` for one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracedSteps(pub RangeInclusive<u64>);

impl FromStr for TracedSteps {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let (first, last) = text.split_once("..").unwrap_or((text, text));
        match (first.parse::<u64>(), last.parse::<u64>()) {
            (Ok(first), Ok(last)) if first >= 1 && first <= last && last - first < STEPS_MAX => {
                Ok(TracedSteps(first..=last))
            }
            _ => Err(format!("write the first and the last step, as in 10..12; {STEPS_MAX} at most")),
        }
    }
}

/// A trace that was made.
#[derive(Clone, Debug, PartialEq)]
pub struct Traced {
    /// The first step.
    pub first_step: u64,
    /// How many.
    pub steps: u64,
    /// The file; an error where it could not be written, which is no reason to end a run.
    pub path: std::result::Result<PathBuf, String>,
}

impl fmt::Display for Traced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let last = self.first_step + self.steps.saturating_sub(1);
        match &self.path {
            Ok(path) => {
                write!(f, "traced steps {} to {last}: {} (opens in ui.perfetto.dev)", self.first_step, path.display())
            }
            Err(why) => {
                write!(f, "steps {} to {last} were traced, and the trace could not be written: {why}", self.first_step)
            }
        }
    }
}

/// Traces a run's steps.
pub(crate) struct Tracer {
    world: Arc<Group>,
    position: Arc<Position>,
    asked: Arc<AtomicU64>,
    planned: PlannedTrace,
    folder: PathBuf,
    under_way: Option<UnderWay>,
}

struct UnderWay {
    /// When each step began.
    steps: Vec<(u64, Instant)>,
    last_step: u64,
    /// Where this rank is traced.
    clock: Option<Clock>,
}

impl Tracer {
    pub(crate) fn new(world: &Arc<Group>, position: &Arc<Position>, asked: &Asked, folder: PathBuf) -> Self {
        Tracer {
            world: world.clone(),
            position: position.clone(),
            asked: asked.trace.clone(),
            planned: asked.planned.clone(),
            folder,
            under_way: None,
        }
    }

    /// Before a step: begins a trace, if one was asked for.
    pub(crate) fn before_step(&mut self, trainer: &mut Trainer) -> Result<()> {
        let step = trainer.steps + 1;
        // A run that goes back has another trainer.
        trainer.trace_asked = self.asked.clone();
        if self.under_way.is_none() {
            let planned = self.planned.steps.as_ref().filter(|TracedSteps(steps)| steps.contains(&step));
            let last = planned.map(|TracedSteps(steps)| *steps.end());
            let agreed = std::mem::take(&mut trainer.trace_agreed).min(STEPS_MAX);
            if let Some(last) = last.or((agreed > 0).then(|| step + agreed - 1)) {
                self.begin(last)?;
            }
        }
        self.under_way.iter_mut().for_each(|trace| trace.steps.push((step, Instant::now())));
        Ok(())
    }

    /// After a step, which may be the run's last: ends the trace, if this was its last. All ranks have a file to speak of, which
    /// the first has written.
    pub(crate) fn after_step(&mut self, trainer: &Trainer, is_last: bool) -> Result<Option<Traced>> {
        match self.under_way.take() {
            Some(trace) if is_last || trace.last_step <= trainer.steps => self.end(trace, trainer).map(Some),
            other => {
                self.under_way = other;
                Ok(None)
            }
        }
    }

    fn ranks(&self) -> BTreeSet<usize> {
        let asked = self.planned.ranks.iter().copied().filter(|rank| *rank < self.world.size());
        (0..RANKS_TRACED.min(self.world.size())).chain(asked).take(RANKS_TRACED_MAX).collect()
    }

    fn begin(&mut self, last_step: u64) -> Result<()> {
        let ranks = self.ranks();
        let clock = match ranks.contains(&self.world.rank()) {
            true => Some(Clock::agreed(&self.world, &ranks)?),
            false => None,
        };
        if clock.is_some() {
            self.world.record().keep();
            self.position.begin_trace();
        }
        self.under_way = Some(UnderWay { steps: Vec::new(), last_step, clock });
        Ok(())
    }

    fn end(&mut self, trace: UnderWay, trainer: &Trainer) -> Result<Traced> {
        let ended = Instant::now();
        let first_step = trace.steps.first().map_or(trace.last_step, |(step, _)| *step);
        let steps = trace.steps.len() as u64;
        let rank = self.world.rank();
        let own = trace.clock.map_or_else(Vec::new, |clock| {
            let began = trace.steps.first().map_or(ended, |(_, began)| *began);
            let record = self.world.record();
            let kept = record.take_kept(began.saturating_duration_since(record.epoch()));
            let marks = self.position.end_trace();
            let about = RankAbout {
                host: host::name(),
                clock_offset_us: clock.offset_ns as f64 / 1e3,
                clock_uncertainty_us: clock.uncertainty_ns as f64 / 1e3,
                forgotten: kept.forgotten + marks.forgotten,
            };
            let made = Made {
                rank,
                units: self.position.units(),
                groups: groups(&trainer.ranks),
                steps: &trace.steps,
                ended,
                epoch: record.epoch(),
                clock,
            };
            events(rank, &about, &made.spans(&marks, &kept))
        });
        let name = format!("trace-step-{first_step:06}.json");
        let about =
            About { version: env!("CARGO_PKG_VERSION").to_string(), first_step, steps, ranks: self.world.size() };
        let path = match rank {
            0 => self.write(&self.folder.join(name), &about, own)?,
            _ => {
                self.send(own)?;
                Ok(self.folder.join(name))
            }
        };
        Ok(Traced { first_step, steps, path })
    }

    /// Writes the first rank's events, and then those of the others as they come. Those come whether they can be written or not.
    fn write(&self, path: &Path, about: &About, own: Vec<u8>) -> Result<std::result::Result<PathBuf, String>> {
        let mut file = TraceFile::create(path, about);
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

/// A file that has its name when it is whole.
struct TraceFile {
    path: PathBuf,
    writer: std::io::Result<TraceWriter<BufWriter<File>>>,
}

impl TraceFile {
    fn create(path: &Path, about: &About) -> Self {
        let path = path.to_path_buf();
        let made = path.parent().map_or(Ok(()), create_dir_all).and_then(|()| File::create(partial(&path)));
        let writer = made.and_then(|file| TraceWriter::new(BufWriter::new(file), about));
        TraceFile { path, writer }
    }

    fn add(&mut self, events: &[u8]) {
        let added = self.writer.as_mut().map_or(Ok(()), |writer| writer.add(events));
        if let Err(error) = added {
            self.writer = Err(error);
        }
    }

    fn end(self) -> std::result::Result<PathBuf, String> {
        let ended = self.writer.and_then(TraceWriter::end).and_then(|()| rename(partial(&self.path), &self.path));
        ended.map_err(|error| format!("{}: {error}", self.path.display())).map(|()| self.path)
    }
}

fn partial(path: &Path) -> PathBuf {
    path.with_extension("json.part")
}

/// The first rank's clock, as another one sees it.
#[derive(Clone, Copy, Debug)]
struct Clock {
    /// A moment, as `Instant` and as the system's monotonic clock have it.
    anchor: (Instant, i64),
    /// What the first rank's clock is ahead.
    offset_ns: i64,
    /// By how much that may be wrong.
    uncertainty_ns: i64,
    /// The beginning of the trace, by the first rank's clock.
    origin_ns: i64,
}

impl Clock {
    /// Asks the first rank for the time, rank after rank.
    fn agreed(world: &Group, ranks: &BTreeSet<usize>) -> Result<Self> {
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
            let asked = monotonic_ns();
            world.send("clock", 0, vec![0i64]).wait()?;
            let told = world.receive("clock", 0, vec![0i64; 3]).wait()?;
            let took = monotonic_ns() - asked;
            if took / 2 < clock.uncertainty_ns {
                (clock.offset_ns, clock.uncertainty_ns) = (told[0] - (asked + took / 2), took / 2);
            }
            clock.origin_ns = told[1];
            is_same_machine = told[2] == own_boot;
        }
        // One machine has one clock, if nothing contradicts that.
        if is_same_machine && clock.offset_ns.abs() <= clock.uncertainty_ns {
            (clock.offset_ns, clock.uncertainty_ns) = (0, 0);
        }
        Ok(clock)
    }

    /// A moment of this rank's, since the beginning of the trace.
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

/// Which start of which machine this is.
fn boot() -> i64 {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.bytes().fold(0, |hash, byte| mixed(hash ^ u64::from(byte))) as i64
}

/// The names and sizes of the groups.
fn groups(ranks: &Ranks) -> Vec<(String, usize)> {
    let groups = [&ranks.world, &ranks.groups.shard, &ranks.groups.replicate];
    groups.iter().map(|group| (group.name().to_string(), group.size())).collect()
}

/// What spans are made with.
struct Made<'a> {
    rank: usize,
    units: &'a [String],
    groups: Vec<(String, usize)>,
    steps: &'a [(u64, Instant)],
    ended: Instant,
    /// What the record's times count from.
    epoch: Instant,
    clock: Clock,
}

impl Made<'_> {
    /// What this rank did, from the beginning of the first step to the end of the last.
    fn spans(&self, marks: &Marks, kept: &Kept) -> Vec<Span> {
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
                    self.add(&mut spans, from, began, |span| self.place(mark, span));
                    self.add(&mut spans, began, ended, |span| {
                        self.call(&entry.call, span);
                        span.kind = Kind::Wait;
                    });
                    from = ended;
                }
            }
            self.add(&mut spans, from, until, |span| self.place(mark, span));
        }
        for entry in &kept.entries {
            let Some(started) = entry.started else { continue };
            let ended = entry.ended.map_or(self.ended, |ended| self.epoch + ended);
            self.add(&mut spans, self.epoch + started, ended, |span| {
                self.call(&entry.call, span);
                span.thread = Thread::Communication;
            });
        }
        for (_, from, to) in &marks.beside {
            self.add(&mut spans, *from, *to, |span| (span.thread, span.kind) = (Thread::Saving, Kind::Save));
        }
        spans
    }

    fn wait<'e>(&self, entry: &'e Entry) -> Option<(Instant, Instant, &'e Entry)> {
        let (waited, went_on) = (entry.waited?, self.epoch + entry.went_on?);
        Some((went_on.checked_sub(waited)?, went_on, entry))
    }

    /// Adds the time between two moments, as far as it is in the trace and there is any.
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

    fn place(&self, mark: &Mark, span: &mut Span) {
        span.kind = match mark.phase {
            Phase::Data => Kind::Data,
            Phase::Gather => Kind::Gather,
            Phase::Forward => Kind::Forward,
            Phase::Recompute => Kind::Again,
            Phase::Backward => Kind::Backward,
            Phase::Reduce => Kind::Reduce,
            Phase::Optimizer => Kind::Optimizer,
            Phase::Evaluation => Kind::Evaluation,
            Phase::Save | Phase::SaveBefore | Phase::SaveInside | Phase::SaveAfter => Kind::Save,
            Phase::Start | Phase::Between | Phase::End => Kind::Between,
        };
        span.unit = (mark.unit as usize).checked_sub(1).and_then(|unit| self.units.get(unit).cloned());
    }

    fn call(&self, call: &Call, span: &mut Span) {
        let is_of_unit = self.units.iter().any(|unit| **unit == *call.label);
        let kind = match call.verb {
            Verb::AllGather if is_of_unit => Kind::Gather,
            Verb::ReduceScatter | Verb::AllReduce if is_of_unit => Kind::Reduce,
            _ => Kind::Agree,
        };
        span.kind = kind;
        span.unit = Some(call.label.to_string());
        span.call = Some(SpanCall {
            kind,
            // Its messages run beside its collectives.
            group: match call.verb.is_collective() {
                true => call.group.to_string(),
                false => format!("{} messages", call.group),
            },
            number: call.number,
            verb: call.verb.to_string(),
            sent_bytes: self.sent_bytes(call),
        });
    }

    /// What this rank hands to others, as theory counts it.
    fn sent_bytes(&self, call: &Call) -> u64 {
        let size = self.groups.iter().find(|(name, _)| **name == *call.group).map_or(1, |(_, size)| *size) as u64;
        let bytes = (call.elements * call.dtype.bytes()) as u64;
        match call.verb {
            Verb::AllGather | Verb::ReduceScatter | Verb::AllToAll => bytes * (size - 1) / size,
            Verb::AllReduce => 2 * bytes * (size - 1) / size,
            Verb::Send | Verb::Broadcast => bytes,
            Verb::Receive | Verb::Barrier => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use shardwise_comm::Outcome;
    use shardwise_plan::Dtype;

    use super::*;

    fn entry(label: &str, times: [u64; 5]) -> Entry {
        let [queued, started, ended, waited, went_on] = times.map(Duration::from_millis);
        Entry {
            call: Call {
                verb: Verb::AllGather,
                label: label.into(),
                group: "shard 0-1".into(),
                number: 1,
                elements: 1000,
                dtype: Dtype::Bf16,
            },
            queued,
            started: Some(started),
            ended: Some(ended),
            waited: Some(waited),
            went_on: Some(went_on),
            outcome: Outcome::Done,
            waits_for: Vec::new(),
        }
    }

    #[test]
    fn phases_are_cut_where_the_rank_stood_still() {
        let epoch = Instant::now();
        let at = |ms: u64| epoch + Duration::from_millis(ms);
        let mark = |ms: u64, phase, unit| Mark { at: at(ms), phase, unit };
        let marks = Marks {
            training: vec![mark(0, Phase::Between, 0), mark(12, Phase::Gather, 1), mark(20, Phase::Forward, 1)],
            ..Marks::default()
        };
        // The first call was waited for before the trace began, and is under way until 11.
        let kept = Kept {
            entries: vec![entry("loss", [1, 2, 11, 3, 11]), entry("block.0", [5, 11, 18, 5, 18])],
            forgotten: 0,
        };
        let made = Made {
            rank: 1,
            units: &["block.0".to_string()],
            groups: vec![("shard 0-1".to_string(), 2)],
            steps: &[(7, at(10)), (8, at(19))],
            ended: at(30),
            epoch,
            clock: Clock { anchor: (epoch, 0), offset_ns: 0, uncertainty_ns: 0, origin_ns: 0 },
        };
        let spans = made.spans(&marks, &kept);
        let told: Vec<(String, i64, u64, u64)> = spans
            .iter()
            .map(|span| (span.name(), span.start_ns / 1_000_000, span.length_ns / 1_000_000, span.step))
            .collect();
        let told: Vec<(&str, i64, u64, u64)> = told.iter().map(|(name, a, b, c)| (name.as_str(), *a, *b, *c)).collect();
        assert_eq!(
            told,
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
    fn steps_are_written_as_a_range() {
        assert_eq!("10..12".parse(), Ok(TracedSteps(10..=12)));
        assert_eq!("3".parse(), Ok(TracedSteps(3..=3)));
        for wrong in ["", "0", "5..3", "1..101", "a..b", "1..", "99999999999999999999"] {
            assert!(wrong.parse::<TracedSteps>().is_err(), "{wrong}");
        }
    }
}
