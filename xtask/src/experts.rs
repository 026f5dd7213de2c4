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
