//! The options of communication over MPI.

use std::time::Duration;

use crate::CallFault;

/// Options for [`world`](super::world).
#[derive(Clone, Debug)]
pub struct Options {
    /// How long a call may go without any progress before it fails. Must be longer than any legitimate wait of one rank for
    /// another.
    pub timeout: Duration,
    /// Whether the ranks of a group compare their calls before each collective. Must be the same on all ranks.
    pub verify_collectives: bool,
    /// A fault to inject, for tests.
    pub fault: Option<CallFault>,
}

impl Default for Options {
    /// A timeout of 300 seconds, no verification, no fault.
    fn default() -> Self {
        Options { timeout: Duration::from_secs(300), verify_collectives: false, fault: None }
    }
}
