//! Leaving: ranks end together, and a rank that has left while others wait for it is found out.
//!
//! `MPI_Finalize` waits for all ranks, in silence and without a limit. A rank that drops its groups because something went
//! wrong would wait there for ranks that wait for it in a call. So the ranks first meet in a barrier that does not block, and
//! listen meanwhile. A rank whose call stands still asks one of those it waits for, now and then, with an empty message. A
//! rank that is still in the run ignores it, for it is only late. A rank that has left, and is asked twice by the same rank, will
//! never come to that call: it stops waiting, so that its program can say why and end. Calls that are under way when the last
//! group is dropped are finished before all this, each within its time limit.
//!
//! Nobody announces that it leaves, so leaving costs the barrier's N log N messages, and a rank that leaves early and is not
//! missed harms nobody. A rank that waits asks one rank at a time, at most every half second, so even a thousand ranks that wait
//! for one send it few messages.
//!
//! # Note: why twice
//! A question may be out of date when it arrives: whoever sent it was waiting for the last call, which has completed since.
//! Such questions arrive within moments of leaving, so those of the first second are ignored. A process that was not
//! scheduled for longer may still send one late, but not two: it looks at its call again before it asks again.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::sys::{Communicator, Outcome, Requests};

/// The tag of a question, on a communicator that carries nothing else.
const QUESTION: usize = 1;

/// How long a call stands still before it asks for the first time, and the least and the most time between two questions.
const ASK_FIRST: Duration = Duration::from_millis(500);
const ASK_AGAIN_MAX: Duration = Duration::from_secs(5);

/// How long questions are ignored after leaving.
const OUT_OF_DATE: Duration = Duration::from_secs(1);

/// How often a rank that has left looks around: at first, and later.
const REST: Duration = Duration::from_millis(1);
const LONG_REST: Duration = Duration::from_millis(20);

/// How a rank has left.
pub(super) enum Left {
    /// With all others.
    Together,
    /// While this rank waits for it in a call.
    Missed(usize),
    /// MPI could not bring the ranks together, in its words.
    Failed(String),
}

/// This rank's end of all farewells.
pub(super) struct Farewell {
    /// All ranks, with messages of their own.
    comm: Communicator,
    /// Those that are on their way, with whom they go to.
    questions: Requests<usize>,
}

impl Farewell {
    pub(super) fn new(comm: Communicator) -> Self {
        Farewell { comm, questions: Requests::new() }
    }

    /// Asks a rank of the world whether it has left. Only a rank that has will care.
    pub(super) fn ask(&mut self, rank: usize) {
        self.ignore_questions();
        // A question that cannot be sent is sent again soon, and the call that it is about has its time limit.
        drop(self.questions.poll(|_, _| Ok(())));
        // SAFETY: an empty message has no memory.
        if let Ok(request) = unsafe { self.comm.send(std::ptr::null(), 0, rank, QUESTION) } {
            self.questions.push(request, rank);
        }
    }

    /// Removes questions that have arrived. It also lets MPI finish what it still has to do for calls that are over here: a
    /// message that was handed to it may not be out yet.
    pub(super) fn ignore_questions(&self) {
        while self.take_question().is_some() {}
    }

    /// Waits until all ranks have left, for as long as they are busy, unless one of them waits for this rank.
    pub(super) fn leave(&self) -> Left {
        self.wait_for_all().unwrap_or_else(Left::Failed)
    }

    fn wait_for_all(&self) -> Outcome<Left> {
        let mut barrier = self.comm.start_barrier()?;
        let left_at = Instant::now();
        let (mut listening, mut askers) = (false, BTreeSet::new());
        while !barrier.is_complete()? {
            while let Some(rank) = self.take_question() {
                if listening && !askers.insert(rank) {
                    return Ok(Left::Missed(rank));
                }
            }
            // Not before everything that had arrived by now was removed, however long this thread did not run.
            listening |= left_at.elapsed() > OUT_OF_DATE;
            std::thread::sleep(if listening { LONG_REST } else { REST });
        }
        Ok(Left::Together)
    }

    /// Who has asked, if anyone has. An error here is found by the call that suffers from it.
    fn take_question(&self) -> Option<usize> {
        self.comm.take_empty_message(QUESTION).ok().flatten()
    }
}

/// Whom a call that stands still asks, and when.
#[derive(Default)]
pub(super) struct Questions {
    asked: usize,
    /// How long the call stands still before it asks again.
    next: Duration,
}

impl Questions {
    /// The rank to ask now, if it is time: one of those that are missing, in turn, less often the longer the call stands still.
    pub(super) fn whom(&mut self, still: Duration, missing: impl FnOnce() -> Vec<usize>) -> Option<usize> {
        if still < self.next.max(ASK_FIRST) {
            return None;
        }
        self.next = still + (still / 2).clamp(ASK_FIRST, ASK_AGAIN_MAX);
        let missing = missing();
        let rank = *missing.get(self.asked % missing.len().max(1))?;
        self.asked += 1;
        Some(rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_missing_are_asked_in_turn_and_less_and_less_often() {
        let mut questions = Questions::default();
        let asked: Vec<(u64, usize)> = (0..60_000)
            .step_by(100)
            .filter_map(|ms| Some((ms, questions.whom(Duration::from_millis(ms), || vec![3, 8])?)))
            .collect();
        let times: Vec<u64> = asked.iter().map(|&(ms, _)| ms).collect();
        assert_eq!(times[..6], [500, 1000, 1500, 2300, 3500, 5300]);
        assert!(times.windows(2).all(|pair| pair[1] - pair[0] <= 5100), "{times:?}");
        assert!(asked.iter().enumerate().all(|(index, &(_, rank))| rank == [3, 8][index % 2]), "{asked:?}");
        assert_eq!(Questions::default().whom(Duration::from_secs(9), Vec::new), None);
    }
}
