//! The `shardwise` program.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use shardwise_cli::Arguments;

fn main() -> ExitCode {
    shardwise_cli::run(Arguments::parse())
}
