//! A rank's side: it joins, and from then on one thread says where the rank stands and listens for orders.
//!
//! The thread sleeps until a beat is due, an order comes or the rank has something to say. It takes no part in training and
//! training does not wait for it, with one exception: last words ([`Watch::failed`], [`Watch::bye`]) are waited for, because the
//! process may end right after them.
//!
//! A rank must not outlive its supervisor, who alone can end it. When the connection ends, or nobody has confirmed what was sent
//! for [`GONE_LIMIT`], the rank is ordered to end as if the supervisor had said so.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use mio::{Events, Interest, Poll, Token, Waker};
use shardwise_journal::Entry;

use crate::message::{
    FRAME_BYTES_MAX, FromRank, FromStranger, FromSupervisor, Hello, Inbox, Order, UNPROVEN_BYTES_MAX, frame_bytes,
    refusal_proof, welcome_proof,
};
use crate::secret::{Nonce, Secret};
use crate::server::flush;
use crate::standing::{name, text};
use crate::{Error, FailureKind, Result, Standing};

/// How long what was sent may stay unconfirmed before the supervisor counts as gone.
const GONE_LIMIT: Duration = Duration::from_secs(60);
/// How long a rank waits for its last words to be sent.
const LAST_WORDS_LIMIT: Duration = Duration::from_secs(5);
/// How long one attempt at joining may take.
const ATTEMPT_LIMIT: Duration = Duration::from_secs(5);
/// The times between attempts, which double. The supervisor may have had too many ranks at its door at once.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// What a supervisor may ask for. More often would be a load, and less often no sign of life.
const BEAT_MIN: Duration = Duration::from_millis(1);
const BEAT_MAX: Duration = Duration::from_secs(60);
/// What may wait to be sent before notes and lines of the journal are left out.
const OUTBOX_BYTES_MAX: usize = 256 << 10;

const STREAM: Token = Token(0);
const COMMANDS: Token = Token(1);

/// Who a rank is, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its number.
    pub rank: u32,
    /// How many there are.
    pub ranks: u32,
    /// The host that it runs on.
    pub host: String,
    /// Its process there.
    pub pid: u32,
    /// The how-manieth attempt at the run it belongs to.
    pub attempt: u64,
}

/// A rank's end of the channel, after both sides have proved to know the secret.
#[derive(Debug)]
pub struct Client {
    stream: TcpStream,
    beat: Duration,
}

impl Client {
    /// Joins the supervisor that listens at one of these addresses, which are tried in turn, for at most `limit`.
    ///
    /// # Errors
    /// If none was reached in time; and at once, if all who were reached know another secret or none, or if the supervisor
    /// refuses this rank.
    pub fn join(addresses: &[SocketAddr], secret: &Secret, place: &Place, limit: Duration) -> Result<Client> {
        // A limit that no clock has is none.
        let end = Instant::now() + limit.min(Duration::from_secs(86_400));
        let mut pause = PAUSE_MIN;
        loop {
            let mut last = Error::Malformed("no address was given".to_string());
            let mut hopeless = !addresses.is_empty();
            for &address in addresses {
                match greet(address, secret, place, end.min(Instant::now() + ATTEMPT_LIMIT)) {
                    Ok(client) => return Ok(client),
                    Err(refused @ Error::Refused { .. }) => return Err(refused),
                    Err(error) => {
                        hopeless &= matches!(error, Error::Stranger { .. } | Error::WrongSecret { .. });
                        last = error;
                    }
                }
            }
            if hopeless {
                return Err(last);
            }
            // Ranks that were turned away together should not come back together.
            let pause_now = pause + Duration::from_millis(u64::from(place.rank % 64));
            if addresses.is_empty() || Instant::now() + pause_now >= end {
                return Err(Error::Unreached { addresses: addresses.to_vec(), limit, last: last.to_string() });
            }
            std::thread::sleep(pause_now);
            pause = (2 * pause).min(PAUSE_MAX);
        }
    }

    /// How often the supervisor wants to hear where the rank stands.
    pub fn beat_every(&self) -> Duration {
        self.beat
    }

    /// Says once where the rank stands, and waits until that is sent; for those who have no thread to spare.
    ///
    /// # Errors
    /// If the supervisor is gone.
    pub fn beat(&mut self, standing: Standing) -> Result<()> {
        let mut frame = Vec::new();
        FromRank::Beat(standing.cut()).write(&mut frame);
        self.stream.write_all(&frame).map_err(Error::io("a beat"))
    }

    /// The connection as it is, for those who have to say what a rank would not: tests.
    pub fn into_stream(self) -> TcpStream {
        self.stream
    }

    /// Starts the thread that says with every beat what `standing` says, and hands orders to `on_order`.
    ///
    /// Both run on that thread, and neither may use the [`Watch`], which waits for it. While `standing` takes long the rank is
    /// silent, so it must not wait for what training holds. A rank that is ordered to end should do so in `on_order` itself:
    /// the thread that trains may be waiting for a rank that is no more. When either panics the connection ends, and the
    /// supervisor takes the rank for dead.
    ///
    /// # Errors
    /// If the system gives no thread, or nothing to wait with.
    pub fn watch(
        self,
        standing: impl Fn() -> Standing + Send + 'static,
        on_order: impl Fn(Order) + Send + 'static,
    ) -> Result<Watch> {
        let prepared = || {
            self.stream.set_nonblocking(true)?;
            let mut stream = mio::net::TcpStream::from_std(self.stream);
            let poll = Poll::new()?;
            poll.registry().register(&mut stream, STREAM, Interest::READABLE | Interest::WRITABLE)?;
            let waker = Waker::new(poll.registry(), COMMANDS)?;
            Ok((stream, poll, waker))
        };
        let (stream, poll, waker) = prepared().map_err(Error::io("watching"))?;
        let (commands, received) = mpsc::channel();
        let session = Session {
            stream,
            poll,
            inbox: Inbox::default(),
            outbox: Vec::new(),
            waiting: Vec::new(),
            commands: received,
            beat: self.beat,
            standing,
            on_order,
            ended: false,
        };
        let thread = std::thread::Builder::new().name("watch".to_string());
        thread.spawn(move || session.run()).map_err(Error::io("the thread of the watch"))?;
        Ok(Watch { commands, waker })
    }
}

/// A rank under watch. When it is dropped without a [`bye`](Watch::bye), the supervisor takes the rank for dead.
#[derive(Debug)]
pub struct Watch {
    commands: Sender<Command>,
    waker: Waker,
}

impl Watch {
    /// Says that something went wrong. Returns when that is sent, or cannot be.
    pub fn failed(&self, kind: FailureKind, text: &str) {
        self.last_words(|sent| Command::Failed { kind, text: text.to_string(), sent });
    }

    /// Says something that people should read.
    pub fn note(&self, text: &str) {
        self.command(Command::Note { text: text.to_string() });
    }

    /// Hands on a line of the journal, if this is the first rank. Where too much waits to be sent, it is left out.
    pub fn entry(&self, entry: &Entry) {
        self.command(Command::Entry(Box::new(entry.clone())));
    }

    /// Says that the rank ends with this exit code, and means to. Returns when that is sent, or cannot be. From then on no order
    /// comes.
    pub fn bye(&self, code: i32) {
        self.last_words(|sent| Command::Bye { code, sent });
    }

    fn last_words(&self, command: impl FnOnce(Sender<()>) -> Command) {
        let (sent, is_sent) = mpsc::channel();
        self.command(command(sent));
        // An error is that the thread has ended, or the limit: there is nobody to tell.
        let _ = is_sent.recv_timeout(LAST_WORDS_LIMIT);
    }

    fn command(&self, command: Command) {
        // Without a thread there is no supervisor, and the rank has been told so.
        if self.commands.send(command).is_ok() {
            drop(self.waker.wake());
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.command(Command::Leave);
    }
}

#[derive(Debug)]
enum Command {
    Failed { kind: FailureKind, text: String, sent: Sender<()> },
    Note { text: String },
    Entry(Box<Entry>),
    Bye { code: i32, sent: Sender<()> },
    Leave,
}

/// What the thread has.
struct Session<S, O> {
    stream: mio::net::TcpStream,
    poll: Poll,
    inbox: Inbox,
    outbox: Vec<u8>,
    /// Who waits for the outbox to be empty.
    waiting: Vec<Sender<()>>,
    commands: Receiver<Command>,
    beat: Duration,
    standing: S,
    on_order: O,
    /// It was ordered to end, and need not be told again.
    ended: bool,
}

/// How far the rank is from leaving.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Watching,
    /// It has said bye, and leaves when that is sent.
    Leaving,
    Left,
}

impl<S: Fn() -> Standing, O: Fn(Order)> Session<S, O> {
    fn run(mut self) {
        if let (Err(why), false) = (self.watch(), self.ended) {
            (self.on_order)(Order::End { reason: format!("the supervisor is gone: {why}") });
        }
    }

    /// Until the rank leaves, or the error is why the supervisor counts as gone.
    fn watch(&mut self) -> std::result::Result<(), String> {
        let mut events = Events::with_capacity(8);
        let mut next_beat = Instant::now();
        let mut stuck_since = None;
        let mut stage = Stage::Watching;
        loop {
            let timeout = next_beat.saturating_duration_since(Instant::now());
            match self.poll.poll(&mut events, Some(timeout)) {
                Err(error) if error.kind() != ErrorKind::Interrupted => return Err(format!("cannot wait: {error}")),
                _ => {}
            }
            let now = Instant::now();
            stage = self.obey(stage);
            if now >= next_beat {
                next_beat = now + self.beat;
                // Where the last beat is still here, a second would be late as well.
                if stage == Stage::Watching && self.outbox.is_empty() {
                    FromRank::Beat((self.standing)().cut()).write(&mut self.outbox);
                }
            }
            let flushed = flush(&mut self.stream, &mut self.outbox);
            if self.outbox.is_empty() {
                stuck_since = None;
                // Who waited has given up where this is an error.
                self.waiting.drain(..).for_each(|sent| sent.send(()).unwrap_or_default());
            }
            match stage {
                Stage::Left => return Ok(()),
                Stage::Leaving if flushed.is_err() => return Ok(()),
                Stage::Leaving if self.outbox.is_empty() => {
                    drop(self.stream.shutdown(Shutdown::Write));
                    return Ok(());
                }
                Stage::Leaving | Stage::Watching => {}
            }
            // Before the error: an order to end may be the last that came.
            self.listen()?;
            flushed.map_err(|error| error.to_string())?;
            if !self.outbox.is_empty() && now - *stuck_since.get_or_insert(now) > GONE_LIMIT {
                return Err(format!("it has taken nothing for {} s", GONE_LIMIT.as_secs()));
            }
        }
    }

    /// Takes what the rank wants to say.
    fn obey(&mut self, mut stage: Stage) -> Stage {
        while let Ok(command) = self.commands.try_recv() {
            match (stage, command) {
                (_, Command::Leave) => return Stage::Left,
                (Stage::Watching, Command::Failed { kind, text: said, sent }) => {
                    let standing = (self.standing)().cut();
                    FromRank::Failed { kind, text: text(said), standing }.write(&mut self.outbox);
                    self.waiting.push(sent);
                }
                (Stage::Watching, Command::Note { text: said }) => {
                    if self.outbox.len() < OUTBOX_BYTES_MAX {
                        FromRank::Note { text: text(said) }.write(&mut self.outbox);
                    }
                }
                (Stage::Watching, Command::Entry(entry)) => {
                    if self.outbox.len() < OUTBOX_BYTES_MAX {
                        self.outbox.extend(FromRank::entry(*entry).unwrap_or_default());
                    }
                }
                (Stage::Watching, Command::Bye { code, sent }) => {
                    FromRank::Bye { code }.write(&mut self.outbox);
                    self.waiting.push(sent);
                    stage = Stage::Leaving;
                }
                // After a bye there is nothing to say.
                (Stage::Leaving | Stage::Left, _) => {}
            }
        }
        stage
    }

    /// Takes what the supervisor wants.
    fn listen(&mut self) -> std::result::Result<(), String> {
        let mut buffer = [0; 4096];
        loop {
            let count = match self.stream.read(&mut buffer) {
                Ok(0) => return Err("it has closed the connection".to_string()),
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
                    _ => Err(Error::Malformed("something else than an order".to_string())),
                });
            taken.map_err(|error| error.to_string())?;
        }
    }
}

/// One attempt at joining.
fn greet(address: SocketAddr, secret: &Secret, place: &Place, end: Instant) -> Result<Client> {
    let stream = call(address, end)?;
    let stranger = Error::Stranger { address };
    // Not even our language: a stranger, unless the connection was at fault.
    let hear = || match hear(&stream, end) {
        Err(Error::Malformed(_)) => Err(Error::Stranger { address }),
        heard => heard,
    };
    let FromSupervisor::Challenge { nonce: challenge } = hear()? else { return Err(stranger) };
    let nonce = Nonce::new()?;
    let Place { rank, ranks, host, pid, attempt } = place.clone();
    // In place of the proof, which covers all else, until it is made.
    let unproven = secret.proof(&nonce, &[]);
    let mut hello = Hello { rank, ranks, host: name(host), pid, attempt, nonce, proof: unproven };
    hello.proof = hello.prove(secret, &challenge);
    (&stream).write_all(&FromStranger::Hello(hello).frame()).map_err(Error::io("introducing the rank"))?;
    match hear()? {
        FromSupervisor::Welcome { proof, beat_ms } if proof == welcome_proof(secret, &nonce, beat_ms) => {
            // From now on a late answer is no error.
            let freed = stream.set_read_timeout(None).and_then(|()| stream.set_write_timeout(Some(GONE_LIMIT)));
            freed.map_err(Error::io("preparing the connection"))?;
            Ok(Client { stream, beat: Duration::from_millis(beat_ms).clamp(BEAT_MIN, BEAT_MAX) })
        }
        FromSupervisor::Refused { reason, proof } if proof == refusal_proof(secret, &nonce, &reason) => {
            Err(Error::Refused { rank, reason })
        }
        FromSupervisor::Stranger {} => Err(Error::WrongSecret { address }),
        _ => Err(stranger),
    }
}

/// A connection to a supervisor, until `end`.
pub(crate) fn call(address: SocketAddr, end: Instant) -> Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&address, left(end)).map_err(Error::io("connecting"))?;
    let prepared = || {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(left(end)))?;
        // A supervisor's host that loses its power says no goodbye. The system gives up what nobody confirms.
        let limit_ms = u32::try_from(GONE_LIMIT.as_millis()).unwrap_or(u32::MAX);
        rustix::net::sockopt::set_tcp_user_timeout(&stream, limit_ms).map_err(std::io::Error::from)
    };
    prepared().map_err(Error::io("preparing the connection"))?;
    Ok(stream)
}

/// The next word of a supervisor that has proved nothing yet, which is a short one; until `end`.
pub(crate) fn hear(stream: &TcpStream, end: Instant) -> Result<FromSupervisor> {
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
    read(&mut header).map_err(Error::io("waiting for the supervisor's word"))?;
    let mut frame = vec![0; frame_bytes(header, UNPROVEN_BYTES_MAX)?];
    read(&mut frame).map_err(Error::io("reading the supervisor's word"))?;
    FromSupervisor::read(&frame)
}

fn left(end: Instant) -> Duration {
    end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}
