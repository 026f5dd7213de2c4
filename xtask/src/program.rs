//! The claims about programs: what is simulated is what happens.

use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::claim::{Claim, Verdict};
use crate::setting::{
    BASE, M21, M58, M124, M213, SMALL, Setting, compare_memory, measure_step, predict_step, profile, shardwise,
};
use crate::workspace::{Scratch, median};

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
    compare_memory(&memory_settings())
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

/// The rounds. In each, every setting is measured once, right after the base was profiled: the clock of a shared machine drifts by
/// more than the bar within minutes.
const ROUNDS: usize = 3;

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

fn time() -> Result<Verdict> {
    let program = shardwise()?;
    let scratch = Scratch::new("time")?;
    let costs = scratch.path().join("costs.json");
    let settings = time_settings();
    let mut errors: Vec<Vec<f64>> = vec![Vec::new(); settings.len()];
    for round in 1..=ROUNDS {
        for (index, (setting, rate)) in settings.iter().enumerate() {
            let profiled = Setting { prefetch: 0, ..BASE };
            let recipe = profiled.write(&scratch, profiled.size.blocks)?;
            profile(&program, &recipe, profiled.ranks, 4, &[format!("--costs={}", costs.display())])?;
            let recipe = setting.write(&scratch, setting.size.blocks)?;
            let measured_s = measure_step(&program, &recipe, setting, *rate)?;
            let predicted_s = predict_step(&program, &recipe, setting, &costs, *rate)?;
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
