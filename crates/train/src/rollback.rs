//! Handles spikes: reports them, stops the run, or rolls back to the newest checkpoint and skips the batch.
//!
//! The skipped batches are part of a trainer's progress and thus of its checkpoints, so a resumed run skips the same ones.
//! `spike_detector` decides what a spike is.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use shardwise_checkpoint::Store;
use shardwise_zero::ShardedUnit;

use crate::recipe::Recipe;
use crate::resume::resume_newest;
use crate::run::init_trainer;
use crate::spike_detector::{OnSpike, Spike, SpikeDetector};
use crate::{Error, Options, Ranks, Result, Trainer};

/// At most this many batches may be skipped within this many steps. Bad samples are rare, so more spikes than that have another cause.
const SKIPPED_MAX: usize = 3;
const SKIPPED_WINDOW: u64 = 100;

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

impl Trainer {
    /// Returns this step's spike for the report, or fails before the update if the options say so.
    pub(crate) fn check_spike(&mut self, loss: f64, unit_norms: &[f64]) -> Result<Option<Spike>> {
        let spike = self.spike_detector.detect(loss, unit_norms, |unit| self.shards[unit].name().to_string());
        match spike {
            Some(spike) if self.options.on_spike == OnSpike::Stop => {
                self.shards.iter_mut().for_each(ShardedUnit::discard_gradients);
                Err(Error::Spike { step: self.steps, spike: Box::new(spike) })
            }
            spike => {
                self.spike_detector.record(self.steps, loss, unit_norms);
                Ok(spike)
            }
        }
    }

    /// Skips the next step if its batch caused a spike: counts the step, so that the schedule advances, but updates nothing.
    pub fn skip_batch(&mut self) -> Option<SkippedBatch> {
        let next = self.skipped_batches.iter().find(|batch| batch.step == self.steps + 1)?.clone();
        self.steps += 1;
        Some(next)
    }
}

/// Rolls back to the newest checkpoint, or to step 0 if there is none yet. The returned trainer will skip the batch that
/// spiked. Fails if too many batches were skipped recently.
pub(crate) fn roll_back(
    recipe: &Recipe,
    order: &Value,
    store: &Arc<Store>,
    trainer: Trainer,
    (step, spike): (u64, Box<Spike>),
    log: &mut dyn FnMut(&str),
) -> Result<Trainer> {
    let (ranks, options, mut spike_detector, mut skipped_batches) = take_apart(trainer);
    let is_recent = |batch: &&SkippedBatch| batch.step.abs_diff(step) < SKIPPED_WINDOW;
    let before: Vec<u64> = skipped_batches.iter().filter(is_recent).map(|batch| batch.step).collect();
    if before.len() >= SKIPPED_MAX {
        return Err(Error::RepeatedSpikes { step, spike, before });
    }
    log(&format!("step {step}: {spike}; nothing was updated, rolling back"));
    let found = resume_newest(recipe, order, store, &ranks, &options, log)?;
    let mut trainer = match found {
        Some(trainer) => trainer,
        None => {
            log("there is no checkpoint yet: starting over");
            init_trainer(recipe, recipe.model()?, ranks, options)?
        }
    };
    spike_detector.roll_back_to(trainer.steps);
    skipped_batches.push(SkippedBatch { step, why: spike.to_string() });
    (trainer.spike_detector, trainer.skipped_batches) = (spike_detector, skipped_batches);
    Ok(trainer)
}

/// Keeps what the next trainer needs, and frees the rest before the next trainer is created.
fn take_apart(trainer: Trainer) -> (Ranks, Options, SpikeDetector, Vec<SkippedBatch>) {
    let Trainer { ranks, options, spike_detector, skipped_batches, .. } = trainer;
    (ranks, options, spike_detector, skipped_batches)
}
