//! A million invalid or absurd messages to a running supervisor, from unauthenticated peers and from broken ranks.
//!
//! The random numbers come from a seed, so failures are reproducible.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use shardwise_harness::Stopwatch;
use shardwise_watch::{Cause, Client, Event, FailureKind, RankIdentity, Secret, Server, explain};

/// The number of unauthenticated peers, each with its own nonsense; set `STRANGERS=1000000` in the environment for more.
fn strangers() -> u64 {
    std::env::var("STRANGERS").map_or(24_000, |count| count.parse().unwrap())
}
const RANKS: u32 = 8_000;
/// Valid but absurd messages of each rank, before it sends an invalid one.
const ABSURD_EACH: u64 = 125;
/// Peers that keep their connection open for as long as they can.
const IDLE_MAX: usize = 500;

#[test]
fn a_million_nonsense_messages_change_nothing() {
    let secret = Secret::new().unwrap();
    // On every address of this host, so that there are enough ports for all connections.
    let mut server = Server::bind("0.0.0.0:0".parse().unwrap(), secret.clone(), RANKS as usize, 1).unwrap();
    let port = server.address().port();
    // All messages, and the valid ones that cause an event.
    let (sent, valid) = (AtomicU64::new(0), AtomicU64::new(0));
    let started = Stopwatch::start();
    std::thread::scope(|scope| {
        let nonsense = scope.spawn(|| {
            let (mut random, mut idle) = (Random(0x5eed), VecDeque::new());
            for number in 0..strangers() {
                let address = SocketAddr::from(([127, 0, (number >> 8) as u8, number as u8 | 1], port));
                let (stream, count) = run_stranger(address, &mut random);
                sent.fetch_add(count, Ordering::Relaxed);
                idle.extend((number % 4 == 0).then_some(stream));
                if idle.len() > IDLE_MAX {
                    idle.pop_front();
                }
                if let Some(rank) = u32::try_from(number).ok().filter(|&rank| rank < RANKS) {
                    let (count, events) = run_broken_rank(address, &secret, rank, &mut random);
                    sent.fetch_add(count, Ordering::Relaxed);
                    valid.fetch_add(events, Ordering::Relaxed);
                }
            }
        });
        let (mut early_kb, mut connections, mut events) = (None, 0, [0u64; 6]);
        let mut end = None;
        while server.connections() > 0 || end.is_none_or(|end| Instant::now() < end) {
            for event in server.poll(Duration::from_millis(10)).unwrap() {
                events[kind(&event)] += 1;
            }
            connections = connections.max(server.connections());
            // After the first tenth, all buffers have reached their largest size, except for the status of each rank.
            if early_kb.is_none() && sent.load(Ordering::Relaxed) > 100_000 {
                early_kb = Some(resident_kb());
            }
            if end.is_none() && nonsense.is_finished() {
                end = Some(Instant::now() + Duration::from_millis(200));
            }
        }
        nonsense.join().unwrap();
        let [joined, left, malformed, failed, notes, refused] = events;
        let grown_kb = resident_kb().saturating_sub(early_kb.unwrap());
        let (sent, valid) = (sent.load(Ordering::Relaxed), valid.load(Ordering::Relaxed));
        println!(
            "{sent} messages in {:.1} s; {} rejected, {joined} joined, {malformed} malformed, {left} left; at most {connections} \
             connections at once; memory grew by {grown_kb} KiB",
            started.elapsed().as_secs_f64(),
            server.rejected(),
        );
        assert!(sent >= 1_000_000);
        assert_eq!((joined, left, refused), (u64::from(RANKS), u64::from(RANKS), 0));
        assert!(failed + notes >= valid, "{} of {valid} valid messages arrived", failed + notes);
        assert!(server.rejected() >= strangers() && malformed > u64::from(RANKS) / 2);
        // The last status of each rank remains: at most 64 KiB, and less than one here.
        assert!(grown_kb < 16 << 10, "{grown_kb} KiB");
        assert!(connections < IDLE_MAX + 50, "{connections}");
    });
    // The supervisor still explains failures.
    let ranks: Vec<usize> = (0..RANKS as usize).collect();
    for cause in [Cause::Silent { ranks }, Cause::Failed { rank: 0, kind: FailureKind::Timeout, text: "x".into() }] {
        assert!(explain(server.ranks(), &cause, Instant::now()).len() < 10_000);
    }
    assert!(started.elapsed() < Duration::from_secs(60 + strangers() / 10_000));
}

fn kind(event: &Event) -> usize {
    match event {
        Event::Joined { .. } => 0,
        Event::Left { .. } => 1,
        Event::Malformed { error, .. } => {
            assert!(error.len() < 1000, "{error}");
            2
        }
        Event::Failed { .. } => 3,
        Event::Note { .. } => 4,
        Event::Refused { .. } => 5,
        Event::Entry(_) | Event::Requested(_) => panic!("nobody sent such a message: {event:?}"),
    }
}

/// A program that has found the port. Returns its connection and the number of messages that it sent.
fn run_stranger(address: SocketAddr, random: &mut Random) -> (TcpStream, u64) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    if random.below(2) == 0 {
        drop(stream.read(&mut [0; 256]));
    }
    let (count, mut sent) = (random.below(4), Vec::new());
    for _ in 0..count {
        nonsense(random, &mut sent);
    }
    // The supervisor may close the connection in between.
    drop(stream.write_all(&sent));
    (stream, count)
}

/// A rank that authenticates and then sends nonsense. Returns the number of its messages, and of those that cause an event.
fn run_broken_rank(address: SocketAddr, secret: &Secret, rank: u32, random: &mut Random) -> (u64, u64) {
    let identity = RankIdentity { rank, ranks: RANKS, host: format!("n{}", rank / 8), pid: rank, attempt: 1 };
    let client = Client::join(&[address], secret, &identity, Duration::from_secs(10)).unwrap();
    let mut sent = Vec::new();
    let events = (0..ABSURD_EACH).map(|_| u64::from(absurd(random, &mut sent))).sum();
    let more = random.below(3);
    for _ in 0..=more {
        nonsense(random, &mut sent);
    }
    drop(client.into_stream().write_all(&sent));
    (ABSURD_EACH + more + 1, events)
}

/// Adds a valid message with absurd content. Returns whether it causes an event.
fn absurd(random: &mut Random, out: &mut Vec<u8>) -> bool {
    let number = [0, 1, u64::MAX, random.next()][random.below(4) as usize];
    let ranks = ["", "0-4294967295", "7", "0-4294967294/2", "3,1,2"][random.below(5) as usize];
    let name = ["", "block.7", "\\u00e9\\\"", "x' (0 B, shard 0-1): it has"][random.below(4) as usize];
    let call = format!(
        r#"{{"group":"{name}","ranks":"{ranks}","number":{number},"verb":"{name}","label":"{name}","elements":{number},"bytes":{number},"dtype":"","state":"in_progress","in_state_ms":{number},"waiting_for":"{ranks}"}}"#
    );
    let calls = vec![call; random.below(3) as usize].join(",");
    let status = format!(
        r#"{{"step":{number},"first_step":{number},"phase":"{name}","unit":"{name}","in_phase_ms":{number},"calls":[{calls}]}}"#
    );
    let form = random.below(4);
    let message = match form {
        0 => format!(r#"{{"failed":{{"kind":"timeout","text":"{name}","status":{status}}}}}"#),
        1 => format!(r#"{{"note":{{"text":"{name}"}}}}"#),
        _ => format!(r#"{{"heartbeat":{status}}}"#),
    };
    frame(message.as_bytes(), out);
    form < 2
}

/// Adds an invalid message.
fn nonsense(random: &mut Random, out: &mut Vec<u8>) {
    let digits = "00".repeat(32);
    match random.below(12) {
        0 => out.extend((0..random.below(64)).map(|_| random.next() as u8)),
        1 => out.extend_from_slice(&(random.next() as u32).to_le_bytes()),
        2 => out.extend_from_slice(&[0; 4]),
        3 => frame(&vec![b'['; random.below(2000) as usize + 1], out),
        4 => frame(br#"{"heartbeat":{"step":-1}}"#, out),
        5 => frame(format!(r#"{{"bye":{{"code":{}}}}}"#, random.next()).as_bytes(), out),
        6 => frame(
            format!(
                r#"{{"hello":{{"rank":{},"ranks":{RANKS},"host":"a","pid":1,"attempt":1,"nonce":"{digits}","proof":"{digits}"}}}}"#,
                random.below(u64::from(RANKS))
            )
            .as_bytes(),
            out,
        ),
        7 => {
            let mut whole = Vec::new();
            absurd(random, &mut whole);
            whole.truncate(random.below(whole.len() as u64) as usize);
            out.extend(whole);
        }
        8 => {
            let mut whole = Vec::new();
            absurd(random, &mut whole);
            let index = 4 + random.below(whole.len() as u64 - 4) as usize;
            whole[index] = random.next() as u8;
            out.extend(whole);
        }
        9 => frame(format!(r#"{{"view":{{"nonce":"{digits}","proof":"{digits}"}}}}"#).as_bytes(), out),
        10 => frame(br#"{"entry":{"time_s":1,"kind":"ended","code":0,"restarts":0,"lost_s":0}}"#, out),
        _ => frame(format!(r#"{{"note":{{"text":"{}"}}}}"#, "y".repeat(8193)).as_bytes(), out),
    }
}

fn frame(bytes: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(&u32::try_from(bytes.len()).unwrap().to_le_bytes());
    out.extend_from_slice(bytes);
}

fn resident_kb() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }
}
