//! The supervisor's side: every rank's connection, on one thread.
//!
//! [`Server::poll`] waits for what comes, and returns what happened. Beats do not happen: they replace what is known of a rank
//! ([`Server::ranks`]), and whoever wants to know who is silent asks ([`Server::silent`]).
//!
//! Anyone on the network can reach the port. Until a connection has proved to know the secret it may send one short message, in
//! five seconds, and when too many such connections are open the oldest goes. Ranks whose connection had to go try again.
//!
//! One that knows the secret may also come to look on. It is shown what the supervisor shows ([`Server::show`]) and, every
//! half second, where the ranks are. Nobody waits for it: one that does not take what it is sent is dropped.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};
use shardwise_journal::Entry;

use crate::message::{
    FRAME_BYTES_MAX, FromRank, FromStranger, FromSupervisor, FromViewer, Hello, Inbox, Order, Request,
    UNPROVEN_BYTES_MAX, refusal_proof, view_proof, welcome_proof,
};
use crate::secret::{Nonce, Proof, Secret};
use crate::standing::text;
use crate::{Error, FailureKind, History, Result, Snapshot, Standing};

/// How long a connection may take to prove itself.
const PROOF_LIMIT: Duration = Duration::from_secs(5);
/// How often a rank says where it stands, unless told otherwise.
const BEAT: Duration = Duration::from_millis(500);
/// How many connections may be without proof at once, beside one for each rank.
const UNPROVEN_SPARE: usize = 256;
/// How many files the supervisor may have open for other things.
const FILES_SPARE: usize = 64;
/// What may wait to be sent to one rank.
const OUTBOX_BYTES_MAX: usize = 64 << 10;
/// The most who may look on, what may wait to be sent to one of them, how often they are told where the ranks are, and how often
/// one may ask for something.
const VIEWERS_MAX: usize = 16;
const VIEWER_OUTBOX_BYTES_MAX: usize = 4 << 20;
const SNAPSHOT_EVERY: Duration = Duration::from_millis(500);
const REQUEST_EVERY: Duration = Duration::from_millis(200);
/// The most lines of the journal that are taken in one turn; a rank that has more to say is not listened to.
const ENTRIES_MAX: usize = 256;
/// How often one connection is read from, and how many are accepted, before it is the others' turn.
const READS_MAX: usize = 16;
const ACCEPTS_MAX: usize = 1024;

const LISTENER: usize = usize::MAX;

/// Something happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A rank is here.
    Joined {
        /// The rank.
        rank: usize,
    },
    /// A rank says that something went wrong.
    Failed {
        /// The rank.
        rank: usize,
        /// What kind of failure.
        kind: FailureKind,
        /// What it says.
        text: String,
    },
    /// A rank says something that people should read.
    Note {
        /// The rank.
        rank: usize,
        /// What it says.
        text: String,
    },
    /// The first rank has written this line into the run's journal.
    Entry(Box<Entry>),
    /// One who looks on asks for this.
    Asked(Request),
    /// A rank is gone.
    Left {
        /// The rank.
        rank: usize,
        /// The exit code that it announced; none where its connection just ended.
        code: Option<i32>,
    },
    /// A rank has sent what is no message. Its connection is closed, so that it has `Left` too.
    Malformed {
        /// The rank.
        rank: usize,
        /// What is wrong with it.
        error: String,
    },
    /// One that knows the secret wanted to be a rank, and may not.
    Refused {
        /// The rank that it wanted to be.
        rank: u32,
        /// Why not.
        reason: String,
    },
}

/// Whether a rank is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Presence {
    /// It has not joined yet.
    Awaited,
    /// It is connected.
    Here,
    /// It was, and is gone.
    Left {
        /// The exit code that it announced; none where its connection just ended.
        code: Option<i32>,
    },
}

/// What is known of a rank.
#[derive(Clone, Debug)]
pub struct Seen {
    /// The host that it runs on; empty before it has joined.
    pub host: String,
    /// Its process there.
    pub pid: u32,
    /// What it said last of where it stands.
    pub standing: Standing,
    /// When it was heard last.
    pub heard: Option<Instant>,
    /// Whether it is there.
    pub presence: Presence,
}

/// The supervisor's end of the channel, for one attempt at a run.
pub struct Server {
    poll: Poll,
    listener: TcpListener,
    address: SocketAddr,
    secret: Secret,
    attempt: u64,
    beat: Duration,
    ranks: Vec<Seen>,
    slots: Vec<Option<Connection>>,
    free: Vec<usize>,
    unproven: Unproven,
    /// Given before all ranks were there.
    order: Option<Order>,
    events: Vec<Event>,
    /// How many of them are lines of the journal.
    entries: usize,
    /// What those who come to look on are shown first.
    history: History,
    viewers: usize,
    next_snapshot: Instant,
    strangers: u64,
    ready: Events,
    /// Whose turn it is now, and who has more to say than one turn allows.
    turn: Vec<usize>,
    again: Vec<usize>,
    /// There was no file for a connection that waits.
    is_full: bool,
    buffer: Vec<u8>,
}

struct Connection {
    stream: TcpStream,
    inbox: Inbox,
    outbox: Vec<u8>,
    stage: Stage,
}

#[derive(Clone, Copy)]
enum Stage {
    /// The challenge that it was sent, and its number among all connections.
    Unproven { nonce: Nonce, id: u64 },
    /// It is this rank.
    Proven { rank: usize },
    /// It looks on, and has last asked for something then.
    Viewer { asked: Option<Instant> },
}

/// The connections without proof, oldest first. Those that are through with it are taken out when their turn comes.
struct Unproven {
    queue: VecDeque<(u64, usize, Instant)>,
    next: u64,
    count: usize,
    count_max: usize,
}

impl Server {
    /// Listens at `address` for that many ranks of that attempt. Port 0 is one that is free.
    ///
    /// # Errors
    /// If the address is not to be had, or the process may not open a file for every rank.
    pub fn bind(address: SocketAddr, secret: Secret, ranks: usize, attempt: u64) -> io::Result<Server> {
        let files = raise_open_files(ranks)?;
        let poll = Poll::new()?;
        let mut listener = TcpListener::bind(address)?;
        poll.registry().register(&mut listener, Token(LISTENER), Interest::READABLE)?;
        let awaited = || Seen {
            host: String::new(),
            pid: 0,
            standing: Standing::default(),
            heard: None,
            presence: Presence::Awaited,
        };
        let count_max = (ranks + UNPROVEN_SPARE).min(files.saturating_sub(ranks + FILES_SPARE)).max(1);
        Ok(Server {
            poll,
            address: listener.local_addr()?,
            listener,
            secret,
            attempt,
            beat: BEAT,
            ranks: (0..ranks).map(|_| awaited()).collect(),
            slots: Vec::new(),
            free: Vec::new(),
            unproven: Unproven { queue: VecDeque::new(), next: 0, count: 0, count_max },
            order: None,
            events: Vec::new(),
            entries: 0,
            history: History::default(),
            viewers: 0,
            next_snapshot: Instant::now(),
            strangers: 0,
            ready: Events::with_capacity(1024),
            turn: Vec::new(),
            again: Vec::new(),
            is_full: false,
            buffer: vec![0; 64 << 10],
        })
    }

    /// Ranks that join from now on are asked to say this often where they stand.
    pub fn set_beat(&mut self, beat: Duration) {
        self.beat = beat;
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What is known of every rank.
    pub fn ranks(&self) -> &[Seen] {
        &self.ranks
    }

    /// The ranks that are here and were not heard for longer than `limit`.
    pub fn silent(&self, now: Instant, limit: Duration) -> Vec<usize> {
        let silent = |seen: &Seen| {
            let heard = seen.heard.filter(|_| seen.presence == Presence::Here);
            heard.is_some_and(|heard| now.saturating_duration_since(heard) > limit)
        };
        (0..self.ranks.len()).filter(|&rank| silent(&self.ranks[rank])).collect()
    }

    /// The ranks that have not joined.
    pub fn awaited(&self) -> Vec<usize> {
        (0..self.ranks.len()).filter(|&rank| self.ranks[rank].presence == Presence::Awaited).collect()
    }

    /// How many connections went without having proved anything.
    pub fn strangers(&self) -> u64 {
        self.strangers
    }

    /// How many connections are open.
    pub fn connections(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// How many look on.
    pub fn viewers(&self) -> usize {
        self.viewers
    }

    /// What those who come to look on are shown first: what earlier attempts have shown.
    pub fn set_history(&mut self, history: History) {
        self.history = history;
    }

    /// Shows a line of the journal to all who look on, now or later.
    pub fn show(&mut self, entry: Entry) {
        if self.viewers > 0
            && let Some(frame) = FromSupervisor::entry(entry.clone())
        {
            self.send_to_viewers(&frame);
        }
        self.history.add(entry);
    }

    /// Says to all who look on what became of a request.
    pub fn answer(&mut self, said: &str) {
        let mut frame = Vec::new();
        FromSupervisor::Answer { text: text(said.to_string()) }.write(&mut frame);
        self.send_to_viewers(&frame);
    }

    /// Asks the first rank that is here: ranks agree among themselves on what one of them was asked for, and one that hears of it
    /// later than others would do it twice. Whether there is one.
    pub fn ask_one(&mut self, order: Order) -> bool {
        let mut frame = Vec::new();
        FromSupervisor::Order(order).write(&mut frame);
        let of = |slot: &usize| match self.slots[*slot].as_ref()?.stage {
            Stage::Proven { rank } => Some(rank),
            Stage::Unproven { .. } | Stage::Viewer { .. } => None,
        };
        let first = (0..self.slots.len()).filter(|slot| of(slot).is_some()).min_by_key(of);
        let Some((slot, mut connection)) = first.and_then(|slot| Some((slot, self.slots[slot].take()?))) else {
            return false;
        };
        let kept = connection.send(&frame).is_ok();
        self.settle(slot, connection, kept);
        kept
    }

    /// Tells every rank, also those that join later. The order is on its way when this returns, except to ranks that take
    /// nothing; [`Server::poll`] sees to those.
    pub fn order(&mut self, order: Order) {
        let order = match order {
            Order::End { reason } => Order::End { reason: text(reason) },
            other => other,
        };
        let mut frame = Vec::new();
        FromSupervisor::Order(order.clone()).write(&mut frame);
        self.order = Some(order);
        for slot in 0..self.slots.len() {
            let Some(mut connection) = self.slots[slot].take() else { continue };
            let kept = match connection.stage {
                Stage::Unproven { .. } | Stage::Viewer { .. } => Ok(()),
                Stage::Proven { .. } => connection.send(&frame),
            };
            self.settle(slot, connection, kept.is_ok());
        }
    }

    /// Waits for what comes, for at most `timeout`, and says what has happened.
    ///
    /// # Errors
    /// If the system cannot wait. What goes wrong on a connection ends that connection only.
    pub fn poll(&mut self, timeout: Duration) -> io::Result<Vec<Event>> {
        let nothing_waits = self.again.is_empty() && self.events.is_empty();
        let timeout = if nothing_waits { self.unproven.until(Instant::now(), timeout) } else { Duration::ZERO };
        match self.poll.poll(&mut self.ready, Some(timeout)) {
            Err(error) if error.kind() != ErrorKind::Interrupted => return Err(error),
            _ => {}
        }
        let now = Instant::now();
        let mut turn = std::mem::take(&mut self.turn);
        turn.append(&mut self.again);
        if std::mem::take(&mut self.is_full) {
            turn.push(LISTENER);
        }
        turn.extend(self.ready.iter().map(|event| event.token().0));
        for token in turn.drain(..) {
            match token {
                LISTENER => self.accept(now),
                slot => self.serve(slot, now),
            }
        }
        self.turn = turn;
        while let Some(slot) = self.unproven.overdue(now, &self.slots) {
            self.drop_stranger(slot);
        }
        if self.viewers > 0 && now >= self.next_snapshot {
            self.next_snapshot = now + SNAPSHOT_EVERY;
            let mut frame = Vec::new();
            FromSupervisor::Snapshot(Snapshot::of(&self.ranks, self.attempt, now)).write(&mut frame);
            self.send_to_viewers(&frame);
        }
        self.entries = 0;
        Ok(std::mem::take(&mut self.events))
    }

    fn send_to_viewers(&mut self, frame: &[u8]) {
        if self.viewers == 0 {
            return;
        }
        for slot in 0..self.slots.len() {
            let looks_on = |connection: &Connection| matches!(connection.stage, Stage::Viewer { .. });
            if let Some(mut connection) = self.slots[slot].take_if(|connection| looks_on(connection)) {
                let kept = connection.send(frame).is_ok();
                self.settle(slot, connection, kept);
            }
        }
    }

    fn accept(&mut self, now: Instant) {
        for _ in 0..ACCEPTS_MAX {
            match self.listener.accept() {
                Ok((stream, _)) => self.challenge(stream, now),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // No more files, or no more memory: strangers go first. Without any, it is tried again with the next poll.
                Err(error) if is_out_of_files(&error) => match self.unproven.oldest(&self.slots) {
                    Some(slot) => self.drop_stranger(slot),
                    None => {
                        self.is_full = true;
                        return;
                    }
                },
                // That connection ended before its turn came.
                Err(_) => {}
            }
        }
        self.again.push(LISTENER);
    }

    /// The first word on a new connection.
    fn challenge(&mut self, mut stream: TcpStream, now: Instant) {
        while self.unproven.count >= self.unproven.count_max {
            match self.unproven.oldest(&self.slots) {
                Some(slot) => self.drop_stranger(slot),
                None => break,
            }
        }
        let Ok(nonce) = Nonce::new() else { return };
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        let interest = Interest::READABLE | Interest::WRITABLE;
        let registered = self.poll.registry().register(&mut stream, Token(slot), interest);
        // A beat is one small write, and nothing is gained by its waiting for the next.
        let prepared = registered.and_then(|()| stream.set_nodelay(true));
        let id = self.unproven.add(slot, now, &self.slots);
        let stage = Stage::Unproven { nonce, id };
        let mut connection = Connection { stream, inbox: Inbox::default(), outbox: Vec::new(), stage };
        let mut frame = Vec::new();
        FromSupervisor::Challenge { nonce }.write(&mut frame);
        let kept = prepared.is_ok() && connection.send(&frame).is_ok();
        self.settle(slot, connection, kept);
    }

    /// A connection's turn: sends what waits, and reads what has come.
    fn serve(&mut self, slot: usize, now: Instant) {
        // Gone already, in the same turn.
        let Some(mut connection) = self.slots.get_mut(slot).and_then(Option::take) else { return };
        let mut buffer = std::mem::take(&mut self.buffer);
        let mut kept = connection.flush().is_ok();
        let mut reads = 0;
        while kept {
            if reads == READS_MAX {
                self.again.push(slot);
                break;
            }
            reads += 1;
            match connection.stream.read(&mut buffer) {
                Ok(0) => kept = false,
                Ok(count) => kept = self.take(&mut connection, &buffer[..count], now),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => kept = false,
            }
        }
        self.buffer = buffer;
        self.settle(slot, connection, kept);
    }

    /// Takes what has come on a connection. Whether the connection is kept.
    fn take(&mut self, connection: &mut Connection, bytes: &[u8], now: Instant) -> bool {
        match connection.stage {
            Stage::Unproven { nonce, .. } => {
                let mut word = None;
                let taken = connection.inbox.take(bytes, UNPROVEN_BYTES_MAX, |frame| {
                    let said = FromStranger::read(frame)?;
                    match word.replace(said) {
                        None => Ok(()),
                        Some(_) => Err(Error::Malformed("more than a hello before the welcome".to_string())),
                    }
                });
                match (taken, word) {
                    (Err(_), _) => false,
                    (Ok(()), None) => true,
                    (Ok(()), Some(_)) if connection.inbox.has_rest() => false,
                    (Ok(()), Some(FromStranger::Hello(hello))) => self.welcome(connection, &nonce, hello, now),
                    (Ok(()), Some(FromStranger::View { nonce: own, proof })) => {
                        self.welcome_viewer(connection, &nonce, &own, proof)
                    }
                }
            }
            Stage::Viewer { ref mut asked } => {
                let mut requests = Vec::new();
                let taken = connection.inbox.take(bytes, UNPROVEN_BYTES_MAX, |frame| {
                    let FromViewer::Ask(request) = FromViewer::read(frame)?;
                    requests.push(request);
                    Ok(())
                });
                for request in requests {
                    if asked.is_none_or(|asked| now.saturating_duration_since(asked) >= REQUEST_EVERY) {
                        *asked = Some(now);
                        self.events.push(Event::Asked(request));
                    }
                }
                taken.is_ok()
            }
            Stage::Proven { rank } => {
                let taken = connection.inbox.take(bytes, FRAME_BYTES_MAX, |frame| self.hear(rank, frame, now));
                if let Err(error) = taken {
                    self.events.push(Event::Malformed { rank, error: error.to_string() });
                    return false;
                }
                self.ranks[rank].presence == Presence::Here
            }
        }
    }

    /// Answers one who wants to look on. Whether the connection is kept.
    fn welcome_viewer(&mut self, connection: &mut Connection, challenge: &Nonce, nonce: &Nonce, proof: Proof) -> bool {
        let mut frame = Vec::new();
        if view_proof(&self.secret, challenge, nonce) != proof {
            FromSupervisor::Stranger {}.write(&mut frame);
            drop(connection.send(&frame));
            return false;
        }
        if self.viewers >= VIEWERS_MAX {
            let reason = format!("{VIEWERS_MAX} look on already");
            let proof = refusal_proof(&self.secret, nonce, &reason);
            FromSupervisor::Refused { reason, proof }.write(&mut frame);
            drop(connection.send(&frame));
            return false;
        }
        connection.stage = Stage::Viewer { asked: None };
        self.unproven.count -= 1;
        self.viewers += 1;
        self.next_snapshot = Instant::now();
        let beat_ms = SNAPSHOT_EVERY.as_millis() as u64;
        FromSupervisor::Welcome { proof: welcome_proof(&self.secret, nonce, beat_ms), beat_ms }.write(&mut frame);
        for entry in self.history.entries() {
            frame.extend(FromSupervisor::entry(entry.clone()).unwrap_or_default());
        }
        connection.send(&frame).is_ok()
    }

    /// Answers a hello. Whether the connection is kept.
    fn welcome(&mut self, connection: &mut Connection, nonce: &Nonce, hello: Hello, now: Instant) -> bool {
        let mut frame = Vec::new();
        if hello.prove(&self.secret, nonce) != hello.proof {
            FromSupervisor::Stranger {}.write(&mut frame);
            drop(connection.send(&frame));
            return false;
        }
        if let Err(reason) = self.admit(&hello) {
            let proof = refusal_proof(&self.secret, &hello.nonce, &reason);
            FromSupervisor::Refused { reason: reason.clone(), proof }.write(&mut frame);
            drop(connection.send(&frame));
            self.events.push(Event::Refused { rank: hello.rank, reason });
            return false;
        }
        let rank = hello.rank as usize;
        connection.stage = Stage::Proven { rank };
        self.unproven.count -= 1;
        let seen = &mut self.ranks[rank];
        (seen.host, seen.pid, seen.heard, seen.presence) = (hello.host, hello.pid, Some(now), Presence::Here);
        self.events.push(Event::Joined { rank });
        let beat_ms = u64::try_from(self.beat.as_millis()).unwrap_or(u64::MAX).max(1);
        let proof = welcome_proof(&self.secret, &hello.nonce, beat_ms);
        FromSupervisor::Welcome { proof, beat_ms }.write(&mut frame);
        if let Some(order) = &self.order {
            FromSupervisor::Order(order.clone()).write(&mut frame);
        }
        connection.send(&frame).is_ok()
    }

    /// Whether one that knows the secret may be the rank that it says it is; otherwise why not.
    fn admit(&self, hello: &Hello) -> std::result::Result<(), String> {
        if hello.attempt != self.attempt {
            return Err(format!(
                "it belongs to attempt {} of the run, and this is attempt {}",
                hello.attempt, self.attempt
            ));
        }
        if hello.ranks as usize != self.ranks.len() {
            return Err(format!("it counts {} ranks, and the supervisor {}", hello.ranks, self.ranks.len()));
        }
        let Some(seen) = self.ranks.get(hello.rank as usize) else {
            return Err(format!("there are {} ranks, counted from 0", self.ranks.len()));
        };
        match seen.presence {
            Presence::Awaited => Ok(()),
            Presence::Here => Err(format!("it is here already, as process {} of host {}", seen.pid, seen.host)),
            Presence::Left { .. } => {
                Err(format!("it was here, as process {} of host {}, and has left", seen.pid, seen.host))
            }
        }
    }

    /// Takes a message of a rank.
    fn hear(&mut self, rank: usize, frame: &[u8], now: Instant) -> Result<()> {
        let seen = &mut self.ranks[rank];
        if seen.presence != Presence::Here {
            return Err(Error::Malformed("words after a bye".to_string()));
        }
        seen.heard = Some(now);
        match FromRank::read(frame)? {
            FromRank::Beat(standing) => seen.standing = standing,
            FromRank::Failed { kind, text, standing } => {
                seen.standing = standing;
                self.events.push(Event::Failed { rank, kind, text });
            }
            FromRank::Note { text } => self.events.push(Event::Note { rank, text }),
            FromRank::Entry(_) if rank != 0 => {
                return Err(Error::Malformed("a line of the journal, which the first rank alone writes".to_string()));
            }
            FromRank::Entry(_) if self.entries >= ENTRIES_MAX => {}
            FromRank::Entry(entry) => {
                self.entries += 1;
                self.events.push(Event::Entry(Box::new(entry)));
            }
            FromRank::Bye { code } => {
                seen.presence = Presence::Left { code: Some(code) };
                self.events.push(Event::Left { rank, code: Some(code) });
            }
        }
        Ok(())
    }

    /// Puts a connection back where it is kept, and otherwise lets it go, and the rank with it.
    fn settle(&mut self, slot: usize, connection: Connection, kept: bool) {
        if kept {
            self.slots[slot] = Some(connection);
            return;
        }
        self.free.push(slot);
        match connection.stage {
            Stage::Unproven { .. } => {
                self.unproven.count -= 1;
                self.strangers += 1;
            }
            Stage::Viewer { .. } => self.viewers -= 1,
            Stage::Proven { rank } => {
                let presence = &mut self.ranks[rank].presence;
                if *presence == Presence::Here {
                    *presence = Presence::Left { code: None };
                    self.events.push(Event::Left { rank, code: None });
                }
            }
        }
    }

    fn drop_stranger(&mut self, slot: usize) {
        if let Some(connection) = self.slots[slot].take() {
            self.settle(slot, connection, false);
        }
    }
}

impl Connection {
    /// Sends at once what the system takes, and keeps the rest for later.
    fn send(&mut self, frame: &[u8]) -> io::Result<()> {
        self.outbox.extend_from_slice(frame);
        self.flush()?;
        let bytes_max = match self.stage {
            Stage::Viewer { .. } => VIEWER_OUTBOX_BYTES_MAX,
            Stage::Unproven { .. } | Stage::Proven { .. } => OUTBOX_BYTES_MAX,
        };
        if self.outbox.len() > bytes_max {
            return Err(io::Error::from(ErrorKind::StorageFull));
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        flush(&mut self.stream, &mut self.outbox)
    }
}

/// Writes as much of `outbox` as the system takes.
pub(crate) fn flush(stream: &mut TcpStream, outbox: &mut Vec<u8>) -> io::Result<()> {
    let mut written = 0;
    while written < outbox.len() {
        match stream.write(&outbox[written..]) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(count) => written += count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    outbox.drain(..written);
    if outbox.is_empty() {
        *outbox = Vec::new();
    }
    Ok(())
}

impl Unproven {
    fn add(&mut self, slot: usize, now: Instant, slots: &[Option<Connection>]) -> u64 {
        // One that takes its five seconds holds up the tidying of all that came after it.
        if self.queue.len() > 2 * self.count_max {
            self.queue.retain(|&(id, slot, _)| is_unproven(slots, slot, id));
        }
        let id = self.next;
        self.next += 1;
        self.count += 1;
        self.queue.push_back((id, slot, now));
        id
    }

    fn oldest(&mut self, slots: &[Option<Connection>]) -> Option<usize> {
        self.tidy(slots);
        self.queue.front().map(|&(_, slot, _)| slot)
    }

    /// One that has taken too long.
    fn overdue(&mut self, now: Instant, slots: &[Option<Connection>]) -> Option<usize> {
        self.tidy(slots);
        let &(_, slot, since) = self.queue.front()?;
        (now.saturating_duration_since(since) >= PROOF_LIMIT).then_some(slot)
    }

    /// How long to wait at most for the next to take too long.
    fn until(&self, now: Instant, timeout: Duration) -> Duration {
        self.queue
            .front()
            .map_or(timeout, |&(_, _, since)| timeout.min((since + PROOF_LIMIT).saturating_duration_since(now)))
    }

    fn tidy(&mut self, slots: &[Option<Connection>]) {
        while self.queue.front().is_some_and(|&(id, slot, _)| !is_unproven(slots, slot, id)) {
            self.queue.pop_front();
        }
    }
}

fn is_unproven(slots: &[Option<Connection>], slot: usize, id: u64) -> bool {
    let connection = slots.get(slot).and_then(Option::as_ref);
    connection.is_some_and(|connection| matches!(connection.stage, Stage::Unproven { id: own, .. } if own == id))
}

/// Sees to it that the process may have a connection with every rank, and says how many files it may open.
fn raise_open_files(ranks: usize) -> io::Result<usize> {
    let needed = (ranks + UNPROVEN_SPARE + FILES_SPARE) as u64;
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let mut limit = current;
    if current.is_some_and(|current| current < needed + ranks as u64) {
        setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?;
        limit = maximum;
    }
    if let Some(limit) = limit.filter(|&limit| limit < needed) {
        let ask = "raise the hard limit of open files (ulimit -Hn)";
        return Err(io::Error::other(format!(
            "{ranks} ranks need {needed} open files, and {limit} are allowed; {ask}"
        )));
    }
    Ok(limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX)))
}

fn is_out_of_files(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let errno = Errno::from_io_error(error);
    [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM].into_iter().any(|out| errno == Some(out))
}
