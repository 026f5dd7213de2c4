//! `shardwise plan`: finds where to cut a model into the stages of a pipeline.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use shardwise_supervisor::{absolute, exit_code, rank_command};

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
    let mut command = rank_command()?;
    let arguments: Vec<OsString> = [layers.arguments(), flags.arguments()].concat();
    command.arg("plan").arg(absolute(recipe)).arg(format!("--ranks={ranks}")).args(arguments);
    let status = command.status();
    Ok(exit_code(status.with_context(|| command.get_program().display().to_string())?))
}
