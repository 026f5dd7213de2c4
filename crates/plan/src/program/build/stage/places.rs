//! Where buffers of a unit are that a program moves.

/// Where a unit's reduced gradients are.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Gradients {
    /// In memory, or there are none.
    InMemory,
    Stored,
    Fetching,
}

/// Where an input is that a recomputed unit keeps.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum KeptInput {
    Storing,
    Stored,
    Fetching,
}
