//! Groups of CPU ranks over MPI.
//!
//! One thread per rank, started by [`world`], makes every MPI call of the process, including initialization and finalization,
//! so `MPI_THREAD_FUNNELED` is enough. Other threads send it calls through a queue (`engine.rs`). It uses MPI only for
//! initialization, subgroups, point-to-point messages and the barrier at shutdown. The collectives are built from messages
//! (`exchange.rs`), because MPI's own were measured to be slower and cannot be interrupted:
//!
//! - reduce-scatter works in rounds: while the pieces of one round are summed, still in the cache, those of the next are being
//!   sent. MPI's own sums in an order of its choice, and does not support bf16.
//! - all-gather is direct: every rank sends to every other rank, straight into place.
//! - a small all-reduce (a loss, a norm) gathers all contributions and sums them locally, for latency; a barrier is such a
//!   gather of one byte each.
//! - broadcast goes down a binomial tree, piece by piece.
//!
//! Messages are at most 4 MiB long, so lengths stay far below MPI's 32-bit counts, and progress is visible. A call without
//! progress for [`Options::timeout`] fails with the ranks it waits for; its buffers are leaked, because MPI may still write
//! to them.
//!
//! # Note: collective verification
//! Ranks that make different calls send each other messages that were not meant for each other. If the lengths differ, that
//! is an error, at once for short messages and after the timeout for long ones; if they are equal, the result is wrong
//! numbers, and an error at the first call that differs. With [`Options::verify_collectives`] the ranks of a group first
//! exchange signatures of 64 bytes (`call_signature.rs`), and if they differ, the call fails on every rank with [`Error::Mismatch`],
//! which names the ranks and their calls, before any buffer is touched (PyTorch: `TORCH_DISTRIBUTED_DEBUG=DETAIL`). That costs
//! as much as a barrier before each collective: little compared with a unit's parameters, much compared with a small sum.
//! Point-to-point messages are not verified.
//!
//! # Note: full duplex
//! Between hosts, Open MPI's TCP transport answers the announcement of a long message on the same queue that carries its own
//! long messages. So when two ranks send to each other, one often waits until the other is done: an all-gather of 168 MB
//! between two hosts at 1 Gbit/s took 1.41 s instead of 0.70 s, as MPI_Allgather sometimes did too. With Open MPI's emulation
//! of remote writes turned off (`mpirun --mca btl_tcp_flags 1`, or `OMPI_MCA_btl_tcp_flags=1` in the environment of every rank)
//! it took 0.70 s every time. Launch ranks with that setting.
//!
//! # Note: shutdown
//! MPI is finalized when the last group is dropped on all ranks (`shutdown.rs`). If a rank drops its groups while another waits
//! for it in a call, as when `main` returns an error, the drop returns after a few seconds: the program prints the error and
//! exits, and the launcher, which sees it exit without `MPI_Finalize`, ends the others. If its process is still alive after
//! half a minute, it aborts the run. A program that knows that it has failed need not wait: it calls [`Group::abort`].
//!
//! If the communication thread panics, the process aborts at once. Unwinding would free buffers that MPI still writes to.

mod call_signature;
mod engine;
mod exchange;
mod options;
mod shutdown;
mod sys;

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use shardwise_plan::RankSet;
use shardwise_torch::tch::Device;

use crate::instruments::Instruments;
use crate::pending::Completion;
use crate::transport::{Job, Transport};
use crate::{Error, Group, Result};
use engine::{Ending, Engine, Message};

pub use options::Options;

/// The shortest timeout for initializing MPI. Busy hosts may load processes slowly, and a run with a timeout of a few seconds
/// must not mistake a slow start for a hang.
const START_TIMEOUT_MIN: Duration = Duration::from_secs(60);

/// How long a rank that left the run alone may take to report its error and exit, before it aborts the run. Longer than the
/// supervisor needs to collect the status of the others.
const EXIT_GRACE: Duration = Duration::from_secs(30);

/// How long the launcher gets to forward this rank's output before the run is aborted.
const OUTPUT_GRACE: Duration = Duration::from_millis(200);
/// How long the abort may take.
const ABORT_TIMEOUT: Duration = Duration::from_secs(5);

/// Initializes MPI, and returns the group of all ranks that the launcher (`mpirun`, `srun`) has started; without a launcher,
/// a group of one. Can be called once per process. MPI is finalized when the last group is dropped.
pub fn world(options: Options) -> Result<Group> {
    let timeout = options.timeout;
    let instruments = Instruments::new(options.fault.clone());
    let (sender, receiver) = channel();
    let (report, reported) = channel();
    let (alive, ended) = channel();
    std::thread::Builder::new()
        .name("shardwise-comm".to_string())
        .spawn(move || match Engine::start(options) {
            Ok(mut engine) => {
                let (rank, size) = engine.rank_and_size();
                // Declared after the engine, so that a panic reaches it while the engine still holds all buffers.
                let _guard = AbortOnPanic { rank };
                // The receiver is gone only if it panicked; then there is nothing to do.
                if report.send(Ok((rank, size))).is_err() {
                    return;
                }
                match engine.run(&receiver) {
                    // Dropping the last group waits for this message, and then until the engine has finalized MPI.
                    Ending::Together => {
                        let _ = alive.send(());
                    }
                    Ending::Alone => {
                        drop(alive);
                        if size > 1 {
                            std::thread::sleep(EXIT_GRACE);
                            engine.abort();
                        }
                    }
                }
            }
            Err(error) => drop(report.send(Err(error))),
        })
        .map_err(|error| Error::Setup(format!("the communication thread could not be started: {error}")))?;
    let start_timeout = timeout.max(START_TIMEOUT_MIN);
    let (rank, size) = reported.recv_timeout(start_timeout).map_err(|error| match error {
        RecvTimeoutError::Timeout => Error::Setup(format!(
            "MPI did not start within {start_timeout:?}; check that all hosts can reach each other"
        )),
        RecvTimeoutError::Disconnected => Error::Stopped,
    })??;
    // Only now that MPI has started: dropping it waits for the thread, which could be stuck in MPI_Init.
    let thread = Arc::new(CommThread { sender, ended: Mutex::new(ended), timeout });
    let transport = Arc::new(MpiGroup { thread, id: engine::WORLD });
    Ok(Group::new("world", RankSet::world(size), rank, transport, instruments))
}

/// The name and version of the MPI library.
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

/// The communication thread; dropping the last handle finalizes MPI.
struct CommThread {
    sender: Sender<Message>,
    /// Receives a message when all ranks have left. Disconnected when there is nothing more to wait for: the thread has
    /// ended, or this rank left alone.
    ended: Mutex<Receiver<()>>,
    timeout: Duration,
}

impl CommThread {
    fn send(&self, message: Message) -> Result<()> {
        self.sender.send(message).map_err(|_| Error::Stopped)
    }
}

impl Drop for CommThread {
    fn drop(&mut self) {
        // MPI_Finalize waits for all ranks. A rank that panics must not wait for others that wait for it: it exits without
        // finalizing, and the launcher notices.
        let finalize = !std::thread::panicking();
        if self.send(Message::Stop { finalize }).is_ok() && finalize {
            let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
            // Without a timeout: the others may be busy for a long time, and exiting before them would end them as well.
            if ended.recv().is_ok() {
                // A thread that is stuck inside MPI is left behind; it ends with the process.
                let _ = ended.recv_timeout(self.timeout);
            }
        }
    }
}

struct MpiGroup {
    thread: Arc<CommThread>,
    id: engine::GroupId,
}

impl Transport for MpiGroup {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn start(&self, job: Job) -> Completion {
        let (reply, result) = channel();
        if let Err(error) = self.thread.send(Message::Start { group: self.id, job, reply }) {
            return Box::new(move || Err(error));
        }
        Box::new(move || result.recv().unwrap_or(Err(Error::Stopped)))
    }

    fn split(&self, ranks: RankSet, name: &Arc<str>) -> Result<Arc<dyn Transport>> {
        let (reply, result) = channel();
        self.thread.send(Message::Split { parent: self.id, ranks, name: name.clone(), reply })?;
        let id = result.recv().unwrap_or(Err(Error::Stopped))?;
        Ok(Arc::new(MpiGroup { thread: self.thread.clone(), id }))
    }

    fn timeout(&self) -> Duration {
        self.thread.timeout
    }

    fn abort(&self) {
        std::thread::sleep(OUTPUT_GRACE);
        if self.thread.send(Message::Abort).is_ok() {
            // The thread ends this process, unless it is stuck in MPI.
            std::thread::sleep(ABORT_TIMEOUT);
        }
    }
}
