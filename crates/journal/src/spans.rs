//! Where the time of a few steps went, as spans: written and read as Chrome's trace JSON, which Perfetto opens.
//!
//! A rank is a process of the trace, and has a thread that trains, one that saves, and one for each group in which it talks. The spans
//! of the thread that trains follow each other without a gap, and none is inside another: what it did, and when it stood still and
//! for what. So their lengths can be added up by whoever reads the file, with or without this module. Times are those of the
//! first rank's clock. It does not measure: `shardwise-train` does.

use std::fmt;
use std::io::{Read, Write};
use std::str::FromStr;

use serde::de::{Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::json;

use crate::{Error, Result};

/// The largest trace that is read.
const TRACE_BYTES_MAX: u64 = 1 << 30;

/// The most spans that are read.
const SPANS_MAX: usize = 4 << 20;

/// The longest name of a unit, a call or a group.
const NAME_BYTES_MAX: usize = 1 << 10;

/// The threads of a rank; those of groups follow.
const TRAINING: u64 = 1;
const SAVING: u64 = 2;
const GROUPS: u64 = 10;

/// What a span is spent on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Reading the step's tokens.
    Data,
    /// Making a unit's parameters whole.
    Gather,
    /// Computing a unit's output.
    Forward,
    /// Computing it again for the backward pass.
    Again,
    /// Computing a unit's gradients.
    Backward,
    /// Handing gradients to the ranks that own them.
    Reduce,
    /// Updating parameters.
    Optimizer,
    /// Numbers that all ranks have to know: tokens, losses, norms.
    Agree,
    /// Standing still for a call.
    Wait,
    /// Measuring on text that was held out.
    Evaluation,
    /// Looking after checkpoints.
    Save,
    /// What the loop does around the step.
    Between,
}

impl Kind {
    /// Every kind with its name.
    pub const ALL: [(Kind, &str); 12] = [
        (Kind::Data, "data"),
        (Kind::Gather, "gather"),
        (Kind::Forward, "forward"),
        (Kind::Again, "recompute"),
        (Kind::Backward, "backward"),
        (Kind::Reduce, "reduce"),
        (Kind::Optimizer, "optimizer"),
        (Kind::Agree, "agree"),
        (Kind::Wait, "wait"),
        (Kind::Evaluation, "evaluation"),
        (Kind::Save, "save"),
        (Kind::Between, "between"),
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        Kind::ALL.iter().find(|(kind, _)| *kind == self).map_or("", |(_, name)| name)
    }
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let found = Kind::ALL.iter().find(|(_, name)| *name == text);
        found.map(|(kind, _)| *kind).ok_or_else(|| format!("there is no kind of span '{text}'"))
    }
}

/// Whose time it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Thread {
    /// That of the thread that trains.
    Training,
    /// That of the thread that writes checkpoints.
    Saving,
    /// That of the call's group.
    Communication,
}

/// A call between ranks. Ranks number the calls of a group alike, so group and number say which belong together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpanCall {
    /// Gathering, reducing, or agreeing.
    pub kind: Kind,
    /// The group's name.
    pub group: String,
    /// The call's number in the group.
    pub number: u64,
    /// `all-gather`, …
    pub verb: String,
    /// What this rank hands to others in it.
    pub sent_bytes: u64,
}

/// Some time of a thread.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// The rank.
    pub rank: usize,
    /// The thread.
    pub thread: Thread,
    /// What for.
    pub kind: Kind,
    /// In which step.
    pub step: u64,
    /// The unit, or the quantity that a call is about.
    pub unit: Option<String>,
    /// From when on, in nanoseconds since the trace began.
    pub start_ns: i64,
    /// For how long.
    pub length_ns: u64,
    /// The call that it is, or that is waited for.
    pub call: Option<SpanCall>,
}

impl Span {
    /// When it ends.
    pub fn end_ns(&self) -> i64 {
        self.start_ns.saturating_add_unsigned(self.length_ns)
    }

    /// As in `wait gather block.3`.
    pub fn name(&self) -> String {
        let mut name = self.kind.name().to_string();
        if let (Kind::Wait, Some(call)) = (self.kind, &self.call) {
            name += &format!(" {}", call.kind.name());
        }
        self.unit.iter().for_each(|unit| name += &format!(" {unit}"));
        name
    }
}

/// What a trace says of itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct About {
    /// The version of Shardwise.
    pub version: String,
    /// The first step.
    pub first_step: u64,
    /// How many.
    pub steps: u64,
    /// How many ranks the run has, of which some may not be in the trace.
    pub ranks: usize,
}

/// What there is to know of a rank beside its spans.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankAbout {
    /// Its host.
    pub host: String,
    /// What its clock was behind the first rank's, in microseconds.
    pub clock_offset_us: f64,
    /// By how much that may be wrong.
    pub clock_uncertainty_us: f64,
    /// Calls and phases that there was no room for.
    pub forgotten: u64,
}

/// A trace.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// What it says of itself.
    pub about: About,
    /// Its ranks, in the order in which they were written.
    pub ranks: Vec<(usize, RankAbout)>,
    /// All spans.
    pub spans: Vec<Span>,
}

/// Writes a trace, rank after rank, so that nobody has to hold all of it.
pub struct TraceWriter<W> {
    out: W,
}

impl<W: Write> TraceWriter<W> {
    /// Begins a trace.
    pub fn new(mut out: W, about: &About) -> std::io::Result<Self> {
        // A first event, so that every other one follows a comma.
        let begin = json!({ "ph": "M", "name": "trace_began", "pid": 0, "args": {} });
        write!(out, "{{\"displayTimeUnit\":\"ms\",\"otherData\":{},\"traceEvents\":[\n{begin}", json!(about))?;
        Ok(TraceWriter { out })
    }

    /// Adds what [`events`] has made, which may come in pieces.
    pub fn add(&mut self, events: &[u8]) -> std::io::Result<()> {
        self.out.write_all(events)
    }

    /// Ends it.
    pub fn end(mut self) -> std::io::Result<()> {
        self.out.write_all(b"\n]}\n")?;
        self.out.flush()
    }
}

/// A rank's spans as a trace has them, to be added to one.
pub fn events(rank: usize, about: &RankAbout, spans: &[Span]) -> Vec<u8> {
    let mut text = String::new();
    let mut add = |event: serde_json::Value| text += &format!(",\n{event}");
    let named = |what: &str, tid: u64, name: &str| json!({ "ph": "M", "name": what, "pid": rank, "tid": tid, "args": { "name": name } });
    add(named("process_name", 0, &format!("rank {rank} ({})", about.host)));
    add(json!({ "ph": "M", "name": "process_sort_index", "pid": rank, "args": { "sort_index": rank } }));
    add(json!({ "ph": "M", "name": "rank", "pid": rank, "args": about }));
    add(named("thread_name", TRAINING, "training"));
    let mut groups: Vec<&str> = Vec::new();
    for span in spans.iter().filter(|span| span.rank == rank) {
        let group = span.call.as_ref().map_or("", |call| &call.group);
        let tid = match span.thread {
            Thread::Training => TRAINING,
            Thread::Saving => SAVING,
            Thread::Communication => match groups.iter().position(|known| *known == group) {
                Some(index) => GROUPS + index as u64,
                None => {
                    groups.push(group);
                    let tid = GROUPS + groups.len() as u64 - 1;
                    add(named("thread_name", tid, &format!("communication, {group}")));
                    tid
                }
            },
        };
        add(event(span, tid));
    }
    add(named("thread_name", SAVING, "saving"));
    text.into_bytes()
}

fn event(span: &Span, tid: u64) -> serde_json::Value {
    let mut args = json!({ "step": span.step });
    span.unit.iter().for_each(|unit| args["unit"] = json!(unit));
    if let Some(call) = &span.call {
        for (key, value) in [
            ("for", json!(call.kind.name())),
            ("group", json!(call.group)),
            ("call", json!(call.number)),
            ("verb", json!(call.verb)),
            ("bytes", json!(call.sent_bytes)),
        ] {
            args[key] = value;
        }
    }
    // Microseconds, as the format has it.
    let (ts, dur) = (span.start_ns as f64 / 1e3, span.length_ns as f64 / 1e3);
    json!({
        "ph": "X", "name": span.name(), "cat": span.kind.name(), "pid": span.rank, "tid": tid, "ts": ts, "dur": dur,
        "args": args,
    })
}

impl Trace {
    /// Reads a trace that was written here. Nothing in it is trusted.
    pub fn read(path: &std::path::Path) -> Result<Self> {
        let fail = |error| Error::File { path: path.display().to_string(), error };
        let file = std::fs::File::open(path).map_err(fail)?;
        Trace::parse(file).map_err(|problem| Error::Trace { path: path.display().to_string(), problem })
    }

    /// The same from anywhere.
    pub fn parse(from: impl Read) -> std::result::Result<Self, String> {
        let limited = std::io::BufReader::new(from.take(TRACE_BYTES_MAX));
        let file: Written = serde_json::from_reader(limited).map_err(|error| error.to_string())?;
        let Events { ranks, spans } = file.events;
        Ok(Trace { about: file.about, ranks, spans })
    }
}

/// The file.
#[derive(Deserialize)]
struct Written {
    #[serde(rename = "otherData")]
    about: About,
    #[serde(rename = "traceEvents")]
    events: Events,
}

struct Events {
    ranks: Vec<(usize, RankAbout)>,
    spans: Vec<Span>,
}

/// An event, of which much may be missing.
#[derive(Deserialize)]
struct Event {
    ph: String,
    name: String,
    #[serde(default)]
    cat: String,
    #[serde(default)]
    pid: u32,
    #[serde(default)]
    tid: u64,
    #[serde(default)]
    ts: f64,
    #[serde(default)]
    dur: f64,
    #[serde(default)]
    args: serde_json::Value,
}

impl<'de> Deserialize<'de> for Events {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Each;
        impl<'de> Visitor<'de> for Each {
            type Value = Events;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of events")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<Events, A::Error> {
                let mut events = Events { ranks: Vec::new(), spans: Vec::new() };
                while let Some(event) = seq.next_element::<Event>()? {
                    events.take(event).map_err(A::Error::custom)?;
                    if events.spans.len() > SPANS_MAX || events.ranks.len() > SPANS_MAX {
                        return Err(A::Error::custom(format!("there are more than {SPANS_MAX} spans")));
                    }
                }
                Ok(events)
            }
        }
        deserializer.deserialize_seq(Each)
    }
}

impl Events {
    fn take(&mut self, event: Event) -> std::result::Result<(), String> {
        let rank = event.pid as usize;
        if event.ph == "M" && event.name == "rank" {
            let about = serde_json::from_value(event.args).map_err(|error| error.to_string())?;
            self.ranks.push((rank, about));
            return Ok(());
        }
        if event.ph != "X" {
            return Ok(());
        }
        let text = |key: &str| -> Option<String> {
            let text = event.args[key].as_str()?;
            (text.len() <= NAME_BYTES_MAX).then(|| text.to_string())
        };
        let number = |key: &str| event.args[key].as_u64().unwrap_or(0);
        let call = match (text("for"), text("group")) {
            (Some(kind), Some(group)) => Some(SpanCall {
                kind: kind.parse()?,
                group,
                number: number("call"),
                verb: text("verb").unwrap_or_default(),
                sent_bytes: number("bytes"),
            }),
            _ => None,
        };
        self.spans.push(Span {
            rank,
            thread: match event.tid {
                TRAINING => Thread::Training,
                SAVING => Thread::Saving,
                _ => Thread::Communication,
            },
            kind: event.cat.parse()?,
            step: number("step"),
            unit: text("unit"),
            start_ns: nanoseconds(event.ts)?,
            length_ns: nanoseconds(event.dur)?.try_into().map_err(|_| "a span has a negative length".to_string())?,
            call,
        });
        Ok(())
    }
}

/// A thousand years and more are no time of a trace.
fn nanoseconds(microseconds: f64) -> std::result::Result<i64, String> {
    match microseconds.is_finite() && microseconds.abs() < 1e15 {
        true => Ok((microseconds * 1e3).round() as i64),
        false => Err(format!("{microseconds} is no time")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use super::*;

    pub(crate) fn trace(spans: Vec<Span>) -> Trace {
        let about = About { version: "0".to_string(), first_step: 3, steps: 1, ranks: 2 };
        let mut ranks: Vec<usize> = spans.iter().map(|span| span.rank).collect();
        ranks.dedup();
        let of = |rank: usize| RankAbout {
            host: format!("host-{rank}"),
            clock_offset_us: -1.5,
            clock_uncertainty_us: 0.25,
            forgotten: 0,
        };
        Trace { about, ranks: ranks.into_iter().map(|rank| (rank, of(rank))).collect(), spans }
    }

    fn written(trace: &Trace) -> Vec<u8> {
        let mut text = Vec::new();
        let mut writer = TraceWriter::new(&mut text, &trace.about).unwrap();
        for (rank, about) in &trace.ranks {
            writer.add(&events(*rank, about, &trace.spans)).unwrap();
        }
        writer.end().unwrap();
        text
    }

    fn spans() -> Vec<Span> {
        let call = SpanCall {
            kind: Kind::Gather,
            group: "shard 0-1".to_string(),
            number: 7,
            verb: "all-gather".to_string(),
            sent_bytes: 1 << 20,
        };
        let of = |rank, thread, kind, call| Span {
            rank,
            thread,
            kind,
            step: 3,
            unit: Some("block.\"0\"".to_string()),
            start_ns: 1_234_567_891,
            length_ns: 1001,
            call,
        };
        let mut spans = Vec::new();
        for rank in 0..2 {
            spans.push(of(rank, Thread::Training, Kind::Forward, None));
            spans.push(of(rank, Thread::Training, Kind::Wait, Some(call.clone())));
            spans.push(of(rank, Thread::Communication, Kind::Gather, Some(call.clone())));
            spans.push(of(rank, Thread::Saving, Kind::Save, None));
        }
        spans
    }

    #[test]
    fn what_is_written_is_read() {
        let trace = trace(spans());
        let text = written(&trace);
        assert_eq!(Trace::parse(&text[..]).unwrap(), trace);
        let json: serde_json::Value = serde_json::from_slice(&text).unwrap();
        let names: Vec<&str> =
            json["traceEvents"].as_array().unwrap().iter().filter_map(|event| event["name"].as_str()).collect();
        assert!(names.contains(&"wait gather block.\"0\"") && names.contains(&"forward block.\"0\""), "{names:?}");
    }

    #[test]
    fn what_is_no_trace_is_refused() {
        let whole = String::from_utf8(written(&trace(spans()))).unwrap();
        for (wrong, with) in [
            ("\"cat\":\"forward\"", "\"cat\":\"lunch\""),
            ("\"dur\":1.001", "\"dur\":-1.0"),
            ("\"dur\":1.001", "\"dur\":1e300"),
            ("\"pid\":1", "\"pid\":-1"),
            ("]}", "]"),
        ] {
            let torn = whole.replacen(wrong, with, 1);
            assert!(torn != whole && Trace::parse(torn.as_bytes()).is_err(), "{with}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_break_the_reader(bytes: Vec<u8>) {
            drop(Trace::parse(&bytes[..]));
        }

        #[test]
        fn no_change_breaks_the_reader(place: usize, byte: u8) {
            let mut text = written(&trace(spans()));
            let place = place % text.len();
            text[place] = byte;
            if let Ok(trace) = Trace::parse(&text[..]) {
                drop(crate::Profile::of(&trace));
            }
        }
    }
}
