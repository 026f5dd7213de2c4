//! Measures the supervisor's side of the channel with many ranks: its load, and how soon it finds a rank that falls silent.
//!
//! A second process simulates the ranks, because one process may not open enough files for both sides. To the supervisor they look
//! real: each has its own connection, authenticates, and sends a heartbeat of the usual length once a second.
//!
//!     bench-watch [RANKS] [SECONDS] [SILENT] [LIMIT_S]
//!
//! After SECONDS seconds, the rank SILENT stops sending heartbeats. The last line of output has the measurements as JSON. The exit
//! code is 0 if that rank, and no other, was found.

#![forbid(unsafe_code)]

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use shardwise_watch::{
    CallState, CallStatus, Cause, Client, Event, Order, RankIdentity, RankStatus, Ranks, Secret, Server, explain,
};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const HEARTBEAT: Duration = Duration::from_secs(1);
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
    server.set_heartbeat(HEARTBEAT);
    // If the supervisor fails, it must not leave its ranks behind.
    let mut child = KillOnDrop(
        Command::new(std::env::current_exe()?)
            .args(["ranks", &server.address().to_string(), &ranks.to_string()])
            .stdin(Stdio::piped())
            .spawn()?,
    );
    let mut input = child.0.stdin.take().ok_or("the ranks have no standard input")?;
    writeln!(input, "{}", secret.to_hex())?;

    let started = Instant::now();
    while !server.not_joined().is_empty() {
        for event in server.poll(Duration::from_millis(100))? {
            if !matches!(event, Event::Joined { .. }) {
                return Err(format!("while ranks joined: {event:?}").into());
            }
        }
        if started.elapsed() > JOIN_LIMIT {
            return Err(format!("after {JOIN_LIMIT:?} {} ranks have not joined", server.not_joined().len()).into());
        }
    }
    let join_s = started.elapsed().as_secs_f64();

    let (start, cpu) = (Instant::now(), cpu_s());
    let mut found = wait_for_silence(&mut server, steady, limit)?;
    let false_alarms = found.len();
    let cpu_share = (cpu_s() - cpu) / start.elapsed().as_secs_f64();
    let rss_mb = resident_mb()?;

    if false_alarms == 0 {
        writeln!(input, "{silent}")?;
        found = wait_for_silence(&mut server, 2 * limit + Duration::from_secs(5), limit)?;
    }
    let now = Instant::now();
    let since_heard = server.ranks()[silent].last_heard.map_or(Duration::MAX, |heard| now - heard);
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

/// Polls until ranks are silent for longer than `limit`, or the time is up. Any event is an error.
fn wait_for_silence(server: &mut Server, time: Duration, limit: Duration) -> Outcome<Vec<usize>> {
    let end = Instant::now() + time;
    // Check for silence ten times a second, however often data arrives.
    let mut next = Instant::now();
    while Instant::now() < end {
        if let Some(event) = server.poll(next.saturating_duration_since(Instant::now()))?.first() {
            return Err(format!("unexpected event: {event:?}").into());
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

/// Simulates all ranks on one thread. The first line of input is the secret, the second the rank that falls silent.
fn simulate(address: SocketAddr, ranks: u32) -> Outcome<()> {
    let mut lines = BufReader::new(std::io::stdin()).lines();
    let secret = Secret::from_hex(lines.next().ok_or("no secret was given")??.as_str())?;
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || lines.map_while(Result::ok).for_each(|line| drop(sender.send(line))));
    raise_open_files()?;
    let mut clients = Vec::new();
    for rank in 0..ranks {
        let identity = RankIdentity { rank, ranks, host: format!("n{}", rank / 8), pid: 100_000 + rank, attempt: 1 };
        clients.push(Client::join(&[address], &secret, &identity, JOIN_LIMIT)?);
    }
    let mut silent = None;
    let mut next = Instant::now();
    for step in 0.. {
        for (rank, client) in clients.iter_mut().enumerate() {
            // Spread the heartbeats over the interval.
            if rank % 100 == 0 {
                std::thread::sleep(next.saturating_duration_since(Instant::now()));
                next += HEARTBEAT.mul_f64(100.0 / f64::from(ranks.max(100)));
            }
            if silent != Some(rank) && client.send_heartbeat(status(rank, ranks as usize, step)).is_err() {
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

/// The status of a rank in two groups, as at stage 3 with replication.
fn status(rank: usize, ranks: usize, step: u64) -> RankStatus {
    let first = rank - rank % 8;
    let call = |group: String, ranks: Ranks, verb: &str, state| CallStatus {
        group,
        ranks,
        number: 400 * step + 12,
        verb: verb.to_string(),
        label: "block.7".to_string(),
        elements: 3_145_728,
        bytes: 12_582_912,
        dtype: "f32".to_string(),
        state,
        in_state_ms: 17,
        waiting_for: Ranks::default(),
        is_awaited: false,
    };
    let last = (first + 7).min(ranks - 1);
    let shard = Ranks::from_runs([(first, last, 1)]);
    let replicas = Ranks::from_runs([(rank % 8, ranks - 1, 8)]);
    RankStatus {
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

/// A child process that is killed when this is dropped.
struct KillOnDrop(Child);

impl Drop for KillOnDrop {
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
