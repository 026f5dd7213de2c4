//! The claims about programs: what is simulated is what happens.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use shardwise_harness::{Hosts, Network, launcher};

use crate::claim::{Claim, Verdict};
use crate::workspace::{Scratch, build, median, output_of};

pub(crate) const CLAIMS: &[Claim] = &[
    Claim {
        group: "program",
        name: "memory",
        what: "the simulated peak memory is within 5% of the measured one, in 44 settings",
        heavy: true,
        measure: memory,
    },
    Claim {
        group: "program",
        name: "limits",
        what: "at ten memory limits, the largest model that is accepted trains, and one 1.2 times as large does not",
        heavy: true,
        measure: limits,
    },
    Claim {
        group: "program",
        name: "time",
        what: "the time of a step that was not profiled is predicted within 10%, in 24 settings",
        heavy: true,
        measure: time,
    },
];

/// A step to run or to simulate.
#[derive(Clone, Copy)]
struct Setting {
    size: &'static Size,
    ranks: usize,
    stage: u8,
    replicate: usize,
    prefetch: usize,
    checkpointing: &'static str,
    dtype: &'static str,
    sequences: usize,
    micro_batches: usize,
    reduce_each_micro_batch: bool,
}

/// The sizes of a model.
struct Size {
    name: &'static str,
    vocab_size: usize,
    hidden_size: usize,
    blocks: usize,
    heads: usize,
    intermediate_size: usize,
    tied: bool,
}

const M21: Size = size("21M", 16_000, 512, 4, 8, 1376, true);
/// Blocks that are small against everything else.
const SMALL: Size = size("", 8000, 512, 0, 8, 1376, true);
const M42: Size = size("42M", 32_000, 512, 8, 8, 1376, true);
const M58: Size = size("58M, untied", 32_000, 512, 8, 8, 1376, false);
const M124: Size = size("124M", 50_257, 768, 12, 12, 2048, true);
const M213: Size = size("213M", 32_000, 1024, 14, 16, 2816, true);

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

const POSITIONS: usize = 128;

const BASE: Setting = Setting {
    size: &M42,
    ranks: 2,
    stage: 3,
    replicate: 1,
    prefetch: 1,
    checkpointing: "none",
    dtype: "f32",
    sequences: 4,
    micro_batches: 1,
    reduce_each_micro_batch: false,
};

impl Setting {
    fn recipe(&self, blocks: usize) -> String {
        let Setting { stage, replicate, prefetch, checkpointing, dtype, sequences, micro_batches, .. } = self;
        let Size { vocab_size, hidden_size, heads, intermediate_size, tied, .. } = self.size;
        let each = self.reduce_each_micro_batch;
        format!(
            "activation_checkpointing = \"{checkpointing}\"\n[model.llama]\nvocab_size = {vocab_size}\nhidden_size = \
             {hidden_size}\nnum_hidden_layers = {blocks}\nnum_attention_heads = {heads}\nintermediate_size = \
             {intermediate_size}\ntie_word_embeddings = {tied}\n[data]\n[batch]\nmicro_batch_size = {sequences}\nseq_len = \
             {POSITIONS}\ngradient_accumulation_steps = {micro_batches}\n[zero]\nstage = {stage}\nprefetch = {prefetch}\n\
             reduce_each_micro_batch = {each}\n[parallel]\nreplicate = {replicate}\n[precision]\nparam_dtype = \"{dtype}\"\n\
             [optimizer]\nlr = 1e-4\n[run]\nsteps = 12\n"
        )
    }

    fn write(&self, scratch: &Scratch, blocks: usize) -> Result<PathBuf> {
        let path = scratch.path().join("recipe.toml");
        std::fs::write(&path, self.recipe(blocks))?;
        Ok(path)
    }

    fn describe(&self) -> String {
        let Setting { size, ranks, stage, replicate, prefetch, checkpointing, dtype, sequences, micro_batches, .. } =
            self;
        let each = if self.reduce_each_micro_batch { ", reduced each" } else { "" };
        format!(
            "{}, {ranks} ranks, {replicate} replicas, stage {stage}, prefetch {prefetch}, {checkpointing}, {dtype}, \
             {micro_batches} × {} tokens{each}",
            size.name,
            sequences * POSITIONS
        )
    }
}

/// Builds `shardwise`, and `shardwise-rank` in the same folder.
fn shardwise() -> Result<PathBuf> {
    build("shardwise-rank", &["build", "--release", "--workspace", "--bins"])?;
    build("shardwise", &["build", "--release", "--workspace", "--bins"])
}

/// Profiles a setting. Returns the report as JSON.
fn profile(program: &Path, recipe: &Path, ranks: usize, steps: usize, more: &[String]) -> Result<Value> {
    let mut command = Command::new(program);
    command.env("OMP_NUM_THREADS", "1").arg("profile").arg(recipe).args(["-n", &ranks.to_string()]);
    command.args(["--no-tries", "--json", "--steps", &steps.to_string()]).args(more);
    Ok(serde_json::from_str(&output_of(&mut command)?)?)
}

fn number(report: &Value, key: &str) -> f64 {
    report[key].as_f64().unwrap_or(f64::NAN)
}

// ---- memory -----------------------------------------------------------------------------------------------------------

fn memory_settings() -> Vec<Setting> {
    let mut settings = Vec::new();
    for stage in 0..4 {
        for checkpointing in ["none", "selective", "full"] {
            for dtype in ["f32", "bf16"] {
                settings.push(Setting { stage, checkpointing, dtype, size: &M21, sequences: 8, ..BASE });
            }
        }
        settings.push(Setting { stage, sequences: 16, ..BASE });
        settings.push(Setting { stage, ranks: 4, dtype: "bf16", micro_batches: 2, ..BASE });
        settings.push(Setting { stage, size: &M58, prefetch: 2, ..BASE });
    }
    settings.extend([
        Setting { ranks: 1, stage: 0, ..BASE },
        Setting { ranks: 4, replicate: 2, ..BASE },
        Setting { reduce_each_micro_batch: true, micro_batches: 2, ..BASE },
        Setting { stage: 2, micro_batches: 3, prefetch: 0, ..BASE },
        Setting { size: &M124, sequences: 1, ..BASE },
        Setting { size: &M124, stage: 0, sequences: 1, dtype: "bf16", ..BASE },
        Setting { size: &M213, sequences: 1, dtype: "bf16", ..BASE },
        Setting { size: &M213, sequences: 1, stage: 1, ..BASE },
    ]);
    settings
}

fn memory() -> Result<Verdict> {
    let program = shardwise()?;
    let scratch = Scratch::new("memory")?;
    let (mut tensors, mut resident) = (Vec::new(), Vec::new());
    println!("tensors: measured  simulated   resident: measured  estimated");
    for setting in memory_settings() {
        let recipe = setting.write(&scratch, setting.size.blocks)?;
        let report = profile(&program, &recipe, setting.ranks, 1, &[])?;
        let phases = report["memory"].as_array().context("the memory of phases")?;
        let peak = |key: &str| phases.iter().map(|phase| number(phase, key)).fold(0., f64::max);
        let (measured, simulated) = (peak("measured_bytes"), peak("simulated_bytes"));
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

// ---- limits -----------------------------------------------------------------------------------------------------------

fn limits() -> Result<Verdict> {
    let program = shardwise()?;
    let scratch = Scratch::new("limits")?;
    let small = Setting { size: &SMALL, ..BASE };
    let limits = [
        (700, Setting { stage: 0, sequences: 1, ..small }),
        (600, Setting { stage: 1, sequences: 1, ..small }),
        (600, Setting { stage: 2, sequences: 1, ..small }),
        (500, Setting { sequences: 1, ..small }),
        (900, Setting { sequences: 8, ..small }),
        (700, Setting { sequences: 8, checkpointing: "full", ..small }),
        (900, Setting { stage: 0, sequences: 8, checkpointing: "selective", ..small }),
        (600, Setting { dtype: "bf16", ..small }),
        (800, Setting { stage: 1, dtype: "bf16", micro_batches: 2, ..small }),
        (500, Setting { ranks: 4, sequences: 2, ..small }),
    ];
    let mut held = 0;
    for (mebibytes, setting) in &limits {
        let limited = |blocks: usize, arguments: &[&str]| {
            let recipe = setting.write(&scratch, blocks)?;
            let mut command = Command::new("prlimit");
            command.arg(format!("--data={}", mebibytes << 20)).arg(&program).arg("train").arg(recipe);
            command.args(["-n", &setting.ranks.to_string(), "--set", "run.steps=3"]).args(arguments);
            command.env("OMP_NUM_THREADS", "1");
            command.output().context("prlimit is missing; install Debian's util-linux")
        };
        let accepted = |blocks: usize| Ok::<_, anyhow::Error>(limited(blocks, &["--dry-run"])?.status.success());
        let (mut most, mut refused) = (0, 1);
        while accepted(refused)? {
            (most, refused) = (refused, 2 * refused);
        }
        while refused - most > 1 {
            let middle = (most + refused) / 2;
            *(if accepted(middle)? { &mut most } else { &mut refused }) = middle;
        }
        ensure!(most > 4, "a limit of {mebibytes} MiB is too low to measure anything");
        let larger = (most * 6).div_ceil(5);
        let (runs, fails) = (limited(most, &[])?, limited(larger, &["--force"])?);
        let said = String::from_utf8_lossy(&fails.stderr).into_owned();
        let is_as_claimed = runs.status.success() && !fails.status.success() && said.contains("out of memory");
        held += usize::from(is_as_claimed);
        println!(
            "{mebibytes} MiB: {most} blocks {}, {larger} blocks {}  ({})",
            if runs.status.success() { "run" } else { "FAIL" },
            if fails.status.success() { "RUN" } else { "fail" },
            setting.describe()
        );
        if !runs.status.success() {
            println!("{}", String::from_utf8_lossy(&runs.stderr));
        }
    }
    Ok(Verdict {
        figure: format!("{held} of {} limits", limits.len()),
        bar: "all".to_string(),
        holds: held == limits.len(),
    })
}

// ---- time -------------------------------------------------------------------------------------------------------------

/// The rounds; each profiles the base and measures every setting once.
const ROUNDS: usize = 2;

fn time_settings() -> Vec<(Setting, Option<&'static str>)> {
    let here = [
        Setting { stage: 0, ..BASE },
        Setting { stage: 1, ..BASE },
        Setting { stage: 2, ..BASE },
        BASE,
        Setting { prefetch: 2, ..BASE },
        Setting { micro_batches: 2, ..BASE },
        Setting { stage: 2, micro_batches: 3, ..BASE },
        Setting { stage: 0, micro_batches: 2, ..BASE },
        Setting { checkpointing: "full", ..BASE },
        Setting { stage: 0, checkpointing: "full", ..BASE },
        Setting { checkpointing: "selective", ..BASE },
        Setting { stage: 2, micro_batches: 2, reduce_each_micro_batch: true, ..BASE },
        Setting { replicate: 2, ..BASE },
        Setting { ranks: 4, stage: 0, ..BASE },
        Setting { ranks: 4, stage: 1, ..BASE },
        Setting { ranks: 4, stage: 2, ..BASE },
        Setting { ranks: 4, ..BASE },
        Setting { ranks: 4, replicate: 2, ..BASE },
    ];
    let hosts = [
        (Setting { stage: 0, ..BASE }, "1gbit"),
        (BASE, "1gbit"),
        (Setting { prefetch: 0, ..BASE }, "1gbit"),
        (Setting { stage: 2, ..BASE }, "200mbit"),
        (BASE, "200mbit"),
        (Setting { stage: 0, micro_batches: 3, ..BASE }, "200mbit"),
    ];
    let here = here.into_iter().map(|setting| (setting, None));
    here.chain(hosts.into_iter().map(|(setting, rate)| (setting, Some(rate)))).collect()
}

/// The bandwidth of a link in bytes per second, without the headers of its packets.
fn bytes_per_s(rate: &str) -> f64 {
    let bits = if rate == "1gbit" { 1e9 } else { 2e8 };
    bits / 8. * 1448. / 1538.
}

/// Measures the time of a step, here or on two hosts with a link of this rate.
fn measure_step(program: &Path, recipe: &Path, setting: &Setting, network: Option<&Network>) -> Result<f64> {
    let report = match network {
        None => profile(program, recipe, setting.ranks, 4, &[])?,
        Some(network) => {
            let mut command = launcher(Some(network), setting.ranks, Duration::from_secs(900));
            command.arg("OMP_NUM_THREADS=1").arg(program).arg("profile").arg(recipe);
            command.args(["--no-tries", "--json", "--steps", "4"]);
            serde_json::from_str(&output_of(&mut command)?)?
        }
    };
    Ok(number(&report, "least_step_s"))
}

/// Predicts the time of a step from a file of costs.
fn predict_step(program: &Path, recipe: &Path, setting: &Setting, costs: &Path) -> Result<f64> {
    let mut command = Command::new(program);
    command.arg("train").arg(recipe).args(["-n", &setting.ranks.to_string(), "--dry-run", "--costs"]).arg(costs);
    let printed = output_of(&mut command)?;
    let words: Vec<&str> = printed.split_whitespace().collect();
    let place = words.windows(2).position(|pair| pair == ["take", "about"]).context("the time of a step")?;
    Ok(words[place + 2].parse()?)
}

fn time() -> Result<Verdict> {
    let program = shardwise()?;
    let scratch = Scratch::new("time")?;
    let costs = scratch.path().join("costs.json");
    let settings = time_settings();
    let mut errors: Vec<Vec<f64>> = vec![Vec::new(); settings.len()];
    for round in 1..=ROUNDS {
        let profiled = Setting { prefetch: 0, ..BASE };
        let recipe = profiled.write(&scratch, profiled.size.blocks)?;
        profile(&program, &recipe, profiled.ranks, 6, &[format!("--costs={}", costs.display())])?;
        for (index, (setting, rate)) in settings.iter().enumerate() {
            let recipe = setting.write(&scratch, setting.size.blocks)?;
            let network = match rate {
                Some(rate) => Some(
                    Hosts { hosts: 2, ranks_per_host: 1, rate: (*rate).to_string(), delay: "0ms".to_string() }
                        .start()?,
                ),
                None => None,
            };
            let measured_s = measure_step(&program, &recipe, setting, network.as_ref())?;
            drop(network);
            let mut edited: Value = serde_json::from_str(&std::fs::read_to_string(&costs)?)?;
            if let Some(rate) = rate {
                edited["ranks_per_host"] = 1.into();
                edited["cores_per_host"] = 1.into();
                edited["between_hosts"]["bytes_per_s"] = bytes_per_s(rate).into();
                edited["between_hosts"]["latency_s"] = 1e-4.into();
            }
            let used = scratch.path().join("edited.json");
            std::fs::write(&used, edited.to_string())?;
            let predicted_s = predict_step(&program, &recipe, setting, &used)?;
            errors[index].push(predicted_s / measured_s - 1.);
            println!(
                "round {round}: measured {measured_s:.3} s, predicted {predicted_s:.3} s ({:+.1}%)  {}{}",
                100. * (predicted_s / measured_s - 1.),
                setting.describe(),
                rate.map(|rate| format!(", two hosts at {rate}")).unwrap_or_default()
            );
        }
    }
    let medians: Vec<f64> = errors.iter().map(|errors| median(errors).abs()).collect();
    let within = medians.iter().filter(|error| **error <= 0.1).count();
    Ok(Verdict {
        figure: format!(
            "{within} of {} predictions within 10%; at most {:.1}% off, median {:.1}%",
            medians.len(),
            100. * medians.iter().copied().fold(0., f64::max),
            100. * median(&medians)
        ),
        bar: "all within 10%".to_string(),
        holds: within == medians.len(),
    })
}
