//! The phases of a run, and a rank's position in it.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use shardwise_train::StepPhase;

/// A phase of a run. Most are part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Setup: model, data, checkpoint.
    Start,
    /// Reading the step's tokens.
    Data,
    /// All-gathering a unit's parameters.
    Gather,
    /// A unit's forward pass.
    Forward,
    /// Recomputing a unit's activations for its backward pass.
    Recompute,
    /// A unit's backward pass.
    Backward,
    /// Reducing a unit's gradients.
    Reduce,
    /// Fetching what a unit keeps on a disk.
    Fetch,
    /// Updating a unit's parameters.
    Optimizer,
    /// Storing what a unit keeps on a disk.
    Store,
    /// The training loop between steps.
    Between,
    /// Evaluation on held-out text.
    Evaluation,
    /// Saving a checkpoint, or advancing the save in progress.
    Save,
    /// All files of a checkpoint are written, but not its manifest.
    SaveBefore,
    /// The manifest is written under a temporary name.
    SaveInside,
    /// The manifest has been renamed into place.
    SaveAfter,
    /// After the last step.
    End,
}

/// The name of every phase.
pub(crate) const PHASE_NAMES: [(Phase, &str); 17] = [
    (Phase::Start, "start"),
    (Phase::Data, "data"),
    (Phase::Gather, "gather"),
    (Phase::Forward, "forward"),
    (Phase::Recompute, "recompute"),
    (Phase::Backward, "backward"),
    (Phase::Reduce, "reduce"),
    (Phase::Fetch, "fetch"),
    (Phase::Optimizer, "optimizer"),
    (Phase::Store, "store"),
    (Phase::Between, "between"),
    (Phase::Evaluation, "evaluation"),
    (Phase::Save, "save"),
    (Phase::SaveBefore, "save-before"),
    (Phase::SaveInside, "save-inside"),
    (Phase::SaveAfter, "save-after"),
    (Phase::End, "end"),
];

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(PHASE_NAMES.iter().find(|(phase, _)| phase == self).map_or("", |(_, name)| name))
    }
}

impl FromStr for Phase {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = PHASE_NAMES.iter().find(|(_, name)| *name == text);
        found.map(|(phase, _)| *phase).ok_or_else(|| {
            let names: Vec<&str> = PHASE_NAMES.iter().map(|(_, name)| *name).collect();
            format!("unknown phase '{text}'; the phases are {}", names.join(", "))
        })
    }
}

/// A rank's position in the run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Position {
    /// The current step, counted from 1; 0 before the first.
    pub step: u64,
    /// The first step of this process.
    pub first_step: u64,
    /// The current phase.
    pub phase: Phase,
    /// The unit that the phase works on, if it works on one.
    pub unit: Option<String>,
    /// The time since the rank entered this phase and unit.
    pub since: Duration,
}

impl From<StepPhase> for Phase {
    fn from(phase: StepPhase) -> Self {
        match phase {
            StepPhase::Gather => Phase::Gather,
            StepPhase::Forward => Phase::Forward,
            StepPhase::Recompute => Phase::Recompute,
            StepPhase::Backward => Phase::Backward,
            StepPhase::Reduce => Phase::Reduce,
            StepPhase::Fetch => Phase::Fetch,
            StepPhase::Optimizer => Phase::Optimizer,
            StepPhase::Store => Phase::Store,
        }
    }
}
