//! What people who look on are shown of the ranks: a summary whose length does not grow with their number.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::explain::waits;
use crate::standing::{check_length, cut};
use crate::wording::{described, lasting};
use crate::{CallState, Error, Presence, Result, Seen};

/// Of how many ranks it is said where each one is: the first so many.
pub const SHOWN_MAX: usize = 64;
/// How many calls are shown in which ranks wait for others.
const WAITS_MAX: usize = 8;
/// The longest name, and the longest text, in bytes.
const NAME_BYTES_MAX: usize = 48;
const TEXT_BYTES_MAX: usize = 160;

/// A wait that is told in milliseconds.
const SHORT: Duration = Duration::from_secs(1);

/// Where the ranks are, at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Snapshot {
    /// The how-manieth attempt at the run.
    pub attempt: u64,
    /// How many ranks there are.
    pub ranks: u64,
    /// How many of them are connected.
    pub here: u64,
    /// How many have not joined yet.
    pub awaited: u64,
    /// The least and the most step that a rank is at.
    pub steps: (u64, u64),
    /// The first ranks, up to [`SHOWN_MAX`].
    pub shown: Vec<Glimpse>,
    /// Who waits for whom, the longest wait first.
    pub waits: Vec<Wait>,
}

/// Where one rank is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Glimpse {
    /// The rank.
    pub rank: u64,
    /// Its host.
    pub host: String,
    /// Whether it is there.
    pub presence: Presence,
    /// Its step.
    pub step: u64,
    /// What it is at, and of which unit.
    pub doing: String,
    /// For how long.
    pub for_ms: u64,
    /// The call that it waits in, if it waits: `all-gather #88 of 'block.2' (38.7 kB, shard 0-3)`.
    pub call: String,
    /// When it was last heard.
    pub heard_ms_ago: u64,
}

/// A call that some ranks are in, and others have not entered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wait {
    /// Who waits: `ranks 0, 1 and 3`.
    pub waiting: String,
    /// For whom.
    pub missing: String,
    /// In what.
    pub call: String,
    /// For how long: `12 s`.
    pub lasting: String,
}

impl Snapshot {
    /// Of all ranks of an attempt, as they were last heard.
    pub(crate) fn of(ranks: &[Seen], attempt: u64, now: Instant) -> Self {
        let count = |presence: Presence| ranks.iter().filter(|seen| seen.presence == presence).count() as u64;
        let here = || ranks.iter().filter(|seen| seen.presence == Presence::Here).map(|seen| seen.standing.step);
        let short = |text: String| short(text, TEXT_BYTES_MAX);
        let waits = waits(ranks, now).into_iter().take(WAITS_MAX).map(|(waiting, missing, call, age)| Wait {
            waiting: short(waiting),
            missing: short(missing),
            call: short(call),
            lasting: if age < SHORT { format!("{} ms", age.as_millis()) } else { lasting(age) },
        });
        Snapshot {
            attempt,
            ranks: ranks.len() as u64,
            here: count(Presence::Here),
            awaited: count(Presence::Awaited),
            steps: (here().min().unwrap_or(0), here().max().unwrap_or(0)),
            shown: ranks.iter().take(SHOWN_MAX).enumerate().map(|(rank, seen)| glimpse(rank, seen, now)).collect(),
            waits: waits.collect(),
        }
    }

    /// What came is within the limits.
    pub(crate) fn check(&self) -> Result<()> {
        if self.shown.len() > SHOWN_MAX || self.waits.len() > WAITS_MAX {
            return Err(Error::Malformed("a summary of more ranks than there is room for".to_string()));
        }
        for Glimpse { host, doing, call, .. } in &self.shown {
            [host, doing, call].into_iter().try_for_each(|text| check_length(text, TEXT_BYTES_MAX))?;
        }
        for Wait { waiting, missing, call, lasting } in &self.waits {
            [waiting, missing, call, lasting].into_iter().try_for_each(|text| check_length(text, TEXT_BYTES_MAX))?;
        }
        Ok(())
    }
}

fn glimpse(rank: usize, seen: &Seen, now: Instant) -> Glimpse {
    let Seen { host, standing, heard, presence, .. } = seen;
    let since = heard.map_or(Duration::ZERO, |heard| now.saturating_duration_since(heard));
    let doing = match standing.unit.is_empty() {
        true => standing.phase.clone(),
        false => format!("{} of {}", standing.phase, standing.unit),
    };
    let open = standing.calls.iter().filter(|call| call.state == CallState::UnderWay).max_by_key(|call| call.for_ms);
    Glimpse {
        rank: rank as u64,
        host: short(host.clone(), NAME_BYTES_MAX),
        presence: *presence,
        step: standing.step,
        doing: short(doing, NAME_BYTES_MAX),
        for_ms: standing.in_phase_ms,
        call: short(open.map(described).unwrap_or_default(), TEXT_BYTES_MAX),
        heard_ms_ago: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
    }
}

fn short(mut text: String, bytes_max: usize) -> String {
    cut(&mut text, bytes_max);
    text
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use super::*;
    use crate::Standing;
    use crate::standing::tests::call;

    #[test]
    fn ten_thousand_ranks_are_as_short_as_sixty_four() {
        let mut worst = call(3);
        worst.label = "\"".repeat(256);
        let standing = Standing { unit: "\\".repeat(256), calls: vec![worst], ..Standing::default() };
        let seen = |rank: u32| Seen {
            host: "\"".repeat(256),
            pid: rank,
            standing: standing.clone(),
            heard: Some(Instant::now()),
            presence: Presence::Here,
        };
        let ranks: Vec<Seen> = (0..10_000).map(seen).collect();
        let snapshot = Snapshot::of(&ranks, 1, Instant::now());
        assert_eq!((snapshot.ranks, snapshot.here, snapshot.shown.len()), (10_000, 10_000, SHOWN_MAX));
        snapshot.check().unwrap();
        assert!(serde_json::to_string(&snapshot).unwrap().len() < crate::message::FRAME_BYTES_MAX);
    }

    #[test]
    fn who_waits_for_whom_is_said() {
        let seen = |number: u64| {
            let mut own = call(number);
            own.waits_for = crate::Ranks::default();
            Seen {
                host: "a".to_string(),
                pid: 1,
                standing: Standing { step: 7, phase: "forward".into(), calls: vec![own], ..Standing::default() },
                heard: None,
                presence: Presence::Here,
            }
        };
        let mut ranks: Vec<Seen> = [8, 8, 7, 8].into_iter().map(seen).collect();
        ranks[2].standing.calls[0].state = CallState::Done;
        let snapshot = Snapshot::of(&ranks, 1, Instant::now());
        let [Wait { waiting, missing, call, lasting }] = &snapshot.waits[..] else { panic!("{snapshot:?}") };
        assert_eq!((waiting.as_str(), missing.as_str()), ("ranks 0, 1 and 3", "rank 2"));
        assert!(call.contains("reduce-scatter #8 of 'block.7'") && lasting == "31 s", "{snapshot:?}");
        assert_eq!(snapshot.shown[2].call, "");
    }
}
