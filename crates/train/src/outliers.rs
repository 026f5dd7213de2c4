//! What becomes of a step that is far out: it is reported, or the run stops, or it goes back to its newest checkpoint and passes
//! over the step's batch when it comes to it again.
//!
//! Which steps are passed over is part of a trainer's progress, so checkpoints have it, and whoever goes on from one passes over
//! the same. What is far out is `guard`'s to say.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use shardwise_checkpoint::Store;
use shardwise_zero::ShardedUnit;

use crate::guard::{Guard, OnOutlier, Outlier};
use crate::recipe::Recipe;
use crate::resume::resumed;
use crate::run::begun;
use crate::{Error, Options, Ranks, Result, Trainer};

/// How many steps may be passed over within how many: bad samples are rare, and more is another fault.
const PASSED_OVER_MAX: usize = 3;
const WITHIN: u64 = 100;

/// A step that is not taken again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassedOver {
    /// Which.
    pub step: u64,
    /// What was far out when it was tried.
    pub why: String,
}

impl fmt::Display for PassedOver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "passed over; when it was tried: {}", self.why)
    }
}

impl Trainer {
    /// What is far out in this step, if something is: for the report, or as an error before anything is updated.
    pub(crate) fn judged(&mut self, loss: f64, unit_norms: &[f64]) -> Result<Option<Outlier>> {
        let outlier = self.guard.judged(loss, unit_norms, |unit| self.shards[unit].name().to_string());
        match outlier {
            Some(outlier) if self.options.on_outlier == OnOutlier::Stop => {
                self.shards.iter_mut().for_each(ShardedUnit::discard_gradients);
                Err(Error::Outlier { step: self.steps, outlier: Box::new(outlier) })
            }
            outlier => {
                self.guard.taken(self.steps, loss, unit_norms);
                Ok(outlier)
            }
        }
    }

    /// Counts the next step without taking it, if it is one to pass over: the schedule moves on, and nothing is updated.
    pub fn pass_over(&mut self) -> Option<PassedOver> {
        let next = self.passed_over.iter().find(|passed| passed.step == self.steps + 1)?.clone();
        self.steps += 1;
        Some(next)
    }
}

/// The trainer of the newest checkpoint, or of the beginning where there is none yet, which will pass over a step that was
/// far out. It is an error where too many were lately.
pub(crate) fn gone_back(
    recipe: &Recipe,
    order: &Value,
    store: &Arc<Store>,
    trainer: Trainer,
    fault: (u64, Box<Outlier>),
    say: &mut dyn FnMut(&str),
) -> Result<Trainer> {
    let (step, outlier) = fault;
    let (ranks, options, mut guard, mut passed_over) = remembered(trainer);
    let lately = |passed: &&PassedOver| passed.step.abs_diff(step) < WITHIN;
    let before: Vec<u64> = passed_over.iter().filter(lately).map(|passed| passed.step).collect();
    if before.len() >= PASSED_OVER_MAX {
        return Err(Error::Outliers { step, outlier, before });
    }
    say(&format!("step {step}: {outlier}; nothing was updated, and the run goes back"));
    let found = resumed(recipe, order, store, &ranks, &options, say)?;
    let mut trainer = match found {
        Some(trainer) => trainer,
        None => {
            say("there is no checkpoint yet: it begins anew");
            begun(recipe, recipe.model()?, ranks, options)?
        }
    };
    guard.back_to(trainer.steps);
    passed_over.push(PassedOver { step, why: outlier.to_string() });
    (trainer.guard, trainer.passed_over) = (guard, passed_over);
    Ok(trainer)
}

/// What outlives a trainer that is given up. The rest is freed here, before there is another.
fn remembered(trainer: Trainer) -> (Ranks, Options, Guard, Vec<PassedOver>) {
    let Trainer { ranks, options, guard, passed_over, .. } = trainer;
    (ranks, options, guard, passed_over)
}
