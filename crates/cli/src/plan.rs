//! `shardwise plan`: finds where to cut a model into the stages of a pipeline.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use shardwise_supervisor::{absolute, exit_code, rank_program};

use crate::flags::{Layers, PlanFlags};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// The recipe to plan for
    recipe: PathBuf,
    /// Plan for this many ranks
    #[arg(short = 'n', long, value_parser = clap::value_parser!(u32).range(1..))]
    ranks: u32,
    #[command(flatten)]
    layers: Layers,
    #[command(flatten)]
    flags: PlanFlags,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let Options { recipe, ranks, layers, flags } = options;
    let program = rank_program()?;
    let mut command = Command::new(&program);
    let arguments: Vec<OsString> = [layers.arguments(), flags.arguments()].concat();
    command.arg("plan").arg(absolute(recipe)).arg(format!("--ranks={ranks}")).args(arguments);
    Ok(exit_code(command.status().with_context(|| program.display().to_string())?))
}
