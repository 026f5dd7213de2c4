//! The claims about supervision.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::claim::{Claim, Verdict};
use crate::paired_jobs::{Job, measure_slowdown};
use crate::workspace::{Scratch, build, median, output_of, spread};

pub(crate) const CLAIMS: &[Claim] = &[
    Claim {
        group: "supervision",
        name: "kills",
        what: "300 steps on 4 ranks, with 200 kills of a rank in any phase: the run finishes with the same bits as without kills",
        heavy: true,
        measure: kills,
    },
    Claim {
        group: "supervision",
        name: "jobs",
        what: "300 steps on 4 ranks, with 20 kills of the whole job, including the supervisor, each restarted by the same command: the same bits",
        heavy: true,
        measure: jobs,
    },
    Claim {
        group: "supervision",
        name: "slow",
        what: "a rank that is merely twice as slow raises no alarm in 500 steps",
        heavy: true,
        measure: slow,
    },
    Claim {
        group: "supervision",
        name: "lost",
        what: "42M: the death of a rank costs less than 5 s, not counting repeated steps",
        heavy: true,
        measure: lost,
    },
    Claim {
        group: "supervision",
        name: "watching",
        what: "42M: supervision costs less than 0.5% of a step",
        heavy: true,
        measure: watching,
    },
    Claim {
        group: "supervision",
        name: "ranks",
        what: "10,000 simulated ranks on loopback: a silent rank is named in time",
        heavy: true,
        measure: ranks,
    },
];

fn shardwise() -> Result<PathBuf> {
    build("shardwise", &["build", "--release", "--workspace", "--bins"])
}

const SMALL: &str = "[model.llama]\nvocab_size = 2003\nhidden_size = 60\nnum_hidden_layers = 3\n\
     num_attention_heads = 6\nnum_key_value_heads = 3\nintermediate_size = 131\n";
const MEDIUM: &str = "[model.llama]\nvocab_size = 32000\nhidden_size = 512\nnum_hidden_layers = 8\n\
     num_attention_heads = 8\nintermediate_size = 1408\ntie_word_embeddings = true\n";

/// A recipe in its own folder.
struct Run<'a> {
    program: &'a Path,
    folder: PathBuf,
}

impl<'a> Run<'a> {
    fn new(program: &'a Path, folder: PathBuf, model: &str, batch: &str, steps: u64, rest: &str) -> Result<Self> {
        std::fs::create_dir_all(&folder)?;
        let recipe = format!(
            "{model}[data]\nseed = 7\n[batch]\n{batch}\n[optimizer]\nlr = 1e-3\n[run]\nsteps = {steps}\n{rest}"
        );
        std::fs::write(folder.join("recipe.toml"), recipe)?;
        Ok(Run { program, folder })
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.program);
        command.arg("train").arg(self.folder.join("recipe.toml")).args(arguments).env("OMP_NUM_THREADS", "1");
        command
    }

    /// Runs it to the end. Returns its output and the supervisor's messages.
    fn run(&self, arguments: &[&str]) -> Result<(String, String)> {
        let output = self.command(arguments).output()?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (printed, messages) = (text(&output.stdout), text(&output.stderr));
        ensure!(output.status.success(), "it failed ({}):\n{printed}{messages}", output.status);
        Ok((printed, messages))
    }

    /// Checks that the checkpoint of a step is bitwise the same as another run's.
    fn check_same_checkpoint(&self, other: &Run<'_>, step: u64) -> Result<()> {
        let step = step.to_string();
        let mut diff = Command::new(self.program);
        diff.args(["checkpoint", "diff"]).arg(self.folder.join("saved")).args([&step, &step, "--other"]);
        let said = output_of(diff.arg(other.folder.join("saved")))?;
        ensure!(said.contains("the same to the last bit"), "{said}");
        Ok(())
    }
}

/// The step and the loss of every line. A repeated step has several lines.
fn losses(printed: &str) -> Vec<(u64, String)> {
    let parse = |line: &str| {
        let mut words = line.strip_prefix("step ")?.split_whitespace();
        let step = words.next()?.split('/').next()?.parse().ok()?;
        words.next().filter(|word| *word == "loss")?;
        Some((step, words.next()?.to_string()))
    };
    printed.lines().filter_map(parse).collect()
}

/// Checks that every loss is that of the undisturbed run. Returns the number of lines.
fn check_same_losses(printed: &str, whole: &str) -> Result<usize> {
    let (found, undisturbed) = (losses(printed), losses(whole));
    for (step, loss) in &found {
        let (_, expected) = &undisturbed[*step as usize - 1];
        ensure!(loss == expected, "step {step} has a loss of {loss} instead of {expected}");
    }
    Ok(found.len())
}

const STEPS: u64 = 300;
const OFTEN: &str =
    "[checkpoints]\nfolder = \"saved\"\nevery_steps = 1\nbackground = false\n[supervision]\nmax_restarts = 40\n";

fn small_run<'a>(program: &'a Path, folder: PathBuf) -> Result<Run<'a>> {
    Run::new(program, folder, SMALL, "global_batch_size = 8\nmicro_batch_size = 1\nseq_len = 16", STEPS, OFTEN)
}

// ---- kills ------------------------------------------------------------------------------------------------------------

const KILLS: usize = 200;

fn kills() -> Result<Verdict> {
    let program = shardwise()?;
    let scratch = Scratch::new("kills")?;
    let whole = small_run(&program, scratch.path().join("whole"))?;
    let (expected, _) = whole.run(&["-n", "4"])?;
    let killed = small_run(&program, scratch.path().join("killed"))?;
    let (printed, messages) = killed.run(&["-n", "4", "--fault", &format!("random seed=1 kills={KILLS}")])?;
    let made = check_same_losses(&printed, &expected)?;
    killed.check_same_checkpoint(&whole, STEPS)?;
    let deaths = messages.matches(" died (signal 9").count();
    let lost: Vec<f64> = messages.lines().filter_map(seconds_lost).collect();
    ensure!(!lost.is_empty(), "nothing was lost:\n{messages}");
    Ok(Verdict {
        figure: format!(
            "{deaths} deaths reported, {made} lines for {STEPS} steps, the same losses and the same bits; {:.1} s lost per death",
            median(&lost)
        ),
        bar: format!("{KILLS}, the same bits"),
        holds: deaths == KILLS,
    })
}

/// Parses the seconds in `Resumed at step 41 after 2.3 s: …`.
fn seconds_lost(line: &str) -> Option<f64> {
    line.strip_prefix("Resumed at step ")?.split(" after ").nth(1)?.split(' ').next()?.parse().ok()
}

// ---- jobs -------------------------------------------------------------------------------------------------------------

const JOBS: u64 = 20;

fn jobs() -> Result<Verdict> {
    let program = shardwise()?;
    let scratch = Scratch::new("jobs")?;
    let whole = small_run(&program, scratch.path().join("whole"))?;
    let (expected, _) = whole.run(&["-n", "4"])?;
    let killed = small_run(&program, scratch.path().join("killed"))?;
    let (mut printed, mut random) = (String::new(), 1u64);
    for _ in 0..JOBS {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let mut job = killed.command(&["-n", "4"]).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        let mut lines = BufReader::new(job.stdout.take().context("its output")?).lines();
        let steps = 5 + (random >> 33) % 10;
        let mut seen = 0;
        while seen < steps {
            let line = lines.next().context("it ended before it was killed")??;
            seen += u64::from(line.starts_with("step "));
            printed += &(line + "\n");
        }
        std::thread::sleep(Duration::from_micros((random >> 40) % 30_000));
        // Kill all processes at once, as when a host fails: the supervisor, the launcher and the ranks.
        let name = killed.folder.display().to_string();
        output_of(Command::new("pkill").args(["-KILL", "-f", &name]))?;
        job.wait()?;
        // Everything printed before the kill counts, except for an incomplete last line.
        let rest: Vec<String> = lines.map_while(|line| line.ok()).collect();
        for line in rest.iter().take(rest.len().saturating_sub(1)) {
            printed += &(line.clone() + "\n");
        }
    }
    printed += &killed.run(&["-n", "4"])?.0;
    let made = check_same_losses(&printed, &expected)?;
    killed.check_same_checkpoint(&whole, STEPS)?;
    Ok(Verdict {
        figure: format!("{JOBS} kills, {made} lines for {STEPS} steps, the same losses and the same bits"),
        bar: "20, the same bits".to_string(),
        holds: true,
    })
}

// ---- slow -------------------------------------------------------------------------------------------------------------

fn slow() -> Result<Verdict> {
    let program = shardwise()?;
    let scratch = Scratch::new("slow")?;
    let limits = "[supervision]\ntimeout_s = 5\nheartbeat_timeout_s = 5\n";
    let batch = "micro_batch_size = 1\nseq_len = 64";
    let run = Run::new(&program, scratch.path().to_path_buf(), SMALL, batch, 500, limits)?;
    let (_, messages) = run.run(&["-n", "4", "--fault", "slow rank=1 step=1 phase=gather"])?;
    Ok(Verdict {
        figure: format!("{} words of messages in 500 steps", messages.split_whitespace().count()),
        bar: "none".to_string(),
        holds: messages.trim().is_empty(),
    })
}

// ---- lost -------------------------------------------------------------------------------------------------------------

const DEATHS: usize = 5;

fn lost() -> Result<Verdict> {
    let program = shardwise()?;
    let scratch = Scratch::new("lost")?;
    let saves = "[checkpoints]\nfolder = \"saved\"\nevery_steps = 4\n";
    let batch = "micro_batch_size = 4\nseq_len = 256";
    let run = Run::new(&program, scratch.path().to_path_buf(), MEDIUM, batch, 40, saves)?;
    let fault = "kill rank=1 step=+6 phase=backward";
    let faults: Vec<&str> = std::iter::repeat_n(["--fault", fault], DEATHS).flatten().collect();
    let (_, messages) = run.run(&[&["-n", "2"][..], &faults].concat())?;
    println!("{messages}");
    let lost: Vec<f64> = messages.lines().filter_map(seconds_lost).collect();
    ensure!(lost.len() == DEATHS, "expected {DEATHS} deaths:\n{messages}");
    let (least, most) = spread(&lost);
    Ok(Verdict {
        figure: format!("{:.1} s ({least:.1} to {most:.1})", median(&lost)),
        bar: "5 s".to_string(),
        holds: most < 5.,
    })
}

// ---- watching ---------------------------------------------------------------------------------------------------------

fn watching() -> Result<Verdict> {
    let program = shardwise()?;
    let scratch = Scratch::new("watching")?;
    let batch = "micro_batch_size = 4\nseq_len = 256";
    let run = |name: &str| Run::new(&program, scratch.path().join(name), MEDIUM, batch, 100_000, "");
    let mut launched = shardwise_harness::launcher(None, 2, Duration::from_secs(3600));
    launched.arg(&program).arg("train").arg(run("alone")?.folder.join("recipe.toml")).env("OMP_NUM_THREADS", "1");
    let mut alone = Job::start(&mut launched)?;
    let mut watched = Job::start(&mut run("watched")?.command(&["-n", "2"]))?;
    let slowdown = measure_slowdown("watching", &mut alone, &mut watched)?;
    Ok(Verdict {
        figure: format!("{slowdown}; supervision takes {:.3}% of a core in CPU time", 100. * watched.watching_cores()),
        bar: "0.5%".to_string(),
        holds: slowdown.percent() < 0.5,
    })
}

// ---- ranks ------------------------------------------------------------------------------------------------------------

fn ranks() -> Result<Verdict> {
    let program = build("bench-watch", &["build", "--release", "--workspace", "--bins"])?;
    // Its exit code says whether the silent rank, and no other, was found.
    let said = output_of(Command::new(program).args(["10000", "30", "4711", "5"]))?;
    println!("{said}");
    let figure = said.lines().last().context("a figure")?.to_string();
    Ok(Verdict { figure, bar: "the silent rank named within 6 s".to_string(), holds: true })
}
