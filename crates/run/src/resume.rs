//! Resuming from the newest checkpoint that all ranks can read.

use std::sync::Arc;

use serde_json::Value;
use shardwise_checkpoint::{Checkpoint, Store};
use shardwise_comm::Group;

use shardwise_recipe::Recipe;
use shardwise_train::{Options, Ranks, Trainer};

use crate::agreement::agree;
use crate::build;
use crate::error::{Error, Result};

/// Resumes from the newest checkpoint, if there is one. Logs a damaged checkpoint and tries the one before it. Fails if the
/// checkpoint has a different model, or a data order other than `order`: silently starting over would be a surprise.
pub(crate) fn resume_newest(
    recipe: &Recipe,
    order: &Value,
    store: &Arc<Store>,
    ranks: &Ranks,
    options: &Options,
    log: &mut dyn FnMut(&str),
) -> Result<Option<Trainer>> {
    let found = open_newest(store, &ranks.world, log, &mut |checkpoint| {
        check_order(checkpoint, order)?;
        let model = build::model(recipe).map_err(Rejection::from_error)?;
        let resumed = Trainer::resume(model, ranks.clone(), options.clone(), checkpoint);
        resumed.map_err(|error| Rejection::from_error(error.into()))
    })?;
    let Some((checkpoint, trainer)) = found else { return Ok(None) };
    // Parameters with other names or shapes are refused above. The same parameters in other code may compute other numbers.
    let theirs = checkpoint.manifest().training["package"].as_str();
    if let (Some(theirs), Some(ours)) = (theirs, recipe.package_hash())
        && theirs != ours
    {
        let (theirs, ours) = (short(theirs), short(ours));
        log(&format!(
            "the package was compiled again since this run's checkpoint: its hash was {theirs}, and is {ours} now"
        ));
    }
    log(&format!("resuming after step {}, from {}", checkpoint.manifest().step, checkpoint.name()));
    Ok(Some(trainer))
}

/// The start of a hash, enough to tell two apart.
fn short(hash: &str) -> &str {
    hash.get(..12).unwrap_or(hash)
}

/// Opens the newest checkpoint that all ranks can read, if there is any checkpoint, and returns it with the result of `read`.
/// Logs a damaged checkpoint and tries the one before it.
pub(crate) fn open_newest<T>(
    store: &Arc<Store>,
    world: &Group,
    log: &mut dyn FnMut(&str),
    read: &mut dyn FnMut(&Checkpoint) -> std::result::Result<T, Rejection>,
) -> Result<Option<(Checkpoint, T)>> {
    let steps = steps(store, world)?;
    for &step in &steps {
        let opened = Checkpoint::open(store, step).map_err(|error| Rejection::from_checkpoint_error(&error));
        let found = opened.and_then(|checkpoint| read(&checkpoint).map(|found| (checkpoint, found)));
        let refused =
            found.as_ref().err().filter(|rejection| !rejection.is_damage).map(|rejection| rejection.text.clone());
        agree(world, refused.map_or(Ok(()), Err))?.map_err(Error::Checkpoint)?;
        match agree(world, found.map_err(|rejection| rejection.text))? {
            Ok(found) => return Ok(Some(found)),
            Err(text) => log(&format!("the checkpoint of step {step} is damaged and not used: {text}")),
        }
    }
    match steps.is_empty() {
        true => Ok(None),
        false => Err(Error::Checkpoint(format!(
            "none of the {} checkpoints in {} can be read; to start over, set another checkpoints.folder",
            steps.len(),
            store.display(""),
        ))),
    }
}

/// The reason not to use a checkpoint.
pub(crate) struct Rejection {
    is_damage: bool,
    text: String,
}

impl Rejection {
    /// Why a trainer could not be created from a checkpoint.
    pub(crate) fn from_error(error: Error) -> Self {
        let inner = match &error {
            Error::Train(shardwise_train::Error::Zero(shardwise_zero::Error::Init { error, .. })) => {
                error.downcast_ref::<shardwise_checkpoint::Error>()
            }
            _ => None,
        };
        inner.map_or_else(|| Rejection::mismatch(error.to_string()), Rejection::from_checkpoint_error)
    }

    fn from_checkpoint_error(error: &shardwise_checkpoint::Error) -> Self {
        Rejection { is_damage: error.is_damage(), text: error.to_string() }
    }

    /// The checkpoint is intact, but does not match this run.
    fn mismatch(text: String) -> Self {
        Rejection { is_damage: false, text }
    }
}

/// Fails if the checkpoint was trained on data in a different order than `ours`.
fn check_order(checkpoint: &Checkpoint, ours: &Value) -> std::result::Result<(), Rejection> {
    let theirs = &checkpoint.manifest().training["data"];
    // An imported checkpoint has no data order.
    if !theirs.is_null() && theirs != ours {
        let there = |key: &str| theirs[key].to_string();
        let same = ["seed", "sequences", "positions"].iter().all(|key| theirs[*key] == ours[*key]);
        if same {
            return Err(Rejection::mismatch(format!(
                "{} was trained on different data, so the run cannot be resumed; to start a new run from its weights, set \
                 init.weights and another checkpoints.folder",
                checkpoint.name()
            )));
        }
        return Err(Rejection::mismatch(format!(
            "{} was trained with data.seed {}, {} sequences per step and batch.seq_len {}; this recipe has {}, {} \
             (batch.micro_batch_size × batch.gradient_accumulation_steps × ranks) and {}: use the same values, or set another \
             checkpoints.folder to start over",
            checkpoint.name(),
            there("seed"),
            there("sequences"),
            there("positions"),
            ours["seed"],
            ours["sequences"],
            ours["positions"],
        )));
    }
    Ok(())
}

/// The steps that have a manifest, newest first, as seen by rank 0.
fn steps(store: &Store, world: &Group) -> Result<Vec<u64>> {
    let own = if world.rank() == 0 { store.steps() } else { Ok(Vec::new()) };
    let steps = agree(world, own.map_err(|error| error.to_string()))?.map_err(Error::Checkpoint)?;
    let count = world.broadcast("number of checkpoints", 0, vec![steps.len() as i64]).wait()?[0];
    let mut steps: Vec<i64> = steps.into_iter().map(|step| step as i64).collect();
    steps.resize(count as usize, 0);
    Ok(world.broadcast("checkpoints", 0, steps).wait()?.into_iter().map(|step| step as u64).collect())
}
