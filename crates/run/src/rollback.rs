//! Handles spikes: reports them, stops the run, or rolls back to the newest checkpoint and skips the batch.
//!
//! The skipped batches are part of a trainer's progress and thus of its checkpoints, so a resumed run skips the same ones.
//! `spike_detector` decides what a spike is.

use std::sync::Arc;

use serde_json::Value;
use shardwise_checkpoint::Store;
use shardwise_recipe::Recipe;
use shardwise_train::{SkippedBatch, Trainer};

use crate::build;
use crate::error::{Error, Result};
use crate::resume::resume_newest;
use crate::setup::init_trainer;
use crate::spike::Spike;

/// At most this many batches may be skipped within this many steps. Bad samples are rare, so more spikes than that have another cause.
const SKIPPED_MAX: usize = 3;
const SKIPPED_WINDOW: u64 = 100;

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
    let (ranks, options) = (trainer.ranks().clone(), trainer.options().clone());
    let mut skipped_batches = trainer.skipped_batches().to_vec();
    // Its memory is needed for the next one.
    drop(trainer);
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
            init_trainer(recipe, build::model(recipe)?, ranks, options)?
        }
    };
    skipped_batches.push(SkippedBatch { step, why: spike.to_string() });
    trainer.set_skipped_batches(skipped_batches);
    Ok(trainer)
}
