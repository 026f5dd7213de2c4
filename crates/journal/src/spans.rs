//! Traces of a few steps, written and read in Chrome's trace JSON, which Perfetto opens.
//!
//! A rank is a process of the trace, with one thread for training, one for saving, and one for each communication group. The spans of
//! the training thread follow each other without gaps or nesting: what it computed, and what it waited for. So anyone who reads the
//! file can add up their lengths, with or without this module. All times are on rank 0's clock. `shardwise-train` does the measuring.

use std::fmt;
use std::io::{Read, Write};
use std::str::FromStr;

use serde::de::{Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::json;

use crate::{Error, Result};

/// The largest trace that is accepted.
const TRACE_BYTES_MAX: u64 = 1 << 30;

/// The maximum number of spans that are accepted.
const SPANS_MAX: usize = 4 << 20;

/// The longest accepted name of a unit, a call or a group.
const NAME_BYTES_MAX: usize = 1 << 10;

/// The thread ids of a rank; groups are numbered from `GROUPS` on.
const TRAINING: u64 = 1;
const SAVING: u64 = 2;
const GROUPS: u64 = 10;

/// What a thread does during a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Reads the tokens of the step.
    Data,
    /// All-gathers the parameters of a unit.
    Gather,
    /// Computes the output of a unit.
    Forward,
    /// Recomputes activations for the backward pass.
    Recompute,
    /// Computes the gradients of a unit.
    Backward,
    /// Reduces gradients to the ranks that own them.
    Reduce,
    /// Fetches what a unit keeps on a disk.
    Fetch,
    /// Updates parameters.
    Optimizer,
    /// Stores what a unit keeps on a disk.
    Store,
    /// Reduces numbers that all ranks need: token counts, losses, norms.
    Agree,
    /// Waits for a call to complete.
    Wait,
    /// Evaluates the model on held-out text.
    Evaluation,
    /// Saves a checkpoint.
    Save,
    /// Runs the training loop around the step.
    Between,
}

impl Kind {
    /// All kinds with their names.
    pub const ALL: [(Kind, &str); 14] = [
        (Kind::Data, "data"),
        (Kind::Gather, "gather"),
        (Kind::Forward, "forward"),
        (Kind::Recompute, "recompute"),
        (Kind::Backward, "backward"),
        (Kind::Reduce, "reduce"),
        (Kind::Fetch, "fetch"),
        (Kind::Optimizer, "optimizer"),
        (Kind::Store, "store"),
        (Kind::Agree, "agree"),
        (Kind::Wait, "wait"),
        (Kind::Evaluation, "evaluation"),
        (Kind::Save, "save"),
        (Kind::Between, "between"),
    ];

    /// Returns its name in trace files.
    pub fn name(self) -> &'static str {
        Kind::ALL.iter().find(|(kind, _)| *kind == self).map_or("", |(_, name)| name)
    }
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let found = Kind::ALL.iter().find(|(_, name)| *name == text);
        found.map(|(kind, _)| *kind).ok_or_else(|| format!("unknown kind of span '{text}'"))
    }
}

/// The thread that a span belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Thread {
    /// The training thread.
    Training,
    /// The thread that writes checkpoints.
    Saving,
    /// The thread of a communication group.
    Communication,
}

/// A communication call. All ranks of a group number its calls alike, so group and number identify a call across ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpanCall {
    /// What the call is for: gather, reduce, or agree.
    pub kind: Kind,
    /// The group's name.
    pub group: String,
    /// The call's number in the group.
    pub number: u64,
    /// `all-gather`, …
    pub verb: String,
    /// The bytes that this rank sends in it.
    pub sent_bytes: u64,
}

/// A period of time on one thread.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// The rank.
    pub rank: usize,
    /// The thread.
    pub thread: Thread,
    /// What the thread does.
    pub kind: Kind,
    /// The step during which it starts.
    pub step: u64,
    /// The unit, or the label of a call that belongs to no unit.
    pub unit: Option<String>,
    /// Its start, in nanoseconds since the start of the trace.
    pub start_ns: i64,
    /// Its duration.
    pub length_ns: u64,
    /// The call that it represents, or that it waits for.
    pub call: Option<SpanCall>,
}

impl Span {
    /// Returns its end, in nanoseconds since the start of the trace.
    pub fn end_ns(&self) -> i64 {
        self.start_ns.saturating_add_unsigned(self.length_ns)
    }

    /// Returns its name, such as `wait gather block.3`.
    pub fn name(&self) -> String {
        let mut name = self.kind.name().to_string();
        if let (Kind::Wait, Some(call)) = (self.kind, &self.call) {
            name += &format!(" {}", call.kind.name());
        }
        self.unit.iter().for_each(|unit| name += &format!(" {unit}"));
        name
    }
}

/// The metadata of a trace.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TraceInfo {
    /// The version of Shardwise.
    pub version: String,
    /// The first traced step.
    pub first_step: u64,
    /// The number of traced steps.
    pub steps: u64,
    /// The world size. Not every rank has to be in the trace.
    pub ranks: usize,
}

/// The metadata of one rank in a trace.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TraceRank {
    /// Its host.
    pub host: String,
    /// How far its clock was behind rank 0's, in microseconds.
    pub clock_offset_us: f64,
    /// The uncertainty of that offset, in microseconds.
    pub clock_uncertainty_us: f64,
    /// The number of calls and phases that did not fit into the trace buffer.
    #[serde(rename = "forgotten")]
    pub dropped: u64,
}

/// A trace.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// Its metadata.
    pub info: TraceInfo,
    /// Its ranks with their metadata, in the order in which they were written.
    pub ranks: Vec<(usize, TraceRank)>,
    /// All spans.
    pub spans: Vec<Span>,
}

/// Writes a trace rank by rank, so that no process has to hold the whole trace.
pub struct TraceWriter<W> {
    out: W,
}

impl<W: Write> TraceWriter<W> {
    /// Writes the start of a trace.
    pub fn new(mut out: W, info: &TraceInfo) -> std::io::Result<Self> {
        // A first event, so that every other event can start with a comma.
        let first = json!({ "ph": "M", "name": "trace_began", "pid": 0, "args": {} });
        write!(out, "{{\"displayTimeUnit\":\"ms\",\"otherData\":{},\"traceEvents\":[\n{first}", json!(info))?;
        Ok(TraceWriter { out })
    }

    /// Adds the output of [`events`], whole or in pieces.
    pub fn add(&mut self, events: &[u8]) -> std::io::Result<()> {
        self.out.write_all(events)
    }

    /// Writes the end of the trace.
    pub fn finish(mut self) -> std::io::Result<()> {
        self.out.write_all(b"\n]}\n")?;
        self.out.flush()
    }
}

/// Formats the spans of a rank for [`TraceWriter::add`].
pub fn events(rank: usize, info: &TraceRank, spans: &[Span]) -> Vec<u8> {
    let mut text = String::new();
    let mut add = |event: serde_json::Value| text += &format!(",\n{event}");
    let named = |key: &str, tid: u64, name: &str| json!({ "ph": "M", "name": key, "pid": rank, "tid": tid, "args": { "name": name } });
    add(named("process_name", 0, &format!("rank {rank} ({})", info.host)));
    add(json!({ "ph": "M", "name": "process_sort_index", "pid": rank, "args": { "sort_index": rank } }));
    add(json!({ "ph": "M", "name": "rank", "pid": rank, "args": info }));
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
    // The format counts in microseconds.
    let (ts, dur) = (span.start_ns as f64 / 1e3, span.length_ns as f64 / 1e3);
    json!({
        "ph": "X", "name": span.name(), "cat": span.kind.name(), "pid": span.rank, "tid": tid, "ts": ts, "dur": dur,
        "args": args,
    })
}

impl Trace {
    /// Reads a trace file. Its content is not trusted.
    pub fn read(path: &std::path::Path) -> Result<Self> {
        let fail = |error| Error::File { path: path.display().to_string(), error };
        let file = std::fs::File::open(path).map_err(fail)?;
        Trace::parse(file).map_err(|problem| Error::Trace { path: path.display().to_string(), problem })
    }

    /// Reads a trace from any reader.
    pub fn parse(from: impl Read) -> std::result::Result<Self, String> {
        let limited = std::io::BufReader::new(from.take(TRACE_BYTES_MAX));
        let file: TraceFile = serde_json::from_reader(limited).map_err(|error| error.to_string())?;
        let Events { ranks, spans } = file.events;
        Ok(Trace { info: file.info, ranks, spans })
    }
}

/// The JSON of a trace file.
#[derive(Deserialize)]
struct TraceFile {
    #[serde(rename = "otherData")]
    info: TraceInfo,
    #[serde(rename = "traceEvents")]
    events: Events,
}

struct Events {
    ranks: Vec<(usize, TraceRank)>,
    spans: Vec<Span>,
}

/// An event. Other programs' events may lack most fields.
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
        struct EventsVisitor;
        impl<'de> Visitor<'de> for EventsVisitor {
            type Value = Events;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of events")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<Events, A::Error> {
                let mut events = Events { ranks: Vec::new(), spans: Vec::new() };
                while let Some(event) = seq.next_element::<Event>()? {
                    events.add(event).map_err(A::Error::custom)?;
                    if events.spans.len() > SPANS_MAX || events.ranks.len() > SPANS_MAX {
                        return Err(A::Error::custom(format!("it has more than {SPANS_MAX} spans")));
                    }
                }
                Ok(events)
            }
        }
        deserializer.deserialize_seq(EventsVisitor)
    }
}

impl Events {
    fn add(&mut self, event: Event) -> std::result::Result<(), String> {
        let rank = event.pid as usize;
        if event.ph == "M" && event.name == "rank" {
            let info = serde_json::from_value(event.args).map_err(|error| error.to_string())?;
            self.ranks.push((rank, info));
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

/// Converts microseconds to nanoseconds, and rejects times that no trace can have.
fn nanoseconds(microseconds: f64) -> std::result::Result<i64, String> {
    match microseconds.is_finite() && microseconds.abs() < 1e15 {
        true => Ok((microseconds * 1e3).round() as i64),
        false => Err(format!("{microseconds} µs is not a valid time")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use super::*;

    pub(crate) fn trace(spans: Vec<Span>) -> Trace {
        let info = TraceInfo { version: "0".to_string(), first_step: 3, steps: 1, ranks: 2 };
        let mut ranks: Vec<usize> = spans.iter().map(|span| span.rank).collect();
        ranks.dedup();
        let of = |rank: usize| TraceRank {
            host: format!("host-{rank}"),
            clock_offset_us: -1.5,
            clock_uncertainty_us: 0.25,
            dropped: 0,
        };
        Trace { info, ranks: ranks.into_iter().map(|rank| (rank, of(rank))).collect(), spans }
    }

    fn write(trace: &Trace) -> Vec<u8> {
        let mut text = Vec::new();
        let mut writer = TraceWriter::new(&mut text, &trace.info).unwrap();
        for (rank, info) in &trace.ranks {
            writer.add(&events(*rank, info, &trace.spans)).unwrap();
        }
        writer.finish().unwrap();
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
    fn a_trace_survives_writing_and_reading() {
        let trace = trace(spans());
        let text = write(&trace);
        assert_eq!(Trace::parse(&text[..]).unwrap(), trace);
        let json: serde_json::Value = serde_json::from_slice(&text).unwrap();
        let names: Vec<&str> =
            json["traceEvents"].as_array().unwrap().iter().filter_map(|event| event["name"].as_str()).collect();
        assert!(names.contains(&"wait gather block.\"0\"") && names.contains(&"forward block.\"0\""), "{names:?}");
    }

    #[test]
    fn an_invalid_trace_is_refused() {
        let whole = String::from_utf8(write(&trace(spans()))).unwrap();
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
        fn no_change_breaks_the_reader(index: usize, byte: u8) {
            let mut text = write(&trace(spans()));
            let index = index % text.len();
            text[index] = byte;
            if let Ok(trace) = Trace::parse(&text[..]) {
                drop(crate::Profile::from_trace(&trace));
            }
        }
    }
}
