//! The kinds of failures that ranks report.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The kind of a failure that a rank reports. It shows which rank is at fault, and whether a restart may help.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// An error that all ranks report, and would report again after a restart.
    Final,
    /// The rank ran out of memory.
    Memory,
    /// Any other error of the rank itself.
    Error,
    /// A spot check failed: ranks computed different gradients from the same samples.
    SpotCheck,
    /// Ranks entered a collective with different calls.
    Mismatch,
    /// A call made no progress for too long. The cause is on another rank.
    Timeout,
    /// A call failed, or could no longer be started.
    Transport,
}

impl FailureKind {
    /// Whether all ranks detected it together. Its text names the ranks at fault; the rank that reports it is seldom one of them.
    pub(crate) fn is_collective(self) -> bool {
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
