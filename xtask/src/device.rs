//! Claims about devices, on the one that tests pretend to have.

use anyhow::Result;

use crate::claim::{Claim, Verdict};
use crate::mutants;
use crate::workspace::run_tests;

pub(crate) const CLAIMS: &[Claim] = &[
    Claim {
        group: "device",
        name: "seeds",
        what: "1,000 seeds of pauses in streams change no bit: of steps on two devices, and of the work around collectives",
        heavy: true,
        measure: seeds,
    },
    Claim {
        group: "device",
        name: "mutants",
        what: "the mutants of zero/mutants that concern devices",
        heavy: true,
        measure: || mutants::measure_some(&["device-", "flash-", "nccl-"]),
    },
];

/// The tests of CI try a few.
fn seeds() -> Result<Verdict> {
    let tests = ["--test", "device", "--test", "nccl", "for_every_seed"];
    let holds = run_tests(&tests, &[("SHARDWISE_SEEDS", "1000")])?;
    let figure = if holds { "all have the same bits" } else { "some differ" }.to_string();
    Ok(Verdict { figure, bar: "no bit".to_string(), holds })
}
