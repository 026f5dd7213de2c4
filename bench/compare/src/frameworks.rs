//! The training benchmark: the frameworks that are compared (Shardwise at each stage, bare libtorch, and the peers), the workload that
//! all of them train, and a run of one framework.

use std::cell::Cell;
use std::fmt;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use shardwise_harness::{Hosts, launcher, python};

use crate::workspace::{Scratch, build, median, output_of, root};

// ---- the workload -----------------------------------------------------------------------------------------------------

/// The model and batch that every framework trains.
#[derive(Clone, Debug)]
pub struct Workload {
    /// The size of the model.
    pub size: Size,
    /// The type of its parameters.
    pub precision: Precision,
    /// The number of sequences in a micro-batch.
    pub micro_batch_size: usize,
    /// The number of micro-batches per rank and step.
    pub micro_batches: usize,
    /// The length of a sequence, in tokens.
    pub seq_len: usize,
    /// The number of steps, including those of the warm-up.
    pub steps: usize,
    /// The number of units that Shardwise gathers ahead.
    pub prefetch: usize,
    /// Whether the head's weight is the embedding.
    pub tie_word_embeddings: bool,
    /// The experts in place of every MLP.
    pub experts: Option<Experts>,
    /// Whether optimizer state is on a disk: on that of the recipe's folder. FSDP2 can only keep it in the host's memory.
    pub offloads: bool,
}

/// The experts of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Experts {
    /// How many there are.
    pub number: usize,
    /// The number of experts that process a token.
    pub per_token: usize,
    /// The size of an expert's hidden layer.
    pub intermediate_size: usize,
}

/// The size of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Size {
    /// 1 million parameters, to check that all frameworks agree
    #[value(name = "1m")]
    Tiny,
    /// 42 million parameters
    #[value(name = "42m")]
    Small,
    /// 124 million parameters: a Llama with GPT-2's vocabulary, hidden size and layers
    #[value(name = "124m")]
    Medium,
}

/// The type in which parameters are gathered and units compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Precision {
    /// 32 bits
    F32,
    /// bfloat16, with f32 master weights
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

impl Workload {
    /// The usual batch and number of steps.
    pub fn new(size: Size, precision: Precision) -> Self {
        Workload {
            size,
            precision,
            micro_batch_size: 4,
            micro_batches: 1,
            seq_len: 256,
            steps: WARM_UP + 3,
            prefetch: 1,
            tie_word_embeddings: true,
            experts: None,
            offloads: false,
        }
    }

    /// The workload of pipelines: small micro-batches that fill the stages. The stages of `torch.distributed.pipelining` cannot share
    /// a parameter, so the head is not tied to the embedding.
    pub fn pipelined(size: Size, precision: Precision) -> Self {
        let usual = Workload::new(size, precision);
        Workload { micro_batch_size: 1, micro_batches: 8, tie_word_embeddings: false, ..usual }
    }

    fn recipe(&self) -> String {
        let (vocab_size, hidden_size, num_hidden_layers, num_attention_heads, intermediate_size) = match self.size {
            Size::Tiny => (1000, 128, 3, 4, 352),
            Size::Small => (32_000, 512, 8, 8, 1408),
            Size::Medium => (50_257, 768, 12, 12, 2048),
        };
        let Workload {
            precision, micro_batch_size, micro_batches, seq_len, steps, prefetch, tie_word_embeddings, ..
        } = self;
        let experts = self.experts.map_or(String::new(), |Experts { number, per_token, intermediate_size }| {
            format!(
                "[model.llama.moe]\nnum_experts = {number}\nnum_experts_per_tok = {per_token}\n\
                 moe_intermediate_size = {intermediate_size}\nrouter_aux_loss_coef = 0\n"
            )
        });
        let offload = if self.offloads { "[offload]\noptimizer = \".\"\n" } else { "" };
        format!(
            "[model.llama]\nvocab_size = {vocab_size}\nhidden_size = {hidden_size}\nnum_hidden_layers = {num_hidden_layers}\n\
             num_attention_heads = {num_attention_heads}\nintermediate_size = {intermediate_size}\n\
             tie_word_embeddings = {tie_word_embeddings}\n{experts}\
             [init]\nweights = \"start.safetensors\"\n[data]\nseed = 7\n\
             [batch]\nmicro_batch_size = {micro_batch_size}\ngradient_accumulation_steps = {micro_batches}\n\
             seq_len = {seq_len}\n[zero]\nprefetch = {prefetch}\n\
             [precision]\nparam_dtype = \"{precision}\"\nreduce_dtype = \"f32\"\n{offload}\
             [optimizer]\nlr = 3e-4\nbetas = [0.9, 0.95]\neps = 1e-8\nweight_decay = 0.1\n[run]\nsteps = {steps}\n"
        )
    }
}

// ---- the ranks --------------------------------------------------------------------------------------------------------

/// How many ranks train, and how many of them share each layer or hold the stages of a pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Layout {
    /// The number of ranks.
    pub ranks: usize,
    /// The number of ranks that share each layer and its batch (tensor parallelism); 1 if none do.
    pub tensor: usize,
    /// The number of ranks that each hold a stage of the model and read the same batch (pipeline parallelism); 1 if there are no stages.
    pub pipeline: usize,
}

impl Layout {
    /// Ranks that share no layers and hold the whole model.
    pub const fn data_parallel(ranks: usize) -> Self {
        Layout { ranks, tensor: 1, pipeline: 1 }
    }

    /// The number of ranks that train one batch together.
    pub fn sharers(self) -> usize {
        self.tensor * self.pipeline
    }

    /// The number of ranks that read different samples.
    pub fn data_ranks(self) -> usize {
        self.ranks / self.sharers()
    }

    /// The frameworks that can be compared, in the order of their ZeRO stages or by schedule.
    pub fn frameworks(self) -> &'static [Framework] {
        match (self.pipeline, self.tensor, self.data_ranks()) {
            (1, 1, _) => &FRAMEWORKS,
            (1, _, 1) => &TENSOR_PARALLEL,
            (1, _, _) => &SHARDED_TENSOR_PARALLEL,
            _ => &PIPELINE_PARALLEL,
        }
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.tensor, self.pipeline) {
            (1, 1) => write!(f, "{} ranks", self.ranks),
            (tensor, 1) => write!(f, "{} ranks, {tensor} per layer", self.ranks),
            (_, pipeline) => write!(f, "{} ranks, {pipeline} stages", self.ranks),
        }
    }
}

// ---- the frameworks ---------------------------------------------------------------------------------------------------

/// A pipeline schedule of both Shardwise and `torch.distributed.pipelining`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// One forward, one backward.
    OneFOneB,
    /// 1F1B with two chunks per rank.
    Interleaved1F1B,
    /// Two chunks per rank, there and back, and split backward passes.
    ZeroBubbleV,
}

impl Schedule {
    /// Its argument on the command line of the benchmark program.
    fn argument(self) -> &'static str {
        match self {
            Schedule::OneFOneB => "1f1b",
            Schedule::Interleaved1F1B => "interleaved-1f1b",
            Schedule::ZeroBubbleV => "zb-v",
        }
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Schedule::OneFOneB => "1F1B",
            Schedule::Interleaved1F1B => "interleaved 1F1B",
            Schedule::ZeroBubbleV => "ZB-V",
        })
    }
}

/// A framework and its configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(into = "String")]
pub enum Framework {
    /// Bare libtorch: one autograd graph, fused AdamW, no communication.
    Bare,
    /// Shardwise at a ZeRO stage.
    Shardwise(u8),
    /// Shardwise at a ZeRO stage, with a model that `shardwise compile` has compiled.
    ShardwiseCompiled(u8),
    /// Bare PyTorch: the same in Python.
    PyTorch,
    /// PyTorch's DDP.
    Ddp,
    /// DDP with PyTorch's `ZeroRedundancyOptimizer`.
    Zero1,
    /// FSDP2 with `reshard_after_forward=False`.
    Fsdp2Keep,
    /// FSDP2.
    Fsdp2,
    /// DeepSpeed at a ZeRO stage.
    DeepSpeed(u8),
    /// DDP with each block compiled by Inductor.
    DdpCompiled,
    /// FSDP2 with `reshard_after_forward=False` and each block compiled by Inductor.
    Fsdp2KeepCompiled,
    /// FSDP2 with each block compiled by Inductor.
    Fsdp2Compiled,
    /// PyTorch's tensor and sequence parallelism (`parallelize_module`).
    Tensor,
    /// FSDP2 and PyTorch's tensor and sequence parallelism, on a mesh of two axes.
    Fsdp2Tensor,
    /// Shardwise with the stages of a pipeline, at ZeRO stage 1: the ranks of a stage, if it has several, shard the optimizer state.
    ShardwisePipeline(Schedule),
    /// PyTorch's pipeline parallelism (`torch.distributed.pipelining`).
    PyTorchPipeline(Schedule),
}

/// The frameworks whose ranks share no layers, in the order of their stages.
const FRAMEWORKS: [Framework; 16] = [
    Framework::Bare,
    Framework::PyTorch,
    Framework::Shardwise(0),
    Framework::Ddp,
    Framework::DdpCompiled,
    Framework::Shardwise(1),
    Framework::Zero1,
    Framework::DeepSpeed(1),
    Framework::Shardwise(2),
    Framework::Fsdp2Keep,
    Framework::Fsdp2KeepCompiled,
    Framework::DeepSpeed(2),
    Framework::Shardwise(3),
    Framework::Fsdp2,
    Framework::Fsdp2Compiled,
    Framework::DeepSpeed(3),
];

/// The frameworks on ranks that share every layer. PyTorch's are not compiled: in torch 2.13 the backward pass of a compiled block with
/// `SequenceParallel` norms fails.
const TENSOR_PARALLEL: [Framework; 4] =
    [Framework::Bare, Framework::PyTorch, Framework::Shardwise(0), Framework::Tensor];

/// The frameworks on ranks that share layers and shard what is left.
const SHARDED_TENSOR_PARALLEL: [Framework; 4] =
    [Framework::Bare, Framework::PyTorch, Framework::Shardwise(3), Framework::Fsdp2Tensor];

/// The frameworks on ranks that hold the stages of a pipeline.
const PIPELINE_PARALLEL: [Framework; 8] = [
    Framework::Bare,
    Framework::PyTorch,
    Framework::ShardwisePipeline(Schedule::OneFOneB),
    Framework::PyTorchPipeline(Schedule::OneFOneB),
    Framework::ShardwisePipeline(Schedule::Interleaved1F1B),
    Framework::PyTorchPipeline(Schedule::Interleaved1F1B),
    Framework::ShardwisePipeline(Schedule::ZeroBubbleV),
    Framework::PyTorchPipeline(Schedule::ZeroBubbleV),
];

impl Framework {
    /// Whether it is not part of this project.
    pub fn is_peer(self) -> bool {
        !matches!(
            self,
            Framework::Bare
                | Framework::Shardwise(_)
                | Framework::ShardwiseCompiled(_)
                | Framework::ShardwisePipeline(_)
        )
    }

    /// Whether Inductor compiles its blocks.
    pub fn is_compiled(self) -> bool {
        matches!(self, Framework::DdpCompiled | Framework::Fsdp2KeepCompiled | Framework::Fsdp2Compiled)
    }

    /// Whether its ranks train together.
    pub fn is_joint(self) -> bool {
        !matches!(self, Framework::Bare | Framework::PyTorch)
    }

    /// The baseline that computes the same model without communication.
    pub fn bare(self) -> Framework {
        if self.is_peer() { Framework::PyTorch } else { Framework::Bare }
    }

    /// The configuration of Shardwise that it is compared with: that of the same schedule, or of the same ZeRO stage.
    pub fn counterpart(self) -> Framework {
        self.schedule().map_or(Framework::Shardwise(self.stage()), Framework::ShardwisePipeline)
    }

    /// The schedule of its pipeline, if it has one.
    fn schedule(self) -> Option<Schedule> {
        match self {
            Framework::ShardwisePipeline(schedule) | Framework::PyTorchPipeline(schedule) => Some(schedule),
            _ => None,
        }
    }

    /// The equivalent ZeRO stage.
    pub fn stage(self) -> u8 {
        match self {
            Framework::Bare | Framework::PyTorch | Framework::Ddp | Framework::DdpCompiled => 0,
            Framework::Tensor => 0,
            Framework::Zero1 | Framework::ShardwisePipeline(_) | Framework::PyTorchPipeline(_) => 1,
            Framework::Fsdp2Keep | Framework::Fsdp2KeepCompiled => 2,
            Framework::Fsdp2 | Framework::Fsdp2Compiled => 3,
            Framework::Fsdp2Tensor => 3,
            Framework::Shardwise(stage) | Framework::ShardwiseCompiled(stage) | Framework::DeepSpeed(stage) => stage,
        }
    }

    /// Its argument on the command line of the benchmark program.
    fn argument(self) -> String {
        match self {
            Framework::Bare | Framework::PyTorch => "bare".to_string(),
            Framework::Shardwise(stage) | Framework::ShardwiseCompiled(stage) => format!("stage-{stage}"),
            Framework::Ddp => "ddp".to_string(),
            Framework::Zero1 => "zero1".to_string(),
            Framework::Fsdp2Keep => "fsdp2-keep".to_string(),
            Framework::Fsdp2 => "fsdp2".to_string(),
            Framework::DdpCompiled => "ddp-compiled".to_string(),
            Framework::Fsdp2KeepCompiled => "fsdp2-keep-compiled".to_string(),
            Framework::Fsdp2Compiled => "fsdp2-compiled".to_string(),
            Framework::DeepSpeed(stage) => format!("deepspeed-{stage}"),
            Framework::Tensor => "tensor".to_string(),
            Framework::Fsdp2Tensor => "fsdp2-tensor".to_string(),
            Framework::ShardwisePipeline(_) => "stage-1".to_string(),
            Framework::PyTorchPipeline(_) => "pipeline".to_string(),
        }
    }
}

impl fmt::Display for Framework {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Framework::Bare => f.write_str("bare libtorch"),
            Framework::PyTorch => f.write_str("bare PyTorch"),
            Framework::Shardwise(stage) => write!(f, "Shardwise {stage}"),
            Framework::ShardwiseCompiled(stage) => write!(f, "Shardwise {stage}, compiled"),
            Framework::Ddp => f.write_str("DDP"),
            Framework::Zero1 => f.write_str("DDP + ZeRO optimizer"),
            Framework::Fsdp2Keep => f.write_str("FSDP2, no reshard"),
            Framework::Fsdp2 => f.write_str("FSDP2"),
            Framework::DdpCompiled => f.write_str("DDP, compiled"),
            Framework::Fsdp2KeepCompiled => f.write_str("FSDP2, no reshard, compiled"),
            Framework::Fsdp2Compiled => f.write_str("FSDP2, compiled"),
            Framework::DeepSpeed(stage) => write!(f, "DeepSpeed {stage}"),
            Framework::Tensor => f.write_str("PyTorch TP"),
            Framework::Fsdp2Tensor => f.write_str("FSDP2 + TP"),
            Framework::ShardwisePipeline(schedule) => write!(f, "Shardwise {schedule}"),
            Framework::PyTorchPipeline(schedule) => write!(f, "PyTorch {schedule}"),
        }
    }
}

impl From<Framework> for String {
    fn from(framework: Framework) -> String {
        framework.to_string()
    }
}

// ---- a run ------------------------------------------------------------------------------------------------------------

/// The line that a framework prints for a step.
#[derive(Clone, Copy, Debug, Deserialize)]
struct Step {
    step: usize,
    loss: f64,
}

/// The results that a framework prints at the end of a run, per step, without warm-up steps. Times and memory are those of the rank
/// with the most; the rest are means over ranks.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub struct Run {
    /// The loss of the first step.
    #[serde(skip_deserializing)]
    pub first_loss: f64,
    /// The loss of the last step.
    #[serde(skip_deserializing)]
    pub last_loss: f64,
    /// The duration of a step.
    #[serde(rename = "step_seconds")]
    pub step_s: f64,
    /// The CPU time of all threads of a rank.
    #[serde(rename = "cpu_seconds")]
    pub cpu_s: f64,
    /// The CPU time of the optimizer; only for the bare baselines.
    #[serde(rename = "optimizer_cpu_seconds")]
    pub optimizer_cpu_s: f64,
    /// For Shardwise the payload that its meter counts; for peers all bytes on the loopback device.
    pub sent_bytes: f64,
    /// The duration of calls; only for Shardwise.
    #[serde(rename = "talked_seconds", default)]
    pub talked_s: f64,
    /// The time that a rank waited for calls; only for Shardwise.
    #[serde(rename = "waited_seconds", default)]
    pub waited_s: f64,
    /// How much longer the first step took; only for compiled frameworks.
    #[serde(rename = "compile_seconds", default)]
    pub compile_s: f64,
    /// The time from launch to the first step.
    #[serde(rename = "ready_seconds")]
    pub ready_s: f64,
    /// The peak memory.
    pub peak_bytes: f64,
    /// The proportional set size at the end.
    pub pss_bytes: f64,
}

/// An explanation of `sent_bytes` for readers of tables.
pub const SENT: &str = "Bytes sent are the payload that the meter counts for Shardwise, and all bytes on the loopback device for \
                               the peers.";

/// The number of warm-up steps.
pub const WARM_UP: usize = 2;

/// The median of a figure over runs.
pub fn median_of<'a>(runs: impl IntoIterator<Item = &'a Run>, figure: fn(&Run) -> f64) -> f64 {
    median(&runs.into_iter().map(figure).collect::<Vec<_>>())
}

/// The benchmark programs, and a folder with the recipe and the initial weights of all frameworks.
pub struct Bench {
    program: PathBuf,
    peers: PathBuf,
    folder: Scratch,
    /// The number of steps of the current workload.
    steps: Cell<usize>,
}

/// Installs the other frameworks, and returns the Python of their environment.
pub fn peers_python() -> Result<PathBuf> {
    let torch = python().map_err(anyhow::Error::msg)?;
    let mut setup = Command::new(root().join("bench/peers/setup"));
    Ok(output_of(setup.arg(torch).stderr(std::process::Stdio::inherit()))?.trim().into())
}

impl Bench {
    /// Builds and installs the programs, and writes the recipe and the initial weights.
    pub fn new(workload: &Workload) -> Result<Self> {
        let program = build("bench-train", &["build", "--release", "--workspace", "--bins"])?;
        let peers = peers_python()?;
        let folder = Scratch::new("frameworks")?;
        let bench = Bench { program, peers, folder, steps: Cell::new(0) };
        bench.set(workload)?;
        output_of(Command::new(&bench.program).arg("weights").arg(bench.recipe()))?;
        Ok(bench)
    }

    /// Changes the workload, except for the model.
    pub fn set(&self, workload: &Workload) -> Result<()> {
        self.steps.set(workload.steps);
        Ok(std::fs::write(self.recipe(), workload.recipe())?)
    }

    /// The recipe of the current workload.
    pub fn recipe(&self) -> PathBuf {
        self.folder.path().join("recipe.toml")
    }

    /// The program that runs Shardwise's side.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// The recipe of [`Framework::ShardwiseCompiled`].
    pub fn compiled_recipe(&self) -> PathBuf {
        self.folder.path().join("compiled.toml")
    }

    /// Compiles the model of a workload, for [`Framework::ShardwiseCompiled`]. Returns how long it took, in seconds.
    pub fn compile(&self, workload: &Workload) -> Result<f64> {
        let started = Instant::now();
        let folder = self.folder.path();
        let config = output_of(Command::new(&self.program).arg("config").arg(self.recipe()))?;
        std::fs::write(folder.join("config.json"), config)?;
        let python = output_of(&mut Command::new(root().join("python/setup")))?;
        let mut command = Command::new(python.trim());
        command.env("PYTHONPATH", root().join("python")).args(["-m", "shardwise_compile"]);
        command.arg(folder.join("config.json")).arg("--out").arg(folder.join("package"));
        command.args(["--micro-batch-size", &workload.micro_batch_size.to_string()]);
        command.args(["--seq-len", &workload.seq_len.to_string(), "--dtype", &workload.precision.to_string()]);
        output_of(&mut command)?;
        let recipe = workload.recipe();
        let (_, rest) = recipe.split_once("[init]").context("the recipe's model comes first")?;
        std::fs::write(self.compiled_recipe(), format!("[model]\npackage = \"package\"\n[init]{rest}"))?;
        Ok(started.elapsed().as_secs_f64())
    }

    /// Runs a framework with one thread per rank, on simulated hosts if `hosts` is given.
    pub fn run(&self, framework: Framework, layout: Layout, hosts: Option<&Hosts>) -> Result<Run> {
        let pipeline_arguments = self.pipeline_arguments(framework, layout)?;
        let network = hosts.map(Hosts::start).transpose()?;
        let mut command = launcher(network.as_ref(), layout.ranks, Duration::from_secs(1800));
        let launched = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64();
        command.args([
            "OMP_NUM_THREADS=1",
            &format!("SHARDWISE_LAUNCHED={launched}"),
            &format!("SHARDWISE_WARM_UP={WARM_UP}"),
        ]);
        if framework.is_peer() {
            // DeepSpeed looks for its compiled extensions, and for ninja.
            let environment = self.peers.ancestors().nth(2).context("the peers' environment")?;
            let path = std::env::join_paths(
                std::iter::once(environment.join("bin"))
                    .chain(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())),
            )?;
            // Hosts are connected by their data links. The first one, which has rank 0, has the first address.
            let (interface, address) = if hosts.is_some() { ("data", "10.89.0.1") } else { ("lo", "127.0.0.1") };
            command.args([
                "DS_ACCELERATOR=cpu",
                &format!("GLOO_SOCKET_IFNAME={interface}"),
                "PYTHONDONTWRITEBYTECODE=1",
            ]);
            command.arg(format!("TORCH_EXTENSIONS_DIR={}", environment.join("extensions").display()));
            command.arg(format!("PATH={}", path.display()));
            command
                .arg(&self.peers)
                .arg(root().join("bench/peers/train.py"))
                .arg(framework.argument())
                .arg(self.recipe());
            // This port is free now, and stays free because nothing else is started.
            let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
            command.arg(format!("{address}:{port}"));
        } else {
            let is_compiled = matches!(framework, Framework::ShardwiseCompiled(_));
            let recipe = if is_compiled { self.compiled_recipe() } else { self.recipe() };
            command.arg(&self.program).arg(framework.argument()).arg(recipe);
        }
        command.args(["--tensor", &layout.tensor.to_string()]).args(pipeline_arguments);
        let printed = output_of(&mut command).with_context(|| format!("{framework} on {layout}"))?;
        parse_run(&printed, self.steps.get()).with_context(|| format!("{framework} printed {printed}"))
    }

    /// The arguments about the pipeline. PyTorch's stages begin with the same units as Shardwise's chunks.
    fn pipeline_arguments(&self, framework: Framework, layout: Layout) -> Result<Vec<String>> {
        let mut arguments = vec!["--pipeline".to_string(), layout.pipeline.to_string()];
        if let Some(schedule) = framework.schedule() {
            arguments.extend(["--schedule".to_string(), schedule.argument().to_string()]);
            if framework.is_peer() {
                let mut command = Command::new(&self.program);
                let points = output_of(command.arg("split-points").arg(self.recipe()).args(&arguments))?;
                arguments.extend(["--split-points".to_string(), points.trim().to_string()]);
            }
        }
        Ok(arguments)
    }
}

/// Parses the output of a run. Libraries may print other lines.
fn parse_run(printed: &str, steps: usize) -> Result<Run> {
    let lines = || printed.lines().filter(|line| line.starts_with('{'));
    let losses: Vec<Step> = lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let run: Option<Run> = lines().find_map(|line| serde_json::from_str(line).ok());
    let (Some(run), [first, .., last]) = (run, &losses[..]) else { bail!("too few lines") };
    ensure!(losses.len() == steps && last.step == steps, "{} of {steps} steps", losses.len());
    Ok(Run { first_loss: first.loss, last_loss: last.loss, ..run })
}

/// Checks that all frameworks computed the same thing: first losses agree because weights and tokens are the same, last losses because
/// ranks train together. The check is meaningful, because baselines whose ranks train alone end with different losses, unless all
/// ranks read the same samples.
pub fn check_losses(runs: &[(Framework, Run)], precision: Precision, layout: Layout) -> Result<()> {
    // In bf16, frameworks round in different places.
    let allowed = if precision == Precision::F32 { 1e-5 } else { 1e-3 };
    let together =
        runs.iter().find(|(framework, _)| framework.is_joint()).context("a framework whose ranks train together")?;
    let off = |loss: fn(&Run) -> f64, run: &Run| (loss(run) / loss(&together.1) - 1.).abs();
    for (framework, run) in runs {
        let (first, last) = (off(|run| run.first_loss, run), off(|run| run.last_loss, run));
        ensure!(first <= allowed, "void: the first losses of {framework} and {} are {first:.1e} apart", together.0);
        let same = last <= allowed;
        let expected = framework.is_joint() || layout.data_ranks() == 1;
        ensure!(
            same == expected,
            "void: the last losses of {framework} and {} are {last:.1e} apart; expected {} {allowed:.0e}",
            together.0,
            if expected { "at most" } else { "more than" }
        );
    }
    Ok(())
}

/// Runs every framework once per round, in varying order. The runs of a round are returned in the order of `frameworks`.
pub fn run_rounds(
    bench: &Bench,
    workload: &Workload,
    frameworks: &[Framework],
    layout: Layout,
    rounds: usize,
) -> Result<Vec<Vec<(Framework, Run)>>> {
    let mut all = Vec::new();
    for round in 0..rounds {
        let mut order: Vec<Framework> = frameworks.to_vec();
        order.rotate_left(round * frameworks.len() / rounds);
        if round % 2 == 1 {
            order.reverse();
        }
        let mut runs = Vec::new();
        for framework in order {
            let run = bench.run(framework, layout, None)?;
            eprintln!(
                "{layout}, round {} of {rounds}: {framework}: {:.3} s per step, {:.0} MB",
                round + 1,
                run.step_s,
                run.peak_bytes / 1e6
            );
            runs.push((framework, run));
        }
        runs.sort_by_key(|(framework, _)| frameworks.iter().position(|other| other == framework));
        check_losses(&runs, workload.precision, layout)?;
        all.push(runs);
    }
    Ok(all)
}
