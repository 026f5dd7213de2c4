//! The claims of supervision.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::abreast::{Side, more_of};
use crate::claims::{Claim, Verdict};
use crate::workspace::{Scratch, built, median, output_of, spread};

pub(crate) const CLAIMS: &[Claim] = &[
    Claim {
        group: "supervision",
        name: "kills",
        what: "300 steps on 4 ranks, one of which is killed 200 times in any phase: the run finishes with the bits of one without kills",
        heavy: true,
        measure: kills,
    },
    Claim {
        group: "supervision",
        name: "jobs",
        what: "300 steps on 4 ranks, of which the whole job, supervisor included, is killed 20 times and started again by the same command: the same bits",
        heavy: true,
        measure: jobs,
    },
    Claim {
        group: "supervision",
        name: "slow",
        what: "a rank that is only twice as slow raises no alarm in 500 steps",
        heavy: true,
        measure: slow,
    },
    Claim {
        group: "supervision",
        name: "lost",
        what: "the 42M model: a death costs under 5 s beside steps made again",
        heavy: true,
        measure: lost,
    },
    Claim {
        group: "supervision",
        name: "watching",
        what: "the 42M model: being watched costs under 0.5% of a step",
        heavy: true,
        measure: watching,
    },
    Claim {
        group: "supervision",
        name: "ranks",
        what: "10,000 simulated ranks on loopback: a silent one is found and named in time",
        heavy: true,
        measure: ranks,
    },
];

fn shardwise() -> Result<PathBuf> {
    built("shardwise", &["build", "--release", "--workspace", "--bins"])
}

const SMALL: &str =
    "[model.llama]\nvocabulary = 2003\nwidth = 60\nblocks = 3\nheads = 6\nkv_heads = 3\nmlp_width = 131\n";
const MIDDLE: &str =
    "[model.llama]\nvocabulary = 32000\nwidth = 512\nblocks = 8\nheads = 8\nmlp_width = 1408\ntied = true\n";

/// A recipe in a folder.
struct Run<'a> {
    program: &'a Path,
    folder: PathBuf,
}

impl<'a> Run<'a> {
    fn new(program: &'a Path, folder: PathBuf, model: &str, batch: &str, steps: u64, rest: &str) -> Result<Self> {
        std::fs::create_dir_all(&folder)?;
        let recipe = format!(
            "{model}[data]\nseed = 7\n[batch]\n{batch}\n[optimizer]\nrate = 1e-3\n[run]\nsteps = {steps}\n{rest}"
        );
        std::fs::write(folder.join("recipe.toml"), recipe)?;
        Ok(Run { program, folder })
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.program);
        command.arg("train").arg(self.folder.join("recipe.toml")).args(arguments).env("OMP_NUM_THREADS", "1");
        command
    }

    /// What it printed, and what it told beside.
    fn made(&self, arguments: &[&str]) -> Result<(String, String)> {
        let output = self.command(arguments).output()?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (printed, told) = (text(&output.stdout), text(&output.stderr));
        ensure!(output.status.success(), "it failed ({}):\n{printed}{told}", output.status);
        Ok((printed, told))
    }

    /// Whether it has saved the same as another one, to the last bit.
    fn ends_like(&self, other: &Run<'_>, step: u64) -> Result<()> {
        let step = step.to_string();
        let mut diff = Command::new(self.program);
        diff.args(["checkpoint", "diff"]).arg(self.folder.join("saved")).args([&step, &step, "--other"]);
        let said = output_of(diff.arg(other.folder.join("saved")))?;
        ensure!(said.contains("the same to the last bit"), "{said}");
        Ok(())
    }
}

/// The step and the loss of every line; a step that was made again has several.
fn losses(printed: &str) -> Vec<(u64, String)> {
    let parse = |line: &str| {
        let mut words = line.strip_prefix("step ")?.split_whitespace();
        let step = words.next()?.split('/').next()?.parse().ok()?;
        words.next().filter(|word| *word == "loss")?;
        Some((step, words.next()?.to_string()))
    };
    printed.lines().filter_map(parse).collect()
}

/// That every loss is the one of the undisturbed run.
fn same_losses(printed: &str, whole: &str) -> Result<usize> {
    let (found, whole) = (losses(printed), losses(whole));
    for (step, loss) in &found {
        let (_, expected) = &whole[*step as usize - 1];
        ensure!(loss == expected, "step {step} has a loss of {loss}, and {expected} undisturbed");
    }
    Ok(found.len())
}

const STEPS: u64 = 300;
const OFTEN: &str =
    "[checkpoints]\nfolder = \"saved\"\nevery_steps = 1\nbackground = false\n[supervision]\nrestarts = 40\n";

fn disturbed<'a>(program: &'a Path, folder: PathBuf) -> Result<Run<'a>> {
    Run::new(program, folder, SMALL, "global = 8\nsequences = 1\npositions = 16", STEPS, OFTEN)
}

// ---- kills ------------------------------------------------------------------------------------------------------------

const KILLS: usize = 200;

fn kills() -> Result<Verdict> {
    let program = shardwise()?;
    let scratch = Scratch::new("kills")?;
    let whole = disturbed(&program, scratch.path().join("whole"))?;
    let (expected, _) = whole.made(&["-n", "4"])?;
    let killed = disturbed(&program, scratch.path().join("killed"))?;
    let (printed, told) = killed.made(&["-n", "4", "--fault", &format!("random seed=1 kills={KILLS}")])?;
    let made = same_losses(&printed, &expected)?;
    killed.ends_like(&whole, STEPS)?;
    let deaths = told.matches(" died (signal 9").count();
    let lost: Vec<f64> = told.lines().filter_map(seconds_lost).collect();
    ensure!(!lost.is_empty(), "nothing was lost:\n{told}");
    Ok(Verdict {
        figure: format!(
            "{deaths} deaths named, {made} steps printed for {STEPS}, the same losses and the same bits; {:.1} s lost for each",
            median(&lost)
        ),
        bar: format!("{KILLS}, the same bits"),
        holds: deaths == KILLS,
    })
}

/// Of `At work again at step 41 after 2.3 s: …`.
fn seconds_lost(line: &str) -> Option<f64> {
    line.strip_prefix("At work again at step ")?.split(" after ").nth(1)?.split(' ').next()?.parse().ok()
}

// ---- jobs -------------------------------------------------------------------------------------------------------------

const JOBS: u64 = 20;

fn jobs() -> Result<Verdict> {
    let program = shardwise()?;
    let scratch = Scratch::new("jobs")?;
    let whole = disturbed(&program, scratch.path().join("whole"))?;
    let (expected, _) = whole.made(&["-n", "4"])?;
    let killed = disturbed(&program, scratch.path().join("killed"))?;
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
        // All at once, as when a host goes: whoever starts it and all that it has started.
        let name = killed.folder.display().to_string();
        output_of(Command::new("pkill").args(["-KILL", "-f", &name]))?;
        job.wait()?;
        // What it had printed before it was killed counts, but for a line that was cut.
        let rest: Vec<String> = lines.map_while(|line| line.ok()).collect();
        for line in rest.iter().take(rest.len().saturating_sub(1)) {
            printed += &(line.clone() + "\n");
        }
    }
    printed += &killed.made(&["-n", "4"])?.0;
    let made = same_losses(&printed, &expected)?;
    killed.ends_like(&whole, STEPS)?;
    Ok(Verdict {
        figure: format!("{JOBS} kills, {made} steps printed for {STEPS}, the same losses and the same bits"),
        bar: "20, the same bits".to_string(),
        holds: true,
    })
}

// ---- slow -------------------------------------------------------------------------------------------------------------

fn slow() -> Result<Verdict> {
    let program = shardwise()?;
    let scratch = Scratch::new("slow")?;
    let limits = "[supervision]\ntime_limit_s = 5\nsilence_s = 5\n";
    let batch = "sequences = 1\npositions = 64";
    let run = Run::new(&program, scratch.path().to_path_buf(), SMALL, batch, 500, limits)?;
    let (_, told) = run.made(&["-n", "4", "--fault", "slow rank=1 step=1 phase=gather"])?;
    Ok(Verdict {
        figure: format!("{} words in 500 steps", told.split_whitespace().count()),
        bar: "none".to_string(),
        holds: told.trim().is_empty(),
    })
}

// ---- lost -------------------------------------------------------------------------------------------------------------

const DEATHS: usize = 5;

fn lost() -> Result<Verdict> {
    let program = shardwise()?;
    let scratch = Scratch::new("lost")?;
    let saves = "[checkpoints]\nfolder = \"saved\"\nevery_steps = 4\n";
    let batch = "sequences = 4\npositions = 256";
    let run = Run::new(&program, scratch.path().to_path_buf(), MIDDLE, batch, 40, saves)?;
    let fault = "kill rank=1 step=+6 phase=backward";
    let faults: Vec<&str> = std::iter::repeat_n(["--fault", fault], DEATHS).flatten().collect();
    let (_, told) = run.made(&[&["-n", "2"][..], &faults].concat())?;
    println!("{told}");
    let lost: Vec<f64> = told.lines().filter_map(seconds_lost).collect();
    ensure!(lost.len() == DEATHS, "{DEATHS} deaths were asked for:\n{told}");
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
    let batch = "sequences = 4\npositions = 256";
    let run = |name: &str| Run::new(&program, scratch.path().join(name), MIDDLE, batch, 100_000, "");
    let mut launched = shardwise_harness::launcher(None, 2, Duration::from_secs(3600));
    launched.arg(&program).arg("train").arg(run("alone")?.folder.join("recipe.toml")).env("OMP_NUM_THREADS", "1");
    let mut alone = Side::start(&mut launched)?;
    let mut watched = Side::start(&mut run("watched")?.command(&["-n", "2"]))?;
    let more = more_of("watching", &mut alone, &mut watched)?;
    Ok(Verdict {
        figure: format!("{more}; counted, watching takes {:.3}% of a core", 100. * watched.beside()),
        bar: "0.5%".to_string(),
        holds: more.percent() < 0.5,
    })
}

// ---- ranks ------------------------------------------------------------------------------------------------------------

fn ranks() -> Result<Verdict> {
    let program = built("bench-watch", &["build", "--release", "--workspace", "--bins"])?;
    // Its exit code says whether the silent one, and no other, was found.
    let said = output_of(Command::new(program).args(["10000", "30", "4711", "5"]))?;
    println!("{said}");
    let figure = said.lines().last().context("a figure")?.to_string();
    Ok(Verdict { figure, bar: "the silent one named within 5 s and a second".to_string(), holds: true })
}
