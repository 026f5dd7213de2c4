//! Shutdown: all ranks end together, and a rank that leaves while others still wait for it is detected.
//!
//! `MPI_Finalize` waits for all ranks, silently and without a timeout. A rank that drops its groups because of an error would
//! wait there for ranks that wait for it in a call. So the ranks first meet in a non-blocking barrier, and listen for probes in
//! the meantime. A probe is an empty message that a rank whose call has stalled sends, now and then, to one of the ranks it
//! waits for. A rank that is still in the run ignores probes: it is only late. A rank that has left will never make that call,
//! so after two probes from the same rank it stops waiting, and its program can print its error and exit. Calls that are
//! running when the last group is dropped are finished first, each within its timeout.
//!
//! Ranks do not announce that they leave, so leaving costs only the barrier's N log N messages, and a rank that leaves early
//! without being missed does no harm. A waiting rank probes one rank at a time, at most every half second, so even a thousand
//! ranks that wait for one send it few messages.
//!
//! # Note: why two probes
//! A probe may be stale when it arrives: its sender was waiting for the last call, which has completed since. Stale probes
//! arrive soon after a rank has left, so it ignores probes for the first second. A sender that was descheduled for longer may
//! still send one late, but not two: it polls its call before it probes again.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::sys::{Communicator, MpiResult, Requests};

/// The tag of a probe, on a communicator that carries nothing else.
const PROBE_TAG: usize = 1;

/// How long a call stalls before its first probe, which is also the shortest interval between probes.
const PROBE_AFTER: Duration = Duration::from_millis(500);
/// The longest interval between probes.
const PROBE_INTERVAL_MAX: Duration = Duration::from_secs(5);

/// How long probes are ignored after leaving.
const STALE_PROBES: Duration = Duration::from_secs(1);

/// The sleep between polls of a rank that has just left.
const SLEEP: Duration = Duration::from_millis(1);
/// The sleep between its polls once it listens for probes.
const LONG_SLEEP: Duration = Duration::from_millis(20);

/// The outcome of a shutdown.
pub(super) enum ShutdownOutcome {
    /// All ranks have left.
    Together,
    /// This rank has left, but the rank given here still waits for it in a call.
    StillAwaited(usize),
    /// The barrier failed, with MPI's message.
    Failed(String),
}

/// This rank's side of the shutdown protocol.
pub(super) struct Shutdown {
    /// A communicator of all ranks that carries nothing but probes and the barrier.
    comm: Communicator,
    /// The probes being sent, with their targets.
    probes: Requests<usize>,
}

impl Shutdown {
    pub(super) fn new(comm: Communicator) -> Self {
        Shutdown { comm, probes: Requests::new() }
    }

    /// Probes a rank, given by its global rank. Only a rank that has left reacts.
    pub(super) fn probe(&mut self, rank: usize) {
        self.discard_probes();
        // If this fails, another probe follows soon, and the stalled call has its timeout.
        drop(self.probes.poll(|_, _| Ok(())));
        // SAFETY: an empty message has no memory.
        if let Ok(request) = unsafe { self.comm.send(std::ptr::null(), 0, rank, PROBE_TAG) } {
            self.probes.push(request, rank);
        }
    }

    /// Discards probes that have arrived. Also lets MPI make progress on calls that are complete on this rank: a message that
    /// MPI has accepted may not have been sent yet.
    pub(super) fn discard_probes(&self) {
        while self.take_probe().is_some() {}
    }

    /// Waits until all ranks have left, however long that takes, unless one of them waits for this rank.
    pub(super) fn leave(&self) -> ShutdownOutcome {
        self.wait_for_all().unwrap_or_else(ShutdownOutcome::Failed)
    }

    fn wait_for_all(&self) -> MpiResult<ShutdownOutcome> {
        let mut barrier = self.comm.start_barrier()?;
        let left_at = Instant::now();
        let (mut listening, mut probers) = (false, BTreeSet::new());
        while !barrier.is_complete()? {
            while let Some(rank) = self.take_probe() {
                if listening && !probers.insert(rank) {
                    return Ok(ShutdownOutcome::StillAwaited(rank));
                }
            }
            // Start to listen only after discarding everything that has arrived by now, in case this thread was descheduled for
            // a long time.
            listening |= left_at.elapsed() > STALE_PROBES;
            std::thread::sleep(if listening { LONG_SLEEP } else { SLEEP });
        }
        Ok(ShutdownOutcome::Together)
    }

    /// The sender of the next probe, if one has arrived. Errors are ignored: the affected call will report them.
    fn take_probe(&self) -> Option<usize> {
        self.comm.take_empty_message(PROBE_TAG).ok().flatten()
    }
}

/// When a stalled call sends probes, and to whom.
#[derive(Default)]
pub(super) struct Probes {
    probed: usize,
    /// For how long the call must have stalled before the next probe.
    next: Duration,
}

impl Probes {
    /// Returns the rank to probe now, if it is time: the missing ranks in turn, less often the longer the call stalls.
    pub(super) fn next_rank(&mut self, stalled: Duration, missing: impl FnOnce() -> Vec<usize>) -> Option<usize> {
        if stalled < self.next.max(PROBE_AFTER) {
            return None;
        }
        self.next = stalled + (stalled / 2).clamp(PROBE_AFTER, PROBE_INTERVAL_MAX);
        let missing = missing();
        let rank = *missing.get(self.probed % missing.len().max(1))?;
        self.probed += 1;
        Some(rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_ranks_are_probed_in_turn_and_less_and_less_often() {
        let mut probes = Probes::default();
        let probed: Vec<(u64, usize)> = (0..60_000)
            .step_by(100)
            .filter_map(|ms| Some((ms, probes.next_rank(Duration::from_millis(ms), || vec![3, 8])?)))
            .collect();
        let times: Vec<u64> = probed.iter().map(|&(ms, _)| ms).collect();
        assert_eq!(times[..6], [500, 1000, 1500, 2300, 3500, 5300]);
        assert!(times.windows(2).all(|pair| pair[1] - pair[0] <= 5100), "{times:?}");
        assert!(probed.iter().enumerate().all(|(index, &(_, rank))| rank == [3, 8][index % 2]), "{probed:?}");
        assert_eq!(Probes::default().next_rank(Duration::from_secs(9), Vec::new), None);
    }
}
