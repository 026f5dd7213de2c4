//! The communication thread: an ordered queue of calls per group, and a loop that polls those at the front.
//!
//! The collectives of a group run one after the other, in the order in which they were made. Different groups, and messages
//! between two ranks, run concurrently. So ranks may interleave groups differently, and two ranks that both send before they
//! receive do not deadlock.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::{Duration, Instant};

use shardwise_plan::RankSet;

use super::call_signature::{CallSignature, group_variants};
use super::exchange::{CALL_NUMBERS, Failure, Machine, Progress, machine, rendezvous, verify_then};
use super::options::Options;
use super::shutdown::{Probes, Shutdown, ShutdownOutcome};
use super::sys::{Communicator, Universe};
use crate::error::describe_ranks;
use crate::pending::Buffers;
use crate::transport::{Job, Operation};
use crate::{Error, Result};

/// The index of a group in the communication thread.
pub(super) type GroupId = usize;

/// The group of all ranks.
pub(super) const WORLD: GroupId = 0;

/// How long the thread spins without progress before it sleeps between polls. Longer than the gaps between the messages of a
/// call, shorter than the wait for a rank that is still computing and needs the core.
const SPIN_TIME: Duration = Duration::from_micros(200);
/// The sleep between polls after that.
const SLEEP: Duration = Duration::from_micros(50);

/// How long after the last progress an idle thread still polls often.
const IDLE_RECENT: Duration = Duration::from_secs(1);
/// The sleep between those polls.
const IDLE_SLEEP: Duration = Duration::from_millis(1);
/// The sleep between polls of a thread that has been idle for longer.
const IDLE_LONG_SLEEP: Duration = Duration::from_millis(20);

/// How long a call stalls before the flight recorder shows which ranks it waits for, and the interval between updates.
const STALL_REPORT_INTERVAL: Duration = Duration::from_millis(500);

/// A request from another thread.
pub(super) enum Message {
    Start { group: GroupId, job: Job, reply: Sender<Result<Buffers>> },
    Split { parent: GroupId, ranks: RankSet, name: Arc<str>, reply: Sender<Result<GroupId>> },
    Stop { finalize: bool },
    Abort,
}

/// How the communication thread ended.
pub(super) enum Ending {
    /// All ranks are done, and MPI can be finalized.
    Together,
    /// Other ranks may still wait for this one, or this one for them.
    Alone,
}

pub(super) struct Engine {
    universe: Universe,
    options: Options,
    groups: BTreeMap<GroupId, GroupState>,
    shutdown: Shutdown,
}

/// A group and its calls.
struct GroupState {
    /// The group's global ranks.
    ranks: RankSet,
    collectives: Lane,
    messages: Lane,
    /// The first failure. After it, the ranks no longer agree on the next call.
    broken: Option<String>,
}

/// The calls of one communicator.
struct Lane {
    comm: Communicator,
    queue: VecDeque<QueuedCall>,
    running: Vec<RunningCall>,
    /// The most calls that may run concurrently.
    running_max: usize,
    /// Whether ranks compare the signatures of their calls first.
    verify_collectives: bool,
    /// The number of messages so far to and from each rank.
    messages: BTreeMap<Peer, u64>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Peer {
    To(usize),
    From(usize),
}

/// Pauses between polls.
struct Backoff {
    moved_at: Instant,
}

impl Backoff {
    fn new() -> Self {
        Backoff { moved_at: Instant::now() }
    }

    /// Returns at once after progress, otherwise after yielding or sleeping.
    fn pause(&mut self, moved: bool) {
        if moved {
            self.moved_at = Instant::now();
        } else if self.moved_at.elapsed() < SPIN_TIME {
            std::thread::yield_now();
        } else {
            std::thread::sleep(SLEEP);
        }
    }
}

struct QueuedCall {
    job: Job,
    reply: Sender<Result<Buffers>>,
}

struct RunningCall {
    // Declared before the job, so that the machine is dropped before the memory that it points to.
    machine: Box<dyn Machine>,
    queued: QueuedCall,
    moved_at: Instant,
    /// How long the call had stalled when the flight recorder was last updated.
    stall_reported: Option<Duration>,
    probes: Probes,
}

impl RunningCall {
    fn mark_moved(&mut self) {
        self.moved_at = Instant::now();
        if self.stall_reported.take().is_some() {
            self.queued.job.handle.set_waits_for(&[]);
            self.probes = Probes::default();
        }
    }

    fn report_stall(&mut self, stalled: Duration, ranks: RankSet, shutdown: &mut Shutdown) {
        if stalled > self.stall_reported.unwrap_or_default() + STALL_REPORT_INTERVAL {
            self.stall_reported = Some(stalled);
            let missing = missing(self.machine.as_ref(), ranks);
            self.queued.job.handle.set_waits_for(&missing);
            if let Some(rank) = self.probes.next_rank(stalled, || missing) {
                shutdown.probe(rank);
            }
        }
    }
}

impl Engine {
    pub(super) fn start(options: Options) -> Result<Self> {
        let universe = Universe::start().map_err(Error::Setup)?;
        let world = universe.world().and_then(|world| world.duplicate()).map_err(Error::Setup)?;
        let group =
            GroupState::new(world, RankSet::world(world.size()), options.verify_collectives).map_err(Error::Setup)?;
        let shutdown = Shutdown::new(world.duplicate().map_err(Error::Setup)?);
        Ok(Engine { universe, options, groups: BTreeMap::from([(WORLD, group)]), shutdown })
    }

    /// Terminates this process and all other ranks of the run.
    pub(super) fn abort(&self) -> ! {
        match self.rank_and_size() {
            // Exit quietly: MPI would print a page about the other ranks, and there are none.
            (_, 1) => std::process::exit(1),
            _ => self.universe.abort(),
        }
    }

    /// This rank and the world size.
    pub(super) fn rank_and_size(&self) -> (usize, usize) {
        let comm = self.groups[&WORLD].collectives.comm;
        (comm.rank(), comm.size())
    }

    /// Runs until it is told to stop, or all senders are gone.
    pub(super) fn run(&mut self, messages: &Receiver<Message>) -> Ending {
        let mut backoff = Backoff::new();
        loop {
            let message = match self.is_idle() {
                true => self.idle(messages, &backoff),
                false => messages.try_recv(),
            };
            let moved = match message {
                Ok(Message::Start { group, job, reply }) => {
                    self.group(group).enqueue(QueuedCall { job, reply });
                    true
                }
                Ok(Message::Split { parent, ranks, name, reply }) => {
                    self.drain();
                    // The receiver may be gone; the group is then unused.
                    drop(reply.send(self.split(parent, ranks, &name)));
                    true
                }
                Ok(Message::Stop { finalize }) => return self.stop(finalize),
                Ok(Message::Abort) => self.abort(),
                Err(TryRecvError::Disconnected) => return self.stop(false),
                Err(TryRecvError::Empty) => false,
            };
            let moved_on = self.poll();
            if !self.is_idle() {
                backoff.pause(moved_on || moved);
            }
        }
    }

    /// Waits for a message while no call is running. Also lets MPI make progress: it may still have to send the rest of a call
    /// that is complete on this rank.
    fn idle(&self, messages: &Receiver<Message>, backoff: &Backoff) -> std::result::Result<Message, TryRecvError> {
        self.shutdown.discard_probes();
        let sleep = if backoff.moved_at.elapsed() < IDLE_RECENT { IDLE_SLEEP } else { IDLE_LONG_SLEEP };
        messages.recv_timeout(sleep).map_err(|error| match error {
            RecvTimeoutError::Timeout => TryRecvError::Empty,
            RecvTimeoutError::Disconnected => TryRecvError::Disconnected,
        })
    }

    fn group(&mut self, id: GroupId) -> &mut GroupState {
        self.groups.get_mut(&id).expect("groups are never removed")
    }

    fn is_idle(&self) -> bool {
        self.groups.values().all(|group| group.collectives.is_idle() && group.messages.is_idle())
    }

    /// Polls every running call once. Returns whether any made progress.
    fn poll(&mut self) -> bool {
        let timeout = self.options.timeout;
        let mut moved = false;
        for group in self.groups.values_mut() {
            moved |= group.poll(timeout, &mut self.shutdown);
        }
        moved
    }

    fn drain(&mut self) {
        let mut backoff = Backoff::new();
        while !self.is_idle() {
            backoff.pause(self.poll());
        }
    }

    fn split(&mut self, parent: GroupId, ranks: RankSet, name: &str) -> Result<GroupId> {
        let fail = |message: String| Error::Setup(format!("the group '{name}' could not be created: {message}"));
        let Options { timeout, verify_collectives, .. } = self.options;
        let parent = self.groups.get_mut(&parent).expect("groups are never removed");
        if let Some(cause) = &parent.broken {
            return Err(fail(cause.clone()));
        }
        // MPI's own call blocks and cannot be canceled, so the ranks meet first, which keeps it short.
        let mut rendezvous = rendezvous(parent.messages.comm, &ranks);
        let (mut backoff, started, mut probes) = (Backoff::new(), Instant::now(), Probes::default());
        loop {
            let problem = match rendezvous.poll() {
                Ok(Progress::Done) => break,
                Ok(progress) if started.elapsed() <= timeout => {
                    if let Some(rank) = probes.next_rank(started.elapsed(), || missing(&rendezvous, parent.ranks)) {
                        self.shutdown.probe(rank);
                    }
                    backoff.pause(progress == Progress::Moved);
                    continue;
                }
                Ok(_) => {
                    let waiting_for = waiting_for(&rendezvous, parent.ranks);
                    format!("not all of its ranks asked for it within {timeout:?}{waiting_for}")
                }
                Err(Failure::Message(message)) => message,
                Err(Failure::Mismatch(_)) => unreachable!("a rendezvous compares no signatures"),
            };
            std::mem::forget(rendezvous);
            parent.broken = Some(format!("the group '{name}' could not be created: {problem}"));
            return Err(fail(problem));
        }
        let comm = parent.collectives.comm.subgroup(&ranks);
        let group = comm.and_then(|comm| GroupState::new(comm, ranks, verify_collectives)).map_err(fail)?;
        let id = self.groups.len();
        self.groups.insert(id, group);
        Ok(id)
    }

    fn stop(&mut self, finalize: bool) -> Ending {
        if finalize {
            self.drain();
        }
        // MPI_Finalize waits for all ranks, and after a failure some may never get there. The process then ends without it,
        // which the launcher treats as a failure.
        let whole = self.groups.values().all(|group| group.broken.is_none());
        if finalize && whole && self.leave() {
            return Ending::Together;
        }
        for group in self.groups.values_mut() {
            std::mem::forget(std::mem::take(&mut group.collectives.running));
            std::mem::forget(std::mem::take(&mut group.messages.running));
        }
        self.universe.abandon();
        Ending::Alone
    }

    /// Waits until all ranks have left the run. Returns whether they have.
    fn leave(&self) -> bool {
        let (rank, _) = self.rank_and_size();
        match self.shutdown.leave() {
            ShutdownOutcome::Together => true,
            ShutdownOutcome::StillAwaited(by) => {
                eprintln!("rank {rank} has left the run, but rank {by} still waits for it: the run ends here");
                false
            }
            ShutdownOutcome::Failed(message) => {
                eprintln!("rank {rank} could not shut down together with the other ranks: {message}");
                false
            }
        }
    }
}

impl GroupState {
    fn new(comm: Communicator, ranks: RankSet, verify_collectives: bool) -> std::result::Result<Self, String> {
        // Messages need no verification: a receive checks the length. Neither does a group of one.
        let messages = Lane::new(comm.duplicate()?, usize::MAX, false);
        let collectives = Lane::new(comm, 1, verify_collectives && comm.size() > 1);
        Ok(GroupState { ranks, collectives, messages, broken: None })
    }

    fn enqueue(&mut self, queued: QueuedCall) {
        match queued.job.call.verb.is_collective() {
            true => self.collectives.queue.push_back(queued),
            false => self.messages.queue.push_back(queued),
        }
    }

    fn poll(&mut self, timeout: Duration, shutdown: &mut Shutdown) -> bool {
        let mut moved = false;
        for lane in [&mut self.collectives, &mut self.messages] {
            moved |= lane.poll(timeout, self.ranks, &mut self.broken, shutdown);
        }
        moved
    }
}

impl Lane {
    fn new(comm: Communicator, running_max: usize, verify_collectives: bool) -> Self {
        let (queue, running, messages) = (VecDeque::new(), Vec::new(), BTreeMap::new());
        Lane { comm, queue, running, running_max, verify_collectives, messages }
    }

    fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.running.is_empty()
    }

    fn poll(
        &mut self,
        timeout: Duration,
        ranks: RankSet,
        broken: &mut Option<String>,
        shutdown: &mut Shutdown,
    ) -> bool {
        let mut moved = false;
        while self.running.len() < self.running_max
            && let Some(queued) = self.queue.pop_front()
        {
            moved = true;
            self.start(queued, broken);
        }
        let mut index = 0;
        while let Some(running) = self.running.get_mut(index) {
            let polled = running.machine.poll();
            if running.queued.job.panics {
                panic!("{} was told to panic", running.queued.job.call);
            }
            let failure = match polled {
                Ok(Progress::Done) => {
                    let RunningCall { machine, queued, .. } = self.running.remove(index);
                    drop(machine);
                    queued.succeed();
                    moved = true;
                    continue;
                }
                Ok(Progress::Moved) => {
                    running.mark_moved();
                    moved = true;
                    index += 1;
                    continue;
                }
                Ok(Progress::Stalled) => {
                    let stalled = running.moved_at.elapsed();
                    if stalled <= timeout {
                        running.report_stall(stalled, ranks, shutdown);
                        index += 1;
                        continue;
                    }
                    let waiting_for = waiting_for(running.machine.as_ref(), ranks);
                    Error::TimedOut { call: Box::new(running.queued.job.call.clone()), timeout, waiting_for }
                }
                Err(Failure::Message(message)) => {
                    Error::Transport { call: Box::new(running.queued.job.call.clone()), message }
                }
                Err(Failure::Mismatch(signatures)) => {
                    let call = Box::new(running.queued.job.call.clone());
                    let variants = group_variants(&signatures, ranks, &call.group);
                    Error::Mismatch { call, variants }
                }
            };
            broken.get_or_insert_with(|| failure.to_string());
            let RunningCall { machine, queued, .. } = self.running.remove(index);
            if matches!(failure, Error::Mismatch { .. }) {
                // MPI has only seen the call's signatures, and those have all arrived.
                drop(machine);
                queued.fail(failure);
            } else {
                // MPI may still read and write the machine's staging memory and the call's buffers.
                std::mem::forget(machine);
                queued.fail_and_leak(failure);
            }
            moved = true;
        }
        moved
    }

    fn start(&mut self, queued: QueuedCall, broken: &Option<String>) {
        let call = &queued.job.call;
        if let Some(cause) = broken {
            let error = Error::Broken { call: Box::new(call.clone()), cause: cause.clone() };
            return queued.fail(error);
        }
        queued.job.handle.mark_started();
        // Both sides give a call the same number: for a collective, its position in the group; for a message, its position
        // between the two ranks. The number is part of the tag, so calls of a rank that is ahead, or that has refused one, are
        // not mixed up.
        let mut next_number = |peer| {
            let number = self.messages.entry(peer).or_insert(0);
            *number += 1;
            *number
        };
        let number = match &queued.job.operation {
            Operation::Send { to, .. } => next_number(Peer::To(*to)),
            Operation::Receive { from, .. } => next_number(Peer::From(*from)),
            _ => call.number,
        };
        let mut machine =
            machine(self.comm, (number % CALL_NUMBERS as u64) as usize, call.dtype, &queued.job.operation);
        if self.verify_collectives {
            machine = verify_then(self.comm, CallSignature::new(call, &queued.job.operation), machine);
        }
        let probes = Probes::default();
        self.running.push(RunningCall { machine, queued, moved_at: Instant::now(), stall_reported: None, probes });
    }
}

impl QueuedCall {
    fn succeed(self) {
        self.job.handle.mark_ended(&Ok(()));
        // If the `Pending` was dropped, so are the buffers.
        drop(self.reply.send(Ok(self.job.buffers)));
    }

    fn fail(self, error: Error) {
        let QueuedCall { job, reply } = self;
        job.handle.mark_ended::<()>(&Err(error.clone()));
        // Free the memory before the caller sees the error.
        drop(job);
        drop(reply.send(Err(error)));
    }

    /// Fails the call and leaks its buffers, which MPI may still read and write.
    fn fail_and_leak(mut self, error: Error) {
        std::mem::forget(std::mem::replace(&mut self.job.buffers, Box::new(())));
        self.fail(error);
    }
}

/// The global ranks that a call is waiting for.
fn missing(machine: &dyn Machine, ranks: RankSet) -> Vec<usize> {
    let mut missing = machine.waits_for();
    missing.sort_unstable();
    missing.dedup();
    missing.into_iter().map(|rank| ranks.rank_at(rank)).collect()
}

/// The missing ranks, as the end of an error message.
fn waiting_for(machine: &dyn Machine, ranks: RankSet) -> String {
    match missing(machine, ranks) {
        missing if missing.is_empty() => String::new(),
        missing => format!(", waiting for {}", describe_ranks(&missing)),
    }
}
