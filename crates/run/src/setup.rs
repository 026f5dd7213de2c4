//! Setting up a run: groups of ranks, the checkpoint store, and the trainer.

use std::sync::Arc;

use shardwise_checkpoint::Store;
use shardwise_checkpoint::hugging_face::Weights;
use shardwise_comm::Group;
use shardwise_model::Model;
use shardwise_recipe::{DeviceRecipe, Recipe};
use shardwise_torch::device::use_deterministic_algorithms;
use shardwise_torch::tch::Device;
use shardwise_train::init::{from_seed, from_weights};
use shardwise_train::{Options, Ranks, Trainer};

use crate::agreement::agree;
use crate::build;
use crate::device::choose_gpu;
use crate::error::{Error, Result};
use crate::host::hash_text;

/// Fails if `about` differs between ranks, because their hosts have different files: some would train on other data than the run reports.
pub(crate) fn check_same_on_all_ranks(world: &Group, about: &str) -> Result<()> {
    let own = hash_text(about);
    let first = world.broadcast("data", 0, vec![own]).wait()?[0];
    let differs =
        "its corpora, checkpoints or compiled package differ from those of rank 0; all hosts need the same files"
            .to_string();
    agree(world, if own == first { Ok(()) } else { Err(differs) })?.map_err(Error::Options)
}

/// Opens the checkpoint store. Fails on all ranks if any rank cannot reach it.
pub(crate) fn open_store(folder: &str, world: &Group) -> Result<Arc<Store>> {
    let store = Store::create(folder).map(Arc::new).map_err(|error| error.to_string());
    agree(world, store)?.map_err(Error::Checkpoint)
}

/// Creates a trainer at step 0, initialized from a seed or from weights as the recipe says.
pub(crate) fn init_trainer(recipe: &Recipe, model: Model, ranks: Ranks, options: Options) -> Result<Trainer> {
    let Some(address) = recipe.weights() else {
        let mut init = from_seed(recipe.init_seed());
        return Ok(Trainer::new(model, ranks, options, &mut init)?);
    };
    let weights = Weights::open(address).map_err(|error| error.to_string());
    let weights = agree(&ranks.world, weights)?.map_err(Error::Checkpoint)?;
    Ok(Trainer::new(model, ranks, options, &mut from_weights(&weights))?)
}

/// Creates the groups of ranks, and the options with this rank's device.
pub(crate) fn place_ranks(recipe: &Recipe, world: Arc<Group>) -> Result<(Ranks, Options)> {
    match recipe.run.device {
        DeviceRecipe::Cpu => {
            let mesh = recipe.mesh(world.size())?;
            Ok((Ranks::on_mesh(world, mesh)?, build::options(recipe, Device::Cpu)?))
        }
        DeviceRecipe::Cuda => {
            let mesh = recipe.mesh(world.size())?;
            let device = choose_gpu(recipe, &world)?;
            let options = build::options(recipe, device)?;
            if recipe.supervision.spot_check_every.is_some() {
                // They compare bits. Flash attention, for 16-bit types, takes a warning as permission to be faster; the kernel for others has
                // no form that gives the same bits, but varies only where there is a mask.
                let warn_only = options.precision.param_dtype.bytes() > 2;
                use_deterministic_algorithms(warn_only)?;
            }
            Ok((Ranks::on_gpu(world, mesh, device)?, options))
        }
    }
}
