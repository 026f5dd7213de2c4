//! Going on: from the newest checkpoint that all ranks can read.

use std::sync::Arc;

use serde_json::Value;
use shardwise_checkpoint::{Checkpoint, Store};
use shardwise_comm::Group;

use crate::agreement::agreed;
use crate::recipe::Recipe;
use crate::{Error, Options, Ranks, Result, Trainer};

/// A trainer from the newest checkpoint, if there is any. One that is damaged is named, and the one before it is used; one of
/// another model or another order of data (`order` is this run's) is refused, because to begin anew would be a surprise.
pub(crate) fn resumed(
    recipe: &Recipe,
    order: &Value,
    store: &Arc<Store>,
    ranks: &Ranks,
    options: &Options,
    say: &mut dyn FnMut(&str),
) -> Result<Option<Trainer>> {
    let found = open_newest(store, &ranks.world, say, &mut |checkpoint| {
        check_order(checkpoint, order)?;
        let model = recipe.model().map_err(Why::of)?;
        Trainer::resumed(model, ranks.clone(), options.clone(), checkpoint).map_err(Why::of)
    })?;
    let Some((checkpoint, trainer)) = found else { return Ok(None) };
    say(&format!("goes on after step {}, from {}", checkpoint.manifest().step, checkpoint.name()));
    Ok(Some(trainer))
}

/// The newest checkpoint that all ranks can read, if there is any checkpoint, with what `read` makes of it. One that is
/// damaged is named, and the one before it is used.
pub(crate) fn open_newest<T>(
    store: &Arc<Store>,
    world: &Group,
    say: &mut dyn FnMut(&str),
    read: &mut dyn FnMut(&Checkpoint) -> std::result::Result<T, Why>,
) -> Result<Option<(Checkpoint, T)>> {
    let steps = steps(store, world)?;
    for &step in &steps {
        let opened = Checkpoint::open(store, step).map_err(|error| Why::of_checkpoint(&error));
        let found = opened.and_then(|checkpoint| read(&checkpoint).map(|found| (checkpoint, found)));
        let refused = found.as_ref().err().filter(|why| !why.is_damage).map(|why| why.text.clone());
        agreed(world, refused.map_or(Ok(()), Err))?.map_err(Error::Checkpoint)?;
        match agreed(world, found.map_err(|why| why.text))? {
            Ok(found) => return Ok(Some(found)),
            Err(text) => say(&format!("the checkpoint of step {step} is damaged and not used: {text}")),
        }
    }
    match steps.is_empty() {
        true => Ok(None),
        false => Err(Error::Checkpoint(format!(
            "none of the {} checkpoints in {} can be read; to begin anew, give checkpoints.folder another place",
            steps.len(),
            store.display(""),
        ))),
    }
}

/// Why a checkpoint is not used.
pub(crate) struct Why {
    is_damage: bool,
    text: String,
}

impl Why {
    /// Of a trainer that cannot be made from a checkpoint.
    pub(crate) fn of(error: Error) -> Self {
        let inner = match &error {
            Error::Zero(shardwise_zero::Error::Start { error, .. }) => {
                error.downcast_ref::<shardwise_checkpoint::Error>()
            }
            _ => None,
        };
        inner.map_or_else(|| Why::refused(error.to_string()), Why::of_checkpoint)
    }

    fn of_checkpoint(error: &shardwise_checkpoint::Error) -> Self {
        Why { is_damage: error.is_damage(), text: error.to_string() }
    }

    /// There is nothing wrong with the checkpoint itself.
    fn refused(text: String) -> Self {
        Why { is_damage: false, text }
    }
}

/// Refuses a checkpoint that was trained on data in another order than `ours`.
fn check_order(checkpoint: &Checkpoint, ours: &Value) -> std::result::Result<(), Why> {
    let theirs = &checkpoint.manifest().training["data"];
    // An imported checkpoint has not been trained on anything.
    if !theirs.is_null() && theirs != ours {
        let there = |key: &str| theirs[key].to_string();
        let same = ["seed", "sequences", "positions"].iter().all(|key| theirs[*key] == ours[*key]);
        if same {
            return Err(Why::refused(format!(
                "{} was trained on other data, and here its order would be another: give checkpoints.folder another place to \
                 begin anew, with start.weights for what was learned",
                checkpoint.name()
            )));
        }
        return Err(Why::refused(format!(
            "{} was trained with data.seed {}, {} sequences a step and {} positions; here they are {}, {} (batch.sequences × \
             batch.micro_batches × ranks) and {}: make them the same, or give checkpoints.folder another place to begin anew",
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

/// The steps that have a manifest, the newest first, as the first rank sees them.
fn steps(store: &Store, world: &Group) -> Result<Vec<u64>> {
    let own = if world.rank() == 0 { store.steps() } else { Ok(Vec::new()) };
    let steps = agreed(world, own.map_err(|error| error.to_string()))?.map_err(Error::Checkpoint)?;
    let count = world.broadcast("number of checkpoints", 0, vec![steps.len() as i64]).wait()?[0];
    let mut steps: Vec<i64> = steps.into_iter().map(|step| step as i64).collect();
    steps.resize(count as usize, 0);
    Ok(world.broadcast("checkpoints", 0, steps).wait()?.into_iter().map(|step| step as u64).collect())
}
