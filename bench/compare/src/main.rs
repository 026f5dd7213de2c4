//! `cargo compare`: compares Shardwise with other frameworks and backends.

#![forbid(unsafe_code)]

use anyhow::Result;
use clap::{Parser, Subcommand};
use shardwise_compare::{comm, growth, peers};

/// Compare Shardwise with other frameworks and backends.
#[derive(Parser)]
#[command(name = "cargo compare", bin_name = "cargo compare")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Compare training with bare libtorch, PyTorch DDP, FSDP2 and DeepSpeed
    ///
    /// Trains the same model with all frameworks. Prints a table for each number of ranks, and saves the tables and a plot to a
    /// dated folder in bench/results. Installs the peers from PyPI into a separate environment. On 2 cores, 5 rounds take about
    /// 20 minutes with 42m, and an hour with 124m.
    ///
    /// With --tensor T, T ranks share each layer: compares tensor and sequence parallelism with PyTorch's, and with FSDP2 on top if
    /// there are more than T ranks.
    ///
    /// With --pipeline P, P ranks hold the stages of a pipeline: compares 1F1B, interleaved 1F1B and ZB-V with the same schedules of
    /// torch.distributed.pipelining.
    #[command(after_help = "Examples:\n  cargo compare peers --size 42m --precision f32 --ranks 2,4\n  \
                            cargo compare peers --size 42m --tensor 2 --ranks 2,4\n  \
                            cargo compare peers --size 42m --pipeline 2")]
    Peers(peers::Options),
    /// Measure weak scaling, compared with FSDP2
    ///
    /// Measures the bytes, CPU time, memory and start-up time per rank as ranks are added. Prints a table, and saves it with a
    /// plot to a dated folder in bench/results.
    #[command(after_help = "Example:\n  cargo compare growth --ranks 1,2,4,8,16 --rounds 3")]
    Growth(growth::Options),
    /// Compare reduce-scatter and all-gather with MPI's and gloo's
    ///
    /// Prints a table, and saves it to a dated folder in bench/results.
    #[command(after_help = "Example:\n  cargo compare comm --ranks 2,4,8 --rounds 5")]
    Comm(comm::Options),
}

fn main() -> Result<()> {
    match Arguments::parse().command {
        Command::Peers(options) => peers::run(&options),
        Command::Growth(options) => growth::run(&options),
        Command::Comm(options) => comm::run(&options).map(drop),
    }
}
