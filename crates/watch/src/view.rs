//! The summary of the ranks that viewers receive. Its length does not grow with the world size.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use shardwise_journal::format::format_elapsed_millis;

use crate::explain::waits;
use crate::status::{check_length, shorten};
use crate::wording::describe_call;
use crate::{CallState, Error, Presence, RankInfo, Result};

/// The maximum number of ranks that are shown individually; these are the first ranks.
pub const SHOWN_MAX: usize = 64;
/// The maximum number of waits that are shown.
const WAITS_MAX: usize = 8;
/// The longest name, and the longest text, in bytes.
const NAME_BYTES_MAX: usize = 48;
const TEXT_BYTES_MAX: usize = 160;

/// The state of all ranks at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Snapshot {
    /// The attempt, counted from 1.
    pub attempt: u64,
    /// The world size.
    pub ranks: u64,
    /// The number of connected ranks.
    pub connected: u64,
    /// The number of ranks that have not joined yet.
    pub not_joined: u64,
    /// The lowest and the highest current step of any rank.
    pub steps: (u64, u64),
    /// The first ranks, up to [`SHOWN_MAX`].
    pub shown: Vec<RankSnapshot>,
    /// Which ranks are waiting for which, the longest wait first.
    pub waits: Vec<Wait>,
}

/// The state of one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankSnapshot {
    /// The rank.
    pub rank: u64,
    /// Its host.
    pub host: String,
    /// Whether it is connected.
    pub presence: Presence,
    /// Its current step.
    pub step: u64,
    /// Its current phase and unit: `forward of block.3`.
    pub activity: String,
    /// The time since that phase started.
    pub in_phase_ms: u64,
    /// The call that it is waiting in, if any: `all-gather #88 of 'block.2' (38.7 kB, shard 0-3)`.
    pub call: String,
    /// The time since its last heartbeat.
    pub last_heard_ms_ago: u64,
}

/// A call that some ranks have entered and others have not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wait {
    /// The ranks that are waiting: `ranks 0, 1 and 3`.
    pub waiting: String,
    /// The ranks that they are waiting for.
    pub missing: String,
    /// The call.
    pub call: String,
    /// How long they have been waiting: `12 s`.
    pub duration: String,
}

impl Snapshot {
    /// Creates the summary of all ranks of an attempt.
    pub(crate) fn of(ranks: &[RankInfo], attempt: u64, now: Instant) -> Self {
        let count = |presence: Presence| ranks.iter().filter(|rank| rank.presence == presence).count() as u64;
        let steps = || ranks.iter().filter(|rank| rank.presence == Presence::Connected).map(|rank| rank.status.step);
        let short = |text: String| shortened(text, TEXT_BYTES_MAX);
        let waits = waits(ranks, now).into_iter().take(WAITS_MAX).map(|(waiting, missing, call, age)| Wait {
            waiting: short(waiting),
            missing: short(missing),
            call: short(call),
            duration: format_elapsed_millis(age),
        });
        Snapshot {
            attempt,
            ranks: ranks.len() as u64,
            connected: count(Presence::Connected),
            not_joined: count(Presence::NotJoined),
            steps: (steps().min().unwrap_or(0), steps().max().unwrap_or(0)),
            shown: ranks.iter().take(SHOWN_MAX).enumerate().map(|(rank, info)| snapshot(rank, info, now)).collect(),
            waits: waits.collect(),
        }
    }

    /// Checks that a received summary is within the limits.
    pub(crate) fn check(&self) -> Result<()> {
        if self.shown.len() > SHOWN_MAX || self.waits.len() > WAITS_MAX {
            return Err(Error::Malformed("a summary with too many ranks or waits".to_string()));
        }
        for RankSnapshot { host, activity, call, .. } in &self.shown {
            [host, activity, call].into_iter().try_for_each(|text| check_length(text, TEXT_BYTES_MAX))?;
        }
        for Wait { waiting, missing, call, duration } in &self.waits {
            [waiting, missing, call, duration].into_iter().try_for_each(|text| check_length(text, TEXT_BYTES_MAX))?;
        }
        Ok(())
    }
}

fn snapshot(rank: usize, info: &RankInfo, now: Instant) -> RankSnapshot {
    let RankInfo { host, status, last_heard, presence, .. } = info;
    let since = last_heard.map_or(Duration::ZERO, |heard| now.saturating_duration_since(heard));
    let activity = match status.unit.is_empty() {
        true => status.phase.clone(),
        false => format!("{} of {}", status.phase, status.unit),
    };
    let open = status.calls.iter().filter(|call| call.state == CallState::InProgress);
    let oldest = open.max_by_key(|call| call.in_state_ms);
    RankSnapshot {
        rank: rank as u64,
        host: shortened(host.clone(), NAME_BYTES_MAX),
        presence: *presence,
        step: status.step,
        activity: shortened(activity, NAME_BYTES_MAX),
        in_phase_ms: status.in_phase_ms,
        call: shortened(oldest.map(describe_call).unwrap_or_default(), TEXT_BYTES_MAX),
        last_heard_ms_ago: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
    }
}

fn shortened(mut text: String, bytes_max: usize) -> String {
    shorten(&mut text, bytes_max);
    text
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use super::*;
    use crate::RankStatus;
    use crate::status::tests::call;

    #[test]
    fn a_summary_of_ten_thousand_ranks_fits_into_a_frame() {
        let mut worst = call(3);
        worst.label = "\"".repeat(256);
        let status = RankStatus { unit: "\\".repeat(256), calls: vec![worst], ..RankStatus::default() };
        let info = |rank: u32| RankInfo {
            host: "\"".repeat(256),
            pid: rank,
            status: status.clone(),
            last_heard: Some(Instant::now()),
            presence: Presence::Connected,
        };
        let ranks: Vec<RankInfo> = (0..10_000).map(info).collect();
        let snapshot = Snapshot::of(&ranks, 1, Instant::now());
        assert_eq!((snapshot.ranks, snapshot.connected, snapshot.shown.len()), (10_000, 10_000, SHOWN_MAX));
        snapshot.check().unwrap();
        assert!(serde_json::to_string(&snapshot).unwrap().len() < crate::message::FRAME_BYTES_MAX);
    }

    #[test]
    fn waits_name_both_sides() {
        let info = |number: u64| {
            let mut own = call(number);
            own.waiting_for = crate::Ranks::default();
            RankInfo {
                host: "a".to_string(),
                pid: 1,
                status: RankStatus { step: 7, phase: "forward".into(), calls: vec![own], ..RankStatus::default() },
                last_heard: None,
                presence: Presence::Connected,
            }
        };
        let mut ranks: Vec<RankInfo> = [8, 8, 7, 8].into_iter().map(info).collect();
        ranks[2].status.calls[0].state = CallState::Done;
        let snapshot = Snapshot::of(&ranks, 1, Instant::now());
        let [Wait { waiting, missing, call, duration }] = &snapshot.waits[..] else { panic!("{snapshot:?}") };
        assert_eq!((waiting.as_str(), missing.as_str()), ("ranks 0, 1 and 3", "rank 2"));
        assert!(call.contains("reduce-scatter #8 of 'block.7'") && duration == "31 s", "{snapshot:?}");
        assert_eq!(snapshot.shown[2].call, "");
    }
}
