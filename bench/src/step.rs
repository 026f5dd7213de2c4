//! Compares the training step with bare libtorch: `bench-step ROUNDS` under `mpirun -n 2`.
//!
//! The model is a Llama of 42 million parameters, with 4 sequences of 256 tokens per rank. One side is bare libtorch: one graph,
//! one backward pass, fused AdamW, no communication. The others are stages 0 to 3. Each round runs one step of every side, in
//! rotating order, and prints the side and the seconds of the slower rank for each step.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use shardwise_comm::{Group, ReduceOp, mpi};
use shardwise_model::{Batch, LlamaConfig, Model};
use shardwise_plan::Dtype;
use shardwise_torch::tch::{Device, Kind, Tensor};
use shardwise_train::{Options, Ranks, Schedule, Trainer, init};
use shardwise_zero::{AdamW, Optimizer, Sharding};

mod bare;
use bare::Bare;

const ADAMW: AdamW = AdamW { lr: 3e-4, beta1: 0.9, beta2: 0.95, weight_decay: 0.1, eps: 1e-8 };
const SIDES: [&str; 5] = ["bare", "stage-0", "stage-1", "stage-2", "stage-3"];
const TOKENS: [i64; 2] = [4, 256];

fn main() -> Result<()> {
    let rounds: usize =
        std::env::args().nth(1).context("usage: mpirun -n 2 bench-step ROUNDS")?.parse().context("ROUNDS")?;
    shardwise_torch::enable_caching_allocator();
    let world = Arc::new(mpi::world(mpi::Options::default())?);
    let llama = LlamaConfig { tie_word_embeddings: true, ..LlamaConfig::new(32_000, 512, 8, 8, 1408) };
    let mut bare = Bare::new(Model::from_config(llama.clone())?, Dtype::F32, ADAMW, &mut init::from_seed(1))?;
    let mut trainers = (0..4)
        .map(|stage| {
            let optimizer = Optimizer::AdamW(ADAMW);
            let options = Options::new(Sharding::stage(stage)?, optimizer, Schedule::constant(ADAMW.lr));
            let model = Model::from_config(llama.clone())?;
            Ok(Trainer::new(model, Ranks::sharded(world.clone()), options, &mut init::from_seed(1))?)
        })
        .collect::<Result<Vec<Trainer>>>()?;
    // The first two rounds are warm-up and are not printed.
    for round in 0..rounds + 2 {
        let tokens = Tensor::randint(32_000, TOKENS, (Kind::Int64, Device::Cpu));
        let targets = tokens.roll(-1, 1);
        let batch = Batch::new(tokens, targets);
        for turn in 0..SIDES.len() {
            let side = (turn + round) % SIDES.len();
            world.barrier("start").wait()?;
            let started = Instant::now();
            match side {
                0 => drop(bare.step(std::slice::from_ref(&batch))?),
                stage => drop(trainers[stage - 1].step(std::slice::from_ref(&batch))?),
            }
            // Wait for all ranks: stages 1 and 2 are still gathering updated parameters.
            world.barrier("end").wait()?;
            let seconds = slowest(&world, started.elapsed().as_secs_f64())?;
            if world.rank() == 0 && round >= 2 {
                println!("{} {seconds}", SIDES[side]);
            }
        }
    }
    Ok(())
}

fn slowest(world: &Group, seconds: f64) -> Result<f64> {
    Ok(world.all_reduce("time", ReduceOp::Max, vec![seconds]).wait()?[0])
}
