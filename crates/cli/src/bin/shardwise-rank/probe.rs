//! Checks of the libraries that ranks need, for `shardwise doctor`.

use std::process::ExitCode;

use anyhow::Result;
use serde_json::json;
use shardwise_comm::{ReduceOp, mpi};
use shardwise_run::check_collectives;
use shardwise_torch::device::accelerators;
use shardwise_torch::tch::{Kind, Tensor};

#[derive(Clone, Copy, clap::ValueEnum)]
pub(crate) enum Library {
    Libtorch,
    Mpi,
    Nccl,
    /// Every operation between the GPUs of all ranks
    Collectives,
}

/// Checks a library, and prints what `shardwise doctor` needs to know about it as a line of JSON.
pub(crate) fn run(library: Library) -> Result<ExitCode> {
    match library {
        Library::Libtorch => probe_libtorch()?,
        Library::Mpi => probe_mpi()?,
        Library::Nccl => probe_nccl()?,
        Library::Collectives => return probe_collectives(),
    }
    Ok(ExitCode::SUCCESS)
}

fn probe_libtorch() -> Result<()> {
    let sum = Tensor::f_from_slice(&[1f32, 2., 3.])?.f_sum(Kind::Float)?.f_double_value(&[])?;
    anyhow::ensure!(sum == 6., "libtorch computes 1 + 2 + 3 = {sum}");
    let cuda_devices = accelerators().map_or(0, |devices| devices.len());
    println!("{}", json!({ "version": shardwise_torch::libtorch_version(), "cuda_devices": cuda_devices }));
    Ok(())
}

/// Checks MPI with an all-reduce, and prints its version.
fn probe_mpi() -> Result<()> {
    let world = mpi::world(mpi::Options { timeout: std::time::Duration::from_secs(20), ..mpi::Options::default() })?;
    let ranks = world.all_reduce("doctor", ReduceOp::Sum, vec![1i64]).wait()?[0];
    if world.rank() == 0 {
        // `mpi::world` fails at a lower thread level.
        let version = mpi::library_version();
        println!("{}", json!({ "version": version.lines().next(), "ranks": ranks, "threads": "funneled or better" }));
    }
    Ok(())
}

/// Checks every operation between GPUs. The first rank prints those that are right, and every rank what is wrong with it.
fn probe_collectives() -> Result<ExitCode> {
    let world = mpi::world(mpi::Options { timeout: std::time::Duration::from_secs(60), ..mpi::Options::default() })?;
    let mut wrong = 0;
    for (name, result) in check_collectives(&world)? {
        match result {
            Ok(()) if world.rank() == 0 => println!("ok    {name}"),
            Ok(()) => {}
            Err(problem) => {
                println!("WRONG {name} on rank {}: {problem}", world.rank());
                wrong += 1;
            }
        }
    }
    let wrong = world.all_reduce("probe", ReduceOp::Sum, vec![wrong]).wait()?[0];
    Ok(if wrong == 0i64 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn probe_nccl() -> Result<()> {
    println!("{}", json!({ "version": shardwise_comm::nccl::library_version()? }));
    Ok(())
}
