//! One side of the benchmark of collectives: `bench-comm SIDE BYTES REPEATS` under `mpirun`.
//!
//! SIDE is `shardwise` (this project's groups) or `mpi` (MPI_Reduce_scatter_block and MPI_Allgather, called directly). It runs a
//! reduce-scatter and an all-gather of BYTES bytes of f32, and prints one line for each call: the operation, and the seconds of
//! the slowest rank. `bench/peers/comm_gloo.py` prints the same for gloo; `cargo compare comm` runs them all.

use std::time::Instant;

use anyhow::{Context, Result, bail};
use shardwise_comm::{Group, ReduceOp};
use shardwise_torch::Block;
use shardwise_torch::tch::Device;

/// The operations, as all sides name them.
const VERBS: [&str; 2] = ["reduce-scatter", "all-gather"];

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [side, bytes, repeats] = &arguments[..] else {
        bail!("usage: mpirun -n RANKS bench-comm shardwise|mpi BYTES REPEATS");
    };
    let bytes: usize = bytes.parse().context("BYTES must be a number")?;
    let repeats: usize = repeats.parse().context("REPEATS must be a number")?;
    match side.as_str() {
        "shardwise" => shardwise(bytes, repeats),
        "mpi" => bare_mpi(bytes, repeats),
        _ => bail!("unknown side '{side}': use shardwise or mpi"),
    }
}

fn shardwise(bytes: usize, repeats: usize) -> Result<()> {
    let world = shardwise_comm::mpi::world(shardwise_comm::mpi::Options::default())?;
    let part_len = bytes / 4 / world.size();
    let mut whole = Block::from_slice(&vec![world.rank() as f32 + 1.; part_len * world.size()])?;
    let mut part = Block::new(whole.dtype(), part_len, Device::Cpu)?;
    let expected = (world.size() * (world.size() + 1) / 2) as f32;
    // The first round warms up and is not printed.
    for repeat in 0..=repeats {
        for verb in VERBS {
            world.barrier("start").wait()?;
            let started = Instant::now();
            if verb == "reduce-scatter" {
                (whole, part) = world.reduce_scatter(verb, ReduceOp::Sum, whole, part).wait()?;
            } else {
                (part, whole) = world.all_gather(verb, part, whole).wait()?;
            }
            let seconds = slowest(&world, started.elapsed().as_secs_f32())?;
            if world.rank() == 0 && repeat > 0 {
                println!("{verb} {seconds}");
            }
        }
        let gathered = whole.as_mut_slice::<f32>()?;
        anyhow::ensure!(gathered.iter().all(|&x| x == expected), "the sums are wrong");
        gathered.fill(world.rank() as f32 + 1.);
    }
    Ok(())
}

fn slowest(world: &Group, seconds: f32) -> Result<f32> {
    Ok(world.all_reduce("time", ReduceOp::Max, vec![seconds]).wait()?[0])
}

fn bare_mpi(bytes: usize, repeats: usize) -> Result<()> {
    use mpi::collective::SystemOperation;
    use mpi::traits::*;

    let universe = mpi::initialize().context("MPI could not be initialized")?;
    let world = universe.world();
    let (rank, size) = (world.rank() as usize, world.size() as usize);
    let part_len = bytes / 4 / size;
    let mut whole = vec![rank as f32 + 1.; part_len * size];
    let mut part = vec![0f32; part_len];
    for repeat in 0..=repeats {
        for verb in VERBS {
            world.barrier();
            let started = Instant::now();
            if verb == "reduce-scatter" {
                world.reduce_scatter_block_into(&whole[..], &mut part[..], SystemOperation::sum());
            } else {
                world.all_gather_into(&part[..], &mut whole[..]);
            }
            let seconds = started.elapsed().as_secs_f64();
            let mut slowest = 0f64;
            world.all_reduce_into(&seconds, &mut slowest, SystemOperation::max());
            if rank == 0 && repeat > 0 {
                println!("{verb} {slowest}");
            }
        }
        whole.fill(rank as f32 + 1.);
    }
    Ok(())
}
