//! Groups of CPU ranks over MPI.
//!
//! One thread per rank, started by [`world`], makes every MPI call of the process, start-up and shut-down included, so
//! `MPI_THREAD_FUNNELED` is enough and MPI sees no second thread. The other threads hand it jobs through a queue
//! (`engine.rs`). It uses of MPI the start-up, the sub-groups and messages between two ranks; the collectives are made of
//! such messages here (`exchange.rs`), because MPI's own were measured to be slower and cannot be interrupted:
//!
//! - reduce-scatter is exchange-then-sum in rounds: while one round's pieces are summed, out of the cache they were just
//!   received into, the next round's are on their way. MPI's own sums in an order of its choice, and not in bf16.
//! - all-gather is direct: everyone sends to everyone else, straight into place.
//! - a small all-reduce (a loss, a norm) is one gather of all contributions and a sum, for latency; a barrier is such a gather
//!   of one byte each.
//! - broadcast goes down a binomial tree, piece by piece.
//!
//! Messages are at most 4 MiB long, so lengths are never near MPI's 32-bit counts, and a call that
//! moves is seen to move. A call that does not move for [`Options::time_limit`] fails with the names of those it waits
//! for; its buffers stay with MPI forever, for MPI may still write to them.
//!
//! # Note: checked mode
//! Ranks that come to a collective with different calls send each other messages that were not meant for each other. Where
//! lengths differ, that is an error, of short messages at once and of long ones after the time limit; where they are the
//! same, it is wrong numbers, and an error at the first call that differs. With [`Options::checked`] the ranks of a group
//! first show each other a card of 64 bytes (`card.rs`), and where not all are the same, the call fails on every rank with
//! [`Error::Mismatch`], which says who came with what, before any buffer is touched. That costs as much as a barrier before
//! each collective: little beside a unit's parameters, and a good part of a small sum. Messages between two ranks have no
//! card.
//!
//! # Note: full duplex
//! Between hosts, Open MPI's TCP answers a long message's announcement on the same queue that carries its own long messages, so
//! of two ranks that send to each other one often waits until the other is through: an all-gather of 168 MB between two hosts
//! at 1 Gbit/s took 1.41 s instead of 0.70 s, and MPI_Allgather now and then too. Without its emulation of remote writes
//! (`mpirun --mca btl_tcp_flags 1`, or `OMPI_MCA_btl_tcp_flags=1` in the environment of every rank) it took 0.70 s every
//! time. Start ranks with it.
//!
//! # Note: the end
//! MPI is shut down when the last group is dropped, once all ranks have come so far (`farewell.rs`). A rank that drops its
//! groups while another waits for it in a call, as when `main` returns an error, goes on after a few seconds: its program prints
//! the error and ends, and the launcher, which sees it end without `MPI_Finalize`, ends the others. If its process is still there
//! after half a minute, it aborts the run. A program that knows that it has failed need not wait for that: [`Group::abort`].
//!
//! If the communication thread panics, the process aborts at once. Unwinding would free buffers that MPI still writes to.

mod card;
mod engine;
mod exchange;
mod farewell;
mod sys;

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use shardwise_plan::RankSet;
use shardwise_torch::tch::Device;

use crate::instruments::Instruments;
use crate::pending::Completion;
use crate::transport::{Job, Transport};
use crate::{CallFault, Error, Group, Result};
use engine::{Ending, Engine, Message};

/// How to communicate.
#[derive(Clone, Debug)]
pub struct Options {
    /// How long a call may stand still, with not one piece arriving, before it fails. It must be longer than ranks may
    /// legitimately wait for each other.
    pub time_limit: Duration,
    /// Whether the ranks of a group compare what they are about to do before each collective. All ranks say the same here.
    pub checked: bool,
    /// A mistake that this process is to make, for tests of what is said of it.
    pub fault: Option<CallFault>,
}

impl Default for Options {
    /// 300 seconds, unchecked, and no mistake.
    fn default() -> Self {
        Options { time_limit: Duration::from_secs(300), checked: false, fault: None }
    }
}

/// How long MPI may take to start, at the least. That is no collective: processes are loaded, on hosts that may be busy,
/// and a run that is to notice a hang within seconds would take each slow start for one.
const SHORTEST_START: Duration = Duration::from_secs(60);

/// How long a rank that left the run alone may take to say why and to end, before it aborts the run. Longer than a supervisor
/// takes to ask the others where they are.
const GRACE: Duration = Duration::from_secs(30);

/// How long a launcher may take to forward what this rank has printed before the run is aborted, and how long the abort may take.
const LAST_WORDS: Duration = Duration::from_millis(200);
const ABORT_LIMIT: Duration = Duration::from_secs(5);

/// Starts MPI, and returns the group of all ranks that the launcher (`mpirun`, `srun`) has started; just this one where
/// there was no launcher. A process can do this once. MPI is shut down when the last group is dropped.
pub fn world(options: Options) -> Result<Group> {
    let time_limit = options.time_limit;
    let instruments = Instruments::new(options.fault.clone());
    let (sender, receiver) = channel();
    let (report, reported) = channel();
    let (alive, ended) = channel();
    std::thread::Builder::new()
        .name("shardwise-comm".to_string())
        .spawn(move || match Engine::start(options) {
            Ok(mut engine) => {
                let (rank, size) = engine.place();
                // Declared after the engine, so that a panic reaches it while the engine still holds all buffers.
                let _guard = AbortOnPanic { rank };
                // The starter is gone only if it panicked, and then there is nothing to run for.
                if report.send(Ok((rank, size))).is_err() {
                    return;
                }
                match engine.run(&receiver) {
                    // Whoever dropped the last group waits for this, and then until the engine has finalized MPI.
                    Ending::Together => {
                        let _ = alive.send(());
                    }
                    Ending::Alone => {
                        drop(alive);
                        if size > 1 {
                            std::thread::sleep(GRACE);
                            engine.abort();
                        }
                    }
                }
            }
            Err(error) => drop(report.send(Err(error))),
        })
        .map_err(|error| Error::Setup(format!("the communication thread could not be started: {error}")))?;
    let start_limit = time_limit.max(SHORTEST_START);
    let (rank, size) = reported.recv_timeout(start_limit).map_err(|error| match error {
        RecvTimeoutError::Timeout => {
            Error::Setup(format!("MPI has not started within {start_limit:?}: can all hosts reach each other?"))
        }
        RecvTimeoutError::Disconnected => Error::Stopped,
    })??;
    // Not before MPI has started: dropping it waits for the thread, which may be stuck in that.
    let thread = Arc::new(Thread { sender, ended: Mutex::new(ended), time_limit });
    let transport = Arc::new(MpiGroup { thread, id: engine::WORLD });
    Ok(Group::new("world", RankSet::world(size), rank, transport, instruments))
}

/// What MPI library this is, in its own words.
pub fn library_version() -> String {
    sys::library_version()
}

/// Ends the process if the communication thread panics.
struct AbortOnPanic {
    rank: usize,
}

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "rank {}: the communication thread panicked, see above; MPI may still write to its buffers, so the process \
                 ends at once",
                self.rank
            );
            std::process::abort();
        }
    }
}

/// The communication thread; dropping the last handle shuts MPI down.
struct Thread {
    sender: Sender<Message>,
    /// Hears when all ranks have left together. Disconnected when there is nothing more to wait for: the thread has ended, or
    /// left alone.
    ended: Mutex<Receiver<()>>,
    time_limit: Duration,
}

impl Thread {
    fn tell(&self, message: Message) -> Result<()> {
        self.sender.send(message).map_err(|_| Error::Stopped)
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        // MPI_Finalize waits for all ranks. One that dies of a panic must not wait for others that wait for it: it leaves
        // without a word, and the launcher sees it go.
        let finalize = !std::thread::panicking();
        if self.tell(Message::Stop { finalize }).is_ok() && finalize {
            let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
            // The others may be busy for as long as they like: ending before them would end them as well.
            if ended.recv().is_ok() {
                // A thread that is stuck inside MPI is left behind; it ends with the process.
                let _ = ended.recv_timeout(self.time_limit);
            }
        }
    }
}

struct MpiGroup {
    thread: Arc<Thread>,
    id: engine::GroupId,
}

impl Transport for MpiGroup {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn start(&self, job: Job) -> Completion {
        let (reply, result) = channel();
        if let Err(error) = self.thread.tell(Message::Start { group: self.id, job, reply }) {
            return Box::new(move || Err(error));
        }
        Box::new(move || result.recv().unwrap_or(Err(Error::Stopped)))
    }

    fn split(&self, ranks: RankSet, name: &Arc<str>) -> Result<Arc<dyn Transport>> {
        let (reply, result) = channel();
        self.thread.tell(Message::Split { parent: self.id, ranks, name: name.clone(), reply })?;
        let id = result.recv().unwrap_or(Err(Error::Stopped))?;
        Ok(Arc::new(MpiGroup { thread: self.thread.clone(), id }))
    }

    fn abort(&self) {
        std::thread::sleep(LAST_WORDS);
        if self.thread.tell(Message::Abort).is_ok() {
            // It ends this process, unless the thread is stuck in MPI.
            std::thread::sleep(ABORT_LIMIT);
        }
    }
}
