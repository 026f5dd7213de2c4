//! What was sent, and what is under way: a meter and a flight record, fed by every call of every group of a process.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use shardwise_plan::Dtype;

use crate::{Call, Verb};

/// How many calls the flight record keeps.
const RECORD_CALLS_MAX: usize = 4096;

/// The instruments of one process.
pub(crate) struct Instruments {
    meter: Meter,
    record: Record,
}

impl Instruments {
    pub(crate) fn new() -> Arc<Self> {
        let ring = Ring { entries: Vec::new(), next: 0 };
        Arc::new(Instruments {
            meter: Meter { counts: Mutex::default() },
            record: Record { epoch: Instant::now(), ring: Mutex::new(ring) },
        })
    }

    pub(crate) fn meter(&self) -> &Meter {
        &self.meter
    }

    pub(crate) fn record(&self) -> &Record {
        &self.record
    }

    /// Enters a call, of which this rank hands `elements_sent` to others.
    pub(crate) fn enter(self: &Arc<Self>, call: &Call, elements_sent: usize) -> Ticket {
        self.meter.add(call, elements_sent);
        Ticket { instruments: self.clone(), id: self.record.enter(call) }
    }
}

/// What of a call is counted apart.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tally {
    /// The group's name and ranks.
    pub group: Arc<str>,
    /// The verb.
    pub verb: Verb,
    /// The caller's label.
    pub label: Arc<str>,
    /// The payload's type.
    pub dtype: Dtype,
}

/// How much was sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Calls.
    pub calls: u64,
    /// Elements that this rank handed to others.
    pub elements: u64,
    /// The same in bytes.
    pub bytes: u64,
}

impl std::iter::Sum for Count {
    fn sum<I: Iterator<Item = Count>>(counts: I) -> Count {
        counts.fold(Count::default(), |sum, count| Count {
            calls: sum.calls + count.calls,
            elements: sum.elements + count.elements,
            bytes: sum.bytes + count.bytes,
        })
    }
}

/// Counts calls, elements and bytes per group, verb, label and type.
///
/// What is counted is what this rank hands to others, as theory counts it: of N ranks each sends (N−1)/N of a whole that
/// is gathered or reduced and scattered, and twice that of one that is all-reduced.
pub struct Meter {
    counts: Mutex<BTreeMap<Tally, Count>>,
}

impl Meter {
    /// What was counted so far.
    pub fn read(&self) -> Vec<(Tally, Count)> {
        lock(&self.counts).iter().map(|(tally, count)| (tally.clone(), *count)).collect()
    }

    /// The sum over all tallies that `select` selects.
    pub fn total(&self, select: impl Fn(&Tally) -> bool) -> Count {
        lock(&self.counts).iter().filter(|(tally, _)| select(tally)).map(|(_, count)| *count).sum()
    }

    /// Starts again at nothing.
    pub fn reset(&self) {
        lock(&self.counts).clear();
    }

    fn add(&self, call: &Call, elements: usize) {
        let tally = Tally { group: call.group.clone(), verb: call.verb, label: call.label.clone(), dtype: call.dtype };
        let mut counts = lock(&self.counts);
        let count = counts.entry(tally).or_default();
        count.calls += 1;
        count.elements += elements as u64;
        count.bytes += (elements * call.dtype.bytes()) as u64;
    }
}

/// How far a call has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Behind other calls in the queue.
    Queued,
    /// Begun, not ended.
    UnderWay,
    /// Ended well.
    Done,
    /// Ended with this error.
    Failed(String),
}

/// One call in the flight record. Times are since the start of the process's communication.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The call.
    pub call: Call,
    /// When the caller asked for it.
    pub queued: Duration,
    /// When its turn came.
    pub started: Option<Duration>,
    /// When it ended, well or not.
    pub ended: Option<Duration>,
    /// How long the caller stood still for it, once it has been waited for; also while it was behind other calls in the queue.
    pub waited: Option<Duration>,
    /// How far it has come.
    pub outcome: Outcome,
}

/// The last few thousand calls, in the order in which they were asked for.
pub struct Record {
    epoch: Instant,
    ring: Mutex<Ring>,
}

struct Ring {
    entries: Vec<Entry>,
    next: u64,
}

impl Record {
    /// The calls that are kept, oldest first.
    pub fn read(&self) -> Vec<Entry> {
        let ring = lock(&self.ring);
        let (newer, older) = ring.entries.split_at(ring.next as usize % ring.entries.len().max(1));
        older.iter().chain(newer).cloned().collect()
    }

    fn enter(&self, call: &Call) -> u64 {
        let entry = Entry {
            call: call.clone(),
            queued: self.epoch.elapsed(),
            started: None,
            ended: None,
            waited: None,
            outcome: Outcome::Queued,
        };
        let mut ring = lock(&self.ring);
        let id = ring.next;
        ring.next += 1;
        match ring.entries.len() < RECORD_CALLS_MAX {
            true => ring.entries.push(entry),
            false => ring.entries[id as usize % RECORD_CALLS_MAX] = entry,
        }
        id
    }

    /// Changes the entry `id`, where the ring still holds it.
    fn change(&self, id: u64, change: impl FnOnce(&mut Entry, Duration)) {
        let now = self.epoch.elapsed();
        let mut ring = lock(&self.ring);
        if ring.next - id <= RECORD_CALLS_MAX as u64 {
            change(&mut ring.entries[id as usize % RECORD_CALLS_MAX], now);
        }
    }
}

/// A call's place in the record.
#[derive(Clone)]
pub(crate) struct Ticket {
    instruments: Arc<Instruments>,
    id: u64,
}

impl Ticket {
    pub(crate) fn started(&self) {
        self.instruments.record.change(self.id, |entry, now| {
            entry.started = Some(now);
            entry.outcome = Outcome::UnderWay;
        });
    }

    pub(crate) fn ended<T>(&self, result: &crate::Result<T>) {
        self.instruments.record.change(self.id, |entry, now| {
            entry.ended = Some(now);
            entry.outcome = match result {
                Ok(_) => Outcome::Done,
                Err(error) => Outcome::Failed(error.to_string()),
            };
        });
    }

    pub(crate) fn waited(&self, waited: Duration) {
        self.instruments.record.change(self.id, |entry, _| entry.waited = Some(waited));
    }
}

/// Instruments stay readable when a thread that fed them has panicked.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(number: u64) -> Call {
        Call {
            verb: Verb::AllGather,
            label: "unit".into(),
            group: "world 0-3".into(),
            number,
            elements: 8,
            dtype: Dtype::Bf16,
        }
    }

    #[test]
    fn the_record_keeps_the_last_calls_in_order() {
        let instruments = Instruments::new();
        let calls = RECORD_CALLS_MAX as u64 + 100;
        let first = instruments.enter(&call(0), 0);
        for number in 1..calls {
            let ticket = instruments.enter(&call(number), 0);
            ticket.started();
            ticket.ended(&Ok(()));
        }
        // An entry that has left the ring is not mistaken for the one in its place.
        first.ended::<()>(&Err(crate::Error::Stopped));
        let entries = instruments.record().read();
        let numbers: Vec<u64> = entries.iter().map(|entry| entry.call.number).collect();
        assert_eq!(numbers, (100..calls).collect::<Vec<_>>());
        assert!(entries.iter().all(|entry| entry.outcome == Outcome::Done && entry.ended >= entry.started));
    }

    #[test]
    fn the_meter_counts_elements_and_bytes() {
        let instruments = Instruments::new();
        for number in 0..3 {
            drop(instruments.enter(&call(number), 6));
        }
        let total = instruments.meter().total(|tally| tally.verb == Verb::AllGather);
        assert_eq!(total, Count { calls: 3, elements: 18, bytes: 36 });
        assert_eq!(instruments.meter().total(|tally| &*tally.label == "other"), Count::default());
        instruments.meter().reset();
        assert!(instruments.meter().read().is_empty());
    }
}
