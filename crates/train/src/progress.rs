//! A trainer's progress, as checkpoints store it.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Everything that is needed to resume training, except tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// The number of steps so far.
    pub step: u64,
    /// The number of updates so far.
    pub updates: u32,
    /// The number of steps so far whose update was skipped.
    pub skipped: u64,
    /// The loss scale, if it is dynamic.
    pub loss_scale: Option<f64>,
    /// The number of steps without overflow since the loss scale last changed.
    pub good_steps: u32,
    /// The number of overflows until the loss scale is halved, if the hysteresis is more than 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hysteresis_left: Option<u32>,
    /// The batches to skip after a rollback, including those already skipped.
    #[serde(default, rename = "passed_over", skip_serializing_if = "Vec::is_empty")]
    pub skipped_batches: Vec<SkippedBatch>,
    /// By unit: what is added to the score of each expert when tokens choose; empty for a unit without such a bias.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub expert_biases: Vec<Vec<f32>>,
}

/// A batch that is skipped because its step spiked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkippedBatch {
    /// The step whose batch is skipped.
    pub step: u64,
    /// The description of the spike.
    pub why: String,
}

impl fmt::Display for SkippedBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "batch skipped after a spike: {}", self.why)
    }
}
