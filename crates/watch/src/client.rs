//! A rank's side: it joins, and then one thread sends heartbeats and receives orders.
//!
//! The thread sleeps until a heartbeat is due, an order arrives or the rank has something to send. Training does not wait for it, with
//! one exception: final messages ([`Reporter::report_failure`], [`Reporter::bye`]) block until they are sent, because the process may
//! exit right after them.
//!
//! A rank must not outlive its supervisor, because nothing else would stop it. When the connection ends, or sent data stays
//! unacknowledged for [`GONE_LIMIT`], the rank gets an order to end as if the supervisor had sent it.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use mio::{Events, Interest, Poll, Token, Waker};
use shardwise_journal::Entry;

use crate::message::{
    FRAME_BYTES_MAX, FirstMessage, FromRank, FromSupervisor, Hello, Inbox, Order, UNAUTHENTICATED_BYTES_MAX,
    frame_bytes, refusal_proof, welcome_proof,
};
use crate::secret::{Nonce, Secret};
use crate::server::flush;
use crate::status::{shorten_name, shorten_text};
use crate::{Error, FailureKind, RankStatus, Result};

/// How long sent data may stay unacknowledged before the supervisor counts as gone.
const GONE_LIMIT: Duration = Duration::from_secs(60);
/// How long a rank waits for its final message to be sent.
const FINAL_MESSAGE_LIMIT: Duration = Duration::from_secs(5);
/// How long one attempt at joining may take.
const ATTEMPT_LIMIT: Duration = Duration::from_secs(5);
/// The first and the longest pause between attempts, which doubles. Too many ranks may have tried to join at once.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// The range of heartbeat intervals that a supervisor may ask for: shorter ones are too much load, and longer ones show too late
/// that a rank is alive.
const HEARTBEAT_MIN: Duration = Duration::from_millis(1);
const HEARTBEAT_MAX: Duration = Duration::from_secs(60);
/// The number of unsent bytes beyond which notes and journal entries are dropped.
const OUTBOX_BYTES_MAX: usize = 256 << 10;

const STREAM: Token = Token(0);
const COMMANDS: Token = Token(1);

/// The identity of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankIdentity {
    /// The rank's number.
    pub rank: u32,
    /// The world size.
    pub ranks: u32,
    /// The host that it runs on.
    pub host: String,
    /// Its process id there.
    pub pid: u32,
    /// The attempt that it belongs to, counted from 1.
    pub attempt: u64,
}

/// A rank's end of the channel, after both sides have proved that they know the secret.
#[derive(Debug)]
pub struct Client {
    stream: TcpStream,
    heartbeat: Duration,
}

impl Client {
    /// Joins the supervisor at one of these addresses, which are tried in turn for at most `limit`.
    ///
    /// # Errors
    /// If no supervisor was reached in time. Fails at once if all programs that were reached know another secret or none, or if the
    /// supervisor refuses this rank.
    pub fn join(addresses: &[SocketAddr], secret: &Secret, identity: &RankIdentity, limit: Duration) -> Result<Client> {
        // The limit keeps the sum within the range of the clock.
        let end = Instant::now() + limit.min(Duration::from_secs(86_400));
        let mut pause = PAUSE_MIN;
        loop {
            let mut last = Error::Malformed("no address was given".to_string());
            let mut is_hopeless = !addresses.is_empty();
            for &address in addresses {
                match handshake(address, secret, identity, end.min(Instant::now() + ATTEMPT_LIMIT)) {
                    Ok(client) => return Ok(client),
                    Err(refused @ Error::Refused { .. }) => return Err(refused),
                    Err(error) => {
                        is_hopeless &= matches!(error, Error::NotSupervisor { .. } | Error::WrongSecret { .. });
                        last = error;
                    }
                }
            }
            if is_hopeless {
                return Err(last);
            }
            // Ranks that failed together should not retry together.
            let pause_now = pause + Duration::from_millis(u64::from(identity.rank % 64));
            if addresses.is_empty() || Instant::now() + pause_now >= end {
                return Err(Error::Unreachable { addresses: addresses.to_vec(), limit, last: last.to_string() });
            }
            std::thread::sleep(pause_now);
            pause = (2 * pause).min(PAUSE_MAX);
        }
    }

    /// Returns the heartbeat interval that the supervisor asked for.
    pub fn heartbeat_interval(&self) -> Duration {
        self.heartbeat
    }

    /// Sends one heartbeat and waits until it is sent, for callers that cannot spare a thread.
    ///
    /// # Errors
    /// If the supervisor is gone.
    pub fn send_heartbeat(&mut self, status: RankStatus) -> Result<()> {
        let mut frame = Vec::new();
        FromRank::Heartbeat(status.shorten()).write(&mut frame);
        self.stream.write_all(&frame).map_err(Error::io("sending a heartbeat"))
    }

    /// Returns the raw connection, for tests that send what a rank would not.
    pub fn into_stream(self) -> TcpStream {
        self.stream
    }

    /// Starts the thread that sends the result of `status` with every heartbeat, and calls `on_order` with every order.
    ///
    /// Both run on that thread, and neither may use the [`Reporter`], which waits for the thread. A slow `status` delays heartbeats, so
    /// it must not wait for locks that training holds. A rank that is ordered to end should exit in `on_order` itself, because the
    /// training thread may be waiting for a rank that is gone. If either of them panics, the connection ends, and the supervisor
    /// considers the rank dead.
    ///
    /// # Errors
    /// If the system cannot create the thread or the event queue.
    pub fn start_reporting(
        self,
        status: impl Fn() -> RankStatus + Send + 'static,
        on_order: impl Fn(Order) + Send + 'static,
    ) -> Result<Reporter> {
        let prepare = || {
            self.stream.set_nonblocking(true)?;
            let mut stream = mio::net::TcpStream::from_std(self.stream);
            let poll = Poll::new()?;
            poll.registry().register(&mut stream, STREAM, Interest::READABLE | Interest::WRITABLE)?;
            let waker = Waker::new(poll.registry(), COMMANDS)?;
            Ok((stream, poll, waker))
        };
        let (stream, poll, waker) = prepare().map_err(Error::io("preparing the connection"))?;
        let (commands, received) = mpsc::channel();
        let session = Session {
            stream,
            poll,
            inbox: Inbox::default(),
            outbox: Vec::new(),
            waiting: Vec::new(),
            commands: received,
            heartbeat: self.heartbeat,
            status,
            on_order,
            ended: false,
        };
        let thread = std::thread::Builder::new().name("watch".to_string());
        thread.spawn(move || session.run()).map_err(Error::io("starting the reporter thread"))?;
        Ok(Reporter { commands, waker })
    }
}

/// The handle of a rank's reporter thread. If it is dropped without a [`bye`](Reporter::bye), the supervisor considers the rank dead.
#[derive(Debug)]
pub struct Reporter {
    commands: Sender<Command>,
    waker: Waker,
}

impl Reporter {
    /// Reports a failure. Returns once the report is sent, or cannot be sent.
    pub fn report_failure(&self, kind: FailureKind, text: &str) {
        self.send_final(|sent| Command::Failed { kind, text: text.to_string(), sent });
    }

    /// Sends a message for people.
    pub fn note(&self, text: &str) {
        self.command(Command::Note { text: text.to_string() });
    }

    /// Forwards a journal entry; only rank 0 may do so. The entry is dropped if too much data is waiting to be sent.
    pub fn send_entry(&self, entry: &Entry) {
        self.command(Command::Entry(Box::new(entry.clone())));
    }

    /// Announces that the rank exits as planned with this exit code. Returns once that is sent, or cannot be sent. No orders
    /// arrive afterwards.
    pub fn bye(&self, code: i32) {
        self.send_final(|sent| Command::Bye { code, sent });
    }

    /// Sends a command, and waits until its message is sent.
    fn send_final(&self, command: impl FnOnce(Sender<()>) -> Command) {
        let (sent, is_sent) = mpsc::channel();
        self.command(command(sent));
        // On an error, the thread has ended or the time is up; nothing more can be done.
        let _ = is_sent.recv_timeout(FINAL_MESSAGE_LIMIT);
    }

    fn command(&self, command: Command) {
        // If the thread has ended, the supervisor is gone, and the rank has already been ordered to end.
        if self.commands.send(command).is_ok() {
            drop(self.waker.wake());
        }
    }
}

impl Drop for Reporter {
    fn drop(&mut self) {
        self.command(Command::Disconnect);
    }
}

#[derive(Debug)]
enum Command {
    Failed { kind: FailureKind, text: String, sent: Sender<()> },
    Note { text: String },
    Entry(Box<Entry>),
    Bye { code: i32, sent: Sender<()> },
    Disconnect,
}

/// The state of the reporter thread.
struct Session<S, O> {
    stream: mio::net::TcpStream,
    poll: Poll,
    inbox: Inbox,
    outbox: Vec<u8>,
    /// Callers that wait until the outbox is empty.
    waiting: Vec<Sender<()>>,
    commands: Receiver<Command>,
    heartbeat: Duration,
    status: S,
    on_order: O,
    /// Whether an order to end has arrived, which is then not repeated.
    ended: bool,
}

/// Whether the rank is leaving.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Reporting,
    /// It has queued its bye, and disconnects once that is sent.
    Leaving,
    Left,
}

impl<S: Fn() -> RankStatus, O: Fn(Order)> Session<S, O> {
    fn run(mut self) {
        if let (Err(why), false) = (self.report(), self.ended) {
            (self.on_order)(Order::End { reason: format!("the supervisor is gone: {why}") });
        }
    }

    /// Reports until the rank leaves. The error says why the supervisor counts as gone.
    fn report(&mut self) -> std::result::Result<(), String> {
        let mut events = Events::with_capacity(8);
        let mut next_heartbeat = Instant::now();
        let mut stuck_since = None;
        let mut stage = Stage::Reporting;
        loop {
            let timeout = next_heartbeat.saturating_duration_since(Instant::now());
            match self.poll.poll(&mut events, Some(timeout)) {
                Err(error) if error.kind() != ErrorKind::Interrupted => return Err(format!("cannot wait: {error}")),
                _ => {}
            }
            let now = Instant::now();
            stage = self.run_commands(stage);
            if now >= next_heartbeat {
                next_heartbeat = now + self.heartbeat;
                // While the last heartbeat is still unsent, another one would be late as well.
                if stage == Stage::Reporting && self.outbox.is_empty() {
                    FromRank::Heartbeat((self.status)().shorten()).write(&mut self.outbox);
                }
            }
            let flushed = flush(&mut self.stream, &mut self.outbox);
            if self.outbox.is_empty() {
                stuck_since = None;
                // On an error, the waiting thread has given up.
                self.waiting.drain(..).for_each(|sent| sent.send(()).unwrap_or_default());
            }
            match stage {
                Stage::Left => return Ok(()),
                Stage::Leaving if flushed.is_err() => return Ok(()),
                Stage::Leaving if self.outbox.is_empty() => {
                    drop(self.stream.shutdown(Shutdown::Write));
                    return Ok(());
                }
                Stage::Leaving | Stage::Reporting => {}
            }
            // Do this before returning a send error: the last data received may be an order to end.
            self.receive_orders()?;
            flushed.map_err(|error| error.to_string())?;
            if !self.outbox.is_empty() && now - *stuck_since.get_or_insert(now) > GONE_LIMIT {
                return Err(format!("it has accepted no data for {} s", GONE_LIMIT.as_secs()));
            }
        }
    }

    /// Runs the commands of the rank.
    fn run_commands(&mut self, mut stage: Stage) -> Stage {
        while let Ok(command) = self.commands.try_recv() {
            match (stage, command) {
                (_, Command::Disconnect) => return Stage::Left,
                (Stage::Reporting, Command::Failed { kind, text, sent }) => {
                    let status = (self.status)().shorten();
                    FromRank::Failed { kind, text: shorten_text(text), status }.write(&mut self.outbox);
                    self.waiting.push(sent);
                }
                (Stage::Reporting, Command::Note { text }) => {
                    if self.outbox.len() < OUTBOX_BYTES_MAX {
                        FromRank::Note { text: shorten_text(text) }.write(&mut self.outbox);
                    }
                }
                (Stage::Reporting, Command::Entry(entry)) => {
                    if self.outbox.len() < OUTBOX_BYTES_MAX {
                        self.outbox.extend(FromRank::entry(*entry).unwrap_or_default());
                    }
                }
                (Stage::Reporting, Command::Bye { code, sent }) => {
                    FromRank::Bye { code }.write(&mut self.outbox);
                    self.waiting.push(sent);
                    stage = Stage::Leaving;
                }
                // Nothing is sent after a bye.
                (Stage::Leaving | Stage::Left, _) => {}
            }
        }
        stage
    }

    /// Receives orders from the supervisor.
    fn receive_orders(&mut self) -> std::result::Result<(), String> {
        let mut buffer = [0; 4096];
        loop {
            let count = match self.stream.read(&mut buffer) {
                Ok(0) => return Err("it closed the connection".to_string()),
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error.to_string()),
            };
            let (on_order, ended) = (&self.on_order, &mut self.ended);
            let taken =
                self.inbox.take(&buffer[..count], FRAME_BYTES_MAX, |frame| match FromSupervisor::read(frame)? {
                    FromSupervisor::Order(order) => {
                        *ended |= matches!(order, Order::End { .. });
                        on_order(order);
                        Ok(())
                    }
                    _ => Err(Error::Malformed("a message that is not an order".to_string())),
                });
            taken.map_err(|error| error.to_string())?;
        }
    }
}

/// Makes one attempt at joining.
fn handshake(address: SocketAddr, secret: &Secret, identity: &RankIdentity, end: Instant) -> Result<Client> {
    let stream = connect(address, end)?;
    let not_supervisor = Error::NotSupervisor { address };
    // A program that does not speak our protocol is not a supervisor.
    let receive = || match receive(&stream, end) {
        Err(Error::Malformed(_)) => Err(Error::NotSupervisor { address }),
        received => received,
    };
    let FromSupervisor::Challenge { nonce: challenge } = receive()? else { return Err(not_supervisor) };
    let nonce = Nonce::new()?;
    let RankIdentity { rank, ranks, host, pid, attempt } = identity.clone();
    // A placeholder for the proof, which covers all other fields.
    let unproven = secret.proof(&nonce, &[]);
    let mut hello = Hello { rank, ranks, host: shorten_name(host), pid, attempt, nonce, proof: unproven };
    hello.proof = hello.prove(secret, &challenge);
    (&stream).write_all(&FirstMessage::Hello(hello).frame()).map_err(Error::io("sending the hello"))?;
    match receive()? {
        FromSupervisor::Welcome { proof, heartbeat_ms } if proof == welcome_proof(secret, &nonce, heartbeat_ms) => {
            // From now on, reads may block for as long as it takes.
            let prepared = stream.set_read_timeout(None).and_then(|()| stream.set_write_timeout(Some(GONE_LIMIT)));
            prepared.map_err(Error::io("preparing the connection"))?;
            Ok(Client { stream, heartbeat: Duration::from_millis(heartbeat_ms).clamp(HEARTBEAT_MIN, HEARTBEAT_MAX) })
        }
        FromSupervisor::Refused { reason, proof } if proof == refusal_proof(secret, &nonce, &reason) => {
            Err(Error::Refused { rank, reason })
        }
        FromSupervisor::WrongSecret {} => Err(Error::WrongSecret { address }),
        _ => Err(not_supervisor),
    }
}

/// Connects to a supervisor before `end`.
pub(crate) fn connect(address: SocketAddr, end: Instant) -> Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&address, left(end)).map_err(Error::io("connecting"))?;
    let prepare = || {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(left(end)))?;
        // A host that loses power closes no connection. With this, the system gives up on unacknowledged data.
        let limit_ms = u32::try_from(GONE_LIMIT.as_millis()).unwrap_or(u32::MAX);
        rustix::net::sockopt::set_tcp_user_timeout(&stream, limit_ms).map_err(std::io::Error::from)
    };
    prepare().map_err(Error::io("preparing the connection"))?;
    Ok(stream)
}

/// Receives a message of the handshake before `end`. These messages are short.
pub(crate) fn receive(stream: &TcpStream, end: Instant) -> Result<FromSupervisor> {
    let read = |bytes: &mut [u8]| {
        let mut filled = 0;
        while filled < bytes.len() {
            if Instant::now() >= end {
                return Err(ErrorKind::TimedOut.into());
            }
            stream.set_read_timeout(Some(left(end)))?;
            match (&mut &*stream).read(&mut bytes[filled..]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => filled += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    };
    let mut header = [0; 4];
    read(&mut header).map_err(Error::io("waiting for the supervisor"))?;
    let mut frame = vec![0; frame_bytes(header, UNAUTHENTICATED_BYTES_MAX)?];
    read(&mut frame).map_err(Error::io("reading from the supervisor"))?;
    FromSupervisor::read(&frame)
}

fn left(end: Instant) -> Duration {
    end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}
