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
    let steps = steps(store, &ranks.world)?;
    let mut damage = Vec::new();
    for &step in &steps {
        let begun = attempt(recipe, order, store, ranks, options, step);
        let refused = begun.as_ref().err().filter(|why| !why.is_damage).map(|why| why.text.clone());
        agreed(&ranks.world, refused.map_or(Ok(()), Err))?.map_err(Error::Checkpoint)?;
        match agreed(&ranks.world, begun.map_err(|why| why.text))? {
            Ok(trainer) => {
                say(&format!(
                    "goes on after step {step}, from {}",
                    store.display(&shardwise_checkpoint::folder_of(step))
                ));
                return Ok(Some(trainer));
            }
            Err(text) => {
                say(&format!("the checkpoint of step {step} is damaged and not used: {text}"));
                damage.push(step);
            }
        }
    }
    match damage.is_empty() {
        true => Ok(None),
        false => Err(Error::Checkpoint(format!(
            "none of the {} checkpoints in {} can be read; to begin anew, give checkpoints.folder another place",
            damage.len(),
            store.display(""),
        ))),
    }
}

/// Why a checkpoint is not gone on from.
struct Why {
    is_damage: bool,
    text: String,
}

fn attempt(
    recipe: &Recipe,
    ours: &Value,
    store: &Arc<Store>,
    ranks: &Ranks,
    options: &Options,
    step: u64,
) -> std::result::Result<Trainer, Why> {
    let refused = |text: String| Why { is_damage: false, text };
    let checkpoint = Checkpoint::open(store, step).map_err(|error| why(&error))?;
    let theirs = &checkpoint.manifest().training["data"];
    // An imported checkpoint has not been trained on anything.
    if !theirs.is_null() && theirs != ours {
        let there = |key: &str| theirs[key].to_string();
        let same = ["seed", "sequences", "positions"].iter().all(|key| theirs[*key] == ours[*key]);
        if same {
            return Err(refused(format!(
                "{} was trained on other data, and here its order would be another: give checkpoints.folder another place to \
                 begin anew, with start.weights for what was learned",
                checkpoint.name()
            )));
        }
        return Err(refused(format!(
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
    let model = recipe.model().map_err(|error| refused(error.to_string()))?;
    Trainer::resumed(model, ranks.clone(), options.clone(), &checkpoint).map_err(|error| match &error {
        Error::Zero(shardwise_zero::Error::Start { error: inner, .. }) => match inner.downcast_ref() {
            Some(inner) => why(inner),
            None => refused(error.to_string()),
        },
        _ => refused(error.to_string()),
    })
}

fn why(error: &shardwise_checkpoint::Error) -> Why {
    Why { is_damage: error.is_damage(), text: error.to_string() }
}

/// The steps that have a manifest, the newest first, as the first rank sees them.
pub(crate) fn steps(store: &Store, world: &Group) -> Result<Vec<u64>> {
    let own = if world.rank() == 0 { store.steps() } else { Ok(Vec::new()) };
    let steps = agreed(world, own.map_err(|error| error.to_string()))?.map_err(Error::Checkpoint)?;
    let count = world.broadcast("number of checkpoints", 0, vec![steps.len() as i64]).wait()?[0];
    let mut steps: Vec<i64> = steps.into_iter().map(|step| step as i64).collect();
    steps.resize(count as usize, 0);
    Ok(world.broadcast("checkpoints", 0, steps).wait()?.into_iter().map(|step| step as u64).collect())
}
