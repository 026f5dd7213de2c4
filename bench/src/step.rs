//! The step beside the same model in bare libtorch: `bench-step ROUNDS` under `mpirun -n 2`.
//!
//! The model is a Llama of 42 million parameters, each rank has 4 sequences of 256 tokens. One side is bare libtorch: one
//! graph, one backward pass, fused AdamW, no word between the ranks. The others are stages 0 to 3. Each round runs one step of
//! every side, in turned order; what is printed for each step is the side and the seconds of the slower rank.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use shardwise_comm::{Group, Reduce, mpi};
use shardwise_model::{Batch, Llama};
use shardwise_plan::Dtype;
use shardwise_torch::tch::{Device, Kind, Tensor};
use shardwise_train::{Options, Ranks, Schedule, Trainer, start};
use shardwise_zero::{AdamW, Optimizer, Sharding};

mod bare;
use bare::Bare;

const ADAMW: AdamW = AdamW { rate: 3e-4, beta1: 0.9, beta2: 0.95, weight_decay: 0.1, epsilon: 1e-8 };
const SIDES: [&str; 5] = ["bare", "stage-0", "stage-1", "stage-2", "stage-3"];
const TOKENS: [i64; 2] = [4, 256];

fn main() -> Result<()> {
    let rounds: usize =
        std::env::args().nth(1).context("usage: mpirun -n 2 bench-step ROUNDS")?.parse().context("ROUNDS")?;
    shardwise_torch::keep_freed_memory();
    let world = Arc::new(mpi::world(mpi::Options::default())?);
    let llama = Llama { tied: true, ..Llama::new(32_000, 512, 8, 8, 1408) };
    let mut bare = Bare::new(llama.model()?, Dtype::F32, ADAMW, &mut start::from_seed(1))?;
    let mut trainers = (0..4)
        .map(|stage| {
            let optimizer = Optimizer::AdamW(ADAMW);
            let options = Options::new(Sharding::stage(stage)?, optimizer, Schedule::constant(ADAMW.rate));
            Ok(Trainer::new(llama.model()?, Ranks::sharded(world.clone()), options, &mut start::from_seed(1))?)
        })
        .collect::<Result<Vec<Trainer>>>()?;
    // The first rounds warm up and are not printed.
    for round in 0..rounds + 2 {
        let tokens = Tensor::randint(32_000, TOKENS, (Kind::Int64, Device::Cpu));
        let targets = tokens.roll(-1, 1);
        let batch = Batch::new(tokens, targets);
        for turn in 0..SIDES.len() {
            let side = (turn + round) % SIDES.len();
            world.barrier("start").wait()?;
            let started = Instant::now();
            match side {
                0 => drop(bare.step(&batch)?),
                stage => drop(trainers[stage - 1].step(std::slice::from_ref(&batch))?),
            }
            // Stages 1 and 2 still gather what they have updated.
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
    Ok(world.all_reduce("time", Reduce::Max, vec![seconds]).wait()?[0])
}
