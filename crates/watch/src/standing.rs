//! Where a rank stands: what it says of itself with every beat.
//!
//! It is made by a thread that has other things to do than to be exact. So a standing is small, and cut to its limits before it
//! is sent; the supervisor, which trusts no length that it has not checked, closes a connection that exceeds them.

use serde::{Deserialize, Serialize};

use crate::{Error, Ranks, Result};

/// The longest name, in bytes.
const NAME_BYTES_MAX: usize = 256;
/// The longest text of a failure or a note, in bytes. JSON may make six of one, and they must fit a frame.
pub(crate) const TEXT_BYTES_MAX: usize = 8 << 10;
/// The most calls.
const CALLS_MAX: usize = 16;

/// Where a rank stands.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Standing {
    /// The step; zero before the first.
    pub step: u64,
    /// The first step that this process made, once it has begun it.
    pub first_step: u64,
    /// What it is at: `gather`, `forward`, `backward`, `optimizer`, `save` and whatever else `Phase` in
    /// `crates/train/src/position.rs` has. Empty before there is anything to say.
    pub phase: String,
    /// On which unit, where that means something.
    pub unit: String,
    /// For how long.
    pub in_phase_ms: u64,
    /// Of each of its groups the oldest call that has not ended, and the newest; one where they are the same.
    pub calls: Vec<CallStanding>,
}

/// Where a call stands on one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CallStanding {
    /// The group's name and ranks, as calls name it: `shard 0-3`. All ranks of a group write it alike.
    pub group: String,
    /// The group's ranks.
    pub ranks: Ranks,
    /// The how-manieth call in this group.
    pub number: u64,
    /// What is done: `reduce-scatter`.
    pub verb: String,
    /// For whom: `block.7`.
    pub label: String,
    /// The larger of the two buffers.
    pub elements: u64,
    /// The same in bytes.
    pub bytes: u64,
    /// Its elements: `f32`.
    pub dtype: String,
    /// How far it has come.
    pub state: CallState,
    /// For how long it has been in that state.
    pub for_ms: u64,
    /// The ranks that it waits for, where that is known.
    pub waits_for: Ranks,
}

/// How far a call has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CallState {
    /// Behind other calls in the queue.
    Queued,
    /// Begun, not ended.
    UnderWay,
    /// Ended.
    Done,
}

impl Standing {
    /// Within the limits, so that it can be sent.
    pub(crate) fn cut(mut self) -> Self {
        self.calls.truncate(CALLS_MAX);
        self.names_mut().for_each(|name| cut(name, NAME_BYTES_MAX));
        self
    }

    /// What came is within the limits.
    pub(crate) fn check(&self) -> Result<()> {
        if self.calls.len() > CALLS_MAX {
            return Err(Error::Malformed(format!("{} calls, and {CALLS_MAX} are the most", self.calls.len())));
        }
        self.names().try_for_each(|name| check_name(name))
    }

    fn names(&self) -> impl Iterator<Item = &String> {
        let of_calls = self.calls.iter().flat_map(|call| [&call.group, &call.verb, &call.label, &call.dtype]);
        [&self.phase, &self.unit].into_iter().chain(of_calls)
    }

    fn names_mut(&mut self) -> impl Iterator<Item = &mut String> {
        let of_calls = self
            .calls
            .iter_mut()
            .flat_map(|CallStanding { group, verb, label, dtype, .. }| [group, verb, label, dtype]);
        [&mut self.phase, &mut self.unit].into_iter().chain(of_calls)
    }
}

/// A name that can be sent.
pub(crate) fn name(mut text: String) -> String {
    cut(&mut text, NAME_BYTES_MAX);
    text
}

/// A text that can be sent.
pub(crate) fn text(mut text: String) -> String {
    cut(&mut text, TEXT_BYTES_MAX);
    text
}

/// A name that came is within its limits.
pub(crate) fn check_name(name: &str) -> Result<()> {
    check_length(name, NAME_BYTES_MAX)
}

/// A text that came is within its limits.
pub(crate) fn check_text(text: &str) -> Result<()> {
    check_length(text, TEXT_BYTES_MAX)
}

/// A text that came is no longer than that, and can be shown.
pub(crate) fn check_length(text: &str, bytes_max: usize) -> Result<()> {
    if text.len() > bytes_max {
        return Err(Error::Malformed(format!("a text of {} bytes, where {bytes_max} are the most", text.len())));
    }
    if text.contains(unprintable) {
        return Err(Error::Malformed("a text with control characters".to_string()));
    }
    Ok(())
}

/// A text of no more than that, which can be shown.
pub(crate) fn cut(text: &mut String, bytes_max: usize) {
    if text.contains(unprintable) {
        *text = text.replace(unprintable, " ");
    }
    if text.len() > bytes_max {
        let end = text.floor_char_boundary(bytes_max - '…'.len_utf8());
        text.truncate(end);
        text.push('…');
    }
}

/// What comes from ranks ends up on people's terminals, which obey control characters.
fn unprintable(letter: char) -> bool {
    letter.is_control() && letter != '\n' && letter != '\t'
}

#[cfg(test)]
pub(crate) mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use super::*;

    pub(crate) fn call(number: u64) -> CallStanding {
        CallStanding {
            group: "shard 0-3".to_string(),
            ranks: Ranks::of(0..4),
            number,
            verb: "reduce-scatter".to_string(),
            label: "block.7".to_string(),
            elements: 3_145_728,
            bytes: 12_582_912,
            dtype: "f32".to_string(),
            state: CallState::UnderWay,
            for_ms: 31_000,
            waits_for: Ranks::of([3]),
        }
    }

    #[test]
    fn what_is_sent_is_cut_to_what_is_read() {
        let long = CallStanding { label: "é\u{1b}[2J".repeat(200), ..call(1) };
        let standing = Standing { unit: "x".repeat(1000), calls: vec![long; 40], ..Standing::default() };
        assert!(standing.check().is_err());
        let standing = standing.cut();
        standing.check().unwrap();
        assert_eq!(standing.calls.len(), CALLS_MAX);
        assert!(standing.unit.len() <= NAME_BYTES_MAX && standing.unit.ends_with('…'));
        assert!(!standing.calls[0].label.contains('\u{1b}'));
    }
}
