//! The claims about mixtures of experts.

use anyhow::Result;

use crate::claim::{Claim, Verdict};
use crate::mutants;
use crate::setting::{BASE, Experts, M21, M42, Setting, compare_memory, measure_step, shardwise};
use crate::workspace::{Scratch, median};

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
    compare_memory(&settings)
}

const ROUNDS: usize = 5;

/// A step of the dense model and one of the mixture, in turn.
fn speed() -> Result<Verdict> {
    let (program, scratch) = (shardwise()?, Scratch::new("experts")?);
    let dense = Setting { sequences: 8, ..BASE };
    // Two of these multiply as much as the MLP of the dense model.
    let experts = Experts { experts: 8, per_token: 2, intermediate_size: 688, shared: 0 };
    let mixture = Setting { experts: Some(experts), ..dense };
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..ROUNDS {
        for (setting, times) in [&dense, &mixture].into_iter().zip(&mut times) {
            let recipe = setting.write(&scratch, setting.size.blocks)?;
            times.push(measure_step(&program, &recipe, setting, None)?);
        }
        println!("round {}: dense {:.3} s, experts {:.3} s", round + 1, times[0][round], times[1][round]);
    }
    let [dense_s, mixture_s] = &times;
    let ratios: Vec<f64> = dense_s.iter().zip(mixture_s).map(|(dense, mixture)| mixture / dense).collect();
    let ratio = median(&ratios);
    Ok(Verdict {
        figure: format!(
            "{} with 8 experts on 2 ranks: {:.3} s, dense {:.3} s: {ratio:.2} times as long",
            M42.name(),
            median(mixture_s),
            median(dense_s)
        ),
        bar: "1.25".to_string(),
        holds: ratio <= 1.25,
    })
}
