//! The supervisor's side: the connections of all ranks, on one thread.
//!
//! [`Server::poll`] waits for data and returns events. Heartbeats are not events: they update the status of a rank
//! ([`Server::ranks`]), and [`Server::silent`] returns the ranks that have stopped sending them.
//!
//! Anyone on the network can reach the port. Until a connection has proved that it knows the secret, it may send one short message
//! within five seconds, and when too many such connections are open, the oldest is closed. Ranks whose connection was closed retry.
//!
//! A peer that knows the secret may also join as a viewer. It receives what the supervisor publishes ([`Server::publish`]) and, every
//! half second, the state of the ranks. Nothing waits for a viewer: one that does not read is dropped.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use shardwise_journal::Entry;

use crate::message::{
    FRAME_BYTES_MAX, FirstMessage, FromRank, FromSupervisor, FromViewer, Hello, Inbox, Order, Request,
    UNAUTHENTICATED_BYTES_MAX, refusal_proof, view_proof, welcome_proof,
};
use crate::secret::{Nonce, Proof, Secret};
use crate::status::shorten_text;
use crate::{Coordinates, Error, FailureKind, History, ModelAxes, Presence, RankInfo, RankStatus, Result, Snapshot};

/// How long a connection may take to authenticate.
const PROOF_LIMIT: Duration = Duration::from_secs(5);
/// The default heartbeat interval.
const HEARTBEAT: Duration = Duration::from_millis(500);
/// The maximum number of unauthenticated connections, in addition to one per rank.
const UNAUTHENTICATED_SPARE: usize = 256;
/// The number of open files that the supervisor needs for other purposes.
const FILES_SPARE: usize = 64;
/// The maximum number of unsent bytes per rank.
const OUTBOX_BYTES_MAX: usize = 64 << 10;
/// The maximum number of viewers and of unsent bytes per viewer, the interval of snapshots, and the shortest interval between two
/// requests from a viewer.
const VIEWERS_MAX: usize = 16;
const VIEWER_OUTBOX_BYTES_MAX: usize = 4 << 20;
const SNAPSHOT_EVERY: Duration = Duration::from_millis(500);
const REQUEST_EVERY: Duration = Duration::from_millis(200);
/// The maximum number of journal entries that are accepted in one poll; further ones are dropped.
const ENTRIES_MAX: usize = 256;
/// The maximum number of reads from one connection, and of accepted connections, before other connections get their turn.
const READS_MAX: usize = 16;
const ACCEPTS_MAX: usize = 1024;

const LISTENER: usize = usize::MAX;

/// Something that happened on the channel.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A rank joined.
    Joined {
        /// The rank that joined.
        rank: usize,
    },
    /// A rank reported a failure.
    Failed {
        /// The rank that failed.
        rank: usize,
        /// The kind of failure.
        kind: FailureKind,
        /// The rank's message.
        text: String,
    },
    /// A rank sent a message for people.
    Note {
        /// The rank that sent it.
        rank: usize,
        /// The message.
        text: String,
    },
    /// Rank 0 wrote this entry to the run's journal.
    Entry(Box<Entry>),
    /// A viewer sent this request.
    Requested(Request),
    /// A rank disconnected.
    Left {
        /// The rank that disconnected.
        rank: usize,
        /// The exit code that it announced; `None` if the connection just ended.
        code: Option<i32>,
    },
    /// A rank sent an invalid message. Its connection is closed, so a `Left` follows.
    Malformed {
        /// The rank that sent it.
        rank: usize,
        /// What is wrong with the message.
        error: String,
    },
    /// A peer that knows the secret tried to join as a rank, and was refused.
    Refused {
        /// The rank that it claimed to be.
        rank: u32,
        /// The reason.
        reason: String,
    },
}

/// The supervisor's end of the channel, for one attempt.
pub struct Server {
    poll: Poll,
    listener: TcpListener,
    address: SocketAddr,
    secret: Secret,
    attempt: u64,
    heartbeat: Duration,
    ranks: Vec<RankInfo>,
    slots: Vec<Option<Connection>>,
    free: Vec<usize>,
    unauthenticated: Unauthenticated,
    /// The latest order, which ranks that join later receive as well.
    order: Option<Order>,
    events: Vec<Event>,
    /// The number of journal entries received in this poll.
    entries: usize,
    /// The entries that new viewers receive first.
    history: History,
    viewers: usize,
    next_snapshot: Instant,
    /// The number of connections that ended without authentication.
    rejected: u64,
    ready: Events,
    /// The connections to serve in this poll, and those that have more data than one turn allows.
    turn: Vec<usize>,
    again: Vec<usize>,
    /// Whether a connection could not be accepted for lack of open files.
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
    /// The challenge that it was sent, and its id among all connections.
    Unauthenticated { nonce: Nonce, id: u64 },
    /// It is this rank.
    Rank { rank: usize },
    /// It is a viewer, with the time of its last request.
    Viewer { requested: Option<Instant> },
}

/// The unauthenticated connections, oldest first. Those that have authenticated are removed lazily.
struct Unauthenticated {
    queue: VecDeque<(u64, usize, Instant)>,
    next: u64,
    count: usize,
    count_max: usize,
}

impl Server {
    /// Listens at `address` for the ranks of an attempt. Port 0 picks a free port.
    ///
    /// # Errors
    /// If the address is not available, or the process may not open a file for every rank.
    pub fn bind(address: SocketAddr, secret: Secret, ranks: usize, attempt: u64) -> io::Result<Server> {
        let files = raise_open_files(ranks)?;
        let poll = Poll::new()?;
        let mut listener = TcpListener::bind(address)?;
        poll.registry().register(&mut listener, Token(LISTENER), Interest::READABLE)?;
        let not_joined = || RankInfo {
            coordinates: Coordinates::default(),
            host: String::new(),
            pid: 0,
            status: RankStatus::default(),
            last_heard: None,
            presence: Presence::NotJoined,
        };
        let count_max = (ranks + UNAUTHENTICATED_SPARE).min(files.saturating_sub(ranks + FILES_SPARE)).max(1);
        Ok(Server {
            poll,
            address: listener.local_addr()?,
            listener,
            secret,
            attempt,
            heartbeat: HEARTBEAT,
            ranks: (0..ranks).map(|_| not_joined()).collect(),
            slots: Vec::new(),
            free: Vec::new(),
            unauthenticated: Unauthenticated { queue: VecDeque::new(), next: 0, count: 0, count_max },
            order: None,
            events: Vec::new(),
            entries: 0,
            history: History::default(),
            viewers: 0,
            next_snapshot: Instant::now(),
            rejected: 0,
            ready: Events::with_capacity(1024),
            turn: Vec::new(),
            again: Vec::new(),
            is_full: false,
            buffer: vec![0; 64 << 10],
        })
    }

    /// Sets the heartbeat interval of ranks that join from now on.
    pub fn set_heartbeat(&mut self, interval: Duration) {
        self.heartbeat = interval;
    }

    /// Sets the sizes of the axes that cut the model into parts, which give ranks their coordinates.
    pub fn set_axes(&mut self, axes: ModelAxes) {
        let world = self.ranks.len();
        for (rank, info) in self.ranks.iter_mut().enumerate() {
            info.coordinates = axes.coordinates(rank, world);
        }
    }

    /// Returns the address that it listens at.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns what is known about every rank.
    pub fn ranks(&self) -> &[RankInfo] {
        &self.ranks
    }

    /// Returns the connected ranks that have sent nothing for longer than `limit`.
    pub fn silent(&self, now: Instant, limit: Duration) -> Vec<usize> {
        let is_silent = |info: &RankInfo| {
            let last_heard = info.last_heard.filter(|_| info.presence == Presence::Connected);
            last_heard.is_some_and(|heard| now.saturating_duration_since(heard) > limit)
        };
        (0..self.ranks.len()).filter(|&rank| is_silent(&self.ranks[rank])).collect()
    }

    /// Returns the ranks that have not joined.
    pub fn not_joined(&self) -> Vec<usize> {
        (0..self.ranks.len()).filter(|&rank| self.ranks[rank].presence == Presence::NotJoined).collect()
    }

    /// Returns the number of connections that ended without authentication.
    pub fn rejected(&self) -> u64 {
        self.rejected
    }

    /// Returns the number of open connections.
    pub fn connections(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Returns the number of viewers.
    pub fn viewers(&self) -> usize {
        self.viewers
    }

    /// Sets the entries that new viewers receive first: the history of earlier attempts.
    pub fn set_history(&mut self, history: History) {
        self.history = history;
    }

    /// Sends a journal entry to all viewers, present and future.
    pub fn publish(&mut self, entry: Entry) {
        if self.viewers > 0
            && let Some(frame) = FromSupervisor::entry(entry.clone())
        {
            self.send_to_viewers(&frame);
        }
        self.history.add(entry);
    }

    /// Sends the answer to a request to all viewers.
    pub fn answer(&mut self, text: &str) {
        let mut frame = Vec::new();
        FromSupervisor::Answer { text: shorten_text(text.to_string()) }.write(&mut frame);
        self.send_to_viewers(&frame);
    }

    /// Sends an order to the lowest connected rank only. The ranks agree among themselves on what one of them was ordered. If all of
    /// them got the order, it would be carried out twice if it reached one of them late. Returns whether there is a connected rank.
    pub fn order_one(&mut self, order: Order) -> bool {
        let mut frame = Vec::new();
        FromSupervisor::Order(order).write(&mut frame);
        let rank_of = |slot: &usize| match self.slots[*slot].as_ref()?.stage {
            Stage::Rank { rank } => Some(rank),
            Stage::Unauthenticated { .. } | Stage::Viewer { .. } => None,
        };
        let first = (0..self.slots.len()).filter(|slot| rank_of(slot).is_some()).min_by_key(rank_of);
        let Some((slot, mut connection)) = first.and_then(|slot| Some((slot, self.slots[slot].take()?))) else {
            return false;
        };
        let is_open = connection.send(&frame).is_ok();
        self.put_back(slot, connection, is_open);
        is_open
    }

    /// Sends an order to every rank, including those that join later. When this returns, the order has been sent to all ranks that
    /// read; [`Server::poll`] retries the others.
    pub fn order(&mut self, order: Order) {
        let order = match order {
            Order::End { reason } => Order::End { reason: shorten_text(reason) },
            other => other,
        };
        let mut frame = Vec::new();
        FromSupervisor::Order(order.clone()).write(&mut frame);
        self.order = Some(order);
        for slot in 0..self.slots.len() {
            let Some(mut connection) = self.slots[slot].take() else { continue };
            let sent = match connection.stage {
                Stage::Unauthenticated { .. } | Stage::Viewer { .. } => Ok(()),
                Stage::Rank { .. } => connection.send(&frame),
            };
            self.put_back(slot, connection, sent.is_ok());
        }
    }

    /// Waits for data for at most `timeout`, and returns what happened.
    ///
    /// # Errors
    /// If waiting itself fails. An error of a connection closes only that connection.
    pub fn poll(&mut self, timeout: Duration) -> io::Result<Vec<Event>> {
        let is_idle = self.again.is_empty() && self.events.is_empty();
        let timeout = if is_idle { self.unauthenticated.until(Instant::now(), timeout) } else { Duration::ZERO };
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
        while let Some(slot) = self.unauthenticated.overdue(now, &self.slots) {
            self.close(slot);
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
            let is_viewer = |connection: &Connection| matches!(connection.stage, Stage::Viewer { .. });
            if let Some(mut connection) = self.slots[slot].take_if(|connection| is_viewer(connection)) {
                let is_open = connection.send(frame).is_ok();
                self.put_back(slot, connection, is_open);
            }
        }
    }

    fn accept(&mut self, now: Instant) {
        for _ in 0..ACCEPTS_MAX {
            match self.listener.accept() {
                Ok((stream, _)) => self.challenge(stream, now),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // Out of files or memory: close unauthenticated connections first. If there are none, retry in the next poll.
                Err(error) if is_out_of_files(&error) => match self.unauthenticated.oldest(&self.slots) {
                    Some(slot) => self.close(slot),
                    None => {
                        self.is_full = true;
                        return;
                    }
                },
                // The connection ended before it was accepted.
                Err(_) => {}
            }
        }
        self.again.push(LISTENER);
    }

    /// Sends the first message on a new connection.
    fn challenge(&mut self, mut stream: TcpStream, now: Instant) {
        while self.unauthenticated.count >= self.unauthenticated.count_max {
            match self.unauthenticated.oldest(&self.slots) {
                Some(slot) => self.close(slot),
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
        // A heartbeat is one small write, which should not wait for the next.
        let prepared = registered.and_then(|()| stream.set_nodelay(true));
        let id = self.unauthenticated.add(slot, now, &self.slots);
        let stage = Stage::Unauthenticated { nonce, id };
        let mut connection = Connection { stream, inbox: Inbox::default(), outbox: Vec::new(), stage };
        let mut frame = Vec::new();
        FromSupervisor::Challenge { nonce }.write(&mut frame);
        let is_open = prepared.is_ok() && connection.send(&frame).is_ok();
        self.put_back(slot, connection, is_open);
    }

    /// Serves a connection: sends what is pending, and reads what has arrived.
    fn serve(&mut self, slot: usize, now: Instant) {
        // It may have been closed earlier in the same poll.
        let Some(mut connection) = self.slots.get_mut(slot).and_then(Option::take) else { return };
        let mut buffer = std::mem::take(&mut self.buffer);
        let mut is_open = connection.flush().is_ok();
        let mut reads = 0;
        while is_open {
            if reads == READS_MAX {
                self.again.push(slot);
                break;
            }
            reads += 1;
            match connection.stream.read(&mut buffer) {
                Ok(0) => is_open = false,
                Ok(count) => is_open = self.receive(&mut connection, &buffer[..count], now),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => is_open = false,
            }
        }
        self.buffer = buffer;
        self.put_back(slot, connection, is_open);
    }

    /// Handles data from a connection. Returns whether the connection stays open.
    fn receive(&mut self, connection: &mut Connection, bytes: &[u8], now: Instant) -> bool {
        match connection.stage {
            Stage::Unauthenticated { nonce, .. } => {
                let mut first = None;
                let taken = connection.inbox.take(bytes, UNAUTHENTICATED_BYTES_MAX, |frame| {
                    match first.replace(FirstMessage::read(frame)?) {
                        None => Ok(()),
                        Some(_) => Err(Error::Malformed("more than one message before the welcome".to_string())),
                    }
                });
                match (taken, first) {
                    (Err(_), _) => false,
                    (Ok(()), None) => true,
                    (Ok(()), Some(_)) if connection.inbox.has_partial_frame() => false,
                    (Ok(()), Some(FirstMessage::Hello(hello))) => self.welcome(connection, &nonce, hello, now),
                    (Ok(()), Some(FirstMessage::View { nonce: own, proof })) => {
                        self.welcome_viewer(connection, &nonce, &own, proof)
                    }
                }
            }
            Stage::Viewer { ref mut requested } => {
                let mut requests = Vec::new();
                let taken = connection.inbox.take(bytes, UNAUTHENTICATED_BYTES_MAX, |frame| {
                    let FromViewer::Request(request) = FromViewer::read(frame)?;
                    requests.push(request);
                    Ok(())
                });
                for request in requests {
                    if requested.is_none_or(|last| now.saturating_duration_since(last) >= REQUEST_EVERY) {
                        *requested = Some(now);
                        self.events.push(Event::Requested(request));
                    }
                }
                taken.is_ok()
            }
            Stage::Rank { rank } => {
                let taken =
                    connection.inbox.take(bytes, FRAME_BYTES_MAX, |frame| self.handle_message(rank, frame, now));
                if let Err(error) = taken {
                    self.events.push(Event::Malformed { rank, error: error.to_string() });
                    return false;
                }
                self.ranks[rank].presence == Presence::Connected
            }
        }
    }

    /// Answers a viewer's first message. Returns whether the connection stays open.
    fn welcome_viewer(&mut self, connection: &mut Connection, challenge: &Nonce, nonce: &Nonce, proof: Proof) -> bool {
        let mut frame = Vec::new();
        if view_proof(&self.secret, challenge, nonce) != proof {
            FromSupervisor::WrongSecret {}.write(&mut frame);
            drop(connection.send(&frame));
            return false;
        }
        if self.viewers >= VIEWERS_MAX {
            let reason = format!("it has {VIEWERS_MAX} viewers already");
            let proof = refusal_proof(&self.secret, nonce, &reason);
            FromSupervisor::Refused { reason, proof }.write(&mut frame);
            drop(connection.send(&frame));
            return false;
        }
        connection.stage = Stage::Viewer { requested: None };
        self.unauthenticated.count -= 1;
        self.viewers += 1;
        self.next_snapshot = Instant::now();
        let heartbeat_ms = SNAPSHOT_EVERY.as_millis() as u64;
        FromSupervisor::Welcome { proof: welcome_proof(&self.secret, nonce, heartbeat_ms), heartbeat_ms }
            .write(&mut frame);
        for entry in self.history.entries() {
            frame.extend(FromSupervisor::entry(entry.clone()).unwrap_or_default());
        }
        connection.send(&frame).is_ok()
    }

    /// Answers a rank's hello. Returns whether the connection stays open.
    fn welcome(&mut self, connection: &mut Connection, nonce: &Nonce, hello: Hello, now: Instant) -> bool {
        let mut frame = Vec::new();
        if hello.prove(&self.secret, nonce) != hello.proof {
            FromSupervisor::WrongSecret {}.write(&mut frame);
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
        connection.stage = Stage::Rank { rank };
        self.unauthenticated.count -= 1;
        let info = &mut self.ranks[rank];
        (info.host, info.pid, info.last_heard, info.presence) = (hello.host, hello.pid, Some(now), Presence::Connected);
        self.events.push(Event::Joined { rank });
        let heartbeat_ms = u64::try_from(self.heartbeat.as_millis()).unwrap_or(u64::MAX).max(1);
        let proof = welcome_proof(&self.secret, &hello.nonce, heartbeat_ms);
        FromSupervisor::Welcome { proof, heartbeat_ms }.write(&mut frame);
        if let Some(order) = &self.order {
            FromSupervisor::Order(order.clone()).write(&mut frame);
        }
        connection.send(&frame).is_ok()
    }

    /// Checks whether a peer that knows the secret may join as the rank that it claims to be. The error says why not.
    fn admit(&self, hello: &Hello) -> std::result::Result<(), String> {
        if hello.attempt != self.attempt {
            return Err(format!("it belongs to attempt {}, but this is attempt {}", hello.attempt, self.attempt));
        }
        if hello.ranks as usize != self.ranks.len() {
            return Err(format!("its world size is {}, but the supervisor's is {}", hello.ranks, self.ranks.len()));
        }
        let Some(info) = self.ranks.get(hello.rank as usize) else {
            return Err(format!("the world size is {}, and ranks are counted from 0", self.ranks.len()));
        };
        match info.presence {
            Presence::NotJoined => Ok(()),
            Presence::Connected => {
                Err(format!("it is already connected, as process {} on host {}", info.pid, info.host))
            }
            Presence::Left { .. } => {
                Err(format!("it was connected, as process {} on host {}, and has left", info.pid, info.host))
            }
        }
    }

    /// Handles a message from a rank.
    fn handle_message(&mut self, rank: usize, frame: &[u8], now: Instant) -> Result<()> {
        let info = &mut self.ranks[rank];
        if info.presence != Presence::Connected {
            return Err(Error::Malformed("a message after the bye".to_string()));
        }
        info.last_heard = Some(now);
        match FromRank::read(frame)? {
            FromRank::Heartbeat(status) => info.status = status,
            FromRank::Failed { kind, text, status } => {
                info.status = status;
                self.events.push(Event::Failed { rank, kind, text });
            }
            FromRank::Note { text } => self.events.push(Event::Note { rank, text }),
            FromRank::Entry(_) if rank != 0 => {
                return Err(Error::Malformed("a journal entry, which only rank 0 may send".to_string()));
            }
            FromRank::Entry(_) if self.entries >= ENTRIES_MAX => {}
            FromRank::Entry(entry) => {
                self.entries += 1;
                self.events.push(Event::Entry(Box::new(entry)));
            }
            FromRank::Bye { code } => {
                info.presence = Presence::Left { code: Some(code) };
                self.events.push(Event::Left { rank, code: Some(code) });
            }
        }
        Ok(())
    }

    /// Puts a connection back into its slot if it is open. Otherwise frees the slot and records the end of the connection.
    fn put_back(&mut self, slot: usize, connection: Connection, is_open: bool) {
        if is_open {
            self.slots[slot] = Some(connection);
            return;
        }
        self.free.push(slot);
        match connection.stage {
            Stage::Unauthenticated { .. } => {
                self.unauthenticated.count -= 1;
                self.rejected += 1;
            }
            Stage::Viewer { .. } => self.viewers -= 1,
            Stage::Rank { rank } => {
                let presence = &mut self.ranks[rank].presence;
                if *presence == Presence::Connected {
                    *presence = Presence::Left { code: None };
                    self.events.push(Event::Left { rank, code: None });
                }
            }
        }
    }

    fn close(&mut self, slot: usize) {
        if let Some(connection) = self.slots[slot].take() {
            self.put_back(slot, connection, false);
        }
    }
}

impl Connection {
    /// Sends as much as the system accepts now, and keeps the rest for later.
    fn send(&mut self, frame: &[u8]) -> io::Result<()> {
        self.outbox.extend_from_slice(frame);
        self.flush()?;
        let bytes_max = match self.stage {
            Stage::Viewer { .. } => VIEWER_OUTBOX_BYTES_MAX,
            Stage::Unauthenticated { .. } | Stage::Rank { .. } => OUTBOX_BYTES_MAX,
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

/// Writes as much of `outbox` as the system accepts.
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

impl Unauthenticated {
    fn add(&mut self, slot: usize, now: Instant, slots: &[Option<Connection>]) -> u64 {
        // A connection that takes all of its five seconds blocks the lazy removal of all later ones.
        if self.queue.len() > 2 * self.count_max {
            self.queue.retain(|&(id, slot, _)| is_unauthenticated(slots, slot, id));
        }
        let id = self.next;
        self.next += 1;
        self.count += 1;
        self.queue.push_back((id, slot, now));
        id
    }

    fn oldest(&mut self, slots: &[Option<Connection>]) -> Option<usize> {
        self.remove_authenticated(slots);
        self.queue.front().map(|&(_, slot, _)| slot)
    }

    /// The oldest connection, if its time is up.
    fn overdue(&mut self, now: Instant, slots: &[Option<Connection>]) -> Option<usize> {
        self.remove_authenticated(slots);
        let &(_, slot, since) = self.queue.front()?;
        (now.saturating_duration_since(since) >= PROOF_LIMIT).then_some(slot)
    }

    /// Limits a timeout to the time until the oldest connection is overdue.
    fn until(&self, now: Instant, timeout: Duration) -> Duration {
        self.queue
            .front()
            .map_or(timeout, |&(_, _, since)| timeout.min((since + PROOF_LIMIT).saturating_duration_since(now)))
    }

    fn remove_authenticated(&mut self, slots: &[Option<Connection>]) {
        while self.queue.front().is_some_and(|&(id, slot, _)| !is_unauthenticated(slots, slot, id)) {
            self.queue.pop_front();
        }
    }
}

fn is_unauthenticated(slots: &[Option<Connection>], slot: usize, id: u64) -> bool {
    let connection = slots.get(slot).and_then(Option::as_ref);
    connection.is_some_and(|connection| matches!(connection.stage, Stage::Unauthenticated { id: own, .. } if own == id))
}

/// Raises the limit on open files so that every rank can connect, and returns the limit.
fn raise_open_files(ranks: usize) -> io::Result<usize> {
    let needed = (ranks + UNAUTHENTICATED_SPARE + FILES_SPARE) as u64;
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let mut limit = current;
    if current.is_some_and(|current| current < needed + ranks as u64) {
        setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?;
        limit = maximum;
    }
    if let Some(limit) = limit.filter(|&limit| limit < needed) {
        return Err(io::Error::other(format!(
            "{ranks} ranks need {needed} open files, but only {limit} are allowed; raise the hard limit of open files (ulimit -Hn)"
        )));
    }
    Ok(limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX)))
}

fn is_out_of_files(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let errno = Errno::from_io_error(error);
    [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM].into_iter().any(|out| errno == Some(out))
}
