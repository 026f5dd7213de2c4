//! The claims about mixtures of experts.

use std::process::Command;

use anyhow::{Context, Result};
use shardwise_compare::frameworks::{
    self as compared, Bench, Framework, Layout, Precision, Size, Workload, run_rounds,
};
use shardwise_harness::readme_commands;

use crate::claim::{Claim, Verdict};
use crate::mutants;
use crate::setting::{BASE, Experts, M21, M42, Setting, compare_memory, measure_step, shardwise};
use crate::workspace::{Scratch, median, output_of};

pub(crate) const CLAIMS: &[Claim] = &[
    Claim {
        group: "experts",
        name: "memory",
        what: "the simulated peak memory of a mixture of experts is within 5% of the measured one",
        heavy: true,
        measure: memory,
    },
    Claim {
        group: "experts",
        name: "speed",
        what: "a step of 8 experts, of which a token uses 2, takes little longer than that of a dense model with the active parameters",
        heavy: true,
        measure: speed,
    },
    Claim {
        group: "experts",
        name: "peers",
        what: "a step of 8 experts on 2 ranks is at least as fast as that of the same layer in plain PyTorch, under DDP and FSDP2, and has its loss",
        heavy: true,
        measure: peers,
    },
    Claim {
        group: "experts",
        name: "quality",
        what: "the quick start's model with three lines for experts needs fewer bits per byte than the dense one, at equal multiplications",
        heavy: true,
        measure: quality,
    },
    Claim {
        group: "experts",
        name: "mutants",
        what: "the mutants of zero/mutants that concern experts",
        heavy: true,
        measure: || mutants::measure_some(&["experts-"]),
    },
];

fn memory() -> Result<Verdict> {
    let plain = Experts { experts: 8, per_token: 2, intermediate_size: 688, shared: 0 };
    let shared = Experts { experts: 16, per_token: 3, intermediate_size: 344, shared: 1 };
    let mut settings = Vec::new();
    for checkpointing in ["none", "selective", "full"] {
        for (stage, dtype, experts) in [(0, "f32", plain), (3, "bf16", shared)] {
            let experts = Some(experts);
            settings.push(Setting { size: &M21, checkpointing, stage, dtype, experts, sequences: 8, ..BASE });
        }
    }
    let base = Setting { size: &M21, experts: Some(plain), sequences: 8, ..BASE };
    settings.push(Setting { tensor: 2, ..base });
    settings.push(Setting { tensor: 2, sequence: false, ..base });
    settings.push(Setting { stage: 2, micro_batches: 2, ..base });
    for checkpointing in ["none", "selective", "full"] {
        settings.push(Setting { expert: 2, checkpointing, ..base });
    }
    settings.push(Setting { expert: 2, stage: 1, experts: Some(shared), ..base });
    settings.push(Setting { expert: 2, stage: 0, dtype: "bf16", ..base });
    settings.push(Setting { expert: 2, ranks: 4, ..base });
    settings.push(Setting { expert: 2, tensor: 2, ranks: 4, ..base });
    compare_memory(&settings)
}

const ROUNDS: usize = 5;

/// A step of the dense model, one of the mixture, and one with experts on different ranks, in turn.
fn speed() -> Result<Verdict> {
    let (program, scratch) = (shardwise()?, Scratch::new("experts")?);
    let dense = Setting { sequences: 8, ..BASE };
    // Two of these multiply as much as the MLP of the dense model.
    let experts = Experts { experts: 8, per_token: 2, intermediate_size: 688, shared: 0 };
    let mixture = Setting { experts: Some(experts), ..dense };
    let divided = Setting { expert: 2, ..mixture };
    let mut times = [Vec::new(), Vec::new(), Vec::new()];
    for round in 0..ROUNDS {
        for (setting, times) in [&dense, &mixture, &divided].into_iter().zip(&mut times) {
            let recipe = setting.write(&scratch, setting.size.blocks)?;
            times.push(measure_step(&program, &recipe, setting, None)?);
        }
        let [dense, mixture, divided] = [0, 1, 2].map(|side: usize| times[side][round]);
        println!("round {}: dense {dense:.3} s, experts {mixture:.3} s, on different ranks {divided:.3} s", round + 1);
    }
    let [dense_s, mixture_s, divided_s] = &times;
    let ratio =
        |times: &[f64]| median(&dense_s.iter().zip(times).map(|(dense, time)| time / dense).collect::<Vec<_>>());
    let ratios = [ratio(mixture_s), ratio(divided_s)];
    Ok(Verdict {
        figure: format!(
            "{} with 8 experts on 2 ranks: {:.3} s, on different ranks {:.3} s, dense {:.3} s: {:.2} and {:.2} times as long",
            M42.name(),
            median(mixture_s),
            median(divided_s),
            median(dense_s),
            ratios[0],
            ratios[1]
        ),
        bar: "1.25 and 1.4".to_string(),
        holds: ratios[0] <= 1.25 && ratios[1] <= 1.4,
    })
}

fn peers() -> Result<Verdict> {
    let experts = Some(compared::Experts { number: 8, per_token: 2, intermediate_size: 704 });
    let workload = Workload { experts, ..Workload::new(Size::Small, Precision::F32) };
    let (bench, layout) = (Bench::new(&workload)?, Layout::data_parallel(2));
    let pairs = [(Framework::Shardwise(0), Framework::Ddp), (Framework::Shardwise(3), Framework::Fsdp2)];
    let frameworks: Vec<Framework> = pairs.iter().flat_map(|&(own, peer)| [own, peer]).collect();
    let rounds = run_rounds(&bench, &workload, &frameworks, layout, ROUNDS)?;
    let (mut figures, mut holds) = (Vec::new(), true);
    for (own, peer) in pairs {
        let runs_of = |wanted: Framework| rounds.iter().flatten().filter(move |(framework, _)| *framework == wanted);
        let ratios: Vec<f64> =
            runs_of(own).zip(runs_of(peer)).map(|((_, own), (_, peer))| peer.step_s / own.step_s).collect();
        let peak = |framework| median(&runs_of(framework).map(|(_, run)| run.peak_bytes / 1e6).collect::<Vec<_>>());
        holds &= median(&ratios) >= 1.;
        figures.push(format!(
            "{:.2} times as fast as {peer}, {:.0} and {:.0} MB",
            median(&ratios),
            peak(own),
            peak(peer)
        ));
    }
    Ok(Verdict { figure: figures.join("; "), bar: "1".to_string(), holds })
}

/// Three lines for experts that multiply as much as the MLP of the quick start's recipe, which is the other file.
const ADD_EXPERTS: &str = "sed 's/^intermediate_size = 704/intermediate_size = 352/' kjv.toml >sparse.toml && \
    printf '\n[model.llama.moe]\nnum_experts = 8\nnum_experts_per_tok = 2\n' >>sparse.toml";

/// Bits per byte of held-out text, after as many steps and with as many multiplications per token.
fn quality() -> Result<Verdict> {
    let (program, scratch) = (shardwise()?, Scratch::new("experts-quality")?);
    let folder = program.parent().context("the program's folder")?;
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap_or_default());
    let run = |shell: &str| {
        let mut command = Command::new("sh");
        output_of(
            command.args(["-c", shell]).env("PATH", &path).env("OMP_NUM_THREADS", "1").current_dir(scratch.path()),
        )
    };
    for command in readme_commands("From text to verses") {
        if command.starts_with("shardwise train") {
            break;
        }
        run(&command)?;
    }
    run(ADD_EXPERTS)?;
    let mut bits = Vec::new();
    for model in ["kjv", "sparse"] {
        let said = run(&format!(
            "shardwise train {model}.toml -n 2 --set run.folder=runs/{model} --set checkpoints.folder=runs/{model}"
        ))?;
        let last = said.lines().rfind(|line| line.contains(" bits per byte")).context("it was not evaluated")?;
        println!("{model}: {last}");
        let number = last.split(" bits per byte").next().and_then(|before| before.split_whitespace().next_back());
        bits.push(number.context("bits per byte")?.parse::<f64>()?);
    }
    Ok(Verdict {
        figure: format!("{:.3} bits per byte with experts, {:.3} without", bits[1], bits[0]),
        bar: "fewer".to_string(),
        holds: bits[1] < bits[0],
    })
}
