//! Supervisor and ranks on the loopback device: who gets in, what arrives, and what becomes of those who are left alone.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{self, Receiver};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use shardwise_watch::{Client, Error, Event, FailureKind, Order, Place, Presence, Secret, Server, Standing, Watch};

const LIMIT: Duration = Duration::from_secs(10);

fn server(secret: &Secret, ranks: usize) -> Server {
    let mut server = Server::bind("127.0.0.1:0".parse().unwrap(), secret.clone(), ranks, 1).unwrap();
    server.set_beat(Duration::from_millis(20));
    server
}

fn place(rank: u32, ranks: u32) -> Place {
    Place { rank, ranks, host: "a".to_string(), pid: 4711 + rank, attempt: 1 }
}

/// Polls until `done` says so, and returns what has happened.
fn until(server: &mut Server, mut done: impl FnMut(&Server, &[Event]) -> bool) -> Vec<Event> {
    let (end, mut events) = (Instant::now() + LIMIT, Vec::new());
    while !done(server, &events) {
        assert!(Instant::now() < end, "only this has happened: {events:?}");
        events.extend(server.poll(Duration::from_millis(20)).unwrap());
    }
    events
}

fn joining(address: SocketAddr, secret: &Secret, place: Place) -> JoinHandle<Result<Client, Error>> {
    let secret = secret.clone();
    std::thread::spawn(move || Client::join(&[address], &secret, &place, LIMIT))
}

fn joined(server: &mut Server, secret: &Secret, rank: u32) -> (Watch, Receiver<Order>) {
    let ranks = u32::try_from(server.ranks().len()).unwrap();
    let client = joining(server.address(), secret, place(rank, ranks));
    let rank = rank as usize;
    let events = until(server, |_, events| events.contains(&Event::Joined { rank }));
    assert_eq!(events, [Event::Joined { rank }]);
    let (sender, orders) = mpsc::channel();
    let step = std::sync::atomic::AtomicU64::new(0);
    let standing = move || Standing {
        step: step.fetch_add(1, std::sync::atomic::Ordering::Relaxed),
        phase: "forward".to_string(),
        ..Standing::default()
    };
    (client.join().unwrap().unwrap().watch(standing, move |order| drop(sender.send(order))).unwrap(), orders)
}

#[test]
fn a_rank_joins_beats_speaks_and_leaves() {
    let secret = Secret::new().unwrap();
    let mut server = server(&secret, 2);
    assert_eq!(server.awaited(), [0, 1]);
    let (watch, orders) = joined(&mut server, &secret, 1);
    assert_eq!(server.awaited(), [0]);
    until(&mut server, |server, _| server.ranks()[1].standing.step >= 3);
    let seen = &server.ranks()[1];
    assert_eq!((seen.host.as_str(), seen.pid, seen.presence), ("a", 4712, Presence::Here));
    assert_eq!(seen.standing.phase, "forward");

    let last = seen.heard.unwrap();
    let limit = Duration::from_secs(5);
    assert!(server.silent(last + limit, limit).is_empty());
    assert_eq!(
        server.silent(last + limit + Duration::from_millis(1), limit),
        [1],
        "rank 0 has not joined: it is awaited"
    );

    server.order(Order::Save);
    assert_eq!(orders.recv_timeout(LIMIT).unwrap(), Order::Save);
    watch.note("the disk is full\u{1b}[2J");
    watch.failed(FailureKind::Timeout, "all-gather #7\nmade no progress");
    watch.bye(3);
    let events = until(&mut server, |_, events| events.len() == 3);
    let expected = [
        Event::Note { rank: 1, text: "the disk is full [2J".to_string() },
        Event::Failed { rank: 1, kind: FailureKind::Timeout, text: "all-gather #7\nmade no progress".to_string() },
        Event::Left { rank: 1, code: Some(3) },
    ];
    assert_eq!(events, expected);
    assert_eq!(server.ranks()[1].presence, Presence::Left { code: Some(3) });
    assert_eq!(server.connections(), 0);
    assert!(server.silent(last + 2 * LIMIT, limit).is_empty(), "who has left is not silent");
    assert!(orders.recv_timeout(LIMIT).is_err(), "after a bye there are no orders");
}

#[test]
fn neither_side_talks_to_a_stranger() {
    let secret = Secret::new().unwrap();
    let mut server = server(&secret, 2);
    let client = joining(server.address(), &Secret::new().unwrap(), place(0, 2));
    let events = until(&mut server, |server, _| server.strangers() == 1);
    let error = client.join().unwrap().unwrap_err();
    assert!(matches!(error, Error::WrongSecret { .. }), "{error}");
    assert!(events.is_empty() && server.connections() == 0 && server.awaited().len() == 2);
    for shown in [format!("{error}"), format!("{error:?}"), format!("{:?}", server.ranks())] {
        assert!(!shown.contains(&secret.to_hex()));
    }

    // One who has taken the supervisor's port, and answers as it would, with proofs of its own making.
    let digits = "ab".repeat(32);
    let answers = [
        format!(r#"{{"welcome":{{"proof":"{digits}","beat_ms":1}}}}"#),
        format!(r#"{{"refused":{{"proof":"{digits}","reason":"go away"}}}}"#),
        r#"{"order":"save"}"#.to_string(),
        "HTTP/1.1 400 Bad Request".to_string(),
    ];
    for answer in answers {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = joining(listener.local_addr().unwrap(), &secret, place(0, 2));
        let (mut stream, _) = listener.accept().unwrap();
        say(&mut stream, format!(r#"{{"challenge":{{"nonce":"{digits}"}}}}"#).as_bytes());
        let hello = String::from_utf8(heard(&mut stream)).unwrap();
        assert!(hello.contains("hello") && !hello.contains(&secret.to_hex()), "{hello}");
        say(&mut stream, answer.as_bytes());
        let error = client.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::Stranger { .. }), "{answer}: {error}");
    }
}

#[test]
fn a_hello_that_was_overheard_opens_no_second_connection() {
    let secret = Secret::new().unwrap();
    let mut server = server(&secret, 1);
    let relay = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = joining(relay.local_addr().unwrap(), &secret, place(0, 1));
    let (mut rank, _) = relay.accept().unwrap();
    let mut supervisor = TcpStream::connect(server.address()).unwrap();
    until(&mut server, |server, _| server.connections() == 1);
    say(&mut rank, &heard(&mut supervisor));
    let hello = heard(&mut rank);
    // The challenge of another connection is another.
    let mut second = TcpStream::connect(server.address()).unwrap();
    until(&mut server, |server, _| server.connections() == 2);
    heard(&mut second);
    say(&mut second, &hello);
    assert!(until(&mut server, |server, _| server.strangers() == 1).is_empty());
    assert_eq!(heard(&mut second), br#"{"stranger":{}}"#);
    drop((rank, relay, supervisor));
    drop(client);
}

#[test]
fn a_rank_is_one_process_of_this_attempt() {
    let secret = Secret::new().unwrap();
    let mut server = server(&secret, 2);
    let (_watch, _orders) = joined(&mut server, &secret, 0);
    let wrong = [
        (place(0, 2), "it is here already, as process 4711 of host a"),
        (place(1, 3), "it counts 3 ranks, and the supervisor 2"),
        (place(2, 2), "there are 2 ranks, counted from 0"),
        (Place { attempt: 2, ..place(1, 2) }, "it belongs to attempt 2 of the run, and this is attempt 1"),
    ];
    for (place, reason) in wrong {
        let rank = place.rank;
        let client = joining(server.address(), &secret, place);
        let events = until(&mut server, |_, events| !events.is_empty());
        assert_eq!(events, [Event::Refused { rank, reason: reason.to_string() }]);
        let error = client.join().unwrap().unwrap_err();
        assert_eq!(error.to_string(), format!("the supervisor refuses rank {rank}: {reason}"));
    }
    assert_eq!(server.connections(), 1);
}

#[test]
fn a_rank_without_its_supervisor_is_told_to_end() {
    let secret = Secret::new().unwrap();
    let mut server = server(&secret, 1);
    let (_watch, orders) = joined(&mut server, &secret, 0);
    drop(server);
    let Order::End { reason } = orders.recv_timeout(LIMIT).unwrap() else { panic!("an order to end") };
    assert!(reason.starts_with("the supervisor is gone"), "{reason}");
}

#[test]
fn an_order_to_end_comes_once_and_to_those_who_are_late_too() {
    let secret = Secret::new().unwrap();
    let mut server = server(&secret, 2);
    let (_first, orders) = joined(&mut server, &secret, 0);
    let end = Order::End { reason: "rank 1 died".to_string() };
    server.order(end.clone());
    assert_eq!(orders.recv_timeout(LIMIT).unwrap(), end);
    let (_second, late) = joined(&mut server, &secret, 1);
    assert_eq!(late.recv_timeout(LIMIT).unwrap(), end);
    drop(server);
    assert!(
        orders.recv_timeout(LIMIT).is_err() && late.recv_timeout(LIMIT).is_err(),
        "both threads end without a word"
    );
}

#[test]
fn a_rank_that_dies_or_talks_nonsense_has_left() {
    let secret = Secret::new().unwrap();
    let mut server = server(&secret, 2);
    let (watch, _orders) = joined(&mut server, &secret, 0);
    drop(watch);
    let events = until(&mut server, |_, events| !events.is_empty());
    assert_eq!(events, [Event::Left { rank: 0, code: None }]);
    let again = joining(server.address(), &secret, place(0, 2));
    until(&mut server, |_, events| !events.is_empty());
    assert!(again.join().unwrap().unwrap_err().to_string().contains("has left"));

    let client = joining(server.address(), &secret, place(1, 2));
    until(&mut server, |_, events| events.contains(&Event::Joined { rank: 1 }));
    let mut stream = client.join().unwrap().unwrap().into_stream();
    say(&mut stream, br#"{"beat":{"step":-1}}"#);
    let events = until(&mut server, |_, events| events.len() == 2);
    assert!(matches!(&events[0], Event::Malformed { rank: 1, error } if error.contains("malformed")), "{events:?}");
    assert_eq!(events[1], Event::Left { rank: 1, code: None });
    assert_eq!(server.connections(), 0);
}

#[test]
fn a_supervisor_that_comes_late_is_waited_for_and_one_that_never_comes_is_named() {
    let secret = Secret::new().unwrap();
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let error = Client::join(&[free], &secret, &place(0, 1), Duration::from_millis(200)).unwrap_err();
    assert!(error.to_string().contains(&free.to_string()), "{error}");
    assert!(Client::join(&[], &secret, &place(0, 1), LIMIT).unwrap_err().to_string().contains("none was given"));

    let client = joining(free, &secret, place(0, 1));
    std::thread::sleep(Duration::from_millis(150));
    let mut server = Server::bind(free, secret, 1, 1).unwrap();
    until(&mut server, |_, events| !events.is_empty());
    assert_eq!(client.join().unwrap().unwrap().beat_every(), Duration::from_millis(500));
}

#[test]
fn the_thread_of_a_rank_sleeps() {
    let secret = Secret::new().unwrap();
    let mut server = server(&secret, 1);
    let (_watch, _orders) = joined(&mut server, &secret, 0);
    until(&mut server, |server, _| server.ranks()[0].standing.step > 0);
    // Of the busiest thread of that name, should other tests run beside this one, and their threads end meanwhile.
    let busy = || -> Duration {
        let threads = std::fs::read_dir("/proc/self/task").unwrap().flatten().map(|thread| thread.path());
        let named =
            threads.filter(|thread| std::fs::read_to_string(thread.join("comm")).is_ok_and(|name| name == "watch\n"));
        let spent = named.filter_map(|thread| std::fs::read_to_string(thread.join("schedstat")).ok());
        spent.filter_map(|spent| spent.split(' ').next()?.parse().ok()).map(Duration::from_nanos).max().unwrap()
    };
    let (before, started) = (busy(), Instant::now());
    until(&mut server, |_, _| started.elapsed() > Duration::from_secs(1));
    assert!(server.ranks()[0].standing.step > 10, "fifty beats are due");
    let after = busy();
    assert!(after < before + Duration::from_millis(100), "{before:?} at first, {after:?} a second later");
}

#[test]
fn those_who_prove_nothing_are_few_and_do_not_stay() {
    let secret = Secret::new().unwrap();
    let mut server = server(&secret, 1);
    let strangers: Vec<TcpStream> = (0..400)
        .map(|_| {
            let stream = TcpStream::connect(server.address()).unwrap();
            server.poll(Duration::ZERO).unwrap();
            stream
        })
        .collect();
    until(&mut server, |server, _| server.strangers() >= 400 - 257);
    assert_eq!(server.connections(), 257, "one for each rank and 256");
    // A rank comes in all the same.
    let (_watch, _orders) = joined(&mut server, &secret, 0);
    let started = Instant::now();
    until(&mut server, |server, _| server.connections() == 1);
    assert!(started.elapsed() < Duration::from_secs(6));
    drop(strangers);
}

fn say(stream: &mut TcpStream, frame: &[u8]) {
    stream.write_all(&u32::try_from(frame.len()).unwrap().to_le_bytes()).unwrap();
    stream.write_all(frame).unwrap();
}

fn heard(stream: &mut TcpStream) -> Vec<u8> {
    let mut header = [0; 4];
    stream.read_exact(&mut header).unwrap();
    let mut frame = vec![0; u32::from_le_bytes(header) as usize];
    stream.read_exact(&mut frame).unwrap();
    frame
}
