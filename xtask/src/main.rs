//! Commands for developers.
//!
//! `cargo xtask show` measures the project's claims; the others are tools for working on it. Comparisons with other frameworks are in
//! `bench/compare`, and the guide's drawings in `docs/drawings`.

#![forbid(unsafe_code)]

mod checkpoints;
mod claim;
mod claims;
mod compiled;
mod context;
mod device;
mod experts;
mod foundation;
mod fuzz;
mod hosts;
mod install;
mod licenses;
mod links;
mod mutants;
mod observability;
mod offload;
mod paired_jobs;
mod peers;
mod pipeline;
mod pipeline_hosts;
mod program;
mod setting;
mod slow_disk;
mod supervision;
mod tensor;
mod text;
mod tidy;
mod workspace;
mod zero;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Commands for developers.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure the project's claims, or list them
    ///
    /// Without a name, lists all claims. GROUP measures the quick claims of a group, or all of them with --heavy; GROUP/NAME
    /// measures one. Each claim ends with a line that shows the figure next to its bar. Exits with 1 unless all claims hold.
    #[command(
        after_help = "Examples:\n  cargo xtask show\n  cargo xtask show foundation\n  cargo xtask show foundation/comm --heavy"
    )]
    Show {
        /// GROUP or GROUP/NAME
        name: Option<String>,
        /// Include claims that take minutes
        #[arg(long)]
        heavy: bool,
    },
    /// Fuzz a reader of untrusted input
    ///
    /// Adds inputs that reach new code to fuzz/corpus, which the tests replay. Installs cargo-fuzz if necessary.
    #[command(after_help = "Example:\n  cargo xtask fuzz manifest --minutes 10")]
    Fuzz(fuzz::Options),
    /// Check the licenses and sources of all dependencies against deny.toml
    Licenses,
    /// Check the rules that the compiler does not: import cycles, crate layers, documented recipe keys and more
    Tidy {
        /// Rules to check; all by default
        rules: Vec<String>,
    },
    /// Write the recipe reference of the guide from the schema
    RecipeReference,
    /// Run a program on several simulated hosts
    ///
    /// The hosts are network namespaces, connected by links with a given bandwidth and delay. Needs root and Debian's iproute2. The
    /// hosts are always removed afterwards.
    #[command(
        after_help = "Example:\n  cargo xtask hosts --hosts 2 --ranks-per-host 1 --rate 1gbit --delay 1ms -- \\\n      target/release/bench-comm shardwise 168000000 3"
    )]
    Hosts(hosts::Options),
}

fn main() -> Result<ExitCode> {
    match Arguments::parse().command {
        Command::Show { name, heavy } => claims::show(name.as_deref(), heavy),
        Command::Fuzz(options) => fuzz::run(&options).map(|()| ExitCode::SUCCESS),
        Command::Licenses => licenses::run(),
        Command::Tidy { rules } => tidy::run(&rules),
        Command::RecipeReference => tidy::write_reference().map(|()| ExitCode::SUCCESS),
        Command::Hosts(options) => hosts::run(&options),
    }
}
