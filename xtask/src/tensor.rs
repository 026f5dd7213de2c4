//! The claims about tensor and sequence parallelism.

use anyhow::Result;

use crate::claim::{Claim, Verdict};
use crate::setting::{BASE, M21, M58, Setting, compare_memory, measure_step, predict_step, profile, shardwise};
use crate::workspace::{Scratch, median, run_tests};

pub(crate) const CLAIMS: &[Claim] = &[
    Claim {
        group: "tensor",
        name: "equality",
        what: "in f64, layers that 2, 3 and 4 ranks share compute the same as on one rank, in every setting, for 20 steps",
        heavy: true,
        measure: equality,
    },
    Claim {
        group: "tensor",
        name: "memory",
        what: "the simulated peak memory of shared layers is within 5% of the measured one",
        heavy: true,
        measure: memory,
    },
    Claim {
        group: "tensor",
        name: "overlap",
        what: "with communication next to computation, a step of shared layers on two hosts takes less time",
        heavy: true,
        measure: overlap,
    },
    Claim {
        group: "tensor",
        name: "links",
        what: "the time of a step on two hosts, by the rate of their link, with tensor parallelism or ZeRO-3 between them",
        heavy: true,
        measure: links,
    },
];

/// The tests of CI train for 20 steps in some settings only.
fn equality() -> Result<Verdict> {
    let holds = run_tests(&["--test", "tensor"], &[("SHARDWISE_THOROUGH", "1")])?;
    let figure = if holds { "all settings agree" } else { "some settings differ" }.to_string();
    Ok(Verdict { figure, bar: "1e-12".to_string(), holds })
}

fn memory() -> Result<Verdict> {
    let mut settings = Vec::new();
    for sequence in [true, false] {
        for checkpointing in ["none", "selective", "full"] {
            for (stage, dtype) in [(0, "f32"), (3, "bf16")] {
                let shared = Setting { tensor: 2, sequence, checkpointing, stage, dtype, size: &M21, ..BASE };
                settings.push(Setting { sequences: 8, ..shared });
            }
        }
        settings.push(Setting { tensor: 2, sequence, ranks: 4, ..BASE });
        settings.push(Setting { tensor: 4, sequence, ranks: 4, size: &M58, stage: 1, ..BASE });
    }
    compare_memory(&settings)
}

const ROUNDS: usize = 3;

/// A step with async tensor parallelism and one without, in turn, on one host and on two.
fn overlap() -> Result<Verdict> {
    let program = shardwise()?;
    let scratch = Scratch::new("overlap")?;
    let (mut figures, mut holds) = (Vec::new(), true);
    for (name, rate, least) in [("one host", None, 0.97), ("1 Gbit/s", Some("1gbit"), 1.)] {
        let mut times = [Vec::new(), Vec::new()];
        for _ in 0..ROUNDS {
            for (async_tensor, times) in [true, false].into_iter().zip(&mut times) {
                let setting = Setting { tensor: 2, stage: 0, async_tensor, ..BASE };
                let recipe = setting.write(&scratch, setting.size.blocks)?;
                times.push(measure_step(&program, &recipe, &setting, rate)?);
            }
        }
        let [overlapped, apart] = &times;
        let ratios: Vec<f64> = overlapped.iter().zip(apart).map(|(overlapped, apart)| apart / overlapped).collect();
        let faster = median(&ratios);
        println!("{name}: {:.3} s, without overlap {:.3} s", median(overlapped), median(apart));
        holds &= faster >= least;
        figures.push(format!("{name}: {faster:.2} times as fast"));
    }
    Ok(Verdict { figure: figures.join(", "), bar: "1 on two hosts, 0.97 on one".to_string(), holds })
}

/// The rates of the link, from fast to slow.
const RATES: [&str; 4] = ["10gbit", "1gbit", "400mbit", "200mbit"];

/// Two ways to use two hosts for the same step, next to one rank that has it to itself.
fn links() -> Result<Verdict> {
    let program = shardwise()?;
    let scratch = Scratch::new("links")?;
    let costs = scratch.path().join("costs.json");
    let alone = Setting { ranks: 1, stage: 0, ..BASE };
    let alone_s = measure_step(&program, &alone.write(&scratch, alone.size.blocks)?, &alone, None)?;
    println!("a step of 512 tokens on one rank takes {alone_s:.3} s; on two hosts, measured (simulated):");
    let sides = [Setting { tensor: 2, stage: 0, ..BASE }, Setting { sequences: 2, ..BASE }];
    let (mut tensor_pays, mut agree, mut errors) = (Vec::new(), true, Vec::new());
    for rate in RATES {
        let [mut measured, mut predicted] = [[0.; 2]; 2];
        for (index, setting) in sides.iter().enumerate() {
            let (mut measured_s, mut predicted_s) = (Vec::new(), Vec::new());
            for _ in 0..ROUNDS {
                // Each is profiled on one host, as it is, just before it is measured on two.
                let recipe = Setting { prefetch: 0, ..*setting }.write(&scratch, setting.size.blocks)?;
                profile(&program, &recipe, setting.ranks, 4, &[format!("--costs={}", costs.display())])?;
                let recipe = setting.write(&scratch, setting.size.blocks)?;
                predicted_s.push(predict_step(&program, &recipe, setting, &costs, Some(rate))?);
                measured_s.push(measure_step(&program, &recipe, setting, Some(rate))?);
            }
            (measured[index], predicted[index]) = (median(&measured_s), median(&predicted_s));
            errors.push((predicted[index] / measured[index] - 1.).abs());
        }
        let ([tensor_s, zero_s], [simulated_tensor_s, simulated_zero_s]) = (measured, predicted);
        println!(
            "{rate:>8}: tensor 2 {tensor_s:.3} ({simulated_tensor_s:.3}) s, ZeRO-3 {zero_s:.3} ({simulated_zero_s:.3}) s"
        );
        agree &= (tensor_s < zero_s) == (simulated_tensor_s < simulated_zero_s);
        agree &= (tensor_s < alone_s) == (simulated_tensor_s < alone_s);
        if tensor_s < alone_s {
            tensor_pays.push(rate);
        }
    }
    let worst = errors.iter().copied().fold(0., f64::max);
    Ok(Verdict {
        figure: format!(
            "sharing layers pays at {}; simulated at most {:.0}% off, median {:.0}%",
            tensor_pays.join(", "),
            100. * worst,
            100. * median(&errors)
        ),
        bar: "simulated within 10%, and agrees on what is faster".to_string(),
        holds: agree && worst <= 0.1,
    })
}
