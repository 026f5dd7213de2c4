//! The `shardwise` program.
//!
//! It does not link libtorch or MPI: what needs them is `shardwise-rank`, the program beside it that runs on every rank. So
//! this one starts in a millisecond, stays small while it watches a run, and can still say what is wrong on a machine where
//! libtorch or MPI is missing.

#![forbid(unsafe_code)]

mod checkpoint;
mod doctor;
mod launch;
mod launched;
mod train;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Trains transformer models that do not fit on one device
#[derive(Parser)]
#[command(name = "shardwise", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Check what this machine has, and say how to mend what is wrong
    ///
    /// Looks at libtorch, MPI (library, thread level, launcher), NCCL and CUDA if there are any, cores, memory and shared
    /// memory. Each thing that is wrong comes with the command that mends it. The exit code is 1 if anything is.
    #[command(after_help = "Example:\n  shardwise doctor")]
    Doctor,
    /// Train what a recipe says
    ///
    /// Starts the ranks itself, on this host; or is started on every rank by mpirun or srun. Says beforehand what a rank needs
    /// of memory, and does not start what cannot fit. The exit code is 2 if the recipe is wrong or does not fit.
    #[command(
        after_help = "Examples:\n  shardwise train recipes/small.toml -n 2\n  shardwise train recipes/small.toml -n 4 --dry-run\n  mpirun -n 4 shardwise train recipes/small.toml"
    )]
    Train(train::Options),
    /// Look at checkpoints, check them, compare them, remove them
    ///
    /// FOLDER is where a recipe's checkpoints are: a folder, or s3://bucket/folder, gs://…, az://….
    #[command(subcommand)]
    Checkpoint(checkpoint::Command),
}

fn main() -> Result<ExitCode> {
    match Arguments::parse().command {
        Command::Doctor => doctor::run(),
        Command::Train(options) => train::run(&options),
        Command::Checkpoint(command) => checkpoint::run(&command),
    }
}
