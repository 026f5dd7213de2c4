//! Supervisor and ranks on the loopback device: who may join, what arrives, and what happens when one side is gone.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{self, Receiver};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use shardwise_watch::{
    Client, Error, Event, FailureKind, Order, Presence, RankIdentity, RankStatus, Reporter, Secret, Server,
};

const LIMIT: Duration = Duration::from_secs(10);

fn server(secret: &Secret, ranks: usize) -> Server {
    let mut server = Server::bind("127.0.0.1:0".parse().unwrap(), secret.clone(), ranks, 1).unwrap();
    server.set_heartbeat(Duration::from_millis(20));
    server
}

fn identity(rank: u32, ranks: u32) -> RankIdentity {
    RankIdentity { rank, ranks, host: "a".to_string(), pid: 4711 + rank, attempt: 1 }
}

/// Polls until `done` returns true, and returns all events.
fn until(server: &mut Server, mut done: impl FnMut(&Server, &[Event]) -> bool) -> Vec<Event> {
    let (end, mut events) = (Instant::now() + LIMIT, Vec::new());
    while !done(server, &events) {
        assert!(Instant::now() < end, "timed out with these events: {events:?}");
        events.extend(server.poll(Duration::from_millis(20)).unwrap());
    }
    events
}

fn spawn_join(address: SocketAddr, secret: &Secret, identity: RankIdentity) -> JoinHandle<Result<Client, Error>> {
    let secret = secret.clone();
    std::thread::spawn(move || Client::join(&[address], &secret, &identity, LIMIT))
}

fn join(server: &mut Server, secret: &Secret, rank: u32) -> (Reporter, Receiver<Order>) {
    let ranks = u32::try_from(server.ranks().len()).unwrap();
    let client = spawn_join(server.address(), secret, identity(rank, ranks));
    let rank = rank as usize;
    let events = until(server, |_, events| events.contains(&Event::Joined { rank }));
    assert_eq!(events, [Event::Joined { rank }]);
    let (sender, orders) = mpsc::channel();
    let step = std::sync::atomic::AtomicU64::new(0);
    let status = move || RankStatus {
        step: step.fetch_add(1, std::sync::atomic::Ordering::Relaxed),
        phase: "forward".to_string(),
        ..RankStatus::default()
    };
    let client = client.join().unwrap().unwrap();
    (client.start_reporting(status, move |order| drop(sender.send(order))).unwrap(), orders)
}

#[test]
fn a_rank_joins_reports_and_leaves() {
    let secret = Secret::new().unwrap();
    let mut server = server(&secret, 2);
    assert_eq!(server.not_joined(), [0, 1]);
    let (reporter, orders) = join(&mut server, &secret, 1);
    assert_eq!(server.not_joined(), [0]);
    until(&mut server, |server, _| server.ranks()[1].status.step >= 3);
    let info = &server.ranks()[1];
    assert_eq!((info.host.as_str(), info.pid, info.presence), ("a", 4712, Presence::Connected));
    assert_eq!(info.status.phase, "forward");

    let last = info.last_heard.unwrap();
    let limit = Duration::from_secs(5);
    assert!(server.silent(last + limit, limit).is_empty());
    assert_eq!(
        server.silent(last + limit + Duration::from_millis(1), limit),
        [1],
        "rank 0 has not joined, so it is not silent"
    );

    server.order(Order::Save);
    assert_eq!(orders.recv_timeout(LIMIT).unwrap(), Order::Save);
    reporter.note("the disk is full\u{1b}[2J");
    reporter.report_failure(FailureKind::Timeout, "all-gather #7\nmade no progress");
    reporter.bye(3);
    let events = until(&mut server, |_, events| events.len() == 3);
    let expected = [
        Event::Note { rank: 1, text: "the disk is full [2J".to_string() },
        Event::Failed { rank: 1, kind: FailureKind::Timeout, text: "all-gather #7\nmade no progress".to_string() },
        Event::Left { rank: 1, code: Some(3) },
    ];
    assert_eq!(events, expected);
    assert_eq!(server.ranks()[1].presence, Presence::Left { code: Some(3) });
    assert_eq!(server.connections(), 0);
    assert!(server.silent(last + 2 * LIMIT, limit).is_empty(), "a rank that has left is not silent");
    assert!(orders.recv_timeout(LIMIT).is_err(), "no orders arrive after a bye");
}

#[test]
fn neither_side_talks_to_a_peer_without_the_secret() {
    let secret = Secret::new().unwrap();
    let mut server = server(&secret, 2);
    let client = spawn_join(server.address(), &Secret::new().unwrap(), identity(0, 2));
    let events = until(&mut server, |server, _| server.rejected() == 1);
    let error = client.join().unwrap().unwrap_err();
    assert!(matches!(error, Error::WrongSecret { .. }), "{error}");
    assert!(events.is_empty() && server.connections() == 0 && server.not_joined().len() == 2);
    for shown in [format!("{error}"), format!("{error:?}"), format!("{:?}", server.ranks())] {
        assert!(!shown.contains(&secret.to_hex()));
    }

    // A program that took the supervisor's port and answers as it would, with invented proofs.
    let digits = "ab".repeat(32);
    let answers = [
        format!(r#"{{"welcome":{{"proof":"{digits}","heartbeat_ms":1}}}}"#),
        format!(r#"{{"refused":{{"proof":"{digits}","reason":"go away"}}}}"#),
        r#"{"order":"save"}"#.to_string(),
        "HTTP/1.1 400 Bad Request".to_string(),
    ];
    for answer in answers {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = spawn_join(listener.local_addr().unwrap(), &secret, identity(0, 2));
        let (mut stream, _) = listener.accept().unwrap();
        send(&mut stream, format!(r#"{{"challenge":{{"nonce":"{digits}"}}}}"#).as_bytes());
        let hello = String::from_utf8(receive(&mut stream)).unwrap();
        assert!(hello.contains("hello") && !hello.contains(&secret.to_hex()), "{hello}");
        send(&mut stream, answer.as_bytes());
        let error = client.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::NotSupervisor { .. }), "{answer}: {error}");
    }
}

#[test]
fn a_replayed_hello_is_rejected() {
    let secret = Secret::new().unwrap();
    let mut server = server(&secret, 1);
    let relay = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = spawn_join(relay.local_addr().unwrap(), &secret, identity(0, 1));
    let (mut rank, _) = relay.accept().unwrap();
    let mut supervisor = TcpStream::connect(server.address()).unwrap();
    until(&mut server, |server, _| server.connections() == 1);
    send(&mut rank, &receive(&mut supervisor));
    let hello = receive(&mut rank);
    // Another connection has another challenge.
    let mut second = TcpStream::connect(server.address()).unwrap();
    until(&mut server, |server, _| server.connections() == 2);
    receive(&mut second);
    send(&mut second, &hello);
    assert!(until(&mut server, |server, _| server.rejected() == 1).is_empty());
    assert_eq!(receive(&mut second), br#"{"wrong_secret":{}}"#);
    drop((rank, relay, supervisor));
    drop(client);
}

#[test]
fn a_rank_can_join_once_and_in_its_own_attempt_only() {
    let secret = Secret::new().unwrap();
    let mut server = server(&secret, 2);
    let (_reporter, _orders) = join(&mut server, &secret, 0);
    let wrong = [
        (identity(0, 2), "it is already connected, as process 4711 on host a"),
        (identity(1, 3), "its world size is 3, but the supervisor's is 2"),
        (identity(2, 2), "the world size is 2, and ranks are counted from 0"),
        (RankIdentity { attempt: 2, ..identity(1, 2) }, "it belongs to attempt 2, but this is attempt 1"),
    ];
    for (identity, reason) in wrong {
        let rank = identity.rank;
        let client = spawn_join(server.address(), &secret, identity);
        let events = until(&mut server, |_, events| !events.is_empty());
        assert_eq!(events, [Event::Refused { rank, reason: reason.to_string() }]);
        let error = client.join().unwrap().unwrap_err();
        assert_eq!(error.to_string(), format!("the supervisor refused rank {rank}: {reason}"));
    }
    assert_eq!(server.connections(), 1);
}

#[test]
fn a_rank_whose_supervisor_is_gone_is_ordered_to_end() {
    let secret = Secret::new().unwrap();
    let mut server = server(&secret, 1);
    let (_reporter, orders) = join(&mut server, &secret, 0);
    drop(server);
    let Order::End { reason } = orders.recv_timeout(LIMIT).unwrap() else { panic!("an order to end") };
    assert!(reason.starts_with("the supervisor is gone"), "{reason}");
}

#[test]
fn an_order_to_end_arrives_once_and_also_at_late_ranks() {
    let secret = Secret::new().unwrap();
    let mut server = server(&secret, 2);
    let (_first, orders) = join(&mut server, &secret, 0);
    let end = Order::End { reason: "rank 1 died".to_string() };
    server.order(end.clone());
    assert_eq!(orders.recv_timeout(LIMIT).unwrap(), end);
    let (_second, late) = join(&mut server, &secret, 1);
    assert_eq!(late.recv_timeout(LIMIT).unwrap(), end);
    drop(server);
    assert!(
        orders.recv_timeout(LIMIT).is_err() && late.recv_timeout(LIMIT).is_err(),
        "both threads end without another order"
    );
}

#[test]
fn a_rank_that_dies_or_sends_nonsense_has_left() {
    let secret = Secret::new().unwrap();
    let mut server = server(&secret, 2);
    let (reporter, _orders) = join(&mut server, &secret, 0);
    drop(reporter);
    let events = until(&mut server, |_, events| !events.is_empty());
    assert_eq!(events, [Event::Left { rank: 0, code: None }]);
    let again = spawn_join(server.address(), &secret, identity(0, 2));
    until(&mut server, |_, events| !events.is_empty());
    assert!(again.join().unwrap().unwrap_err().to_string().contains("has left"));

    let client = spawn_join(server.address(), &secret, identity(1, 2));
    until(&mut server, |_, events| events.contains(&Event::Joined { rank: 1 }));
    let mut stream = client.join().unwrap().unwrap().into_stream();
    send(&mut stream, br#"{"heartbeat":{"step":-1}}"#);
    let events = until(&mut server, |_, events| events.len() == 2);
    assert!(matches!(&events[0], Event::Malformed { rank: 1, error } if error.contains("malformed")), "{events:?}");
    assert_eq!(events[1], Event::Left { rank: 1, code: None });
    assert_eq!(server.connections(), 0);
}

#[test]
fn a_late_supervisor_is_waited_for_and_a_missing_one_is_named() {
    let secret = Secret::new().unwrap();
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let error = Client::join(&[free], &secret, &identity(0, 1), Duration::from_millis(200)).unwrap_err();
    assert!(error.to_string().contains(&free.to_string()), "{error}");
    assert!(Client::join(&[], &secret, &identity(0, 1), LIMIT).unwrap_err().to_string().contains("none was given"));

    let client = spawn_join(free, &secret, identity(0, 1));
    std::thread::sleep(Duration::from_millis(150));
    let mut server = Server::bind(free, secret, 1, 1).unwrap();
    until(&mut server, |_, events| !events.is_empty());
    assert_eq!(client.join().unwrap().unwrap().heartbeat_interval(), Duration::from_millis(500));
}

#[test]
fn the_reporter_thread_sleeps() {
    let secret = Secret::new().unwrap();
    let mut server = server(&secret, 1);
    let (_reporter, _orders) = join(&mut server, &secret, 0);
    until(&mut server, |server, _| server.ranks()[0].status.step > 0);
    // The busiest thread of that name: other tests may run at the same time, and their threads may end meanwhile.
    let busy = || -> Duration {
        let threads = std::fs::read_dir("/proc/self/task").unwrap().flatten().map(|thread| thread.path());
        let named =
            threads.filter(|thread| std::fs::read_to_string(thread.join("comm")).is_ok_and(|name| name == "watch\n"));
        let spent = named.filter_map(|thread| std::fs::read_to_string(thread.join("schedstat")).ok());
        spent.filter_map(|spent| spent.split(' ').next()?.parse().ok()).map(Duration::from_nanos).max().unwrap()
    };
    let (before, started) = (busy(), Instant::now());
    until(&mut server, |_, _| started.elapsed() > Duration::from_secs(1));
    assert!(server.ranks()[0].status.step > 10, "fifty heartbeats are due");
    let after = busy();
    assert!(after < before + Duration::from_millis(100), "{before:?} at first, {after:?} a second later");
}

#[test]
fn unauthenticated_connections_are_limited_in_number_and_time() {
    let secret = Secret::new().unwrap();
    let mut server = server(&secret, 1);
    let strangers: Vec<TcpStream> = (0..400)
        .map(|_| {
            let stream = TcpStream::connect(server.address()).unwrap();
            server.poll(Duration::ZERO).unwrap();
            stream
        })
        .collect();
    until(&mut server, |server, _| server.rejected() >= 400 - 257);
    assert_eq!(server.connections(), 257, "one for each rank, and 256");
    // A rank can still join.
    let (_reporter, _orders) = join(&mut server, &secret, 0);
    let started = Instant::now();
    until(&mut server, |server, _| server.connections() == 1);
    assert!(started.elapsed() < Duration::from_secs(6));
    drop(strangers);
}

fn send(stream: &mut TcpStream, frame: &[u8]) {
    stream.write_all(&u32::try_from(frame.len()).unwrap().to_le_bytes()).unwrap();
    stream.write_all(frame).unwrap();
}

fn receive(stream: &mut TcpStream) -> Vec<u8> {
    let mut header = [0; 4];
    stream.read_exact(&mut header).unwrap();
    let mut frame = vec![0; u32::from_le_bytes(header) as usize];
    stream.read_exact(&mut frame).unwrap();
    frame
}
