//! The meter and the flight recorder, which see every call of every group of a process.
//!
//! The flight recorder is read in two ways: in full, to explain a failure ([`FlightRecorder::read`]), and often, to watch a
//! process ([`FlightRecorder::group_status`]). The latter returns at most two entries per group, and must not hold up the
//! calls.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use shardwise_plan::{Dtype, RankSet};

use crate::fault::{ArmedFault, CallFault, CallFaultKind};
use crate::{Call, Verb};

/// The capacity of the flight recorder's ring buffer, in calls.
const RECORD_CALLS_MAX: usize = 4096;

/// The most calls that have left the ring and are kept after [`FlightRecorder::keep_all`].
const KEPT_CALLS_MAX: usize = 1 << 18;

/// The instruments of a process, and the fault to inject into one of its calls.
pub(crate) struct Instruments {
    meter: Meter,
    record: Arc<FlightRecorder>,
    fault: Option<ArmedFault>,
}

/// The index of a group in the flight recorder.
#[derive(Clone, Copy)]
pub(crate) struct GroupSlot(usize);

impl Instruments {
    pub(crate) fn new(fault: Option<CallFault>) -> Arc<Self> {
        let ring = Ring { entries: Vec::new(), next: 0, groups: Vec::new(), kept: None };
        Arc::new(Instruments {
            meter: Meter { counts: Mutex::default() },
            record: Arc::new(FlightRecorder { epoch: Instant::now(), ring: Mutex::new(ring) }),
            fault: fault.map(ArmedFault::new),
        })
    }

    /// Registers a group.
    pub(crate) fn add_group(&self, ranks: RankSet) -> GroupSlot {
        let mut ring = lock(&self.record.ring);
        ring.groups.push(Lanes { ranks, collectives: Lane::default(), messages: Lane::default() });
        GroupSlot(ring.groups.len() - 1)
    }

    /// Returns the fault to inject into this call, if any.
    pub(crate) fn fault(&self, call: &Call) -> Option<CallFaultKind> {
        self.fault.as_ref().and_then(|armed| armed.fires(call))
    }

    pub(crate) fn meter(&self) -> &Meter {
        &self.meter
    }

    pub(crate) fn flight_recorder(&self) -> &Arc<FlightRecorder> {
        &self.record
    }

    /// Records a new call of a group.
    pub(crate) fn enter(&self, slot: GroupSlot, call: &Call) -> EntryHandle {
        self.meter.add(call);
        let id = self.record.enter(slot, call);
        EntryHandle { record: self.record.clone(), slot, collective: call.verb.is_collective(), id }
    }
}

/// The key by which the [`Meter`] counts calls.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MeterKey {
    /// The group's name and ranks.
    pub group: Arc<str>,
    /// The operation.
    pub verb: Verb,
    /// The caller's label.
    pub label: Arc<str>,
    /// The payload's dtype.
    pub dtype: Dtype,
}

/// The traffic of a set of calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// The number of calls.
    pub calls: u64,
    /// Elements that this rank sent to others.
    pub elements: u64,
    /// Bytes that this rank sent to others.
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

/// Counts calls, elements and bytes per group, operation, label and dtype.
///
/// The counts are nominal: in an all-gather or reduce-scatter among N ranks, each rank sends (N−1)/N of the whole; in an
/// all-reduce, twice that. A backend may send more, for example in a small all-reduce.
pub struct Meter {
    counts: Mutex<BTreeMap<MeterKey, Count>>,
}

impl Meter {
    /// Returns all counts.
    pub fn read(&self) -> Vec<(MeterKey, Count)> {
        lock(&self.counts).iter().map(|(key, count)| (key.clone(), *count)).collect()
    }

    /// Returns the sum over all keys that `select` accepts.
    pub fn total(&self, select: impl Fn(&MeterKey) -> bool) -> Count {
        lock(&self.counts).iter().filter(|(key, _)| select(key)).map(|(_, count)| *count).sum()
    }

    /// Returns the sums per operation, in the order of [`Verb::ALL`].
    pub fn by_verb(&self) -> [Count; Verb::ALL.len()] {
        let mut sums = [Count::default(); Verb::ALL.len()];
        for (key, count) in lock(&self.counts).iter() {
            let sum = &mut sums[key.verb as usize];
            *sum = [*sum, *count].into_iter().sum();
        }
        sums
    }

    /// Resets all counts to zero.
    pub fn reset(&self) {
        lock(&self.counts).clear();
    }

    fn add(&self, call: &Call) {
        let elements = call.elements_sent;
        let key = MeterKey { group: call.group.clone(), verb: call.verb, label: call.label.clone(), dtype: call.dtype };
        let mut counts = lock(&self.counts);
        let count = counts.entry(key).or_default();
        count.calls += 1;
        count.elements += elements as u64;
        count.bytes += (elements * call.dtype.bytes()) as u64;
    }
}

/// The progress of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallStatus {
    /// Behind other calls in the queue.
    Queued,
    /// Started, but not done.
    Running,
    /// Succeeded.
    Done,
    /// Failed with this error.
    Failed(String),
}

/// A call in the flight recorder. Times count from [`FlightRecorder::epoch`].
#[derive(Clone, Debug)]
pub struct Entry {
    /// The call.
    pub call: Call,
    /// When the caller made the call.
    pub queued: Duration,
    /// When the call left the queue.
    pub started: Option<Duration>,
    /// When the call succeeded or failed.
    pub ended: Option<Duration>,
    /// Whether [`Pending::wait`](crate::Pending::wait) was called before the call ended. Until then it runs in the background.
    pub is_awaited: bool,
    /// How long [`Pending::wait`](crate::Pending::wait) blocked, including time that the call spent in the queue.
    pub waited: Option<Duration>,
    /// When `wait` returned.
    pub wait_ended: Option<Duration>,
    /// The call's progress.
    pub status: CallStatus,
    /// The global ranks that the call is waiting for, once it has stalled for half a second; updated about that often. Empty
    /// while it makes progress, and if the ranks are not known (NCCL).
    pub waits_for: Vec<usize>,
}

/// The current call of a group: the first that failed, else the longest running one (of messages, one that the caller waits
/// for, if there is one), else the next in the queue, else the last that ended.
#[derive(Clone, Debug)]
pub struct GroupStatus {
    /// The group's global ranks; the group's name is in the call.
    pub ranks: RankSet,
    /// That call's entry in the flight recorder.
    pub entry: Entry,
    /// How long the call has been in its current status.
    pub status_age: Duration,
    /// The number of later calls of the group that have not ended.
    pub calls_behind: usize,
}

/// The last few thousand calls of a process, in the order in which they were made (PyTorch: the NCCL flight recorder).
pub struct FlightRecorder {
    epoch: Instant,
    ring: Mutex<Ring>,
}

struct Ring {
    entries: Vec<Entry>,
    next: u64,
    groups: Vec<Lanes>,
    /// The calls that have left the ring since [`FlightRecorder::keep_all`].
    kept: Option<RecordedCalls>,
}

impl Ring {
    fn in_order(&self) -> impl Iterator<Item = &Entry> {
        let (newer, older) = self.entries.split_at(self.next as usize % self.entries.len().max(1));
        older.iter().chain(newer)
    }
}

/// All calls made in a period of time.
#[derive(Clone, Debug, Default)]
pub struct RecordedCalls {
    /// The calls, oldest first.
    pub entries: Vec<Entry>,
    /// The number of calls that were dropped for lack of room.
    pub dropped: u64,
}

impl RecordedCalls {
    fn push(&mut self, entry: Entry) {
        match self.entries.len() < KEPT_CALLS_MAX {
            true => self.entries.push(entry),
            false => self.dropped += 1,
        }
    }
}

/// The calls of a group: collectives run one after the other, messages run concurrently with them.
struct Lanes {
    ranks: RankSet,
    collectives: Lane,
    messages: Lane,
}

/// The calls that determine a group's status, kept even when they have left the ring.
#[derive(Default)]
struct Lane {
    /// The calls that have not ended, in the order in which they were made.
    open: VecDeque<(u64, Entry)>,
    /// The last call that ended, or the first that failed.
    last: Option<Entry>,
}

impl Lanes {
    fn lane(&mut self, collective: bool) -> &mut Lane {
        if collective { &mut self.collectives } else { &mut self.messages }
    }
}

impl Lane {
    fn enter(&mut self, id: u64, entry: Entry) {
        // A call that was abandoned never ends. Drop the oldest, as the ring does.
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
            if !matches!(&self.last, Some(Entry { status: CallStatus::Failed(_), .. })) {
                self.last = ended;
            }
        }
    }

    fn group_status(&self, ranks: RankSet, now: Duration) -> Option<GroupStatus> {
        let failed = self.last.as_ref().filter(|last| matches!(last.status, CallStatus::Failed(_)));
        let is_running = |entry: &Entry| entry.status == CallStatus::Running;
        // Any number of messages run at once.
        let is_awaited = |entry: &Entry| entry.is_awaited && !entry.call.verb.is_collective();
        let awaited = || self.open.iter().position(|(_, entry)| is_running(entry) && is_awaited(entry));
        let under_way = || awaited().or_else(|| self.open.iter().position(|(_, entry)| is_running(entry)));
        let (entry, calls_behind) = match failed {
            Some(failed) => (failed, self.open.len()),
            None if self.open.is_empty() => (self.last.as_ref()?, 0),
            None => {
                let index = under_way().unwrap_or(0);
                (&self.open[index].1, self.open.len() - index - 1)
            }
        };
        let since = entry.ended.or(entry.started).unwrap_or(entry.queued);
        Some(GroupStatus { ranks, entry: entry.clone(), status_age: now.saturating_sub(since), calls_behind })
    }
}

impl FlightRecorder {
    /// Returns the calls in the ring, oldest first.
    pub fn read(&self) -> Vec<Entry> {
        lock(&self.ring).in_order().cloned().collect()
    }

    /// The instant from which the times of entries count.
    pub fn epoch(&self) -> Instant {
        self.epoch
    }

    /// Keeps every call from now on, up to a quarter of a million, until [`FlightRecorder::take_kept`].
    pub fn keep_all(&self) {
        lock(&self.ring).kept = Some(RecordedCalls::default());
    }

    /// Stops keeping every call, and returns all calls that had not ended by `since`. None are missing if
    /// [`FlightRecorder::keep_all`] was called before then.
    pub fn take_kept(&self, since: Duration) -> RecordedCalls {
        let mut ring = lock(&self.ring);
        let mut kept = ring.kept.take().unwrap_or_default();
        kept.entries.extend(ring.in_order().cloned());
        drop(ring);
        let is_over = |entry: &Entry| entry.ended.max(entry.wait_ended).is_some_and(|over| over < since);
        kept.entries.retain(|entry| !is_over(entry));
        kept
    }

    /// Returns the current call of each group: one for its collectives and one for its messages, if it has made any. The
    /// cost depends on the number of groups, not on the number of calls, so this can be called often.
    pub fn group_status(&self) -> Vec<GroupStatus> {
        let ring = lock(&self.ring);
        let now = self.epoch.elapsed();
        let lanes =
            ring.groups.iter().flat_map(|group| [(group.ranks, &group.collectives), (group.ranks, &group.messages)]);
        lanes.filter_map(|(ranks, lane)| lane.group_status(ranks, now)).collect()
    }

    fn enter(&self, slot: GroupSlot, call: &Call) -> u64 {
        let entry = Entry {
            call: call.clone(),
            queued: self.epoch.elapsed(),
            started: None,
            ended: None,
            is_awaited: false,
            waited: None,
            wait_ended: None,
            status: CallStatus::Queued,
            waits_for: Vec::new(),
        };
        let mut ring = lock(&self.ring);
        let id = ring.next;
        ring.next += 1;
        ring.groups[slot.0].lane(call.verb.is_collective()).enter(id, entry.clone());
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

    /// Updates a call's entry, in the ring if it is still there, and in its group's lane.
    fn change(&self, handle: &EntryHandle, change: impl Fn(&mut Entry, Duration)) {
        let now = self.epoch.elapsed();
        let mut ring = lock(&self.ring);
        if ring.next - handle.id <= RECORD_CALLS_MAX as u64 {
            change(&mut ring.entries[handle.id as usize % RECORD_CALLS_MAX], now);
        }
        ring.groups[handle.slot.0].lane(handle.collective).change(handle.id, |entry| change(entry, now));
    }
}

/// A handle to a call's entry in the flight recorder.
#[derive(Clone)]
pub(crate) struct EntryHandle {
    record: Arc<FlightRecorder>,
    slot: GroupSlot,
    collective: bool,
    id: u64,
}

impl EntryHandle {
    pub(crate) fn mark_started(&self) {
        self.record.change(self, |entry, now| {
            entry.started = Some(now);
            entry.status = CallStatus::Running;
        });
    }

    /// Sets the global ranks that the call is waiting for; empty once it makes progress again.
    pub(crate) fn set_waits_for(&self, ranks: &[usize]) {
        self.record.change(self, |entry, _| entry.waits_for = ranks.to_vec());
    }

    pub(crate) fn mark_ended<T>(&self, result: &crate::Result<T>) {
        let status = match result {
            Ok(_) => CallStatus::Done,
            Err(error) => CallStatus::Failed(error.to_string()),
        };
        self.record.change(self, |entry, now| {
            entry.ended = Some(now);
            entry.status = status.clone();
            if status == CallStatus::Done {
                entry.waits_for.clear();
            }
        });
    }

    pub(crate) fn mark_awaited(&self) {
        self.record.change(self, |entry, _| entry.is_awaited |= entry.ended.is_none());
    }

    pub(crate) fn mark_waited(&self, waited: Duration) {
        self.record.change(self, |entry, now| {
            entry.waited = Some(waited);
            entry.wait_ended = Some(now);
        });
    }
}

/// Ignores poisoning: the instruments stay readable after a thread panicked.
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
            elements_sent: 0,
        }
    }

    #[test]
    fn the_flight_recorder_keeps_the_last_calls_in_order() {
        let instruments = Instruments::new(None);
        let slot = instruments.add_group(RankSet::world(4));
        let calls = RECORD_CALLS_MAX as u64 + 100;
        let first = instruments.enter(slot, &call(0));
        for number in 1..calls {
            let handle = instruments.enter(slot, &call(number));
            handle.mark_started();
            handle.mark_ended(&Ok(()));
        }
        // An update of an entry that has left the ring does not touch the entry that replaced it.
        first.mark_ended::<()>(&Err(crate::Error::Stopped));
        let entries = instruments.flight_recorder().read();
        let numbers: Vec<u64> = entries.iter().map(|entry| entry.call.number).collect();
        assert_eq!(numbers, (100..calls).collect::<Vec<_>>());
        assert!(entries.iter().all(|entry| entry.status == CallStatus::Done && entry.ended >= entry.started));
    }

    #[test]
    fn no_call_is_dropped_after_keep_all() {
        let instruments = Instruments::new(None);
        let (slot, record) = (instruments.add_group(RankSet::world(4)), instruments.flight_recorder());
        let make = |numbers: std::ops::Range<u64>| {
            for number in numbers {
                let handle = instruments.enter(slot, &call(number));
                handle.mark_ended(&Ok(()));
                handle.mark_waited(Duration::ZERO);
            }
        };
        make(0..3);
        let under_way = instruments.enter(slot, &call(3));
        record.keep_all();
        let since = record.epoch().elapsed();
        make(4..3 * RECORD_CALLS_MAX as u64);
        let kept = record.take_kept(since);
        let numbers: Vec<u64> = kept.entries.iter().map(|entry| entry.call.number).collect();
        assert_eq!(numbers, (3..3 * RECORD_CALLS_MAX as u64).collect::<Vec<_>>(), "and the one that was under way");
        assert_eq!(kept.dropped, 0);
        under_way.mark_ended(&Ok(()));
        make(0..RECORD_CALLS_MAX as u64 + 1);
        assert_eq!(record.take_kept(since).entries.len(), RECORD_CALLS_MAX);
    }

    #[test]
    fn a_groups_status_is_its_running_call_then_the_last_or_the_first_that_failed() {
        let instruments = Instruments::new(None);
        let (slot, quiet) = (instruments.add_group(RankSet::world(4)), instruments.add_group(RankSet::world(2)));
        let record = instruments.flight_recorder().clone();
        let status = || {
            let [status] = record.group_status().try_into().expect("one entry: the other group has had no call");
            let GroupStatus { entry, calls_behind, .. } = status;
            (entry.call.number, entry.status, entry.waits_for, calls_behind)
        };
        assert!(record.group_status().is_empty());
        let handles = [1, 2, 3].map(|number| instruments.enter(slot, &call(number)));
        assert_eq!(status(), (1, CallStatus::Queued, vec![], 2));
        handles[0].mark_started();
        handles[0].set_waits_for(&[3]);
        assert_eq!(status(), (1, CallStatus::Running, vec![3], 2));
        // A call that does not end may leave the ring; it is still its group's current call.
        for number in 0..RECORD_CALLS_MAX as u64 {
            instruments.enter(quiet, &call(number)).mark_ended(&Ok(()));
        }
        assert_eq!(record.group_status().len(), 2);
        assert_eq!(record.group_status()[0].entry.waits_for, [3]);
        handles[0].mark_ended(&Ok(()));
        handles[1].mark_started();
        handles[1].mark_ended::<()>(&Err(crate::Error::Stopped));
        handles[2].mark_ended(&Ok(()));
        let failed = record.group_status().swap_remove(0);
        assert_eq!((failed.entry.call.number, failed.calls_behind), (2, 0));
        assert!(matches!(failed.entry.status, CallStatus::Failed(_)));
    }

    #[test]
    fn the_current_message_is_the_one_that_is_waited_for() {
        let instruments = Instruments::new(None);
        let slot = instruments.add_group(RankSet::world(4));
        let record = instruments.flight_recorder().clone();
        let enter = |verb: Verb, number: u64| {
            let handle = instruments.enter(slot, &Call { verb, ..call(number) });
            handle.mark_started();
            handle
        };
        // Collectives come first, if there are any.
        let current = || {
            let entry = record.group_status().swap_remove(0).entry;
            (entry.call.number, entry.is_awaited)
        };
        let messages = [enter(Verb::Send, 1), enter(Verb::Receive, 2)];
        assert_eq!(current(), (1, false), "the longest running one");
        messages[1].mark_awaited();
        assert_eq!(current(), (2, true));
        messages[1].mark_ended(&Ok(()));
        assert_eq!(current(), (1, false));
        // Collectives run one after the other, whichever of them is waited for.
        let collectives = [enter(Verb::AllGather, 1), enter(Verb::AllGather, 2)];
        collectives[1].mark_awaited();
        assert_eq!(current(), (1, false));
    }

    #[test]
    fn a_fault_fires_once_at_the_matching_call() {
        let fires = |verb, nth| {
            let fault = CallFault { verb, label: "unit".to_string(), nth, kind: CallFaultKind::Skip };
            let instruments = Instruments::new(Some(fault));
            let other = Call { label: "other".into(), ..call(0) };
            let barrier = Call { verb: Verb::Barrier, ..call(0) };
            [&call(0), &other, &barrier, &call(0)].map(|call| instruments.fault(call).is_some())
        };
        assert_eq!(fires(None, 2), [false, false, true, false]);
        assert_eq!(fires(Some(Verb::AllGather), 2), [false, false, false, true]);
        assert_eq!(fires(Some(Verb::Send), 1), [false; 4]);
    }

    #[test]
    fn the_meter_counts_elements_and_bytes() {
        let instruments = Instruments::new(None);
        let slot = instruments.add_group(RankSet::world(4));
        for number in 0..3 {
            drop(instruments.enter(slot, &Call { elements_sent: 6, ..call(number) }));
        }
        let total = instruments.meter().total(|key| key.verb == Verb::AllGather);
        assert_eq!(total, Count { calls: 3, elements: 18, bytes: 36 });
        assert_eq!(instruments.meter().total(|key| &*key.label == "other"), Count::default());
        assert_eq!(Verb::ALL.map(|verb| verb as usize), [0, 1, 2, 3, 4, 5, 6, 7], "by_verb counts in their order");
        assert_eq!(instruments.meter().by_verb()[Verb::AllGather as usize], total);
        assert_eq!(instruments.meter().by_verb()[Verb::AllReduce as usize], Count::default());
        instruments.meter().reset();
        assert!(instruments.meter().read().is_empty());
    }
}
