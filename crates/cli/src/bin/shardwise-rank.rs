//! The program that runs on every rank. `shardwise` starts it; people do not.

use anyhow::{Result, bail};
use serde_json::json;
use shardwise_comm::{Reduce, mpi};
use shardwise_torch::tch::{Cuda, Kind, Tensor};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["probe", "libtorch"] => probe_libtorch(),
        ["probe", "mpi"] => probe_mpi(),
        ["probe", "nccl"] => probe_nccl(),
        _ => bail!("shardwise-rank is started by shardwise; see `shardwise --help`"),
    }
}

/// What `shardwise doctor` wants to know of libtorch, as a line of JSON.
fn probe_libtorch() -> Result<()> {
    let sum = Tensor::f_from_slice(&[1f32, 2., 3.])?.f_sum(Kind::Float)?.f_double_value(&[])?;
    anyhow::ensure!(sum == 6., "libtorch adds 1, 2 and 3 to {sum}");
    println!("{}", json!({ "version": shardwise_torch::libtorch_version(), "cuda_devices": Cuda::device_count() }));
    Ok(())
}

/// The same of MPI, on every rank.
fn probe_mpi() -> Result<()> {
    let world = mpi::world(mpi::Options { time_limit: std::time::Duration::from_secs(20) })?;
    let ranks = world.all_reduce("doctor", Reduce::Sum, vec![1i64]).wait()?[0];
    if world.rank() == 0 {
        // Without that thread level there would be no world.
        let version = mpi::library_version();
        println!("{}", json!({ "version": version.lines().next(), "ranks": ranks, "threads": "funneled or better" }));
    }
    Ok(())
}

#[cfg(feature = "nccl")]
fn probe_nccl() -> Result<()> {
    println!("{}", json!({ "version": shardwise_comm::nccl::library_version()? }));
    Ok(())
}

#[cfg(not(feature = "nccl"))]
fn probe_nccl() -> Result<()> {
    println!("{}", json!({ "version": null }));
    Ok(())
}
