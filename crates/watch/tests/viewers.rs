//! Those who look on: who gets in, what they are shown, what they may ask for, and that nobody waits for them.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use shardwise_journal::{Entry, Start, Step, What};
use shardwise_watch::{
    Client, Error, Event, History, News, Order, Place, Request, Secret, Server, Standing, Viewer, Watch,
};

const LIMIT: Duration = Duration::from_secs(10);

fn server(secret: &Secret, ranks: usize) -> Server {
    let mut server = Server::bind("127.0.0.1:0".parse().unwrap(), secret.clone(), ranks, 1).unwrap();
    server.set_beat(Duration::from_millis(20));
    server
}

/// Polls until `done` says so, and returns what has happened.
fn until(server: &mut Server, mut done: impl FnMut(&mut Server, &[Event]) -> bool) -> Vec<Event> {
    let (end, mut events) = (Instant::now() + LIMIT, Vec::new());
    while !done(server, &events) {
        assert!(Instant::now() < end, "only this has happened: {events:?}");
        events.extend(server.poll(Duration::from_millis(20)).unwrap());
    }
    events
}

fn viewing(address: SocketAddr, secret: &Secret) -> JoinHandle<Result<Viewer, Error>> {
    let secret = secret.clone();
    std::thread::spawn(move || Viewer::join(address, &secret, LIMIT))
}

fn viewer(server: &mut Server, secret: &Secret) -> Viewer {
    let (viewer, before) = (viewing(server.address(), secret), server.viewers());
    until(server, |server, _| server.viewers() > before);
    viewer.join().unwrap().unwrap()
}

fn rank(server: &mut Server, secret: &Secret, rank: u32) -> (Watch, mpsc::Receiver<Order>) {
    let (address, secret, ranks) = (server.address(), secret.clone(), server.ranks().len() as u32);
    let client = std::thread::spawn(move || {
        let place = Place { rank, ranks, host: "a".to_string(), pid: 1, attempt: 1 };
        Client::join(&[address], &secret, &place, LIMIT).unwrap()
    });
    until(server, |_, events| events.contains(&Event::Joined { rank: rank as usize }));
    let (sender, orders) = mpsc::channel();
    let standing = || Standing { step: 7, phase: "forward".to_string(), ..Standing::default() };
    (client.join().unwrap().watch(standing, move |order| drop(sender.send(order))).unwrap(), orders)
}

fn step(step: u64) -> Entry {
    Entry { time_s: step as f64, what: What::Step(Step { step, loss: f64::NAN, ..Step::default() }) }
}

fn number(entry: &Entry) -> u64 {
    let What::Step(step) = &entry.what else { panic!("{entry:?}") };
    step.step
}

/// What a viewer hears until `done` says so.
fn hears(server: &mut Server, viewer: &mut Viewer, mut done: impl FnMut(&[News]) -> bool) -> Vec<News> {
    let mut news = Vec::new();
    until(server, |_, _| {
        news.extend(viewer.hear().unwrap());
        done(&news)
    });
    news
}

fn steps(news: &[News]) -> Vec<u64> {
    news.iter().filter_map(|news| if let News::Entry(entry) = news { Some(number(entry)) } else { None }).collect()
}

#[test]
fn a_viewer_is_shown_what_was_and_what_comes_and_where_ranks_are() {
    let secret = Secret::new().unwrap();
    let mut server = server(&secret, 2);
    let mut earlier = History::default();
    earlier.add(step(1));
    server.set_history(earlier);
    server.show(step(2));
    let (watch, _orders) = rank(&mut server, &secret, 0);
    let mut viewer = viewer(&mut server, &secret);
    watch.entry(&step(3));
    // What the first rank wrote comes to the supervisor, and that shows it.
    let events = until(&mut server, |_, events| !events.is_empty());
    let [Event::Entry(entry)] = &events[..] else { panic!("{events:?}") };
    server.show((**entry).clone());
    let is_whole = |news: &[News]| {
        let at_work = |news: &News| matches!(news, News::Snapshot(snapshot) if snapshot.steps == (7, 7));
        steps(news) == [1, 2, 3] && news.iter().any(at_work)
    };
    let news = hears(&mut server, &mut viewer, is_whole);
    let last = news.iter().rev().find_map(|news| if let News::Snapshot(last) = news { Some(last) } else { None });
    let last = last.unwrap();
    assert_eq!((last.ranks, last.here, last.awaited, last.shown[0].doing.as_str()), (2, 1, 1, "forward"));

    drop(viewer);
    until(&mut server, |server, _| server.viewers() == 0);
}

#[test]
fn a_viewer_asks_and_the_first_rank_alone_is_told() {
    let secret = Secret::new().unwrap();
    let mut server = server(&secret, 2);
    assert!(!server.ask_one(Order::Checkpoint), "nobody is there to be told");
    let (_second, second_orders) = rank(&mut server, &secret, 1);
    let (_first, first_orders) = rank(&mut server, &secret, 0);
    let mut viewer = viewer(&mut server, &secret);
    viewer.ask(Request::Trace { steps: 3 }).unwrap();
    // More than one may ask for.
    (0..100).for_each(|_| viewer.ask(Request::Save).unwrap());
    let events = until(&mut server, |_, events| !events.is_empty());
    assert_eq!(events[0], Event::Asked(Request::Trace { steps: 3 }));
    assert!(events.len() < 10, "{events:?}");
    assert!(server.ask_one(Order::Trace { steps: 3 }));
    server.answer("as you wish\u{7}");
    let said = |news: &[News]| news.contains(&News::Answer("as you wish ".to_string()));
    hears(&mut server, &mut viewer, said);
    assert_eq!(first_orders.recv_timeout(LIMIT).unwrap(), Order::Trace { steps: 3 });
    assert!(second_orders.recv_timeout(Duration::from_millis(200)).is_err());
}

#[test]
fn strangers_are_shown_nothing() {
    let secret = Secret::new().unwrap();
    let mut server = server(&secret, 1);
    server.show(step(1));
    let stranger = viewing(server.address(), &Secret::new().unwrap());
    until(&mut server, |server, _| server.strangers() == 1);
    assert!(matches!(stranger.join().unwrap(), Err(Error::WrongSecret { .. })));
    assert_eq!((server.viewers(), server.connections()), (0, 0));

    // One who listens at a supervisor's port and knows no secret is not believed either.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let viewer = viewing(listener.local_addr().unwrap(), &secret);
    let (mut stream, _) = listener.accept().unwrap();
    let digits = "ab".repeat(32);
    say(&mut stream, format!(r#"{{"challenge":{{"nonce":"{digits}"}}}}"#).as_bytes());
    heard(&mut stream);
    say(&mut stream, format!(r#"{{"welcome":{{"proof":"{digits}","beat_ms":1}}}}"#).as_bytes());
    assert!(matches!(viewer.join().unwrap(), Err(Error::Stranger { .. })));
}

/// A viewer whose connection can say anything.
fn raw_viewer(server: &mut Server, secret: &Secret) -> TcpStream {
    let relay = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let viewer = viewing(relay.local_addr().unwrap(), secret);
    let (mut near, _) = relay.accept().unwrap();
    let mut far = TcpStream::connect(server.address()).unwrap();
    until(server, |server, _| server.connections() > 0);
    say(&mut near, &heard(&mut far));
    say(&mut far, &heard(&mut near));
    until(server, |server, _| server.viewers() == 1);
    say(&mut near, &heard(&mut far));
    viewer.join().unwrap().unwrap();
    far
}

#[test]
fn a_viewer_cannot_speak_for_a_rank() {
    let secret = Secret::new().unwrap();
    let words: [&[u8]; 4] = [
        br#"{"bye":{"code":0}}"#,
        br#"{"note":{"text":"all is well"}}"#,
        br#"{"entry":{"time_s":1,"kind":"note","step":1,"text":"x"}}"#,
        br#"{"order":"save"}"#,
    ];
    for word in words {
        let mut server = server(&secret, 1);
        let mut viewer = raw_viewer(&mut server, &secret);
        say(&mut viewer, word);
        let events = until(&mut server, |server, _| server.viewers() == 0);
        assert!(events.is_empty() && server.connections() == 0 && server.awaited() == [0], "{events:?}");
    }
}

#[test]
fn a_rank_other_than_the_first_writes_no_journal() {
    let secret = Secret::new().unwrap();
    let mut server = server(&secret, 2);
    let (watch, _orders) = rank(&mut server, &secret, 1);
    watch.entry(&step(1));
    let events = until(&mut server, |_, events| events.len() == 2);
    assert!(matches!(&events[0], Event::Malformed { rank: 1, error } if error.contains("first rank")), "{events:?}");
}

#[test]
fn a_flood_of_lines_is_cut_short_and_ranks_are_heard_all_the_same() {
    let secret = Secret::new().unwrap();
    let mut server = server(&secret, 1);
    let (watch, _orders) = rank(&mut server, &secret, 0);
    let recipe = "x".repeat(10_000);
    let start = Entry { time_s: 0., what: What::Start(Box::new(Start { recipe, ..Start::default() })) };
    let flood = std::thread::spawn(move || {
        (0..20_000).for_each(|_| watch.entry(&start));
        watch
    });
    while !flood.is_finished() {
        let events = server.poll(Duration::from_millis(20)).unwrap();
        assert!(events.len() <= 256, "{} lines in one turn", events.len());
    }
    let watch = flood.join().unwrap();
    watch.bye(0);
    until(&mut server, |_, events| events.contains(&Event::Left { rank: 0, code: Some(0) }));
}

#[test]
fn a_viewer_that_takes_nothing_is_dropped_and_others_see_all() {
    let secret = Secret::new().unwrap();
    let mut server = server(&secret, 1);
    let slow = viewer(&mut server, &secret);
    let mut quick = viewer(&mut server, &secret);
    let text = "y".repeat(8 << 10);
    let (mut shown, mut heard) = (0, 0);
    until(&mut server, |server, _| {
        // As fast as the quick one reads them.
        for _ in 0..64 {
            server.show(Entry { time_s: 1., what: What::Note { step: 1, text: text.clone() } });
            shown += 1;
        }
        heard += quick.hear().unwrap().iter().filter(|news| matches!(news, News::Entry(_))).count();
        server.viewers() == 1
    });
    until(&mut server, |_, _| {
        heard += quick.hear().unwrap().iter().filter(|news| matches!(news, News::Entry(_))).count();
        heard == shown
    });
    drop(slow);
}

#[test]
fn there_are_only_so_many_viewers() {
    let secret = Secret::new().unwrap();
    let mut server = server(&secret, 1);
    let viewers: Vec<Viewer> = (0..16).map(|_| viewer(&mut server, &secret)).collect();
    let one_more = viewing(server.address(), &secret);
    until(&mut server, |_, _| one_more.is_finished());
    let error = one_more.join().unwrap().unwrap_err();
    assert!(error.to_string().contains("16 look on already"), "{error}");
    drop(viewers);
    until(&mut server, |server, _| server.viewers() == 0);
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
