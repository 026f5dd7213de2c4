//! One side of a comparison of training: Shardwise at a stage, bare libtorch, or a peer; the work that all of them do, and one
//! run of one of them.

use std::fmt;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use shardwise_harness::{Hosts, launcher, python};

use crate::workspace::{Scratch, built, median, output_of, root};

// ---- the work ---------------------------------------------------------------------------------------------------------

/// What every side trains.
#[derive(Clone, Debug)]
pub(crate) struct Work {
    pub(crate) size: Size,
    pub(crate) precision: Precision,
    pub(crate) sequences: usize,
    pub(crate) positions: usize,
    pub(crate) steps: usize,
    pub(crate) units_in_flight: usize,
}

/// How large the model is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Size {
    /// For a look at whether all sides agree
    #[value(name = "1m")]
    Tiny,
    /// 42 million parameters
    #[value(name = "42m")]
    Small,
    /// 124 million parameters: GPT-2's vocabulary, width and blocks, in a Llama
    #[value(name = "124m")]
    Medium,
}

/// In which type parameters are gathered and computed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Precision {
    F32,
    Bf16,
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Size::Tiny => "1M",
            Size::Small => "42M",
            Size::Medium => "124M",
        })
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Precision::F32 { "f32" } else { "bf16" })
    }
}

impl Work {
    pub(crate) fn new(size: Size, precision: Precision) -> Self {
        Work { size, precision, sequences: 4, positions: 256, steps: WARM_UP + 3, units_in_flight: 1 }
    }

    fn recipe(&self) -> String {
        let (vocabulary, width, blocks, heads, mlp_width) = match self.size {
            Size::Tiny => (1000, 128, 3, 4, 352),
            Size::Small => (32_000, 512, 8, 8, 1408),
            Size::Medium => (50_257, 768, 12, 12, 2048),
        };
        let Work { precision, sequences, positions, steps, units_in_flight, .. } = self;
        format!(
            "[model.llama]\nvocabulary = {vocabulary}\nwidth = {width}\nblocks = {blocks}\nheads = {heads}\n\
             mlp_width = {mlp_width}\ntied = true\n[start]\nweights = \"start.safetensors\"\n[data]\nseed = 7\n\
             [batch]\nsequences = {sequences}\npositions = {positions}\n[sharding]\nunits_in_flight = {units_in_flight}\n\
             [precision]\nparameters = \"{precision}\"\ngradients = \"f32\"\n\
             [optimizer]\nrate = 3e-4\nbetas = [0.9, 0.95]\nepsilon = 1e-8\nweight_decay = 0.1\n[run]\nsteps = {steps}\n"
        )
    }
}

// ---- the sides --------------------------------------------------------------------------------------------------------

/// Who trains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(into = "String")]
pub(crate) enum Side {
    /// The model in bare libtorch: one graph, fused AdamW, no word between ranks.
    Bare,
    Shardwise(u8),
    /// The same in Python.
    PyTorch,
    Ddp,
    Zero1,
    Fsdp2Keep,
    Fsdp2,
    DeepSpeed(u8),
    /// DDP and FSDP2 with each block compiled by Inductor.
    DdpCompiled,
    Fsdp2KeepCompiled,
    Fsdp2Compiled,
}

/// All of them, by stage.
pub(crate) const SIDES: [Side; 16] = [
    Side::Bare,
    Side::PyTorch,
    Side::Shardwise(0),
    Side::Ddp,
    Side::DdpCompiled,
    Side::Shardwise(1),
    Side::Zero1,
    Side::DeepSpeed(1),
    Side::Shardwise(2),
    Side::Fsdp2Keep,
    Side::Fsdp2KeepCompiled,
    Side::DeepSpeed(2),
    Side::Shardwise(3),
    Side::Fsdp2,
    Side::Fsdp2Compiled,
    Side::DeepSpeed(3),
];

impl Side {
    /// Whether it is one of the others.
    pub(crate) fn is_peer(self) -> bool {
        !matches!(self, Side::Bare | Side::Shardwise(_))
    }

    /// Whether Inductor compiles its blocks.
    pub(crate) fn is_compiled(self) -> bool {
        matches!(self, Side::DdpCompiled | Side::Fsdp2KeepCompiled | Side::Fsdp2Compiled)
    }

    /// Whether its ranks train together.
    pub(crate) fn is_joint(self) -> bool {
        !matches!(self, Side::Bare | Side::PyTorch)
    }

    /// The side that computes the same with no word between ranks.
    pub(crate) fn bare(self) -> Side {
        if self.is_peer() { Side::PyTorch } else { Side::Bare }
    }

    /// The stage that does what a peer does.
    pub(crate) fn stage(self) -> u8 {
        match self {
            Side::Bare | Side::PyTorch | Side::Ddp | Side::DdpCompiled => 0,
            Side::Zero1 => 1,
            Side::Fsdp2Keep | Side::Fsdp2KeepCompiled => 2,
            Side::Fsdp2 | Side::Fsdp2Compiled => 3,
            Side::Shardwise(stage) | Side::DeepSpeed(stage) => stage,
        }
    }

    /// What its program calls it.
    fn argument(self) -> String {
        match self {
            Side::Bare | Side::PyTorch => "bare".to_string(),
            Side::Shardwise(stage) => format!("stage-{stage}"),
            Side::Ddp => "ddp".to_string(),
            Side::Zero1 => "zero1".to_string(),
            Side::Fsdp2Keep => "fsdp2-keep".to_string(),
            Side::Fsdp2 => "fsdp2".to_string(),
            Side::DdpCompiled => "ddp-compiled".to_string(),
            Side::Fsdp2KeepCompiled => "fsdp2-keep-compiled".to_string(),
            Side::Fsdp2Compiled => "fsdp2-compiled".to_string(),
            Side::DeepSpeed(stage) => format!("deepspeed-{stage}"),
        }
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Side::Bare => f.write_str("bare libtorch"),
            Side::PyTorch => f.write_str("bare PyTorch"),
            Side::Shardwise(stage) => write!(f, "Shardwise {stage}"),
            Side::Ddp => f.write_str("DDP"),
            Side::Zero1 => f.write_str("DDP + ZeRO optimizer"),
            Side::Fsdp2Keep => f.write_str("FSDP2, no reshard"),
            Side::Fsdp2 => f.write_str("FSDP2"),
            Side::DdpCompiled => f.write_str("DDP, compiled"),
            Side::Fsdp2KeepCompiled => f.write_str("FSDP2, no reshard, compiled"),
            Side::Fsdp2Compiled => f.write_str("FSDP2, compiled"),
            Side::DeepSpeed(stage) => write!(f, "DeepSpeed {stage}"),
        }
    }
}

impl From<Side> for String {
    fn from(side: Side) -> String {
        side.to_string()
    }
}

// ---- a run ------------------------------------------------------------------------------------------------------------

/// What a side prints for a step.
#[derive(Clone, Copy, Debug, Deserialize)]
struct Step {
    step: usize,
    loss: f64,
}

/// What became of a run: what a side prints at its end. Of a step that is neither the first nor the second, which warm up; times
/// and memory of the rank that has the most, the rest in the mean of ranks.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(crate) struct Run {
    #[serde(skip_deserializing)]
    pub(crate) first_loss: f64,
    #[serde(skip_deserializing)]
    pub(crate) last_loss: f64,
    #[serde(rename = "step_seconds")]
    pub(crate) step_s: f64,
    /// Of all threads of a rank.
    #[serde(rename = "cpu_seconds")]
    pub(crate) cpu_s: f64,
    /// What of it went into updates; of the bare sides.
    #[serde(rename = "optimizer_cpu_seconds")]
    pub(crate) optimizer_cpu_s: f64,
    /// Of Shardwise, the payload that its meter counts; of peers, all that went over the loopback device.
    pub(crate) sent_bytes: f64,
    /// What calls between ranks took, and how long a rank stood still for them; of Shardwise.
    #[serde(rename = "talked_seconds", default)]
    pub(crate) talked_s: f64,
    #[serde(rename = "waited_seconds", default)]
    pub(crate) waited_s: f64,
    /// What the first step took longer than the others; of sides that are compiled in it.
    #[serde(rename = "compile_seconds", default)]
    pub(crate) compile_s: f64,
    /// From the launch to the first step.
    #[serde(rename = "ready_seconds")]
    pub(crate) ready_s: f64,
    pub(crate) peak_bytes: f64,
    /// At the end.
    pub(crate) pss_bytes: f64,
}

/// What `sent_bytes` are, for readers of tables.
pub(crate) const SENT: &str = "What Shardwise sent is the payload that its meter counts; what peers sent is all that went over the \
                               loopback device.";

/// The steps that warm up.
pub(crate) const WARM_UP: usize = 2;

/// The median of a figure.
pub(crate) fn middle<'a>(runs: impl IntoIterator<Item = &'a Run>, figure: fn(&Run) -> f64) -> f64 {
    median(&runs.into_iter().map(figure).collect::<Vec<_>>())
}

/// The programs, and a folder with the recipe and the weights that all sides begin with.
pub(crate) struct Ground {
    program: PathBuf,
    peers: PathBuf,
    folder: Scratch,
    steps: usize,
}

impl Ground {
    pub(crate) fn new(work: &Work) -> Result<Self> {
        let program = built("bench-train", &["build", "--release", "--workspace", "--bins"])?;
        let torch = python().map_err(anyhow::Error::msg)?;
        let mut setup = Command::new(root().join("bench/peers/setup"));
        let peers = output_of(setup.arg(torch).stderr(std::process::Stdio::inherit()))?.trim().into();
        let folder = Scratch::new("sides")?;
        let ground = Ground { program, peers, folder, steps: work.steps };
        ground.set(work)?;
        output_of(Command::new(&ground.program).arg("weights").arg(ground.recipe()))?;
        Ok(ground)
    }

    /// Changes the work, but for the model and the number of steps.
    pub(crate) fn set(&self, work: &Work) -> Result<()> {
        Ok(std::fs::write(self.recipe(), work.recipe())?)
    }

    fn recipe(&self) -> PathBuf {
        self.folder.path().join("recipe.toml")
    }

    /// One run of a side, each rank with one thread; on hosts of its own where `hosts` says so.
    pub(crate) fn run(&self, side: Side, ranks: usize, hosts: Option<&Hosts>) -> Result<Run> {
        let network = hosts.map(Hosts::start).transpose()?;
        let mut command = launcher(network.as_ref(), ranks, Duration::from_secs(1800));
        let launched = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64();
        command.args([
            "OMP_NUM_THREADS=1",
            &format!("SHARDWISE_LAUNCHED={launched}"),
            &format!("SHARDWISE_WARM_UP={WARM_UP}"),
        ]);
        if side.is_peer() {
            // DeepSpeed looks for the part of itself that was compiled, and for the ninja that did it.
            let environment = self.peers.ancestors().nth(2).context("the peers' environment")?;
            let path = std::env::join_paths(
                std::iter::once(environment.join("bin"))
                    .chain(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())),
            )?;
            command.args(["DS_ACCELERATOR=cpu", "GLOO_SOCKET_IFNAME=lo", "PYTHONDONTWRITEBYTECODE=1"]);
            command.arg(format!("TORCH_EXTENSIONS_DIR={}", environment.join("extensions").display()));
            command.arg(format!("PATH={}", path.display()));
            command.arg(&self.peers).arg(root().join("bench/peers/train.py")).arg(side.argument()).arg(self.recipe());
            // Free now, and nobody else starts anything.
            command.arg(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string());
        } else {
            command.arg(&self.program).arg(side.argument()).arg(self.recipe());
        }
        let printed = output_of(&mut command).with_context(|| format!("{side} on {ranks} ranks"))?;
        run_of(&printed, self.steps).with_context(|| format!("{side} printed {printed}"))
    }
}

/// What was printed, as figures. Libraries print other things as well.
fn run_of(printed: &str, steps: usize) -> Result<Run> {
    let lines = || printed.lines().filter(|line| line.starts_with('{'));
    let losses: Vec<Step> = lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let run: Option<Run> = lines().find_map(|line| serde_json::from_str(line).ok());
    let (Some(run), [first, .., last]) = (run, &losses[..]) else { bail!("too few lines") };
    ensure!(losses.len() == steps && last.step == steps, "{} of {steps} steps", losses.len());
    Ok(Run { first_loss: first.loss, last_loss: last.loss, ..run })
}

/// Whether all sides did the same: the first loss is that of the same weights on the same tokens, the last one that of ranks
/// that trained together. It would show if they had not: sides whose ranks each train alone come out elsewhere.
pub(crate) fn agree(runs: &[(Side, Run)], precision: Precision, ranks: usize) -> Result<()> {
    // bf16 sides round in different places.
    let allowed = if precision == Precision::F32 { 1e-5 } else { 1e-3 };
    let together = runs.iter().find(|(side, _)| side.is_joint()).context("a side whose ranks train together")?;
    let off = |loss: fn(&Run) -> f64, run: &Run| (loss(run) / loss(&together.1) - 1.).abs();
    for (side, run) in runs {
        let (first, last) = (off(|run| run.first_loss, run), off(|run| run.last_loss, run));
        ensure!(first <= allowed, "void: the first losses of {side} and {} are {first:.1e} apart", together.0);
        let same = last <= allowed;
        let expected = side.is_joint() || ranks == 1;
        ensure!(
            same == expected,
            "void: the last losses of {side} and {} are {last:.1e} apart, and {} {allowed:.0e} was expected",
            together.0,
            if expected { "at most" } else { "more than" }
        );
    }
    Ok(())
}

/// Rounds in which every side runs once, in an order that turns; each round's runs in the order of `sides`.
pub(crate) fn rounds(
    ground: &Ground,
    work: &Work,
    sides: &[Side],
    ranks: usize,
    rounds: usize,
) -> Result<Vec<Vec<(Side, Run)>>> {
    let mut all = Vec::new();
    for round in 0..rounds {
        let mut order: Vec<Side> = sides.to_vec();
        order.rotate_left(round * sides.len() / rounds);
        if round % 2 == 1 {
            order.reverse();
        }
        let mut runs = Vec::new();
        for side in order {
            let run = ground.run(side, ranks, None)?;
            eprintln!(
                "{ranks} ranks, round {} of {rounds}: {side}: {:.3} s a step, {:.0} MB",
                round + 1,
                run.step_s,
                run.peak_bytes / 1e6
            );
            runs.push((side, run));
        }
        runs.sort_by_key(|(side, _)| sides.iter().position(|other| other == side));
        agree(&runs, work.precision, ranks)?;
        all.push(runs);
    }
    Ok(all)
}
