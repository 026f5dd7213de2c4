//! Measures the memory that a rank needs to load a Hugging Face checkpoint at stage 3: `bench-load FOLDER` under `mpirun`.
//!
//! Rank 0 prints a line of JSON with the largest figures of all ranks.

use std::sync::Arc;

use anyhow::{Context, Result};
use serde_json::json;
use shardwise_checkpoint::hugging_face::Weights;
use shardwise_comm::{ReduceOp, mpi};
use shardwise_model::{Model, ModelConfig};
use shardwise_train::{Options, Ranks, Schedule, Trainer, init};
use shardwise_zero::{AdamW, Optimizer, Sharding};

mod process;
use process::kernel_bytes;

const STATUS: &str = "/proc/self/status";

fn main() -> Result<()> {
    let folder = std::env::args().nth(1).context("usage: bench-load FOLDER")?;
    let world = Arc::new(mpi::world(mpi::Options::default())?);
    let adamw = AdamW { lr: 0., beta1: 0.9, beta2: 0.95, weight_decay: 0.1, eps: 1e-8 };
    let options = Options::new(Sharding::stage(3)?, Optimizer::AdamW(adamw), Schedule::constant(1e-4));
    let weights = Weights::open(&folder)?;
    let config = weights.config()?.context("the checkpoint has no config.json")?;
    let model = Model::from_config(ModelConfig::from_hugging_face(&config)?)?;
    let (elements, largest) = (model.elements(), model.units().iter().map(|unit| unit.elements()).max().unwrap_or(0));
    world.barrier("before").wait()?;
    let before = kernel_bytes(STATUS, "VmRSS:")?;
    let trainer = Trainer::new(model, Ranks::sharded(world.clone()), options, &mut init::from_weights(&weights))?;
    let rise = kernel_bytes(STATUS, "VmHWM:")? - before;
    let held = trainer.bytes().0;
    let own = [rise as i64, held.parameters as i64, held.optimizer as i64];
    let most = world.all_reduce("memory", ReduceOp::Max, own.to_vec()).wait()?;
    if world.rank() == 0 {
        println!(
            "{}",
            json!({
                "elements": elements, "largest_unit_bytes": 4 * largest, "rise_bytes": most[0],
                "parameter_bytes": most[1], "optimizer_bytes": most[2], "before_bytes": before,
            })
        );
    }
    Ok(())
}
