//! The claims of checkpoints.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::claims::{Claim, Verdict};
use crate::workspace::{Scratch, built, median, output_of};

pub(crate) const CLAIMS: &[Claim] = &[
    Claim {
        group: "checkpoints",
        name: "killed",
        what: "a run that is killed at 500 random moments while it saves, one rank or all, goes on from the newest checkpoint whose manifest was in place",
        heavy: true,
        measure: killed,
    },
    Claim {
        group: "checkpoints",
        name: "speed",
        what: "4 GB of state: a save that blocks is 0.8 times as fast as dd, and one in the background costs a tenth of it",
        heavy: true,
        measure: speed,
    },
    Claim {
        group: "checkpoints",
        name: "s3",
        what: "an S3 server that is killed in mid-save and started again: the run goes on, says so, and saves; old checkpoints verify",
        heavy: true,
        measure: s3,
    },
];

fn recipe(model: &str, batch: &str, steps: u64, checkpoints: &str) -> String {
    format!(
        "[model.llama]\n{model}\n[data]\nseed = 7\n[batch]\n{batch}\n[optimizer]\nrate = 1e-3\n[run]\nsteps = {steps}\n\
         [checkpoints]\nfolder = \"saved\"\n{checkpoints}\n"
    )
}

/// A run of two ranks, whose lines come with the time at which they came.
struct Running {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
    seen: Vec<String>,
}

impl Running {
    fn new(program: &Path, recipe: &Path, variables: &[(&str, &str)]) -> Result<Self> {
        let mut command = Command::new(program);
        command.arg("train").arg(recipe).args(["-n", "2"]).env("OMP_NUM_THREADS", "1");
        command.envs(variables.iter().copied());
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let lines = BufReader::new(child.stdout.take().context("its output")?).lines();
        Ok(Running { child, lines, seen: Vec::new() })
    }

    /// Reads until a line has this in it, and says when that was.
    fn until(&mut self, part: &str) -> Result<(Instant, String)> {
        for line in self.lines.by_ref() {
            let line = line?;
            self.seen.push(line.clone());
            if line.contains(part) {
                return Ok((Instant::now(), line));
            }
        }
        bail!("no '{part}' in:\n{}", self.seen.join("\n"))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// The ranks that run a recipe.
fn ranks_of(recipe: &Path) -> Result<Vec<String>> {
    let found = Command::new("pgrep").args(["-x", "shardwise-rank"]).output()?;
    let command = |process: &str| std::fs::read_to_string(format!("/proc/{process}/cmdline")).unwrap_or_default();
    let name = recipe.display().to_string();
    let all = String::from_utf8_lossy(&found.stdout).into_owned();
    Ok(all.split_whitespace().filter(|process| command(process).contains(&name)).map(String::from).collect())
}

fn shardwise() -> Result<PathBuf> {
    built("shardwise", &["build", "--release", "--workspace", "--bins"])
}

// ---- killed -----------------------------------------------------------------------------------------------------------

const KILLS: u64 = 500;

fn killed() -> Result<Verdict> {
    let program = shardwise()?;
    let scratch = Scratch::new("killed")?;
    let path = scratch.path().join("recipe.toml");
    let model = "vocabulary = 2003\nwidth = 60\nblocks = 3\nheads = 6\nkv_heads = 3\nmlp_width = 131";
    let often = "every_steps = 1\nbackground = false\nkeep_last = 4";
    std::fs::write(&path, recipe(model, "sequences = 1\npositions = 8", 1_000_000, often))?;
    let (mut newest, mut torn, mut random) = (0, 0, 1u64);
    for round in 0..KILLS {
        let mut running = Running::new(&program, &path, &[])?;
        running.until("saved ").with_context(|| format!("round {round}"))?;
        let text = running.seen.join("\n");
        ensure!(!text.contains("damaged"), "round {round}: {text}");
        if round > 0 {
            let from =
                text.split("goes on after step ").nth(1).and_then(|rest| rest.split(',').next()?.parse::<u64>().ok());
            ensure!(from == Some(newest), "round {round}: step {newest} was the newest whole one: {text}");
        }
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        std::thread::sleep(Duration::from_micros((random >> 33) % 150_000));
        let ranks = ranks_of(&path)?;
        let chosen = if round % 2 == 0 { &ranks[(random >> 40) as usize % 2..][..1] } else { &ranks[..] };
        Command::new("kill").arg("-KILL").args(chosen).status()?;
        drop(running);
        while !ranks_of(&path)?.is_empty() {
            std::thread::sleep(Duration::from_millis(10));
        }
        // All that has a manifest is whole; folders without one are what the kill has torn.
        let saved = scratch.path().join("saved");
        let verified = output_of(Command::new(&program).args(["checkpoint", "verify"]).arg(&saved))?;
        newest =
            verified.split("step ").nth(1).and_then(|rest| rest.split(':').next()?.parse().ok()).context("a step")?;
        torn +=
            std::fs::read_dir(&saved)?.flatten().filter(|folder| !folder.path().join("manifest.json").exists()).count();
        if (round + 1) % 50 == 0 {
            println!("{} kills, {torn} folders torn, the newest checkpoint is of step {newest}", round + 1);
        }
    }
    Ok(Verdict {
        figure: format!(
            "{KILLS} kills, after which {torn} folders were torn; every run went on from the newest whole checkpoint"
        ),
        bar: "always".to_string(),
        holds: torn > KILLS as usize / 10,
    })
}

// ---- speed ------------------------------------------------------------------------------------------------------------

const ROUNDS: usize = 3;
const FIRST_SAVE: u64 = 6;
const STEPS: u64 = 60;

/// What a run of about 4 GB of state took.
struct Saved {
    bytes: f64,
    /// From beginning to end.
    seconds: f64,
    /// By how much training is later than it would have been.
    delay: f64,
    /// The most memory of a rank, and what was stated.
    peak: f64,
    stated: f64,
}

fn speed() -> Result<Verdict> {
    let program = shardwise()?;
    let scratch = Scratch::new("saving")?;
    let (mut against_dd, mut delays) = (Vec::new(), Vec::new());
    let mut peaks_hold = true;
    for round in 1..=ROUNDS {
        let blocking = saved(&program, scratch.path(), false)?;
        let dd = dd(scratch.path(), blocking.bytes)?;
        let background = saved(&program, scratch.path(), true)?;
        against_dd.push(dd / blocking.seconds);
        delays.push(background.delay / blocking.seconds);
        peaks_hold &= background.peak <= background.stated;
        println!(
            "round {round}: {:.2} GB: blocking {:.1} s, dd {dd:.1} s; in the background {:.1} s, training {:.2} s later; \
             peak {:.2} GiB of {:.2} stated",
            blocking.bytes / 1e9,
            blocking.seconds,
            background.seconds,
            background.delay,
            background.peak,
            background.stated,
        );
    }
    let (speed, delay) = (median(&against_dd), median(&delays));
    Ok(Verdict {
        figure: format!(
            "{speed:.2} of dd's speed; in the background a delay of {delay:.2} of the blocking save; peak as stated: {peaks_hold}"
        ),
        bar: "0.80, 0.10, peak at most what is stated".to_string(),
        holds: speed >= 0.8 && delay <= 0.1 && peaks_hold,
    })
}

fn saved(program: &Path, folder: &Path, background: bool) -> Result<Saved> {
    drop(std::fs::remove_dir_all(folder.join("saved")));
    let path = folder.join("recipe.toml");
    // 345 million parameters, of 12 bytes each.
    let model = "vocabulary = 16000\nwidth = 1024\nblocks = 24\nheads = 16\nmlp_width = 2816\ntied = true";
    let when = format!("every_steps = {FIRST_SAVE}\nkeep_last = 1\nbackground = {background}");
    std::fs::write(&path, recipe(model, "sequences = 1\npositions = 128", STEPS, &when))?;
    let mut running = Running::new(program, &path, &[])?;
    let mut at = Vec::new();
    let mut ended = None;
    let gib = |line: &str| line.split_whitespace().rev().nth(1).and_then(|number| number.parse::<f64>().ok());
    // What a step takes is known from those before the save; the first two are slower.
    for step in 1..=FIRST_SAVE {
        at.push(running.until(&format!("step {step:>2}/"))?.0);
    }
    let usual: Vec<f64> = at[2..].windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect();
    let usual = median(&usual);
    let began = at[at.len() - 1];
    let mut steps_since = 0;
    let mut line = String::new();
    while ended.is_none() || steps_since < 1 {
        let (now, found) = running.until("s")?;
        if found.starts_with("saved ") {
            (ended, line) = (Some(now), found);
        } else if found.starts_with("step ") && found.contains("  loss ") {
            at.push(now);
            steps_since = if ended.is_some() { steps_since + 1 } else { 0 };
        }
    }
    let during = at.len() as u64 - FIRST_SAVE;
    let delay = (at[at.len() - 1] - began).as_secs_f64() - during as f64 * usual;
    let bytes =
        line.split(": ").nth(1).and_then(|rest| rest.split(' ').next()?.parse::<f64>().ok()).context("its size")? * 1e6;
    let seconds = (ended.context("an end")? - began).as_secs_f64();
    let steps: Vec<&String> = running.seen.iter().filter(|line| line.contains("  loss ")).collect();
    let peak =
        steps.iter().rev().find_map(|line| gib(line.split("(peak ").nth(1)?.split(')').next()?)).unwrap_or(f64::MAX);
    let stated = running.seen.iter().find(|line| line.contains("together")).and_then(|line| gib(line)).unwrap_or(0.);
    Ok(Saved { bytes, seconds, delay, peak, stated })
}

/// How long dd takes for as many bytes on the same disk, with sync.
fn dd(folder: &Path, bytes: f64) -> Result<f64> {
    let file = folder.join("dd");
    let started = Instant::now();
    output_of(
        Command::new("dd")
            .arg("if=/dev/zero")
            .arg(format!("of={}", file.display()))
            .args(["bs=8M", "conv=fsync", "status=none"])
            .arg(format!("count={}", (bytes / f64::from(8 << 20)).ceil())),
    )?;
    let seconds = started.elapsed().as_secs_f64();
    std::fs::remove_file(file)?;
    Ok(seconds)
}

// ---- S3 ---------------------------------------------------------------------------------------------------------------

const S3_SERVER: &str = "0.14.1";
const PORT: &str = "18014";
const KEYS: [(&str, &str); 5] = [
    ("AWS_ACCESS_KEY_ID", "AKEXAMPLES3S"),
    ("AWS_SECRET_ACCESS_KEY", "SKEXAMPLES3S"),
    ("AWS_ENDPOINT", "http://127.0.0.1:18014"),
    ("AWS_ALLOW_HTTP", "true"),
    ("AWS_REGION", "us-east-1"),
];

/// A server of `s3s-fs` on loopback, which keeps a bucket in a folder.
struct Server(Child);

impl Server {
    fn start(folder: &Path) -> Result<Self> {
        let home = std::env::var("SHARDWISE_HOME").map(PathBuf::from);
        let home = home.or_else(|_| std::env::var("HOME").map(|home| Path::new(&home).join(".cache/shardwise")))?;
        let program = home.join("tools/bin/s3s-fs");
        if !program.exists() {
            println!("installing s3s-fs {S3_SERVER} with cargo");
            let mut install = Command::new(env!("CARGO"));
            install.args(["install", "--locked", "--quiet", "--features", "binary", "--root"]).arg(home.join("tools"));
            output_of(install.arg(format!("s3s-fs@{S3_SERVER}")))?;
        }
        let mut command = Command::new(&program);
        command.args(["--host", "127.0.0.1", "--port", PORT, "--access-key", KEYS[0].1, "--secret-key", KEYS[1].1]);
        let child = command.arg(folder).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        let server = Server(child);
        let deadline = Instant::now() + Duration::from_secs(20);
        while std::net::TcpStream::connect(format!("127.0.0.1:{PORT}")).is_err() {
            ensure!(Instant::now() < deadline, "{} does not listen on port {PORT}", program.display());
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

fn s3() -> Result<Verdict> {
    let program = shardwise()?;
    let scratch = Scratch::new("s3")?;
    let (path, objects) = (scratch.path().join("recipe.toml"), scratch.path().join("objects"));
    std::fs::create_dir_all(objects.join("bucket"))?;
    let model = "vocabulary = 32000\nwidth = 256\nblocks = 4\nheads = 4\nmlp_width = 700\ntied = true";
    let text = recipe(model, "sequences = 1\npositions = 32", 1_000_000, "every_steps = 40\nkeep_last = 9");
    std::fs::write(&path, text.replace("\"saved\"", "\"s3://bucket/runs/one\""))?;
    let server = Server::start(&objects)?;
    let mut running = Running::new(&program, &path, &KEYS)?;
    running.until("saved ")?;
    // In the middle of the next one: it has begun when its step is done, and takes a while.
    running.until("step      80/")?;
    std::thread::sleep(Duration::from_millis(100));
    drop(server);
    let (_, failure) = running.until("could not be saved, and will be tried again")?;
    println!("{failure}");
    running.until("  loss ")?;
    let server = Server::start(&objects)?;
    let (_, saved) = running.until("saved ")?;
    println!("{saved}");
    running.until("saved ")?;
    Command::new("kill").arg("-USR2").args(&ranks_of(&path)?[..1]).status()?;
    running.until("as it was asked to")?;
    let mut verify = Command::new(&program);
    verify.args(["checkpoint", "verify", "s3://bucket/runs/one"]).envs(KEYS);
    let verified = output_of(&mut verify)?;
    print!("{verified}");
    drop(server);
    let whole = verified.matches(": whole").count();
    Ok(Verdict {
        figure: format!("{whole} checkpoints, all whole; the run went on"),
        bar: "the run goes on, the error is said, the next save succeeds, old ones verify".to_string(),
        holds: whole >= 3 && !verified.contains("damaged"),
    })
}
