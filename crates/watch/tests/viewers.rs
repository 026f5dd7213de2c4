//! Viewers: who may join, what they receive, what they may request, and that nothing waits for them.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use shardwise_journal::{Entry, EntryKind, Start, Step};
use shardwise_watch::{
    Client, Error, Event, History, ModelAxes, Order, RankIdentity, RankStatus, Reporter, Request, Secret, Server,
    Update, Viewer,
};

const LIMIT: Duration = Duration::from_secs(10);

fn server(secret: &Secret, ranks: usize) -> Server {
    let mut server = Server::bind("127.0.0.1:0".parse().unwrap(), secret.clone(), ranks, 1).unwrap();
    server.set_heartbeat(Duration::from_millis(20));
    server
}

/// Polls until `done` returns true, and returns all events.
fn until(server: &mut Server, mut done: impl FnMut(&mut Server, &[Event]) -> bool) -> Vec<Event> {
    let (end, mut events) = (Instant::now() + LIMIT, Vec::new());
    while !done(server, &events) {
        assert!(Instant::now() < end, "timed out with these events: {events:?}");
        events.extend(server.poll(Duration::from_millis(20)).unwrap());
    }
    events
}

fn spawn_viewer(address: SocketAddr, secret: &Secret) -> JoinHandle<Result<Viewer, Error>> {
    let secret = secret.clone();
    std::thread::spawn(move || Viewer::join(address, &secret, LIMIT))
}

fn viewer(server: &mut Server, secret: &Secret) -> Viewer {
    let (viewer, before) = (spawn_viewer(server.address(), secret), server.viewers());
    until(server, |server, _| server.viewers() > before);
    viewer.join().unwrap().unwrap()
}

fn rank(server: &mut Server, secret: &Secret, rank: u32) -> (Reporter, mpsc::Receiver<Order>) {
    let (address, secret, ranks) = (server.address(), secret.clone(), server.ranks().len() as u32);
    let client = std::thread::spawn(move || {
        let identity = RankIdentity { rank, ranks, host: "a".to_string(), pid: 1, attempt: 1 };
        Client::join(&[address], &secret, &identity, LIMIT).unwrap()
    });
    until(server, |_, events| events.contains(&Event::Joined { rank: rank as usize }));
    let (sender, orders) = mpsc::channel();
    let status = || RankStatus { step: 7, phase: "forward".to_string(), ..RankStatus::default() };
    (client.join().unwrap().start_reporting(status, move |order| drop(sender.send(order))).unwrap(), orders)
}

fn step(step: u64) -> Entry {
    Entry { time_s: step as f64, kind: EntryKind::Step(Step { step, loss: f64::NAN, ..Step::default() }) }
}

fn number(entry: &Entry) -> u64 {
    let EntryKind::Step(step) = &entry.kind else { panic!("{entry:?}") };
    step.step
}

/// Returns what a viewer receives until `done` returns true.
fn receive_until(server: &mut Server, viewer: &mut Viewer, mut done: impl FnMut(&[Update]) -> bool) -> Vec<Update> {
    let mut updates = Vec::new();
    until(server, |_, _| {
        updates.extend(viewer.receive().unwrap());
        done(&updates)
    });
    updates
}

fn steps(updates: &[Update]) -> Vec<u64> {
    let step = |update: &Update| if let Update::Entry(entry) = update { Some(number(entry)) } else { None };
    updates.iter().filter_map(step).collect()
}

#[test]
fn a_viewer_receives_old_and_new_entries_and_the_state_of_the_ranks() {
    let secret = Secret::new().unwrap();
    let mut server = server(&secret, 2);
    server.set_axes(ModelAxes { pipeline: 2, ..ModelAxes::default() });
    let mut earlier = History::default();
    earlier.add(step(1));
    server.set_history(earlier);
    server.publish(step(2));
    let (reporter, _orders) = rank(&mut server, &secret, 0);
    let mut viewer = viewer(&mut server, &secret);
    reporter.send_entry(&step(3));
    // An entry of rank 0 reaches the supervisor, which publishes it.
    let events = until(&mut server, |_, events| !events.is_empty());
    let [Event::Entry(entry)] = &events[..] else { panic!("{events:?}") };
    server.publish((**entry).clone());
    let is_complete = |updates: &[Update]| {
        let is_training = |update: &Update| matches!(update, Update::Snapshot(snapshot) if snapshot.steps == (7, 7));
        steps(updates) == [1, 2, 3] && updates.iter().any(is_training)
    };
    let updates = receive_until(&mut server, &mut viewer, is_complete);
    let snapshot =
        |update: &Update| if let Update::Snapshot(snapshot) = update { Some(snapshot.clone()) } else { None };
    let last = updates.iter().rev().find_map(snapshot).unwrap();
    assert_eq!((last.ranks, last.connected, last.not_joined, last.shown[0].activity.as_str()), (2, 1, 1, "forward"));
    assert_eq!(last.shown[1].coordinates, "stage 1");

    drop(viewer);
    until(&mut server, |server, _| server.viewers() == 0);
}

#[test]
fn a_request_becomes_an_order_to_the_lowest_rank_only() {
    let secret = Secret::new().unwrap();
    let mut server = server(&secret, 2);
    assert!(!server.order_one(Order::Checkpoint), "no rank is connected");
    let (_second, second_orders) = rank(&mut server, &secret, 1);
    let (_first, first_orders) = rank(&mut server, &secret, 0);
    let mut viewer = viewer(&mut server, &secret);
    viewer.request(Request::Trace { steps: 3 }).unwrap();
    // More requests than a viewer may send in this time.
    (0..100).for_each(|_| viewer.request(Request::Save).unwrap());
    let events = until(&mut server, |_, events| !events.is_empty());
    assert_eq!(events[0], Event::Requested(Request::Trace { steps: 3 }));
    assert!(events.len() < 10, "{events:?}");
    assert!(server.order_one(Order::Trace { steps: 3 }));
    server.answer("as you wish\u{7}");
    let is_answered = |updates: &[Update]| updates.contains(&Update::Answer("as you wish ".to_string()));
    receive_until(&mut server, &mut viewer, is_answered);
    assert_eq!(first_orders.recv_timeout(LIMIT).unwrap(), Order::Trace { steps: 3 });
    assert!(second_orders.recv_timeout(Duration::from_millis(200)).is_err());
}

#[test]
fn a_viewer_without_the_secret_receives_nothing() {
    let secret = Secret::new().unwrap();
    let mut server = server(&secret, 1);
    server.publish(step(1));
    let stranger = spawn_viewer(server.address(), &Secret::new().unwrap());
    until(&mut server, |server, _| server.rejected() == 1);
    assert!(matches!(stranger.join().unwrap(), Err(Error::WrongSecret { .. })));
    assert_eq!((server.viewers(), server.connections()), (0, 0));

    // A program at a supervisor's port that does not know the secret is not trusted either.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let viewer = spawn_viewer(listener.local_addr().unwrap(), &secret);
    let (mut stream, _) = listener.accept().unwrap();
    let digits = "ab".repeat(32);
    send(&mut stream, format!(r#"{{"challenge":{{"nonce":"{digits}"}}}}"#).as_bytes());
    receive(&mut stream);
    send(&mut stream, format!(r#"{{"welcome":{{"proof":"{digits}","heartbeat_ms":1}}}}"#).as_bytes());
    assert!(matches!(viewer.join().unwrap(), Err(Error::NotSupervisor { .. })));
}

/// The raw connection of an authenticated viewer.
fn raw_viewer(server: &mut Server, secret: &Secret) -> TcpStream {
    let relay = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let viewer = spawn_viewer(relay.local_addr().unwrap(), secret);
    let (mut near, _) = relay.accept().unwrap();
    let mut far = TcpStream::connect(server.address()).unwrap();
    until(server, |server, _| server.connections() > 0);
    send(&mut near, &receive(&mut far));
    send(&mut far, &receive(&mut near));
    until(server, |server, _| server.viewers() == 1);
    send(&mut near, &receive(&mut far));
    viewer.join().unwrap().unwrap();
    far
}

#[test]
fn a_viewer_cannot_speak_for_a_rank() {
    let secret = Secret::new().unwrap();
    let messages: [&[u8]; 4] = [
        br#"{"bye":{"code":0}}"#,
        br#"{"note":{"text":"all is well"}}"#,
        br#"{"entry":{"time_s":1,"kind":"note","step":1,"text":"x"}}"#,
        br#"{"order":"save"}"#,
    ];
    for message in messages {
        let mut server = server(&secret, 1);
        let mut viewer = raw_viewer(&mut server, &secret);
        send(&mut viewer, message);
        let events = until(&mut server, |server, _| server.viewers() == 0);
        assert!(events.is_empty() && server.connections() == 0 && server.not_joined() == [0], "{events:?}");
    }
}

#[test]
fn only_rank_0_may_send_journal_entries() {
    let secret = Secret::new().unwrap();
    let mut server = server(&secret, 2);
    let (reporter, _orders) = rank(&mut server, &secret, 1);
    reporter.send_entry(&step(1));
    let events = until(&mut server, |_, events| events.len() == 2);
    assert!(matches!(&events[0], Event::Malformed { rank: 1, error } if error.contains("only rank 0")), "{events:?}");
}

#[test]
fn a_flood_of_entries_does_not_delay_other_messages() {
    let secret = Secret::new().unwrap();
    let mut server = server(&secret, 1);
    let (reporter, _orders) = rank(&mut server, &secret, 0);
    let recipe = "x".repeat(10_000);
    let start = Entry { time_s: 0., kind: EntryKind::Start(Box::new(Start { recipe, ..Start::default() })) };
    let flood = std::thread::spawn(move || {
        (0..20_000).for_each(|_| reporter.send_entry(&start));
        reporter
    });
    while !flood.is_finished() {
        let events = server.poll(Duration::from_millis(20)).unwrap();
        assert!(events.len() <= 256, "{} entries in one poll", events.len());
    }
    let reporter = flood.join().unwrap();
    reporter.bye(0);
    until(&mut server, |_, events| events.contains(&Event::Left { rank: 0, code: Some(0) }));
}

#[test]
fn a_viewer_that_does_not_read_is_dropped_and_others_receive_everything() {
    let secret = Secret::new().unwrap();
    let mut server = server(&secret, 1);
    let slow = viewer(&mut server, &secret);
    let mut quick = viewer(&mut server, &secret);
    let text = "y".repeat(8 << 10);
    let (mut published, mut received) = (0, 0);
    until(&mut server, |server, _| {
        // As fast as the quick one reads them.
        for _ in 0..64 {
            server.publish(Entry { time_s: 1., kind: EntryKind::Note { step: 1, text: text.clone() } });
            published += 1;
        }
        received += quick.receive().unwrap().iter().filter(|update| matches!(update, Update::Entry(_))).count();
        server.viewers() == 1
    });
    until(&mut server, |_, _| {
        received += quick.receive().unwrap().iter().filter(|update| matches!(update, Update::Entry(_))).count();
        received == published
    });
    drop(slow);
}

#[test]
fn the_number_of_viewers_is_limited() {
    let secret = Secret::new().unwrap();
    let mut server = server(&secret, 1);
    let viewers: Vec<Viewer> = (0..16).map(|_| viewer(&mut server, &secret)).collect();
    let one_more = spawn_viewer(server.address(), &secret);
    until(&mut server, |_, _| one_more.is_finished());
    let error = one_more.join().unwrap().unwrap_err();
    assert!(error.to_string().contains("it has 16 viewers already"), "{error}");
    drop(viewers);
    until(&mut server, |server, _| server.viewers() == 0);
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
