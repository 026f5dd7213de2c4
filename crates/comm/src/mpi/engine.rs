//! The communication thread: an ordered queue of jobs per group, and a loop that lets those at the front go on.
//!
//! The collectives of one group run one after the other, in the order in which they were asked for. Different groups, and
//! messages between two ranks, go on beside each other, so ranks may interleave groups differently, and two ranks that
//! both send before they receive do not wait for each other.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::{Duration, Instant};

use shardwise_plan::RankSet;

use super::Options;
use super::card::{Card, sides};
use super::exchange::{Failure, Machine, NUMBERS, Progress, after_cards, machine, meeting};
use super::farewell::{Farewell, Left, Questions};
use super::sys::{Communicator, Universe};
use crate::error::ranks_in_words;
use crate::pending::Luggage;
use crate::transport::{Job, Work};
use crate::{Error, Result};

/// A group, as the communication thread knows it.
pub(super) type GroupId = usize;

/// The group of all ranks.
pub(super) const WORLD: GroupId = 0;

/// How long the thread asks again at once when nothing moves, before it rests between questions. Longer than the gaps
/// between the messages of a call, shorter than the steps that a rank may be late by: a rank that computes needs its core.
const ATTENTIVE: Duration = Duration::from_micros(200);
const REST: Duration = Duration::from_micros(50);

/// The same with no call under way: soon after the last one, and later.
const IDLE_ATTENTIVE: Duration = Duration::from_secs(1);
const IDLE_REST: Duration = Duration::from_millis(1);
const IDLE_LONG_REST: Duration = Duration::from_millis(20);

/// How long a call stands still before the record says whom it waits for, and before it is said again.
const NOTICED: Duration = Duration::from_millis(500);

/// What other threads ask for.
pub(super) enum Message {
    Start { group: GroupId, job: Job, reply: Sender<Result<Luggage>> },
    Split { parent: GroupId, ranks: RankSet, name: Arc<str>, reply: Sender<Result<GroupId>> },
    Stop { finalize: bool },
    Abort,
}

/// How the thread's work has ended.
pub(super) enum Ending {
    /// All ranks are through, and MPI can be finalized.
    Together,
    /// Other ranks may still wait for this one, or it for them.
    Alone,
}

pub(super) struct Engine {
    universe: Universe,
    options: Options,
    groups: BTreeMap<GroupId, Members>,
    farewell: Farewell,
}

/// A group with its calls.
struct Members {
    /// The ranks' numbers in the world, for messages to people.
    ranks: RankSet,
    collectives: Lane,
    messages: Lane,
    /// The first failure; after it, ranks no longer agree about what comes next.
    broken: Option<String>,
}

/// Calls that go over one communicator.
struct Lane {
    comm: Communicator,
    queue: VecDeque<Waiting>,
    running: Vec<Running>,
    /// How many may run beside each other.
    running_max: usize,
    /// Whether ranks compare their calls first.
    checked: bool,
    /// How many messages went before to or from each rank that there were any to or from.
    messages: BTreeMap<Peer, u64>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Peer {
    To(usize),
    From(usize),
}

/// When to ask again.
struct Pace {
    moved_at: Instant,
}

impl Pace {
    fn new() -> Self {
        Pace { moved_at: Instant::now() }
    }

    /// Returns at once after a move, after a while otherwise.
    fn keep(&mut self, moved: bool) {
        if moved {
            self.moved_at = Instant::now();
        } else if self.moved_at.elapsed() < ATTENTIVE {
            std::thread::yield_now();
        } else {
            std::thread::sleep(REST);
        }
    }
}

struct Waiting {
    job: Job,
    reply: Sender<Result<Luggage>>,
}

struct Running {
    // Declared before the job: a machine goes before the memory that it points to.
    machine: Box<dyn Machine>,
    waiting: Waiting,
    moved_at: Instant,
    /// How long it had stood still when the record was last told whom it waits for.
    noticed: Option<Duration>,
    questions: Questions,
}

impl Running {
    fn moved(&mut self) {
        self.moved_at = Instant::now();
        if self.noticed.take().is_some() {
            self.waiting.job.ticket.waits_for(&[]);
            self.questions = Questions::default();
        }
    }

    fn stood_still(&mut self, still: Duration, ranks: RankSet, farewell: &mut Farewell) {
        if still > self.noticed.unwrap_or_default() + NOTICED {
            self.noticed = Some(still);
            let missing = missing(self.machine.as_ref(), ranks);
            self.waiting.job.ticket.waits_for(&missing);
            if let Some(rank) = self.questions.whom(still, || missing) {
                farewell.ask(rank);
            }
        }
    }
}

impl Engine {
    pub(super) fn start(options: Options) -> Result<Self> {
        let universe = Universe::start().map_err(Error::Setup)?;
        let world = universe.world().and_then(|world| world.duplicate()).map_err(Error::Setup)?;
        let members = Members::new(world, RankSet::world(world.size()), options.checked).map_err(Error::Setup)?;
        let farewell = Farewell::new(world.duplicate().map_err(Error::Setup)?);
        Ok(Engine { universe, options, groups: BTreeMap::from([(WORLD, members)]), farewell })
    }

    /// Ends this process and all others of the run.
    pub(super) fn abort(&self) -> ! {
        match self.place() {
            // MPI would print a page about the others, and there are none.
            (_, 1) => std::process::exit(1),
            _ => self.universe.abort(),
        }
    }

    /// This rank and the number of ranks.
    pub(super) fn place(&self) -> (usize, usize) {
        let comm = self.groups[&WORLD].collectives.comm;
        (comm.rank(), comm.size())
    }

    /// Runs until it is told to stop or everyone who could tell it is gone.
    pub(super) fn run(&mut self, messages: &Receiver<Message>) -> Ending {
        let mut pace = Pace::new();
        loop {
            let message = match self.is_idle() {
                true => self.idle(messages, &pace),
                false => messages.try_recv(),
            };
            let moved = match message {
                Ok(Message::Start { group, job, reply }) => {
                    self.members(group).enqueue(Waiting { job, reply });
                    true
                }
                Ok(Message::Split { parent, ranks, name, reply }) => {
                    self.finish();
                    // Whoever asked may have gone; the group is then made in vain.
                    drop(reply.send(self.split(parent, ranks, &name)));
                    true
                }
                Ok(Message::Stop { finalize }) => return self.stop(finalize),
                Ok(Message::Abort) => self.abort(),
                Err(TryRecvError::Disconnected) => return self.stop(false),
                Err(TryRecvError::Empty) => false,
            };
            let turned = self.turn();
            if !self.is_idle() {
                pace.keep(turned || moved);
            }
        }
    }

    /// Waits for a message with no call under way. MPI may still have to push out the end of a call that is over here.
    fn idle(&self, messages: &Receiver<Message>, pace: &Pace) -> std::result::Result<Message, TryRecvError> {
        self.farewell.ignore_questions();
        let rest = if pace.moved_at.elapsed() < IDLE_ATTENTIVE { IDLE_REST } else { IDLE_LONG_REST };
        messages.recv_timeout(rest).map_err(|error| match error {
            RecvTimeoutError::Timeout => TryRecvError::Empty,
            RecvTimeoutError::Disconnected => TryRecvError::Disconnected,
        })
    }

    fn members(&mut self, group: GroupId) -> &mut Members {
        self.groups.get_mut(&group).expect("groups are never removed")
    }

    fn is_idle(&self) -> bool {
        self.groups.values().all(|members| members.collectives.is_idle() && members.messages.is_idle())
    }

    /// Lets every call at the front go on once. Returns whether any has.
    fn turn(&mut self) -> bool {
        let limit = self.options.time_limit;
        let mut moved = false;
        for members in self.groups.values_mut() {
            moved |= members.turn(limit, &mut self.farewell);
        }
        moved
    }

    fn finish(&mut self) {
        let mut pace = Pace::new();
        while !self.is_idle() {
            pace.keep(self.turn());
        }
    }

    fn split(&mut self, parent: GroupId, ranks: RankSet, name: &str) -> Result<GroupId> {
        let fail = |message: String| Error::Setup(format!("the group '{name}' could not be made: {message}"));
        let Options { time_limit: limit, checked, .. } = self.options;
        let parent = self.groups.get_mut(&parent).expect("groups are never removed");
        if let Some(cause) = &parent.broken {
            return Err(fail(cause.clone()));
        }
        // MPI's own call blocks, and cannot be given up. So its ranks meet first, and then it is short.
        let mut meeting = meeting(parent.messages.comm, &ranks);
        let (mut pace, started, mut questions) = (Pace::new(), Instant::now(), Questions::default());
        loop {
            let problem = match meeting.poll() {
                Ok(Progress::Done) => break,
                Ok(progress) if started.elapsed() <= limit => {
                    if let Some(rank) = questions.whom(started.elapsed(), || missing(&meeting, parent.ranks)) {
                        self.farewell.ask(rank);
                    }
                    pace.keep(progress == Progress::Moved);
                    continue;
                }
                Ok(_) => {
                    format!("not all of its ranks asked for it within {limit:?}{}", waiting_for(&meeting, parent.ranks))
                }
                Err(Failure::Message(message)) => message,
                Err(Failure::Cards(_)) => unreachable!("ranks that meet show no cards"),
            };
            std::mem::forget(meeting);
            parent.broken = Some(format!("the group '{name}' could not be made: {problem}"));
            return Err(fail(problem));
        }
        let members =
            parent.collectives.comm.sub(&ranks).and_then(|comm| Members::new(comm, ranks, checked)).map_err(fail)?;
        let id = self.groups.len();
        self.groups.insert(id, members);
        Ok(id)
    }

    fn stop(&mut self, finalize: bool) -> Ending {
        if finalize {
            self.finish();
        }
        // Finalizing waits for all ranks, and after a failure some may never come. The process then ends without it, which
        // the launcher takes for the failure that it is.
        let whole = self.groups.values().all(|members| members.broken.is_none());
        if finalize && whole && self.leave() {
            return Ending::Together;
        }
        for members in self.groups.values_mut() {
            std::mem::forget(std::mem::take(&mut members.collectives.running));
            std::mem::forget(std::mem::take(&mut members.messages.running));
        }
        self.universe.abandon();
        Ending::Alone
    }

    /// Waits until all ranks have left. Returns whether they have.
    fn leave(&self) -> bool {
        let (rank, _) = self.place();
        match self.farewell.leave() {
            Left::Together => true,
            Left::Missed(by) => {
                eprintln!("rank {rank} has left the run, and rank {by} still waits for it: the run ends here");
                false
            }
            Left::Failed(message) => {
                eprintln!("rank {rank} could not leave the run together with the others: {message}");
                false
            }
        }
    }
}

impl Members {
    fn new(comm: Communicator, ranks: RankSet, checked: bool) -> std::result::Result<Self, String> {
        // A message is between two, and its length is compared when it arrives. A group of one has nobody to disagree with.
        let messages = Lane::new(comm.duplicate()?, usize::MAX, false);
        let collectives = Lane::new(comm, 1, checked && comm.size() > 1);
        Ok(Members { ranks, collectives, messages, broken: None })
    }

    fn enqueue(&mut self, waiting: Waiting) {
        match waiting.job.call.verb.is_collective() {
            true => self.collectives.queue.push_back(waiting),
            false => self.messages.queue.push_back(waiting),
        }
    }

    fn turn(&mut self, limit: Duration, farewell: &mut Farewell) -> bool {
        let mut moved = false;
        for lane in [&mut self.collectives, &mut self.messages] {
            moved |= lane.turn(limit, self.ranks, &mut self.broken, farewell);
        }
        moved
    }
}

impl Lane {
    fn new(comm: Communicator, running_max: usize, checked: bool) -> Self {
        let (queue, running, messages) = (VecDeque::new(), Vec::new(), BTreeMap::new());
        Lane { comm, queue, running, running_max, checked, messages }
    }

    fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.running.is_empty()
    }

    fn turn(&mut self, limit: Duration, ranks: RankSet, broken: &mut Option<String>, farewell: &mut Farewell) -> bool {
        let mut moved = false;
        while self.running.len() < self.running_max
            && let Some(waiting) = self.queue.pop_front()
        {
            moved = true;
            self.begin(waiting, broken);
        }
        let mut index = 0;
        while let Some(running) = self.running.get_mut(index) {
            let polled = running.machine.poll();
            if running.waiting.job.panics {
                panic!("{} was told to panic", running.waiting.job.call);
            }
            let failure = match polled {
                Ok(Progress::Done) => {
                    let Running { machine, waiting, .. } = self.running.remove(index);
                    drop(machine);
                    waiting.succeed();
                    moved = true;
                    continue;
                }
                Ok(Progress::Moved) => {
                    running.moved();
                    moved = true;
                    index += 1;
                    continue;
                }
                Ok(Progress::Still) => {
                    let still = running.moved_at.elapsed();
                    if still <= limit {
                        running.stood_still(still, ranks, farewell);
                        index += 1;
                        continue;
                    }
                    let waiting_for = waiting_for(running.machine.as_ref(), ranks);
                    Error::TimedOut { call: Box::new(running.waiting.job.call.clone()), limit, waiting_for }
                }
                Err(Failure::Message(message)) => {
                    Error::Transport { call: Box::new(running.waiting.job.call.clone()), message }
                }
                Err(Failure::Cards(cards)) => {
                    let call = Box::new(running.waiting.job.call.clone());
                    let sides = sides(&cards, ranks, &call.group);
                    Error::Mismatch { call, sides }
                }
            };
            broken.get_or_insert_with(|| failure.to_string());
            let Running { machine, waiting, .. } = self.running.remove(index);
            if matches!(failure, Error::Mismatch { .. }) {
                // MPI has seen nothing of the call but cards, and those have all arrived.
                drop(machine);
                waiting.fail(failure);
            } else {
                // MPI may still read and write the machine's staging memory and the call's buffers.
                std::mem::forget(machine);
                waiting.fail_and_leak(failure);
            }
            moved = true;
        }
        moved
    }

    fn begin(&mut self, waiting: Waiting, broken: &Option<String>) {
        let call = &waiting.job.call;
        if let Some(cause) = broken {
            let error = Error::Broken { call: Box::new(call.clone()), cause: cause.clone() };
            return waiting.fail(error);
        }
        waiting.job.ticket.started();
        // Both sides number a call alike: a collective by its place in the group, a message by its place between the two.
        // The number is in its tags, so that a rank that is ahead, or has refused a call, is not misunderstood.
        let mut between = |peer| {
            let number = self.messages.entry(peer).or_insert(0);
            *number += 1;
            *number
        };
        let number = match &waiting.job.work {
            Work::Send { to, .. } => between(Peer::To(*to)),
            Work::Receive { from, .. } => between(Peer::From(*from)),
            _ => call.number,
        };
        let mut machine = machine(self.comm, (number % NUMBERS as u64) as usize, call.dtype, &waiting.job.work);
        if self.checked {
            machine = after_cards(self.comm, Card::new(call, &waiting.job.work), machine);
        }
        let questions = Questions::default();
        self.running.push(Running { machine, waiting, moved_at: Instant::now(), noticed: None, questions });
    }
}

impl Waiting {
    fn succeed(self) {
        self.job.ticket.ended(&Ok(()));
        // A `Pending` that was dropped does not want its buffers back.
        drop(self.reply.send(Ok(self.job.luggage)));
    }

    fn fail(self, error: Error) {
        let Waiting { job, reply } = self;
        job.ticket.ended::<()>(&Err(error.clone()));
        // Whoever hears of the failure may count on the memory.
        drop(job);
        drop(reply.send(Err(error)));
    }

    /// Fails while MPI may still read and write the buffers.
    fn fail_and_leak(mut self, error: Error) {
        std::mem::forget(std::mem::replace(&mut self.job.luggage, Box::new(())));
        self.fail(error);
    }
}

/// Who is missing, by their numbers in the world.
fn missing(machine: &dyn Machine, ranks: RankSet) -> Vec<usize> {
    let mut missing = machine.waits_for();
    missing.sort_unstable();
    missing.dedup();
    missing.into_iter().map(|rank| ranks.rank_at(rank)).collect()
}

/// The same in words.
fn waiting_for(machine: &dyn Machine, ranks: RankSet) -> String {
    match missing(machine, ranks) {
        missing if missing.is_empty() => String::new(),
        missing => format!(", waiting for {}", ranks_in_words(&missing)),
    }
}
