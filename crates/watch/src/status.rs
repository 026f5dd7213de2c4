//! The status of a rank, which every heartbeat carries.
//!
//! A status is small, and is shortened to the limits below before it is sent. The supervisor trusts no length that it has not
//! checked, and closes a connection that exceeds a limit.

use serde::{Deserialize, Serialize};

use crate::{Error, Ranks, Result};

/// The longest name, in bytes.
const NAME_BYTES_MAX: usize = 256;
/// The longest text of a failure or a note, in bytes. JSON may escape one byte as six, and the result must fit into a frame.
pub(crate) const TEXT_BYTES_MAX: usize = 8 << 10;
/// The maximum number of calls in a status.
const CALLS_MAX: usize = 16;

/// The status of a rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankStatus {
    /// The current step; 0 before the first.
    pub step: u64,
    /// The first step of this process; 0 before it starts.
    pub first_step: u64,
    /// The current phase: `gather`, `forward`, `backward`, `optimizer`, `save` or another `Phase` of
    /// `shardwise-run`. Empty before the first phase.
    pub phase: String,
    /// The current unit; empty in phases that have none.
    pub unit: String,
    /// The time since the phase started.
    pub in_phase_ms: u64,
    /// The current call of each of its groups: one for collectives and one for messages, if it has made any.
    pub calls: Vec<CallStatus>,
}

/// The status of a communication call on one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CallStatus {
    /// The group's name and ranks: `shard 0-3`. It is the same on all ranks of the group.
    pub group: String,
    /// The group's ranks.
    pub ranks: Ranks,
    /// The number of the call in its group.
    pub number: u64,
    /// The operation: `reduce-scatter`.
    pub verb: String,
    /// The unit or purpose: `block.7`.
    pub label: String,
    /// The number of elements of the larger of the two buffers.
    pub elements: u64,
    /// The size of that buffer.
    pub bytes: u64,
    /// The dtype of the elements: `f32`.
    pub dtype: String,
    /// The state of the call.
    pub state: CallState,
    /// The time since it entered that state.
    pub in_state_ms: u64,
    /// The ranks that it is waiting for, if they are known.
    pub waiting_for: Ranks,
    /// Whether the rank is waiting for its end. Messages run in the background until then.
    #[serde(default)]
    pub is_awaited: bool,
}

/// The state of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CallState {
    /// It is queued behind other calls.
    Queued,
    /// It has started and is not done.
    InProgress,
    /// It is done.
    Done,
}

impl RankStatus {
    /// Shortens the status to the limits, so that it can be sent.
    pub(crate) fn shorten(mut self) -> Self {
        self.calls.truncate(CALLS_MAX);
        self.names_mut().for_each(|name| shorten(name, NAME_BYTES_MAX));
        self
    }

    /// Checks that a received status is within the limits.
    pub(crate) fn check(&self) -> Result<()> {
        if self.calls.len() > CALLS_MAX {
            return Err(Error::Malformed(format!("{} calls, but at most {CALLS_MAX} are allowed", self.calls.len())));
        }
        self.names().try_for_each(|name| check_name(name))
    }

    fn names(&self) -> impl Iterator<Item = &String> {
        let of_calls = self.calls.iter().flat_map(|call| [&call.group, &call.verb, &call.label, &call.dtype]);
        [&self.phase, &self.unit].into_iter().chain(of_calls)
    }

    fn names_mut(&mut self) -> impl Iterator<Item = &mut String> {
        let of_calls =
            self.calls.iter_mut().flat_map(|CallStatus { group, verb, label, dtype, .. }| [group, verb, label, dtype]);
        [&mut self.phase, &mut self.unit].into_iter().chain(of_calls)
    }
}

/// Shortens a name, so that it can be sent.
pub(crate) fn shorten_name(mut text: String) -> String {
    shorten(&mut text, NAME_BYTES_MAX);
    text
}

/// Shortens a text, so that it can be sent.
pub(crate) fn shorten_text(mut text: String) -> String {
    shorten(&mut text, TEXT_BYTES_MAX);
    text
}

/// Checks a received name.
pub(crate) fn check_name(name: &str) -> Result<()> {
    check_length(name, NAME_BYTES_MAX)
}

/// Checks a received text.
pub(crate) fn check_text(text: &str) -> Result<()> {
    check_length(text, TEXT_BYTES_MAX)
}

/// Checks that a received text is not too long and can be printed.
pub(crate) fn check_length(text: &str, bytes_max: usize) -> Result<()> {
    if text.len() > bytes_max {
        return Err(Error::Malformed(format!("a text of {} bytes, but at most {bytes_max} are allowed", text.len())));
    }
    if text.contains(is_unprintable) {
        return Err(Error::Malformed("a text with control characters".to_string()));
    }
    Ok(())
}

/// Shortens a text to at most `bytes_max` bytes, and replaces characters that cannot be printed.
pub(crate) fn shorten(text: &mut String, bytes_max: usize) {
    if text.contains(is_unprintable) {
        *text = text.replace(is_unprintable, " ");
    }
    if text.len() > bytes_max {
        let end = text.floor_char_boundary(bytes_max - '…'.len_utf8());
        text.truncate(end);
        text.push('…');
    }
}

/// Whether a character must not be printed: terminals interpret control characters.
fn is_unprintable(letter: char) -> bool {
    letter.is_control() && letter != '\n' && letter != '\t'
}

#[cfg(test)]
pub(crate) mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use super::*;

    pub(crate) fn call(number: u64) -> CallStatus {
        CallStatus {
            group: "shard 0-3".to_string(),
            ranks: Ranks::from_ranks(0..4),
            number,
            verb: "reduce-scatter".to_string(),
            label: "block.7".to_string(),
            elements: 3_145_728,
            bytes: 12_582_912,
            dtype: "f32".to_string(),
            state: CallState::InProgress,
            in_state_ms: 31_000,
            waiting_for: Ranks::from_ranks([3]),
            is_awaited: true,
        }
    }

    #[test]
    fn a_shortened_status_is_accepted() {
        let long = CallStatus { label: "é\u{1b}[2J".repeat(200), ..call(1) };
        let status = RankStatus { unit: "x".repeat(1000), calls: vec![long; 40], ..RankStatus::default() };
        assert!(status.check().is_err());
        let status = status.shorten();
        status.check().unwrap();
        assert_eq!(status.calls.len(), CALLS_MAX);
        assert!(status.unit.len() <= NAME_BYTES_MAX && status.unit.ends_with('…'));
        assert!(!status.calls[0].label.contains('\u{1b}'));
    }
}
