//! The developers' own commands.
//!
//! `cargo xtask show` re-measures what the project claims; the others are tools for working on it.

#![forbid(unsafe_code)]

mod abreast;
mod bench_comm;
mod checkpoints;
mod claims;
mod draw;
mod foundation;
mod fuzz;
mod growth;
mod hosts;
mod licenses;
mod mutants;
mod peers;
mod sides;
mod sight;
mod steps;
mod supervision;
mod text;
mod workspace;
mod zero;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// The developers' own commands.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure the project's claims again, or list them
    ///
    /// Without a name, lists every claim. A group's name runs its quick claims, with --heavy all of them; GROUP/NAME runs
    /// one. Each ends with a line that has the figure beside its bar; the exit code says whether all hold.
    #[command(
        after_help = "Examples:\n  cargo xtask show\n  cargo xtask show foundation\n  cargo xtask show foundation/comm --heavy"
    )]
    Show {
        /// GROUP or GROUP/NAME
        name: Option<String>,
        /// Also those that take minutes
        #[arg(long)]
        heavy: bool,
    },
    /// Compare reduce-scatter and all-gather with MPI's own and with gloo's, side by side
    ///
    /// Prints a table, and keeps it as a dated folder in bench/results.
    #[command(after_help = "Example:\n  cargo xtask bench-comm --ranks 2,4,8 --rounds 5")]
    BenchComm(bench_comm::Options),
    /// Train the same model with Shardwise, bare libtorch, PyTorch DDP and FSDP2, and DeepSpeed, side by side
    ///
    /// Prints a table for each number of ranks, and keeps them with a plot as a dated folder in bench/results. The peers are
    /// installed from PyPI into an environment of their own. 5 rounds take about 20 minutes with 42m on 2 cores, and an
    /// hour with 124m.
    #[command(after_help = "Example:\n  cargo xtask peers --size 42m --precision f32 --ranks 2,4")]
    Peers(peers::Options),
    /// Show what a rank pays as ranks are added, each with the same work, beside FSDP2
    ///
    /// Prints a table of bytes, processor time, memory and start-up, and keeps it with a plot as a dated folder in
    /// bench/results.
    #[command(after_help = "Example:\n  cargo xtask growth --ranks 1,2,4,8,16 --rounds 3")]
    Growth(growth::Options),
    /// Feed a reader of untrusted input with what may break it
    ///
    /// What reaches new code is kept in fuzz/corpus, and tried again by the tests. Installs cargo-fuzz if it is not there.
    #[command(after_help = "Example:\n  cargo xtask fuzz manifest --minutes 10")]
    Fuzz(fuzz::Options),
    /// Check the licenses and origins of all dependencies against deny.toml
    Licenses,
    /// Draw the guide's pictures of a step at each stage
    #[command(after_help = "Example:\n  cargo xtask draw-steps && mdbook build docs")]
    DrawSteps,
    /// Run a program on several hosts: network namespaces with links of a given rate and delay
    ///
    /// Needs root and Debian's iproute2. Whatever happens to it, the hosts are taken down.
    #[command(
        after_help = "Example:\n  cargo xtask hosts --hosts 2 --ranks-per-host 1 --rate 1gbit --delay 1ms -- \\\n      target/release/bench-comm shardwise 168000000 3"
    )]
    Hosts(hosts::Options),
}

fn main() -> Result<ExitCode> {
    match Arguments::parse().command {
        Command::Show { name, heavy } => claims::show(name.as_deref(), heavy),
        Command::BenchComm(options) => bench_comm::run(&options).map(|_| ExitCode::SUCCESS),
        Command::Peers(options) => peers::run(&options).map(|()| ExitCode::SUCCESS),
        Command::Fuzz(options) => fuzz::run(&options).map(|()| ExitCode::SUCCESS),
        Command::Growth(options) => growth::run(&options).map(|()| ExitCode::SUCCESS),
        Command::Licenses => licenses::run(),
        Command::DrawSteps => steps::run().map(|()| ExitCode::SUCCESS),
        Command::Hosts(options) => hosts::run(&options),
    }
}
