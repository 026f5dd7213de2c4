//! Requests to a run from outside.

use std::ops::RangeInclusive;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

/// The maximum number of steps in a trace.
pub(crate) const TRACED_STEPS_MAX: u64 = 100;

/// Requests to a run from outside, on any of its ranks. Signal handlers and the supervisor set them.
#[derive(Clone, Debug, Default)]
pub struct Requests {
    /// Save a checkpoint.
    pub save: Arc<AtomicBool>,
    /// Save a checkpoint and stop.
    pub stop: Arc<AtomicBool>,
    /// Trace this many steps, starting after the next step.
    pub trace: Arc<AtomicU64>,
    /// The steps to trace that were known at launch; the same on all ranks.
    pub planned_trace: PlannedTrace,
}

/// A trace that was requested at launch.
#[derive(Clone, Debug, Default)]
pub struct PlannedTrace {
    /// The steps to trace.
    pub steps: Option<StepRange>,
    /// Ranks to trace in addition to the first ones.
    pub ranks: Vec<usize>,
}

impl PlannedTrace {
    /// Explains why no step will be traced, if the run will not get to any of the planned ones.
    pub(crate) fn explain_if_unreachable(&self, first_step: u64, last_step: u64) -> Option<String> {
        let StepRange(steps) = self.steps.as_ref()?;
        let (first, last) = (steps.start(), steps.end());
        match (*last < first_step, *first > last_step) {
            (true, _) => Some(format!("steps {first} to {last} are past and will not be traced")),
            (false, true) => Some(format!("steps {first} to {last} will not be traced: run.steps is {last_step}")),
            (false, false) => None,
        }
    }
}

/// A range of steps, both ends included: `10..12`, or `10` for one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepRange(pub RangeInclusive<u64>);

impl FromStr for StepRange {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let (first, last) = text.split_once("..").unwrap_or((text, text));
        match (first.parse::<u64>(), last.parse::<u64>()) {
            (Ok(first), Ok(last)) if first >= 1 && first <= last && last - first < TRACED_STEPS_MAX => {
                Ok(StepRange(first..=last))
            }
            _ => Err(format!(
                "expected the first and the last step, as in 10..12, with at most {TRACED_STEPS_MAX} steps"
            )),
        }
    }
}
