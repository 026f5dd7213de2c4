//! The `shardwise` program.
//!
//! It does not link libtorch or MPI: what needs them is `shardwise-rank`, the program beside it that runs on every rank. So
//! this one starts in a millisecond, stays small while it watches a run, and can still say what is wrong on a machine where
//! libtorch or MPI is missing.

#![forbid(unsafe_code)]

mod doctor;

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
}

fn main() -> Result<ExitCode> {
    match Arguments::parse().command {
        Command::Doctor => doctor::run(),
    }
}
