//! Kinds of failures, as ranks tell them apart.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What kind of failure a rank tells of. It says who is at fault, and whether another attempt may do better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// All ranks have the same to say, and would again.
    Final,
    /// There was no memory left for the rank.
    Memory,
    /// The rank's own, of any other sort.
    Error,
    /// Ranks compute different gradients from the same samples.
    SpotCheck,
    /// Ranks came to a collective with different calls.
    Mismatch,
    /// A call stood still for too long: the cause is elsewhere.
    Timeout,
    /// A call failed, or could not be made any more.
    Transport,
}

impl FailureKind {
    /// Whether it was found by all ranks together: whoever tells of it names those at fault, and is seldom one of them.
    pub(crate) fn tells_of_all(self) -> bool {
        matches!(self, FailureKind::SpotCheck | FailureKind::Mismatch)
    }
}

impl fmt::Display for FailureKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FailureKind::Final | FailureKind::Error => "error",
            FailureKind::Memory => "memory",
            FailureKind::SpotCheck => "spot check",
            FailureKind::Mismatch => "mismatch",
            FailureKind::Timeout => "timeout",
            FailureKind::Transport => "transport",
        })
    }
}
