//! A supervisor of many ranks, and the ranks: what watching takes, and how soon one that falls silent is found.
//!
//! The ranks are simulated by a second process, because one may not open files enough for both sides. They are real to the
//! supervisor: each has its own connection and proof, and says where it stands once a second in a message of the usual length.
//!
//!     bench-watch [RANKS] [SECONDS] [SILENT] [LIMIT_S]
//!
//! After the seconds are over one rank falls silent. The last line is what was measured, as JSON. The exit code says whether
//! that rank, and no other, was found.

#![forbid(unsafe_code)]

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use shardwise_watch::{
    CallStanding, CallState, Cause, Client, Event, Order, Place, Ranks, Secret, Server, Standing, explain,
};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const BEAT: Duration = Duration::from_secs(1);
const JOIN_LIMIT: Duration = Duration::from_secs(60);

fn main() -> Outcome<ExitCode> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let [first, address, ranks] = &words[..]
        && first == "ranks"
    {
        simulate(address.parse()?, ranks.parse()?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let number = |index: usize, otherwise: usize| words.get(index).map_or(Ok(otherwise), |word| word.parse());
    let (ranks, seconds) = (number(0, 10_000)?, number(1, 10)? as u64);
    let (silent, limit_s) = (number(2, 4711)?.min(ranks.saturating_sub(1)), number(3, 5)? as u64);
    supervise(ranks, Duration::from_secs(seconds), silent, Duration::from_secs(limit_s))
}

fn supervise(ranks: usize, steady: Duration, silent: usize, limit: Duration) -> Outcome<ExitCode> {
    let secret = Secret::new()?;
    let mut server = Server::bind("127.0.0.1:0".parse()?, secret.clone(), ranks, 1)?;
    server.set_beat(BEAT);
    // A supervisor that fails must not leave its ranks behind; they end when their input does.
    let mut child = Ended(
        Command::new(std::env::current_exe()?)
            .args(["ranks", &server.address().to_string(), &ranks.to_string()])
            .stdin(Stdio::piped())
            .spawn()?,
    );
    let mut input = child.0.stdin.take().ok_or("the ranks have no input")?;
    writeln!(input, "{}", secret.to_hex())?;

    let started = Instant::now();
    while !server.awaited().is_empty() {
        for event in server.poll(Duration::from_millis(100))? {
            if !matches!(event, Event::Joined { .. }) {
                return Err(format!("while ranks joined: {event:?}").into());
            }
        }
        if started.elapsed() > JOIN_LIMIT {
            return Err(format!("after {JOIN_LIMIT:?} {} ranks have not joined", server.awaited().len()).into());
        }
    }
    let join_s = started.elapsed().as_secs_f64();

    let (began, cpu) = (Instant::now(), cpu_s());
    let mut found = watch(&mut server, steady, limit)?;
    let false_alarms = found.len();
    let cpu_share = (cpu_s() - cpu) / began.elapsed().as_secs_f64();
    let rss_mb = resident_mb()?;

    if false_alarms == 0 {
        writeln!(input, "{silent}")?;
        found = watch(&mut server, 2 * limit + Duration::from_secs(5), limit)?;
    }
    let now = Instant::now();
    let since_heard = server.ranks()[silent].heard.map_or(Duration::MAX, |heard| now - heard);
    println!("{}", explain(server.ranks(), &Cause::Silent { ranks: found.clone() }, now));
    server.order(Order::End { reason: "measured".to_string() });
    drop(input);
    child.0.wait()?;
    println!(
        r#"{{"ranks":{ranks},"join_s":{join_s:.2},"cpu_share":{cpu_share:.4},"rss_mb":{rss_mb:.1},"found":{found:?},"found_after_s":{:.2},"limit_s":{}}}"#,
        since_heard.as_secs_f64(),
        limit.as_secs()
    );
    Ok(if false_alarms == 0 && found == [silent] { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Watches until a rank is silent for longer than `limit`, or the time is over. An event is a failure: nothing should happen.
fn watch(server: &mut Server, time: Duration, limit: Duration) -> Outcome<Vec<usize>> {
    let end = Instant::now() + time;
    // Who is silent is asked ten times a second, however often something comes.
    let mut next = Instant::now();
    while Instant::now() < end {
        if let Some(event) = server.poll(next.saturating_duration_since(Instant::now()))?.first() {
            return Err(format!("while nothing should happen: {event:?}").into());
        }
        if Instant::now() >= next {
            next += Duration::from_millis(100);
            let silent = server.silent(Instant::now(), limit);
            if !silent.is_empty() {
                return Ok(silent);
            }
        }
    }
    Ok(Vec::new())
}

/// All ranks, on one thread. The first line of input is the secret, the second the rank that falls silent.
fn simulate(address: SocketAddr, ranks: u32) -> Outcome<()> {
    let mut lines = BufReader::new(std::io::stdin()).lines();
    let secret = Secret::from_hex(lines.next().ok_or("no secret was given")??.as_str())?;
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || lines.map_while(Result::ok).for_each(|line| drop(sender.send(line))));
    raise_open_files()?;
    let mut clients = Vec::new();
    for rank in 0..ranks {
        let place = Place { rank, ranks, host: format!("n{}", rank / 8), pid: 100_000 + rank, attempt: 1 };
        clients.push(Client::join(&[address], &secret, &place, JOIN_LIMIT)?);
    }
    let mut silent = None;
    let mut next = Instant::now();
    for step in 0.. {
        for (rank, client) in clients.iter_mut().enumerate() {
            // Ranks beat when they like, not all at once.
            if rank % 100 == 0 {
                std::thread::sleep(next.saturating_duration_since(Instant::now()));
                next += BEAT.mul_f64(100.0 / f64::from(ranks.max(100)));
            }
            if silent != Some(rank) && client.beat(standing(rank, ranks as usize, step)).is_err() {
                return Ok(());
            }
        }
        match receiver.try_recv() {
            Ok(line) => silent = Some(line.parse()?),
            Err(std::sync::mpsc::TryRecvError::Empty) => {}
            Err(std::sync::mpsc::TryRecvError::Disconnected) => return Ok(()),
        }
    }
    Ok(())
}

/// A rank in two groups, as at stage 3 with replicas.
fn standing(rank: usize, ranks: usize, step: u64) -> Standing {
    let first = rank - rank % 8;
    let call = |group: String, ranks: Ranks, verb: &str, state| CallStanding {
        group,
        ranks,
        number: 400 * step + 12,
        verb: verb.to_string(),
        label: "block.7".to_string(),
        elements: 3_145_728,
        bytes: 12_582_912,
        dtype: "f32".to_string(),
        state,
        for_ms: 17,
        waits_for: Ranks::default(),
    };
    let last = (first + 7).min(ranks - 1);
    let shard = Ranks::of_runs([(first, last, 1)]);
    let replicas = Ranks::of_runs([(rank % 8, ranks - 1, 8)]);
    Standing {
        step,
        first_step: 1,
        phase: "backward".to_string(),
        unit: "block.7".to_string(),
        in_phase_ms: 120,
        calls: vec![
            call(format!("shard {first}-{last}"), shard, "reduce-scatter", CallState::Done),
            call(format!("replicate {replicas}"), replicas, "all-reduce", CallState::Done),
        ],
    }
}

/// A process that is ended with its owner.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

fn cpu_s() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn resident_mb() -> Outcome<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with("VmRSS")).ok_or("no VmRSS")?;
    let kib: f64 = line.split_whitespace().nth(1).ok_or("no number")?.parse()?;
    Ok(kib * 1024.0 / 1e6)
}

fn raise_open_files() -> Outcome<()> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Nofile).maximum;
    Ok(setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?)
}
