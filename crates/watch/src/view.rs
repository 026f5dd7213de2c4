//! The summary of the ranks that viewers receive. Its length does not grow with the world size.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use shardwise_journal::format::format_elapsed_millis;

use crate::explain::DescribedWait;
use crate::situation::{Situation, own_call};
use crate::status::{check_length, shorten};
use crate::wording::describe_call;
use crate::{Error, Presence, RankInfo, Result};

/// The maximum number of ranks that are shown individually; these are the first ranks.
pub const SHOWN_MAX: usize = 64;
/// The maximum number of waits that are shown, between ranks and between stages.
const WAITS_MAX: usize = 8;
const STAGE_WAITS_MAX: usize = 16;
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
    /// Which stages of the pipeline are waiting for which, the longest wait first. A stage waits for one message at a time.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stage_waits: Vec<Wait>,
}

/// The state of one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankSnapshot {
    /// The rank.
    pub rank: u64,
    /// Its coordinates: `stage 1, tensor 0`. Empty if the run has data parallelism alone.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub coordinates: String,
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

/// A call that some ranks have entered and others have not, or a message that a stage is waiting for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wait {
    /// The ranks that are waiting: `ranks 0, 1 and 3`, or `stage 1`.
    pub waiting: String,
    /// The ranks that they are waiting for.
    pub missing: String,
    /// The call, or what the message carries: `activations of block.3`.
    pub call: String,
    /// How long they have been waiting: `12 s`.
    pub duration: String,
}

impl Snapshot {
    /// Creates the summary of all ranks of an attempt.
    pub(crate) fn of(ranks: &[RankInfo], attempt: u64, now: Instant) -> Self {
        let count = |presence: Presence| ranks.iter().filter(|rank| rank.presence == presence).count() as u64;
        let steps = || ranks.iter().filter(|rank| rank.presence == Presence::Connected).map(|rank| rank.status.step);
        let situation = Situation::new(ranks, now);
        let wait = |(waiting, missing, call, age): DescribedWait, bytes_max: usize| Wait {
            waiting: shortened(waiting, bytes_max),
            missing: shortened(missing, bytes_max),
            call: shortened(call, bytes_max),
            duration: format_elapsed_millis(age),
        };
        let waits = situation.describe_stalls().into_iter().take(WAITS_MAX);
        let stage_waits = situation.describe_stage_waits().into_iter().take(STAGE_WAITS_MAX);
        Snapshot {
            attempt,
            ranks: ranks.len() as u64,
            connected: count(Presence::Connected),
            not_joined: count(Presence::NotJoined),
            steps: (steps().min().unwrap_or(0), steps().max().unwrap_or(0)),
            shown: ranks.iter().take(SHOWN_MAX).enumerate().map(|(rank, info)| snapshot(rank, info, now)).collect(),
            waits: waits.map(|described| wait(described, TEXT_BYTES_MAX)).collect(),
            stage_waits: stage_waits.map(|described| wait(described, NAME_BYTES_MAX)).collect(),
        }
    }

    /// Checks that a received summary is within the limits.
    pub(crate) fn check(&self) -> Result<()> {
        let Snapshot { shown, waits, stage_waits, .. } = self;
        if shown.len() > SHOWN_MAX || waits.len() > WAITS_MAX || stage_waits.len() > STAGE_WAITS_MAX {
            return Err(Error::Malformed("a summary with too many ranks or waits".to_string()));
        }
        for RankSnapshot { coordinates, host, activity, call, .. } in shown {
            [coordinates, host, activity, call].into_iter().try_for_each(|text| check_length(text, TEXT_BYTES_MAX))?;
        }
        for Wait { waiting, missing, call, duration } in waits.iter().chain(stage_waits) {
            [waiting, missing, call, duration].into_iter().try_for_each(|text| check_length(text, TEXT_BYTES_MAX))?;
        }
        Ok(())
    }
}

fn snapshot(rank: usize, info: &RankInfo, now: Instant) -> RankSnapshot {
    let RankInfo { coordinates, host, status, last_heard, presence, .. } = info;
    let since = last_heard.map_or(Duration::ZERO, |heard| now.saturating_duration_since(heard));
    let activity = match status.unit.is_empty() {
        true => status.phase.clone(),
        false => format!("{} of {}", status.phase, status.unit),
    };
    RankSnapshot {
        rank: rank as u64,
        coordinates: coordinates.to_string(),
        host: shortened(host.clone(), NAME_BYTES_MAX),
        presence: *presence,
        step: status.step,
        activity: shortened(activity, NAME_BYTES_MAX),
        in_phase_ms: status.in_phase_ms,
        call: shortened(own_call(status).map(describe_call).unwrap_or_default(), TEXT_BYTES_MAX),
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
    use crate::status::tests::call;
    use crate::{CallState, Coordinates, ModelAxes, RankStatus};

    #[test]
    fn a_summary_of_ten_thousand_ranks_fits_into_a_frame() {
        let mut worst = call(3);
        worst.label = "\"".repeat(256);
        let status = RankStatus { unit: "\\".repeat(256), calls: vec![worst], ..RankStatus::default() };
        let info = |rank: u32| RankInfo {
            coordinates: ModelAxes { pipeline: 100, tensor: 100, ..ModelAxes::default() }
                .coordinates(rank as usize, 10_000),
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
                coordinates: Coordinates::default(),
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
        assert!(snapshot.stage_waits.is_empty() && snapshot.shown[2].coordinates.is_empty(), "{snapshot:?}");
    }

    #[test]
    fn stages_that_wait_are_named_once() {
        let info = |rank: usize| {
            let mut own = call(7);
            (own.verb, own.label) = ("receive".to_string(), "activations of block.3".to_string());
            // Ranks 2 and 3 are stage 1, and receive from stage 0.
            own.waiting_for = crate::Ranks::from_ranks(rank.checked_sub(2));
            own.in_state_ms = 1000 * rank as u64;
            RankInfo {
                coordinates: ModelAxes { pipeline: 2, tensor: 2, ..ModelAxes::default() }.coordinates(rank, 4),
                host: "a".to_string(),
                pid: 1,
                status: RankStatus { step: 7, phase: "forward".into(), calls: vec![own], ..RankStatus::default() },
                last_heard: None,
                presence: Presence::Connected,
            }
        };
        let mut ranks: Vec<RankInfo> = (0..4).map(info).collect();
        let snapshot = Snapshot::of(&ranks, 1, Instant::now());
        assert_eq!(snapshot.shown[3].coordinates, "stage 1, tensor 1");
        let [Wait { waiting, missing, call, duration }] = &snapshot.stage_waits[..] else { panic!("{snapshot:?}") };
        assert_eq!((waiting.as_str(), missing.as_str()), ("stage 1", "stage 0"));
        assert_eq!((call.as_str(), duration.as_str()), ("activations of block.3", "3 s"));
        snapshot.check().unwrap();
        // A receive that has started is no wait while the rank computes.
        ranks.iter_mut().for_each(|info| info.status.calls[0].is_awaited = false);
        let snapshot = Snapshot::of(&ranks, 1, Instant::now());
        assert!(snapshot.stage_waits.is_empty() && snapshot.shown[3].call.is_empty(), "{snapshot:?}");
    }
}
