//! Which faults are asked for: those that are written out, and kills that are drawn.

use anyhow::{Context, Result, bail};

/// Where a rank can be killed.
const PHASES: [&str; 8] =
    ["gather", "forward", "backward", "reduce", "optimizer", "save-before", "save-inside", "save-after"];

/// The most kills that are drawn.
const KILLS_MAX: u64 = 100_000;

/// The faults, one for each start of so many ranks.
pub(crate) fn planned(faults: &[String], ranks: usize) -> Result<Vec<String>> {
    let mut plan = Vec::new();
    for fault in faults {
        match fault.strip_prefix("random ") {
            None => plan.push(fault.clone()),
            Some(rest) => plan.extend(drawn(rest, ranks).with_context(|| format!("--fault '{fault}'"))?),
        }
    }
    Ok(plan)
}

/// Kills of any rank in any phase, in the first step that the ranks make or the one after it.
fn drawn(text: &str, ranks: usize) -> Result<Vec<String>> {
    let (mut seed, mut kills) = (0, 1);
    for word in text.split_whitespace() {
        match word.split_once('=') {
            Some(("seed", value)) => seed = value.parse().context("seed")?,
            Some(("kills", value)) => kills = value.parse().context("kills")?,
            _ => bail!("'{word}' is neither seed=NUMBER nor kills=NUMBER"),
        }
    }
    if kills > KILLS_MAX {
        bail!("{kills} kills are more than {KILLS_MAX}");
    }
    let kill = |index: u64| {
        let mut state = seed ^ (index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut below = |limit: usize| {
            state = splitmix(state);
            (state % limit as u64) as usize
        };
        let (rank, step, phase) = (below(ranks), below(2), PHASES[below(PHASES.len())]);
        format!("kill rank={rank} step=+{step} phase={phase}")
    };
    Ok((0..kills).map(kill).collect())
}

/// Sebastiano Vigna's splitmix64: enough to draw with.
fn splitmix(state: u64) -> u64 {
    let z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use super::*;

    #[test]
    fn a_seed_draws_the_same_kills_everywhere_in_all_phases() {
        let faults = ["stop rank=1 step=3 phase=forward".to_string(), "random seed=7 kills=200".to_string()];
        let plan = planned(&faults, 4).unwrap();
        assert_eq!(plan, planned(&faults, 4).unwrap());
        assert_eq!((plan.len(), &plan[0]), (201, &faults[0]));
        for phase in PHASES {
            assert!(plan.iter().any(|kill| kill.ends_with(&format!("phase={phase}"))), "{phase}");
        }
        for rank in 0..4 {
            assert!(plan.iter().filter(|kill| kill.contains(&format!("rank={rank} "))).count() > 20, "rank {rank}");
        }
        assert_ne!(plan[1..], planned(&["random seed=8 kills=200".to_string()], 4).unwrap());
        assert!(planned(&["random kills=many".to_string()], 4).is_err());
    }
}
