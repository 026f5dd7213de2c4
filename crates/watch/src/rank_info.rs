//! What the supervisor knows about each rank.

use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::{Coordinates, RankStatus};

/// Whether a rank is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Presence {
    /// It has not joined yet.
    NotJoined,
    /// It is connected.
    Connected,
    /// It has disconnected.
    Left {
        /// The exit code that it announced; `None` if the connection just ended.
        code: Option<i32>,
    },
}

/// What the supervisor knows about a rank.
#[derive(Clone, Debug)]
pub struct RankInfo {
    /// Its coordinates, along the axes that the run uses.
    pub coordinates: Coordinates,
    /// The host that it runs on; empty before it has joined.
    pub host: String,
    /// Its process id there.
    pub pid: u32,
    /// Its latest status.
    pub status: RankStatus,
    /// When its latest message arrived.
    pub last_heard: Option<Instant>,
    /// Whether it is connected.
    pub presence: Presence,
}
