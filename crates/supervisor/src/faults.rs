//! The faults of `--fault`: faults that are spelled out, and random kills drawn from a seed.

use crate::error::{Error, Result};

/// The phases in which random kills happen.
const PHASES: [&str; 8] =
    ["gather", "forward", "backward", "reduce", "optimizer", "save-before", "save-inside", "save-after"];

const KILLS_MAX: u64 = 100_000;

/// Expands `random …`, so that the plan has one fault for each attempt.
pub fn plan_faults(faults: &[String], ranks: usize) -> Result<Vec<String>> {
    let mut plan = Vec::new();
    for fault in faults {
        match fault.strip_prefix("random ") {
            None => plan.push(fault.clone()),
            Some(rest) => {
                let kills = draw_kills(rest, ranks);
                plan.extend(kills.map_err(|error| Error::failed(format!("--fault '{fault}'"), error))?);
            }
        }
    }
    Ok(plan)
}

/// Draws kills of any rank in any phase, in the first or second step of an attempt.
fn draw_kills(text: &str, ranks: usize) -> Result<Vec<String>> {
    let (mut seed, mut kills) = (0, 1);
    let number = |name: &str, value: &str| value.parse::<u64>().map_err(|error| Error::failed(name, error));
    for word in text.split_whitespace() {
        match word.split_once('=') {
            Some((name @ "seed", value)) => seed = number(name, value)?,
            Some((name @ "kills", value)) => kills = number(name, value)?,
            _ => return Err(Error::Fault(format!("unknown setting '{word}': use seed=NUMBER and kills=NUMBER"))),
        }
    }
    if kills > KILLS_MAX {
        return Err(Error::Fault(format!("kills={kills} is too many: use at most {KILLS_MAX}")));
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

/// Sebastiano Vigna's splitmix64, which is random enough for this.
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
        let plan = plan_faults(&faults, 4).unwrap();
        assert_eq!(plan, plan_faults(&faults, 4).unwrap());
        assert_eq!((plan.len(), &plan[0]), (201, &faults[0]));
        for phase in PHASES {
            assert!(plan.iter().any(|kill| kill.ends_with(&format!("phase={phase}"))), "{phase}");
        }
        for rank in 0..4 {
            assert!(plan.iter().filter(|kill| kill.contains(&format!("rank={rank} "))).count() > 20, "rank {rank}");
        }
        assert_ne!(plan[1..], plan_faults(&["random seed=8 kills=200".to_string()], 4).unwrap());
        assert!(plan_faults(&["random kills=many".to_string()], 4).is_err());
    }
}
