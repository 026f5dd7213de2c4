//! The claims about context parallelism.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::claim::{Claim, Verdict};
use crate::mutants;
use crate::setting::{
    BASE, M21, M42, Setting, compare_memory, measured_memory, number, predict_hidden_share, profile, profile_on_hosts,
    shardwise,
};
use crate::workspace::Scratch;

pub(crate) const CLAIMS: &[Claim] = &[
    Claim {
        group: "context",
        name: "memory",
        what: "the simulated peak memory of divided sequences is within 5% of the measured one",
        heavy: true,
        measure: memory,
    },
    Claim {
        group: "context",
        name: "activations",
        what: "the activations of a sequence that C ranks divide take 1/C of the memory on each",
        heavy: true,
        measure: activations,
    },
    Claim {
        group: "context",
        name: "balance",
        what: "ranks that divide a sequence compute for equally long",
        heavy: true,
        measure: balance,
    },
    Claim {
        group: "context",
        name: "long",
        what: "4 ranks train on 65,536 tokens within a memory limit at which one rank cannot hold 24,000",
        heavy: true,
        measure: long,
    },
    Claim {
        group: "context",
        name: "links",
        what: "between two hosts at 1 Gbit/s, ring attention hides its traffic at 32,768 tokens",
        heavy: true,
        measure: links,
    },
    Claim {
        group: "context",
        name: "mutants",
        what: "the mutants of zero/mutants that concern context parallelism",
        heavy: true,
        measure: || mutants::measure_some(&["context-"]),
    },
];

/// A sequence of this many positions on 2 ranks.
const DIVIDED: Setting = Setting { size: &M21, context: 2, sequences: 1, positions: 2048, ..BASE };

fn memory() -> Result<Verdict> {
    let mut settings = Vec::new();
    for ulysses in [1, 2] {
        for checkpointing in ["none", "selective", "full"] {
            for (stage, dtype) in [(0, "f32"), (3, "bf16")] {
                settings.push(Setting { ulysses, checkpointing, stage, dtype, ..DIVIDED });
            }
        }
    }
    for ulysses in [1, 2, 4] {
        settings.push(Setting { ranks: 4, context: 4, ulysses, positions: 4096, ..DIVIDED });
    }
    settings.push(Setting { ranks: 4, tensor: 2, ..DIVIDED });
    for (checkpointing, dtype) in [("none", "f32"), ("full", "f32"), ("full", "bf16")] {
        let chunked = Setting { checkpointing, dtype, positions: 8192, chunk: Some(1024), ..DIVIDED };
        settings.extend([chunked, Setting { ranks: 1, context: 1, ..chunked }]);
    }
    compare_memory(&settings)
}

/// The tensors of a step besides parameters, gradients and optimizer state, which stage 3 shards anyway.
fn activations() -> Result<Verdict> {
    let (program, scratch) = (shardwise()?, Scratch::new("activations")?);
    let (mut worst, mut figures) = (0f64, Vec::new());
    for ulysses in [1, 0] {
        let mut one = 0.;
        for ranks in [1, 2, 4] {
            let ulysses = if ulysses == 0 { ranks } else { 1 };
            let setting = Setting { ranks, context: ranks, ulysses, positions: 8192, ..DIVIDED };
            let long = measured_memory(&program, &setting, &scratch)?;
            let short = measured_memory(&program, &Setting { positions: 1024, ..setting }, &scratch)?;
            // What does not depend on the length drops out.
            let activations = long - short;
            one = if ranks == 1 { activations } else { one };
            let share = activations / one;
            worst = worst.max((share * ranks as f64 - 1.).abs());
            figures.push(format!("{} {ranks}: {share:.3}", if ulysses > 1 { "Ulysses" } else { "ring" }));
        }
    }
    Ok(Verdict {
        figure: format!("{}; at most {:.1}% off", figures.join(", "), 100. * worst),
        bar: "1/C within 5%".to_string(),
        holds: worst <= 0.05,
    })
}

/// The time that ranks are busy, by the profile.
fn balance() -> Result<Verdict> {
    let (program, scratch) = (shardwise()?, Scratch::new("balance")?);
    let setting = Setting { ranks: 4, context: 4, positions: 8192, stage: 0, ..DIVIDED };
    let recipe = setting.write(&scratch, 2)?;
    let report = profile(&program, &recipe, setting.ranks, 4, &[])?;
    let busy = busy_s(&report)?;
    let (least, most) = (busy.iter().copied().fold(f64::INFINITY, f64::min), busy.iter().copied().fold(0., f64::max));
    Ok(Verdict {
        figure: format!("from {least:.2} to {most:.2} s: {:.1}% apart", 100. * (most / least - 1.)),
        bar: "10%".to_string(),
        holds: most <= 1.1 * least,
    })
}

fn busy_s(report: &Value) -> Result<Vec<f64>> {
    let ranks = report["profile"]["by_rank"].as_array().context("the times of ranks")?;
    Ok(ranks.iter().map(|rank| number(rank, "busy_s")).collect())
}

/// Two layers as wide as those of the 42M model.
fn long() -> Result<Verdict> {
    let (program, scratch) = (shardwise()?, Scratch::new("long")?);
    let plain = Setting { size: &M42, sequences: 1, stage: 3, prefetch: 0, checkpointing: "full", ..BASE };
    let divided = Setting { ranks: 4, context: 4, positions: 65_536, ..plain };
    let alone = Setting { ranks: 1, context: 1, positions: 24_000, ..divided };
    let limit = LONG_LIMIT_BYTES;
    let train = |setting: &Setting, recipe: &Path, steps: usize| {
        let mut command = Command::new("prlimit");
        command.arg(format!("--data={limit}")).arg(&program).arg("train").arg(recipe);
        command.args(["-n", &setting.ranks.to_string(), "--set", &format!("run.steps={steps}")]);
        command.env("OMP_NUM_THREADS", "1").output().context("prlimit is missing; install Debian's util-linux")
    };
    let refused = train(&alone, &alone.write(&scratch, 2)?, 1)?;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(!refused.status.success(), "one rank holds 24,000 tokens within the limit");
    println!("one rank with 24,000 tokens:\n{said}");
    let run = train(&divided, &divided.write(&scratch, 2)?, 3)?;
    let printed = String::from_utf8_lossy(&run.stdout).into_owned();
    println!("{printed}{}", String::from_utf8_lossy(&run.stderr));
    let steps = printed.lines().filter(|line| line.starts_with("step ")).count();
    let last = printed.lines().rfind(|line| line.starts_with("step ")).unwrap_or("no step").to_string();
    Ok(Verdict {
        figure: format!("{steps} steps within {:.1} GiB per rank: {last}", limit as f64 / (1u64 << 30) as f64),
        bar: "3 steps".to_string(),
        holds: run.status.success() && steps == 3,
    })
}

/// Enough for 16,384 of 65,536 tokens, and not for 24,000.
const LONG_LIMIT_BYTES: u64 = 1536 << 20;

/// From short to long.
const LENGTHS: [usize; 5] = [1024, 2048, 4096, 8192, 32_768];
const RATE: &str = "1gbit";

/// One layer whose parameters are frozen but for a norm, so that ranks send each other little but keys, values and their gradients. At the
/// end of a step, the reduction of the norm's gradients waits for the slower rank; that is no traffic of ring attention, and is printed
/// apart.
fn links() -> Result<Verdict> {
    let (program, scratch) = (shardwise()?, Scratch::new("links")?);
    let costs = scratch.path().join("costs.json");
    let mut at_last = 0.;
    let mut begins = [None, None];
    println!(
        "positions, share of ring attention's communication that is hidden, measured (simulated), of all communication:"
    );
    for positions in LENGTHS {
        let setting = Setting { positions, stage: 0, ..DIVIDED };
        let recipe = setting.write(&scratch, 1)?;
        let frozen = r#"model.frozen=["model.embed_tokens", "model.norm", "model.layers.0.self_attn", "model.layers.0.mlp", "model.layers.0.post"]"#;
        let text = std::fs::read_to_string(&recipe)?;
        let keys = frozen.split_once('=').map_or("", |(_, keys)| keys);
        std::fs::write(&recipe, text.replace("[model]\n", &format!("[model]\nfrozen = {keys}\n")))?;
        profile(&program, &recipe, setting.ranks, 2, &[format!("--costs={}", costs.display())])?;
        let simulated = predict_hidden_share(&program, &recipe, &setting, &costs, RATE)?;
        let report = profile_on_hosts(&program, &recipe, &setting, RATE, 2)?;
        let groups = report["profile"]["groups"].as_array().context("the communication by group")?;
        let ring = groups.iter().find(|group| group["axes"] == "ring").context("the communication of the ring")?;
        let share = |communication: &Value| number(communication, "hidden_s") / number(communication, "total_s");
        let measured = share(ring);
        println!(
            "{positions:>8}  {:.1}% ({:.1}%), {:.1}%; a rank sends {:.1} MB around the ring",
            100. * measured,
            100. * simulated,
            100. * share(&report["profile"]["communication"]),
            number(ring, "sent_bytes") / 1e6
        );
        for (begins, share) in begins.iter_mut().zip([measured, simulated]) {
            if share >= 0.9 {
                begins.get_or_insert(positions);
            }
        }
        at_last = measured;
    }
    let name = |begins: Option<usize>| begins.map_or("never".to_string(), |positions| positions.to_string());
    Ok(Verdict {
        figure: format!(
            "{:.1}% at 32,768; 90% from {} on, simulated from {} on",
            100. * at_last,
            name(begins[0]),
            name(begins[1])
        ),
        bar: "90%".to_string(),
        holds: at_last >= 0.9,
    })
}
