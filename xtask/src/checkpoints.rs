//! The claims about checkpoints.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use shardwise_harness::{launcher, rank_pids, run_with_transformers};

use crate::claim::{Claim, Verdict};
use crate::workspace::{Scratch, build, median, output_of, peak_memory_of, tools};

pub(crate) const CLAIMS: &[Claim] = &[
    Claim {
        group: "checkpoints",
        name: "killed",
        what: "a run that is killed (one rank or all) at 500 random moments during saves resumes from the newest checkpoint whose manifest is in place",
        heavy: true,
        measure: killed,
    },
    Claim {
        group: "checkpoints",
        name: "speed",
        what: "4 GB of state: a blocking save reaches 0.8 times the speed of dd, and a background save with a spare core delays training by a tenth of that",
        heavy: true,
        measure: speed,
    },
    Claim {
        group: "checkpoints",
        name: "memory",
        what: "half a billion Hugging Face parameters: 4 ranks load them with the memory of their shards plus the largest unit plus 10%; 2 GB are exported with 500 MB",
        heavy: true,
        measure: memory,
    },
    Claim {
        group: "checkpoints",
        name: "s3",
        what: "an S3 server is killed during a save and restarted: the run continues, reports it, and saves again; old checkpoints verify",
        heavy: true,
        measure: s3,
    },
];

fn recipe(model: &str, batch: &str, steps: u64, checkpoints: &str) -> String {
    format!(
        "[model.llama]\n{model}\n[data]\nseed = 7\n[batch]\n{batch}\n[optimizer]\nlr = 1e-3\n[run]\nsteps = {steps}\n\
         [checkpoints]\nfolder = \"saved\"\n{checkpoints}\n"
    )
}

/// A run in progress, whose output is read line by line.
struct Running {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
    seen: Vec<String>,
}

impl Running {
    fn new(program: &Path, recipe: &Path, ranks: usize, variables: &[(&str, &str)]) -> Result<Self> {
        let mut command = Command::new(program);
        command.arg("train").arg(recipe).args(["-n", &ranks.to_string()]).env("OMP_NUM_THREADS", "1");
        command.envs(variables.iter().copied());
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        let lines = BufReader::new(child.stdout.take().context("its output")?).lines();
        Ok(Running { child, lines, seen: Vec::new() })
    }

    /// Reads until a line contains `part`. Returns the time and the line.
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

fn shardwise() -> Result<PathBuf> {
    build("shardwise", &["build", "--release", "--workspace", "--bins"])
}

// ---- killed -----------------------------------------------------------------------------------------------------------

const KILLS: u64 = 500;

fn killed() -> Result<Verdict> {
    let program = shardwise()?;
    let scratch = Scratch::new("killed")?;
    let path = scratch.path().join("recipe.toml");
    let model = "vocab_size = 2003\nhidden_size = 60\nnum_hidden_layers = 3\n\
        num_attention_heads = 6\nnum_key_value_heads = 3\nintermediate_size = 131";
    let often = "every_steps = 1\nbackground = false\nkeep_last = 4";
    std::fs::write(&path, recipe(model, "micro_batch_size = 1\nseq_len = 8", 1_000_000, often))?;
    let (mut newest, mut torn, mut random) = (0, 0, 1u64);
    for round in 0..KILLS {
        let mut running = Running::new(&program, &path, 2, &[])?;
        running.until("saved ").with_context(|| format!("round {round}"))?;
        let text = running.seen.join("\n");
        ensure!(!text.contains("damaged"), "round {round}: {text}");
        if round > 0 {
            let from =
                text.split("resuming after step ").nth(1).and_then(|rest| rest.split(',').next()?.parse::<u64>().ok());
            ensure!(from == Some(newest), "round {round}: the newest complete checkpoint was of step {newest}: {text}");
        }
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        std::thread::sleep(Duration::from_micros((random >> 33) % 150_000));
        let ranks = rank_pids(&path);
        ensure!(ranks.len() == 2, "round {round}: only {} ranks before the kill", ranks.len());
        let chosen = if round % 2 == 0 { &ranks[(random >> 40) as usize % 2..][..1] } else { &ranks[..] };
        Command::new("kill").arg("-KILL").args(chosen.iter().map(u32::to_string)).status()?;
        drop(running);
        while !rank_pids(&path).is_empty() {
            std::thread::sleep(Duration::from_millis(10));
        }
        // Every checkpoint with a manifest is complete; folders without one were torn by the kill.
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
            "{KILLS} kills, {torn} of which left a torn folder; every run resumed from the newest complete checkpoint"
        ),
        bar: "always".to_string(),
        holds: torn > KILLS as usize / 10,
    })
}

// ---- speed ------------------------------------------------------------------------------------------------------------

const ROUNDS: usize = 3;
const EVERY: usize = 6;
const STEPS: usize = 17;

/// The saves of a run with 4 GB of state.
struct SaveTimes {
    bytes: f64,
    /// The duration of each save.
    seconds: Vec<f64>,
    /// How much each save delayed training.
    delays: Vec<f64>,
    /// The peak memory of any rank, and its estimate.
    peak: f64,
    stated: f64,
    /// The CPU time of all ranks.
    cpu_s: f64,
}

/// The number of saves of a measured run.
const SAVES: usize = STEPS / EVERY + 1;

fn speed() -> Result<Verdict> {
    let program = shardwise()?;
    let scratch = Scratch::new("saving")?;
    // Run one rank per core, with and without a spare core. With a spare core there may be only one rank, for which stage 3 would only
    // copy parameters.
    let cores = std::thread::available_parallelism().map_or(2, usize::from);
    let (spare, busy) = ((cores - 1).max(1), cores);
    let (mut against_dd, mut delays, mut busy_delays, mut cpu_s) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut peaks_hold = true;
    for round in 1..=ROUNDS {
        let blocking = run_with_saves(&program, scratch.path(), (busy, 3), false)?;
        let blocked = median(&blocking.seconds);
        let dd = dd(scratch.path(), blocking.bytes)?;
        against_dd.push(dd / blocked);
        let blocked_spare = median(&run_with_saves(&program, scratch.path(), (spare, 2), false)?.seconds);
        let with_spare = run_with_saves(&program, scratch.path(), (spare, 2), true)?;
        delays.extend(with_spare.delays.iter().map(|delay| delay / blocked_spare));
        let background = run_with_saves(&program, scratch.path(), (busy, 3), true)?;
        busy_delays.extend(background.delays.iter().map(|delay| delay / blocked));
        cpu_s.push((background.cpu_s - unsaved_cpu_s(&program, scratch.path(), busy)?) / SAVES as f64);
        peaks_hold &= [&with_spare, &background].iter().all(|run| run.peak <= run.stated && run.bytes >= 4e9);
        println!(
            "round {round}: {:.2} GB: blocking {blocked:.1} s, dd {dd:.1} s; a background save delayed training by {:.2} s with a spare \
             core, where blocking takes {blocked_spare:.1} s, and by {:.2} s without; peak {:.2} GiB, estimated {:.2}",
            blocking.bytes / 1e9,
            median(&with_spare.delays),
            median(&background.delays),
            background.peak,
            background.stated,
        );
    }
    let (speed, delay, busy_delay) = (median(&against_dd), median(&delays), median(&busy_delays));
    Ok(Verdict {
        figure: format!(
            "{speed:.2} of dd's speed; a background save delays training by {delay:.2} of a blocking save with a spare core and by \
             {busy_delay:.2} with all cores busy, and takes {:.1} s of CPU time; peak within the estimate: {peaks_hold}",
            median(&cpu_s),
        ),
        bar: "0.80; 0.10 with a spare core; peak within the estimate".to_string(),
        holds: speed >= 0.8 && delay <= 0.1 && peaks_hold,
    })
}

/// A recipe with 4 GB of state.
fn large(checkpoints: &str) -> String {
    // 338 million parameters with 12 bytes each.
    let model = "vocab_size = 16000\nhidden_size = 1024\nnum_hidden_layers = 25\n\
        num_attention_heads = 16\nintermediate_size = 2816\ntie_word_embeddings = true";
    recipe(model, "micro_batch_size = 1\nseq_len = 128", STEPS as u64, checkpoints)
}

/// The CPU time of the same run without saves.
fn unsaved_cpu_s(program: &Path, folder: &Path, ranks: usize) -> Result<f64> {
    let (path, text) = (folder.join("recipe.toml"), large(""));
    let (without, _) = text.split_once("[checkpoints]").context("a recipe with checkpoints")?;
    std::fs::write(&path, without)?;
    let before = children_cpu_s()?;
    let mut running = Running::new(program, &path, ranks, &[])?;
    while running.until("").is_ok() {}
    ensure!(running.child.wait()?.success(), "it failed:\n{}", running.seen.join("\n"));
    Ok(children_cpu_s()? - before)
}

/// The CPU time of all child processes that have ended.
fn children_cpu_s() -> Result<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    // The program's name, in parentheses, may contain spaces. The children's times are the 14th and 15th fields after it.
    let (_, fields) = stat.rsplit_once(')').context("/proc/self/stat")?;
    let ticks = fields.split_whitespace().skip(13).take(2).map(str::parse::<f64>);
    let ticks: f64 = ticks.collect::<Result<Vec<_>, _>>()?.iter().sum();
    // The kernel always reports hundredths of a second.
    Ok(ticks / 100.)
}

/// Runs the large recipe with saves, on this many ranks at this stage.
fn run_with_saves(program: &Path, folder: &Path, (ranks, stage): (usize, u8), background: bool) -> Result<SaveTimes> {
    drop(std::fs::remove_dir_all(folder.join("saved")));
    let path = folder.join("recipe.toml");
    let when = format!("every_steps = {EVERY}\nkeep_last = 1\nbackground = {background}\n[zero]\nstage = {stage}");
    std::fs::write(&path, large(&when))?;
    let before = children_cpu_s()?;
    let mut running = Running::new(program, &path, ranks, &[])?;
    let mut at = Vec::new();
    // For each save, the number of steps when it was reported complete.
    let (mut ended, mut lines) = (Vec::new(), Vec::new());
    // Read until the run ends, because the next one uses the same folder.
    while let Ok((now, line)) = running.until("") {
        if line.starts_with("saved ") {
            ended.push(at.len());
            lines.push(line);
        } else if line.starts_with("step ") && line.contains("  loss ") {
            at.push(now);
        }
    }
    running.child.wait()?;
    ensure!(
        at.len() == STEPS && lines.len() == SAVES,
        "expected {STEPS} steps and {SAVES} saves:\n{}",
        running.seen.join("\n")
    );
    // No steps run during the last save.
    ended.pop();
    let took = |step: usize| (at[step] - at[step - 1]).as_secs_f64();
    // From the step after which a save started to the last step during the save.
    let spans: Vec<_> = ended.iter().enumerate().map(|(save, &end)| (save + 1) * EVERY..end).collect();
    // Exclude the first steps and those during a save, which are slower.
    let usual: Vec<f64> = (3..STEPS)
        .filter(|step| !spans.iter().any(|span| span.contains(step) || span.start == *step))
        .map(took)
        .collect();
    let usual = median(&usual);
    let number = |text: &str, after: &str| -> Option<f64> {
        text.split(after).nth(1)?.split_whitespace().next()?.trim_end_matches(')').parse().ok()
    };
    let last = running.seen.iter().rev().find(|line| line.contains("  loss ")).context("a step")?;
    let stated =
        running.seen.iter().find(|line| line.trim_start().starts_with("total ")).context("the memory estimate")?;
    Ok(SaveTimes {
        bytes: number(&lines[0], ": ").context("its size")? * 1e6,
        seconds: lines.iter().filter_map(|line| number(line, " MB in ")).collect(),
        delays: spans.into_iter().map(|span| span.map(|step| took(step) - usual).sum()).collect(),
        peak: number(last, "(peak ").context("its peak")?,
        stated: number(stated, "total").context("its estimate")?,
        cpu_s: children_cpu_s()? - before,
    })
}

/// The time that dd takes to write this many bytes to the same disk and sync them.
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

// ---- memory -----------------------------------------------------------------------------------------------------------

/// The output of `bench-load`.
#[derive(Deserialize)]
struct Loaded {
    elements: f64,
    parameter_bytes: f64,
    /// Moments, which start as zeros.
    optimizer_bytes: f64,
    largest_unit_bytes: f64,
    rise_bytes: f64,
}

/// The memory limit for the export of 2 GB.
const EXPORT_BYTES: f64 = 500e6;

fn memory() -> Result<Verdict> {
    let program = shardwise()?;
    let reader = build("bench-load", &["build", "--release", "--workspace", "--bins"])?;
    let scratch = Scratch::new("memory")?;
    let at = |name: &str| scratch.path().join(name);
    run_with_transformers("hugging_face.py", &[Path::new("large"), &at("model")]).map_err(anyhow::Error::msg)?;

    let mut ranks = launcher(None, 4, Duration::from_secs(600));
    let printed = output_of(ranks.arg("OMP_NUM_THREADS=1").arg(reader).arg(at("model")))?;
    let loaded: Loaded = serde_json::from_str(&printed)?;
    let shards = loaded.parameter_bytes + loaded.optimizer_bytes;
    let stated = shards + loaded.largest_unit_bytes;
    let ratio = loaded.rise_bytes / stated;
    println!(
        "{:.0}M parameters: shards {:.0} MB, of which {:.0} are parameters, the largest unit {:.0} MB; no rank grew by more than {:.0} MB",
        loaded.elements / 1e6,
        shards / 1e6,
        loaded.parameter_bytes / 1e6,
        loaded.largest_unit_bytes / 1e6,
        loaded.rise_bytes / 1e6,
    );

    let mut peaks = Vec::new();
    for (verb, from, to) in [("import", "model", "saved"), ("export", "saved", "exported")] {
        let started = Instant::now();
        let peak = peak_memory_of(Command::new(&program).args(["checkpoint", verb]).arg(at(from)).arg(at(to)))?;
        println!("{verb}: peak {:.0} MB, {:.1} s", peak / 1e6, started.elapsed().as_secs_f64());
        peaks.push(peak);
    }
    let weights = |folder: &str| -> Result<u64> {
        let of_weights = |file: &std::fs::DirEntry| file.path().extension().is_some_and(|end| end == "safetensors");
        Ok(std::fs::read_dir(at(folder))?
            .flatten()
            .filter(of_weights)
            .flat_map(|file| file.metadata())
            .map(|m| m.len())
            .sum())
    };
    let bytes = weights("exported")? as f64;
    ensure!(bytes >= 2e9 && (bytes / weights("model")? as f64 - 1.).abs() < 1e-3, "{bytes} bytes were exported");
    Ok(Verdict {
        figure: format!(
            "loaded with {ratio:.3} of shards plus largest unit; {:.2} GB imported with {:.0} MB and exported with {:.0} MB",
            bytes / 1e9,
            peaks[0] / 1e6,
            peaks[1] / 1e6,
        ),
        bar: "1.10, 500 MB".to_string(),
        holds: ratio <= 1.1 && peaks.iter().all(|&peak| peak <= EXPORT_BYTES),
    })
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

/// An `s3s-fs` server on loopback, which stores buckets in a folder.
struct Server(Child);

impl Server {
    fn start(folder: &Path) -> Result<Self> {
        let program = tools()?.join("bin/s3s-fs");
        if !program.exists() {
            println!("installing s3s-fs {S3_SERVER} with cargo");
            let mut install = Command::new(env!("CARGO"));
            install.args(["install", "--locked", "--quiet", "--features", "binary", "--root"]).arg(tools()?);
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
    let model = "vocab_size = 32000\nhidden_size = 256\nnum_hidden_layers = 4\n\
        num_attention_heads = 4\nintermediate_size = 700\ntie_word_embeddings = true";
    let text = recipe(model, "micro_batch_size = 1\nseq_len = 32", 1_000_000, "every_steps = 40\nkeep_last = 9");
    std::fs::write(&path, text.replace("\"saved\"", "\"s3://bucket/runs/one\""))?;
    let server = Server::start(&objects)?;
    let mut running = Running::new(&program, &path, 2, &KEYS)?;
    running.until("saved ")?;
    // Stop the server in the middle of the next save, which starts after this step and takes a while.
    running.until("step      80/")?;
    std::thread::sleep(Duration::from_millis(100));
    drop(server);
    let (_, failure) = running.until("could not be saved; retrying")?;
    println!("{failure}");
    running.until("  loss ")?;
    let server = Server::start(&objects)?;
    let (_, saved) = running.until("saved ")?;
    println!("{saved}");
    running.until("saved ")?;
    Command::new("kill").arg("-USR1").arg(rank_pids(&path)[0].to_string()).status()?;
    running.until("as requested")?;
    let mut verify = Command::new(&program);
    verify.args(["checkpoint", "verify", "s3://bucket/runs/one"]).envs(KEYS);
    let verified = output_of(&mut verify)?;
    print!("{verified}");
    drop(server);
    let whole = verified.matches(": intact").count();
    Ok(Verdict {
        figure: format!("{whole} complete checkpoints; the run continued"),
        bar: "the run continues, reports the error, and saves again; old checkpoints verify".to_string(),
        holds: whole >= 3 && !verified.contains("damaged"),
    })
}
