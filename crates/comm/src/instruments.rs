//! What was sent, and what is under way: a meter and a flight record, fed by every call of every group of a process.
//!
//! The record is read in two ways: whole, by whoever explains a failure ([`Record::read`]), and often, by whoever watches a
//! process ([`Record::standing`]), who wants one line per group and must not hold up the calls.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use shardwise_plan::{Dtype, RankSet};

use crate::fault::{Awaited, CallFault, Fault};
use crate::{Call, Verb};

/// How many calls the flight record keeps.
const RECORD_CALLS_MAX: usize = 4096;

/// How many more it keeps for who wants all of them.
const KEPT_CALLS_MAX: usize = 1 << 18;

/// The instruments of one process; and the fault that it was told to make, which is the process's too, and counts its calls.
pub(crate) struct Instruments {
    meter: Meter,
    record: Arc<Record>,
    fault: Option<Awaited>,
}

/// A group's place in the record.
#[derive(Clone, Copy)]
pub(crate) struct Seat(usize);

impl Instruments {
    pub(crate) fn new(fault: Option<CallFault>) -> Arc<Self> {
        let ring = Ring { entries: Vec::new(), next: 0, groups: Vec::new(), kept: None };
        Arc::new(Instruments {
            meter: Meter { counts: Mutex::default() },
            record: Arc::new(Record { epoch: Instant::now(), ring: Mutex::new(ring) }),
            fault: fault.map(Awaited::new),
        })
    }

    /// A place for one more group.
    pub(crate) fn seat(&self, ranks: RankSet) -> Seat {
        let mut ring = lock(&self.record.ring);
        ring.groups.push(Lanes { ranks, collectives: Lane::default(), messages: Lane::default() });
        Seat(ring.groups.len() - 1)
    }

    /// What this process was told to do wrong with this call.
    pub(crate) fn fault(&self, call: &Call) -> Option<Fault> {
        self.fault.as_ref().and_then(|awaited| awaited.strikes(call))
    }

    pub(crate) fn meter(&self) -> &Meter {
        &self.meter
    }

    pub(crate) fn record(&self) -> &Arc<Record> {
        &self.record
    }

    /// Enters a call of the group at `seat`, of which this rank hands `elements_sent` to others.
    pub(crate) fn enter(&self, seat: Seat, call: &Call, elements_sent: usize) -> Ticket {
        self.meter.add(call, elements_sent);
        let id = self.record.enter(seat, call);
        Ticket { record: self.record.clone(), seat, collective: call.verb.is_collective(), id }
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

    /// The sums by verb, in the order of [`Verb::ALL`].
    pub fn by_verb(&self) -> [Count; Verb::ALL.len()] {
        let mut sums = [Count::default(); Verb::ALL.len()];
        for (tally, count) in lock(&self.counts).iter() {
            let sum = &mut sums[tally.verb as usize];
            *sum = [*sum, *count].into_iter().sum();
        }
        sums
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
    /// When that was over.
    pub went_on: Option<Duration>,
    /// How far it has come.
    pub outcome: Outcome,
    /// The ranks of the world from or to which something is missing, where the call has stood still for half a second or
    /// more; they are asked for again about as often. Empty while it moves, and where that is not known (NCCL).
    pub waits_for: Vec<usize>,
}

/// Where a group stands: its call under way. Where none is, the next in the queue; where there is none, the last that ended.
/// Of several messages under way it is the one that has been so for longest. A group in which a call has failed stands there.
#[derive(Clone, Debug)]
pub struct Standing {
    /// The group's ranks in the world; its name is the call's.
    pub ranks: RankSet,
    /// The call.
    pub entry: Entry,
    /// How long that has been its outcome: queued, under way, or over.
    pub lasts: Duration,
    /// How many calls of the group were asked for after it and have not ended.
    pub behind: usize,
}

/// The last few thousand calls, in the order in which they were asked for.
pub struct Record {
    epoch: Instant,
    ring: Mutex<Ring>,
}

struct Ring {
    entries: Vec<Entry>,
    next: u64,
    groups: Vec<Lanes>,
    /// What has left the ring, while someone wants all calls.
    kept: Option<Kept>,
}

impl Ring {
    fn in_order(&self) -> impl Iterator<Item = &Entry> {
        let (newer, older) = self.entries.split_at(self.next as usize % self.entries.len().max(1));
        older.iter().chain(newer)
    }
}

/// Calls, the oldest first.
#[derive(Clone, Debug, Default)]
pub struct Kept {
    /// The calls.
    pub entries: Vec<Entry>,
    /// How many more there were, for which there was no room.
    pub forgotten: u64,
}

impl Kept {
    fn push(&mut self, entry: Entry) {
        match self.entries.len() < KEPT_CALLS_MAX {
            true => self.entries.push(entry),
            false => self.forgotten += 1,
        }
    }
}

/// The calls of one group: collectives run one after the other, messages beside them.
struct Lanes {
    ranks: RankSet,
    collectives: Lane,
    messages: Lane,
}

/// What of a lane's calls is needed to say where it stands, also when the ring has forgotten them.
#[derive(Default)]
struct Lane {
    /// Those that have not ended, in the order in which they were asked for.
    open: VecDeque<(u64, Entry)>,
    /// The last that ended, or the first that failed.
    last: Option<Entry>,
}

impl Lanes {
    fn lane(&mut self, collective: bool) -> &mut Lane {
        if collective { &mut self.collectives } else { &mut self.messages }
    }
}

impl Lane {
    fn enter(&mut self, id: u64, entry: Entry) {
        // A call that was given up unseen does not end; it is forgotten like those of the ring.
        if self.open.len() == RECORD_CALLS_MAX {
            self.open.pop_front();
        }
        self.open.push_back((id, entry));
    }

    fn change(&mut self, id: u64, change: impl FnOnce(&mut Entry)) {
        let Some(index) = self.open.iter().position(|&(open, _)| open == id) else {
            return;
        };
        change(&mut self.open[index].1);
        if self.open[index].1.ended.is_some() {
            let ended = self.open.remove(index).map(|(_, entry)| entry);
            if !matches!(&self.last, Some(Entry { outcome: Outcome::Failed(_), .. })) {
                self.last = ended;
            }
        }
    }

    fn standing(&self, ranks: RankSet, now: Duration) -> Option<Standing> {
        let failed = self.last.as_ref().filter(|last| matches!(last.outcome, Outcome::Failed(_)));
        let under_way = || self.open.iter().position(|(_, entry)| entry.outcome == Outcome::UnderWay);
        let (entry, behind) = match failed {
            Some(failed) => (failed, self.open.len()),
            None if self.open.is_empty() => (self.last.as_ref()?, 0),
            None => {
                let index = under_way().unwrap_or(0);
                (&self.open[index].1, self.open.len() - index - 1)
            }
        };
        let since = entry.ended.or(entry.started).unwrap_or(entry.queued);
        Some(Standing { ranks, entry: entry.clone(), lasts: now.saturating_sub(since), behind })
    }
}

impl Record {
    /// The calls that are kept, oldest first.
    pub fn read(&self) -> Vec<Entry> {
        lock(&self.ring).in_order().cloned().collect()
    }

    /// What times in the record count from.
    pub fn epoch(&self) -> Instant {
        self.epoch
    }

    /// Forgets no call from now on, until [`Record::take_kept`]; a quarter of a million at most.
    pub fn keep(&self) {
        lock(&self.ring).kept = Some(Kept::default());
    }

    /// All calls that were not over at `since`, if [`Record::keep`] was called no later. From now on old ones are forgotten again.
    pub fn take_kept(&self, since: Duration) -> Kept {
        let mut ring = lock(&self.ring);
        let mut kept = ring.kept.take().unwrap_or_default();
        kept.entries.extend(ring.in_order().cloned());
        drop(ring);
        let is_over = |entry: &Entry| entry.ended.max(entry.went_on).is_some_and(|over| over < since);
        kept.entries.retain(|entry| !is_over(entry));
        kept
    }

    /// Where each group of the process stands: one line for its collectives, and one for its messages, where it has had any.
    /// It costs as much as there are groups, however many calls there were, and may be asked for often.
    pub fn standing(&self) -> Vec<Standing> {
        let ring = lock(&self.ring);
        let now = self.epoch.elapsed();
        let lanes =
            ring.groups.iter().flat_map(|group| [(group.ranks, &group.collectives), (group.ranks, &group.messages)]);
        lanes.filter_map(|(ranks, lane)| lane.standing(ranks, now)).collect()
    }

    fn enter(&self, seat: Seat, call: &Call) -> u64 {
        let entry = Entry {
            call: call.clone(),
            queued: self.epoch.elapsed(),
            started: None,
            ended: None,
            waited: None,
            went_on: None,
            outcome: Outcome::Queued,
            waits_for: Vec::new(),
        };
        let mut ring = lock(&self.ring);
        let id = ring.next;
        ring.next += 1;
        ring.groups[seat.0].lane(call.verb.is_collective()).enter(id, entry.clone());
        match ring.entries.len() < RECORD_CALLS_MAX {
            true => ring.entries.push(entry),
            false => {
                let oldest = std::mem::replace(&mut ring.entries[id as usize % RECORD_CALLS_MAX], entry);
                if let Some(kept) = &mut ring.kept {
                    kept.push(oldest);
                }
            }
        }
        id
    }

    /// Changes the entry of a ticket, where the ring still holds it, and where its group stands.
    fn change(&self, ticket: &Ticket, change: impl Fn(&mut Entry, Duration)) {
        let now = self.epoch.elapsed();
        let mut ring = lock(&self.ring);
        if ring.next - ticket.id <= RECORD_CALLS_MAX as u64 {
            change(&mut ring.entries[ticket.id as usize % RECORD_CALLS_MAX], now);
        }
        ring.groups[ticket.seat.0].lane(ticket.collective).change(ticket.id, |entry| change(entry, now));
    }
}

/// A call's place in the record.
#[derive(Clone)]
pub(crate) struct Ticket {
    record: Arc<Record>,
    seat: Seat,
    collective: bool,
    id: u64,
}

impl Ticket {
    pub(crate) fn started(&self) {
        self.record.change(self, |entry, now| {
            entry.started = Some(now);
            entry.outcome = Outcome::UnderWay;
        });
    }

    /// Says whom the call waits for, by their numbers in the world; nobody once it moves again.
    pub(crate) fn waits_for(&self, ranks: &[usize]) {
        self.record.change(self, |entry, _| entry.waits_for = ranks.to_vec());
    }

    pub(crate) fn ended<T>(&self, result: &crate::Result<T>) {
        let outcome = match result {
            Ok(_) => Outcome::Done,
            Err(error) => Outcome::Failed(error.to_string()),
        };
        self.record.change(self, |entry, now| {
            entry.ended = Some(now);
            entry.outcome = outcome.clone();
            if outcome == Outcome::Done {
                entry.waits_for.clear();
            }
        });
    }

    pub(crate) fn waited(&self, waited: Duration) {
        self.record.change(self, |entry, now| {
            entry.waited = Some(waited);
            entry.went_on = Some(now);
        });
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
        let instruments = Instruments::new(None);
        let seat = instruments.seat(RankSet::world(4));
        let calls = RECORD_CALLS_MAX as u64 + 100;
        let first = instruments.enter(seat, &call(0), 0);
        for number in 1..calls {
            let ticket = instruments.enter(seat, &call(number), 0);
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
    fn no_call_is_forgotten_while_someone_wants_all_of_them() {
        let instruments = Instruments::new(None);
        let (seat, record) = (instruments.seat(RankSet::world(4)), instruments.record());
        let make = |numbers: std::ops::Range<u64>| {
            for number in numbers {
                let ticket = instruments.enter(seat, &call(number), 0);
                ticket.ended(&Ok(()));
                ticket.waited(Duration::ZERO);
            }
        };
        make(0..3);
        let under_way = instruments.enter(seat, &call(3), 0);
        record.keep();
        let since = record.epoch().elapsed();
        make(4..3 * RECORD_CALLS_MAX as u64);
        let kept = record.take_kept(since);
        let numbers: Vec<u64> = kept.entries.iter().map(|entry| entry.call.number).collect();
        assert_eq!(numbers, (3..3 * RECORD_CALLS_MAX as u64).collect::<Vec<_>>(), "and the one that was under way");
        assert_eq!(kept.forgotten, 0);
        under_way.ended(&Ok(()));
        make(0..RECORD_CALLS_MAX as u64 + 1);
        assert_eq!(record.take_kept(since).entries.len(), RECORD_CALLS_MAX);
    }

    #[test]
    fn a_group_stands_at_its_call_under_way_and_then_at_the_last_or_the_first_that_failed() {
        let instruments = Instruments::new(None);
        let (seat, quiet) = (instruments.seat(RankSet::world(4)), instruments.seat(RankSet::world(2)));
        let record = instruments.record().clone();
        let standing = || {
            let [standing] = record.standing().try_into().expect("one line: the other group has had no call");
            let Standing { entry, behind, .. } = standing;
            (entry.call.number, entry.outcome, entry.waits_for, behind)
        };
        assert!(record.standing().is_empty());
        let tickets = [1, 2, 3].map(|number| instruments.enter(seat, &call(number), 0));
        assert_eq!(standing(), (1, Outcome::Queued, vec![], 2));
        tickets[0].started();
        tickets[0].waits_for(&[3]);
        assert_eq!(standing(), (1, Outcome::UnderWay, vec![3], 2));
        // The ring may forget a call that does not end; its group stands there all the same.
        for number in 0..RECORD_CALLS_MAX as u64 {
            instruments.enter(quiet, &call(number), 0).ended(&Ok(()));
        }
        assert_eq!(record.standing().len(), 2);
        assert_eq!(record.standing()[0].entry.waits_for, [3]);
        tickets[0].ended(&Ok(()));
        tickets[1].started();
        tickets[1].ended::<()>(&Err(crate::Error::Stopped));
        tickets[2].ended(&Ok(()));
        let failed = record.standing().swap_remove(0);
        assert_eq!((failed.entry.call.number, failed.behind), (2, 0));
        assert!(matches!(failed.entry.outcome, Outcome::Failed(_)));
    }

    #[test]
    fn a_fault_strikes_once_at_the_call_that_was_meant() {
        let strikes = |verb, nth| {
            let fault = CallFault { verb, label: "unit".to_string(), nth, what: Fault::Skip };
            let instruments = Instruments::new(Some(fault));
            let other = Call { label: "other".into(), ..call(0) };
            let barrier = Call { verb: Verb::Barrier, ..call(0) };
            [&call(0), &other, &barrier, &call(0)].map(|call| instruments.fault(call).is_some())
        };
        assert_eq!(strikes(None, 2), [false, false, true, false]);
        assert_eq!(strikes(Some(Verb::AllGather), 2), [false, false, false, true]);
        assert_eq!(strikes(Some(Verb::Send), 1), [false; 4]);
    }

    #[test]
    fn the_meter_counts_elements_and_bytes() {
        let instruments = Instruments::new(None);
        let seat = instruments.seat(RankSet::world(4));
        for number in 0..3 {
            drop(instruments.enter(seat, &call(number), 6));
        }
        let total = instruments.meter().total(|tally| tally.verb == Verb::AllGather);
        assert_eq!(total, Count { calls: 3, elements: 18, bytes: 36 });
        assert_eq!(instruments.meter().total(|tally| &*tally.label == "other"), Count::default());
        assert_eq!(Verb::ALL.map(|verb| verb as usize), [0, 1, 2, 3, 4, 5, 6, 7], "by_verb counts in their order");
        assert_eq!(instruments.meter().by_verb()[Verb::AllGather as usize], total);
        assert_eq!(instruments.meter().by_verb()[Verb::AllReduce as usize], Count::default());
        instruments.meter().reset();
        assert!(instruments.meter().read().is_empty());
    }
}
