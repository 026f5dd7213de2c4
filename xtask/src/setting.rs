//! Steps to measure or to simulate, for the claims about programs, parallelism and compiled models.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;
use shardwise_harness::{Hosts, launcher};

use crate::claim::Verdict;
use crate::workspace::{Scratch, build, median, output_of, root};

/// A step to run or to simulate.
#[derive(Clone, Copy)]
pub(crate) struct Setting {
    pub(crate) size: &'static Size,
    pub(crate) ranks: usize,
    pub(crate) stage: u8,
    pub(crate) replicate: usize,
    /// The ranks that share each layer.
    pub(crate) tensor: usize,
    pub(crate) sequence: bool,
    /// Whether those ranks compute while they communicate.
    pub(crate) async_tensor: bool,
    /// The ranks that divide each sequence, and how many of them exchange heads.
    pub(crate) context: usize,
    pub(crate) ulysses: usize,
    /// The length of a sequence.
    pub(crate) positions: usize,
    /// The number of tokens that a block computes at once, if not all.
    pub(crate) chunk: Option<usize>,
    /// The experts in place of the MLP, and the ranks that hold different ones.
    pub(crate) experts: Option<Experts>,
    pub(crate) expert: usize,
    /// The stages of a pipeline.
    pub(crate) pipeline: usize,
    pub(crate) schedule: &'static str,
    pub(crate) prefetch: usize,
    pub(crate) checkpointing: &'static str,
    pub(crate) dtype: &'static str,
    pub(crate) sequences: usize,
    pub(crate) micro_batches: usize,
    pub(crate) reduce_each_micro_batch: bool,
    /// Whether units are updated in the backward pass.
    pub(crate) in_backward: bool,
    /// Whether updates are left to the next forward pass.
    pub(crate) in_forward: bool,
    /// What is offloaded: keys of `[offload]`. The folder is that of the recipe.
    pub(crate) offload: &'static [&'static str],
    /// Whether parameters are sent in 8 bits.
    pub(crate) is_quantized: bool,
    /// Whether the model's layers are compiled.
    pub(crate) compiled: bool,
}

/// The experts of a block.
#[derive(Clone, Copy)]
pub(crate) struct Experts {
    pub(crate) experts: usize,
    /// The number of experts that process a token.
    pub(crate) per_token: usize,
    pub(crate) intermediate_size: usize,
    /// The number of experts that process every token.
    pub(crate) shared: usize,
}

/// The sizes of a model.
pub(crate) struct Size {
    name: &'static str,
    vocab_size: usize,
    hidden_size: usize,
    pub(crate) blocks: usize,
    heads: usize,
    intermediate_size: usize,
    tied: bool,
}

impl Size {
    pub(crate) fn name(&self) -> &'static str {
        self.name
    }
}

pub(crate) const M21: Size = size("21M", 16_000, 512, 4, 8, 1376, true);
/// Blocks that are small against everything else.
pub(crate) const SMALL: Size = size("", 8000, 512, 0, 8, 1376, true);
pub(crate) const M42: Size = size("42M", 32_000, 512, 8, 8, 1376, true);
pub(crate) const M58: Size = size("58M, untied", 32_000, 512, 8, 8, 1376, false);
pub(crate) const M124: Size = size("124M", 50_257, 768, 12, 12, 2048, true);
pub(crate) const M213: Size = size("213M", 32_000, 1024, 14, 16, 2816, true);

const fn size(
    name: &'static str,
    vocab_size: usize,
    hidden_size: usize,
    blocks: usize,
    heads: usize,
    intermediate_size: usize,
    tied: bool,
) -> Size {
    Size { name, vocab_size, hidden_size, blocks, heads, intermediate_size, tied }
}

pub(crate) const POSITIONS: usize = 128;

pub(crate) const BASE: Setting = Setting {
    size: &M42,
    ranks: 2,
    stage: 3,
    replicate: 1,
    tensor: 1,
    sequence: true,
    async_tensor: true,
    context: 1,
    ulysses: 1,
    positions: POSITIONS,
    chunk: None,
    experts: None,
    expert: 1,
    pipeline: 1,
    schedule: "1f1b",
    prefetch: 1,
    checkpointing: "none",
    dtype: "f32",
    sequences: 4,
    micro_batches: 1,
    reduce_each_micro_batch: false,
    in_backward: false,
    in_forward: false,
    offload: &[],
    is_quantized: false,
    compiled: false,
};

impl Setting {
    fn recipe(&self, blocks: usize) -> String {
        let Setting { stage, replicate, tensor, sequence, async_tensor, pipeline, schedule, .. } = self;
        let Setting { prefetch, checkpointing, dtype, sequences, micro_batches, .. } = self;
        let Size { vocab_size, hidden_size, heads, intermediate_size, tied, .. } = self.size;
        let Setting { reduce_each_micro_batch: each, compiled, context, ulysses, expert, positions, .. } = self;
        let chunk = self.chunk.map_or(String::new(), |chunk| format!("block_chunk_tokens = {chunk}\n"));
        let moe = self.experts.map_or(String::new(), |Experts { experts, per_token, intermediate_size, shared }| {
            format!(
                "[model.llama.moe]\nnum_experts = {experts}\nnum_experts_per_tok = {per_token}\nmoe_intermediate_size = \
                 {intermediate_size}\nn_shared_experts = {shared}\n"
            )
        });
        let Setting { in_backward, in_forward, .. } = self;
        let codec = if self.is_quantized { "int8" } else { "none" };
        let offload: String = self.offload.iter().map(|key| format!("{key} = \".\"\n")).collect();
        format!(
            "activation_checkpointing = \"{checkpointing}\"\n[model]\ncompiled = {compiled}\n{chunk}[model.llama]\nvocab_size = {vocab_size}\nhidden_size = \
             {hidden_size}\nnum_hidden_layers = {blocks}\nnum_attention_heads = {heads}\nintermediate_size = \
             {intermediate_size}\ntie_word_embeddings = {tied}\n{moe}[data]\n[batch]\nmicro_batch_size = {sequences}\nseq_len = \
             {positions}\ngradient_accumulation_steps = {micro_batches}\n[zero]\nstage = {stage}\nprefetch = {prefetch}\n\
             reduce_each_micro_batch = {each}\n[parallel]\nreplicate = {replicate}\ntensor = {tensor}\nsequence = {sequence}\n\
             async_tensor = {async_tensor}\ncontext = {context}\nulysses = {ulysses}\nexpert = {expert}\npipeline = {pipeline}\npipeline_schedule = \"{schedule}\"\n\
             [precision]\nparam_dtype = \"{dtype}\"\n[compression]\nparameters = \"{codec}\"\n[offload]\n{offload}\
             [optimizer]\nlr = 1e-4\nin_backward = {in_backward}\nin_forward = {in_forward}\n[run]\nsteps = 12\n"
        )
    }

    pub(crate) fn write(&self, scratch: &Scratch, blocks: usize) -> Result<PathBuf> {
        let path = scratch.path().join("recipe.toml");
        std::fs::write(&path, self.recipe(blocks))?;
        Ok(path)
    }

    pub(crate) fn describe(&self) -> String {
        let Setting { size, ranks, stage, replicate, prefetch, checkpointing, dtype, sequences, micro_batches, .. } =
            self;
        let each = if self.reduce_each_micro_batch { ", reduced each" } else { "" };
        let compiled = if self.compiled { ", compiled" } else { "" };
        let quantized = if self.is_quantized { ", quantized" } else { "" };
        let shared = match (self.tensor, self.sequence) {
            (1, _) => String::new(),
            (tensor, true) => format!(", tensor {tensor}"),
            (tensor, false) => format!(", tensor {tensor} without sequence parallelism"),
        };
        let divided = match (self.context / self.ulysses, self.ulysses) {
            (1, 1) => String::new(),
            (ring, 1) => format!(", ring {ring}"),
            (1, ulysses) => format!(", Ulysses {ulysses}"),
            (ring, ulysses) => format!(", ring {ring} × Ulysses {ulysses}"),
        };
        let experts = self.experts.map_or(String::new(), |Experts { experts, per_token, shared, .. }| {
            let shared = if shared > 0 { format!(" and {shared} shared") } else { String::new() };
            let divided = if self.expert > 1 { format!(" on {} ranks", self.expert) } else { String::new() };
            format!(", {per_token} of {experts} experts{shared}{divided}")
        });
        let chunks = self.chunk.map_or(String::new(), |chunk| format!(", chunks of {chunk}"));
        let updated = match (self.in_backward, self.in_forward) {
            (false, false) => "",
            (true, false) => ", updated in the backward pass",
            (false, true) => ", updated in the forward pass",
            (true, true) => ", updated in both passes",
        };
        let offloaded = match self.offload {
            [] => String::new(),
            keys => format!(", {} offloaded", keys.join(" and ")),
        };
        let staged = match self.pipeline {
            1 => String::new(),
            stages => format!(", pipeline {stages} {}", self.schedule),
        };
        format!(
            "{}{experts}, {ranks} ranks{divided}, {replicate} replicas, stage {stage}, prefetch {prefetch}, {checkpointing}, {dtype}, \
             {micro_batches} × {} tokens{each}{chunks}{shared}{staged}{updated}{offloaded}{quantized}{compiled}",
            size.name,
            sequences * self.positions
        )
    }
}

/// Builds `shardwise`, and `shardwise-rank` in the same folder.
pub(crate) fn shardwise() -> Result<PathBuf> {
    build("shardwise-rank", &["build", "--release", "--workspace", "--bins"])?;
    build("shardwise", &["build", "--release", "--workspace", "--bins"])
}

/// The Python that compiles models.
pub(crate) fn python() -> Result<String> {
    Ok(output_of(&mut Command::new(root().join("python/setup")))?.trim().to_string())
}

/// Compiles a model: that of a recipe, or any other if `more` says where to and for what.
pub(crate) fn compile(program: &Path, model: &Path, more: &[&str]) -> Result<()> {
    let mut command = Command::new(program);
    output_of(command.env("SHARDWISE_PYTHON", python()?).arg("compile").arg(model).args(more)).map(drop)
}

/// Profiles a setting. Returns the report as JSON.
pub(crate) fn profile(program: &Path, recipe: &Path, ranks: usize, steps: usize, more: &[String]) -> Result<Value> {
    let mut command = Command::new(program);
    command.env("OMP_NUM_THREADS", "1").arg("profile").arg(recipe).args(["-n", &ranks.to_string()]);
    command.args(["--no-tries", "--json", "--steps", &steps.to_string()]).args(more);
    Ok(serde_json::from_str(&output_of(&mut command)?)?)
}

pub(crate) fn number(report: &Value, key: &str) -> f64 {
    report[key].as_f64().unwrap_or(f64::NAN)
}

/// The bandwidth of a link in bytes per second, without the headers of its packets.
fn bytes_per_s(rate: &str) -> f64 {
    let megabits = match rate.strip_suffix("gbit") {
        Some(gigabits) => gigabits.parse::<f64>().map(|gigabits| 1000. * gigabits),
        None => rate.trim_end_matches("mbit").parse(),
    };
    megabits.expect("a rate in gbit or mbit") * 1e6 / 8. * 1448. / 1538.
}

/// Two hosts that share the ranks of a setting.
fn two_hosts(setting: &Setting, rate: &str) -> Hosts {
    Hosts { hosts: 2, ranks_per_host: setting.ranks / 2, rate: rate.to_string(), delay: "0ms".to_string() }
}

/// Measures the time of a step, here or on two hosts with a link of this rate.
pub(crate) fn measure_step(program: &Path, recipe: &Path, setting: &Setting, rate: Option<&str>) -> Result<f64> {
    let report = match rate {
        None => profile(program, recipe, setting.ranks, 4, &[])?,
        Some(rate) => profile_on_hosts(program, recipe, setting, rate, 4)?,
    };
    Ok(number(&report, "least_step_s"))
}

/// Profiles a setting on two hosts with a link of this rate. Returns the report as JSON.
pub(crate) fn profile_on_hosts(
    program: &Path,
    recipe: &Path,
    setting: &Setting,
    rate: &str,
    steps: usize,
) -> Result<Value> {
    let network = two_hosts(setting, rate).start()?;
    let mut command = launcher(Some(&network), setting.ranks, Duration::from_secs(1800));
    command.arg("OMP_NUM_THREADS=1").arg(program).arg("profile").arg(recipe);
    command.args(["--no-tries", "--json", "--steps", &steps.to_string()]);
    Ok(serde_json::from_str(&output_of(&mut command)?)?)
}

/// Predicts the share of the communication that is hidden on two hosts with a link of this rate, from a file of costs.
pub(crate) fn predict_hidden_share(
    program: &Path,
    recipe: &Path,
    setting: &Setting,
    costs: &Path,
    rate: &str,
) -> Result<f64> {
    let hosts = two_hosts(setting, rate);
    let printed = simulate_on_hosts(program, recipe, setting.ranks, costs, Some(&hosts), &[])?;
    let before = printed.split("% of the communication is hidden").next().context("what is hidden")?;
    let percent: f64 = before.split_whitespace().last().context("a percentage")?.parse()?;
    Ok(percent / 100.)
}

/// Predicts the time of a step from a file of costs, here or on two hosts with a link of this rate.
pub(crate) fn predict_step(
    program: &Path,
    recipe: &Path,
    setting: &Setting,
    costs: &Path,
    rate: Option<&str>,
) -> Result<f64> {
    let hosts = rate.map(|rate| two_hosts(setting, rate));
    predict_on_hosts(program, recipe, setting.ranks, costs, hosts.as_ref(), &[])
}

/// Predicts the time of a step from a file of costs, here or on simulated hosts. `keys` change the recipe.
pub(crate) fn predict_on_hosts(
    program: &Path,
    recipe: &Path,
    ranks: usize,
    costs: &Path,
    hosts: Option<&Hosts>,
    keys: &[String],
) -> Result<f64> {
    let printed = simulate_on_hosts(program, recipe, ranks, costs, hosts, keys)?;
    let words: Vec<&str> = printed.split_whitespace().collect();
    let place = words.windows(2).position(|pair| pair == ["take", "about"]).context("the time of a step")?;
    Ok(words[place + 2].parse()?)
}

/// What `train --dry-run` says about a step from a file of costs, here or on simulated hosts.
fn simulate_on_hosts(
    program: &Path,
    recipe: &Path,
    ranks: usize,
    costs: &Path,
    hosts: Option<&Hosts>,
    keys: &[String],
) -> Result<String> {
    let mut edited: Value = serde_json::from_str(&std::fs::read_to_string(costs)?)?;
    if let Some(hosts) = hosts {
        // The hosts share the cores of this machine. If there are fewer cores than hosts, a rank's thread gets only a part of one.
        let cores = edited["cores_per_host"].as_u64().unwrap_or(1) as usize;
        edited["ranks_per_host"] = hosts.ranks_per_host.into();
        edited["cores_per_host"] = (cores / hosts.hosts).max(1).into();
        edited["threads_per_rank"] = hosts.hosts.div_ceil(cores).into();
        edited["between_hosts"]["bytes_per_s"] = bytes_per_s(&hosts.rate).into();
        edited["between_hosts"]["latency_s"] = 1e-4.into();
    }
    let costs = costs.with_extension("edited.json");
    std::fs::write(&costs, edited.to_string())?;
    let mut command = Command::new(program);
    command.arg("train").arg(recipe).args(["-n", &ranks.to_string(), "--dry-run", "--costs"]).arg(costs);
    output_of(command.args(keys.iter().map(|key| format!("--set={key}"))))
}

/// The peak of the tensors of a step, in bytes.
pub(crate) fn measured_memory(program: &Path, setting: &Setting, scratch: &Scratch) -> Result<f64> {
    let recipe = setting.write(scratch, setting.size.blocks)?;
    let report = profile(program, &recipe, setting.ranks, 1, &[])?;
    peak(&report, "measured_bytes")
}

/// The largest of a figure of all phases of a step.
fn peak(report: &Value, key: &str) -> Result<f64> {
    let phases = report["memory"].as_array().context("the memory of phases")?;
    Ok(phases.iter().map(|phase| number(phase, key)).fold(0., f64::max))
}

/// Compares the simulated with the measured memory of steps.
pub(crate) fn compare_memory(settings: &[Setting]) -> Result<Verdict> {
    let program = shardwise()?;
    let scratch = Scratch::new("memory")?;
    let (mut tensors, mut resident) = (Vec::new(), Vec::new());
    println!("tensors: measured  simulated   resident: measured  estimated");
    for setting in settings {
        let recipe = setting.write(&scratch, setting.size.blocks)?;
        if setting.compiled {
            compile(&program, &recipe, &[])?;
        }
        let report = profile(&program, &recipe, setting.ranks, 1, &[])?;
        let (measured, simulated) = (peak(&report, "measured_bytes")?, peak(&report, "simulated_bytes")?);
        let (held, estimate) = (number(&report, "memory_peak_bytes"), number(&report, "memory_estimate_bytes"));
        tensors.push((simulated / measured - 1.).abs());
        resident.push((estimate / held - 1.).abs());
        println!(
            "{:9.0} MB {:7.0} MB ({:+5.1}%) {:8.0} MB {:7.0} MB ({:+5.1}%)  {}",
            measured / 1e6,
            simulated / 1e6,
            100. * (simulated / measured - 1.),
            held / 1e6,
            estimate / 1e6,
            100. * (estimate / held - 1.),
            setting.describe()
        );
    }
    let worst = |errors: &[f64]| 100. * errors.iter().copied().fold(0., f64::max);
    Ok(Verdict {
        figure: format!(
            "{} settings: tensors at most {:.1}% off, median {:.1}%; resident at most {:.1}%, median {:.1}%",
            tensors.len(),
            worst(&tensors),
            100. * median(&tensors),
            worst(&resident),
            100. * median(&resident)
        ),
        bar: "5%".to_string(),
        holds: worst(&tensors) <= 5. && worst(&resident) <= 5.,
    })
}
