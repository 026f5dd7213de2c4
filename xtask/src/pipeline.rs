//! The claims about pipeline parallelism.

use anyhow::Result;

use crate::claim::{Claim, Verdict};
use crate::pipeline_hosts::compare_on_hosts;
use crate::setting::{BASE, M21, M58, Setting, compare_memory};
use crate::workspace::run_tests;

pub(crate) const CLAIMS: &[Claim] = &[
    Claim {
        group: "pipeline",
        name: "equality",
        what: "2, 3 and 4 stages train with the bits of one stage, in every schedule, ZeRO stage and precision, with and without tensor \
               parallelism, for 10 steps; six settings for 100 steps",
        heavy: true,
        measure: equality,
    },
    Claim {
        group: "pipeline",
        name: "bubbles",
        what: "the measured bubbles of four stages are within 5 points of the formulas, in every schedule",
        heavy: true,
        measure: bubbles,
    },
    Claim {
        group: "pipeline",
        name: "memory",
        what: "the simulated peak memory of a pipeline's first stage is within 5% of the measured one, in every schedule",
        heavy: true,
        measure: memory,
    },
    Claim {
        group: "pipeline",
        name: "hosts",
        what: "124M on 2 and 4 hosts, 1 Gbit/s and 100 Mbit/s: not slower than PyTorch's pipelines in less memory; the simulated ranking of \
               ZeRO-3, pipeline, and pipeline × ZeRO-1 is the measured one",
        heavy: true,
        measure: compare_on_hosts,
    },
    Claim {
        group: "pipeline",
        name: "partition",
        what: "PipeDream's published profiles are cut as well as by exhaustive search",
        heavy: false,
        measure: partition,
    },
];

/// The tests of CI train for a few steps, and combine settings in pairs.
fn equality() -> Result<Verdict> {
    let chosen = ["--run-ignored", "all", "-E", "package(shardwise-train) - test(bubbles)"];
    let holds = run_tests(&[&["--test", "pipeline"][..], &chosen].concat(), &[])?;
    let figure = if holds { "all settings agree" } else { "some settings differ" }.to_string();
    Ok(Verdict { figure, bar: "the same bits".to_string(), holds })
}

/// Layers that sleep, because idle ranks speed up busy ones on a machine with few cores.
fn bubbles() -> Result<Verdict> {
    let chosen = ["--run-ignored", "only", "-E", "test(bubbles)"];
    let holds = run_tests(&[&["--test", "pipeline", "--no-capture"][..], &chosen].concat(), &[])?;
    let figure = if holds { "all within 5 points" } else { "some differ" }.to_string();
    Ok(Verdict { figure, bar: "5 points".to_string(), holds })
}

fn partition() -> Result<Verdict> {
    let holds = run_tests(&["--test", "pipeline_partition", "--run-ignored", "all"], &[])?;
    let figure = if holds { "never slower" } else { "slower, or no profiles" }.to_string();
    Ok(Verdict { figure, bar: "never slower".to_string(), holds })
}

fn memory() -> Result<Verdict> {
    let staged = Setting { pipeline: 2, stage: 0, micro_batches: 4, sequences: 8, size: &M21, ..BASE };
    let schedules = ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "looped-bfs"];
    let mut settings = schedules.map(|schedule| Setting { schedule, ..staged }).to_vec();
    settings.extend([
        Setting { checkpointing: "selective", ..staged },
        Setting { checkpointing: "full", schedule: "gpipe", ..staged },
        Setting { dtype: "bf16", ..staged },
        Setting { ranks: 4, stage: 1, ..staged },
        Setting { ranks: 4, stage: 3, ..staged },
        Setting { ranks: 4, tensor: 2, ..staged },
        Setting { ranks: 4, pipeline: 4, sequences: 4, micro_batches: 8, size: &M58, ..staged },
    ]);
    compare_memory(&settings)
}
