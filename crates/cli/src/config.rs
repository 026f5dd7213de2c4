//! `shardwise config`: prints the resolved recipe, with the source of each value.

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};

use crate::launch::{absolute, add_layers, exit_code, rank_program};
use crate::layers::Layers;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// The recipe
    #[arg(required_unless_present = "schema")]
    recipe: Option<PathBuf>,
    /// Resolve all three batch sizes for this number of ranks
    #[arg(short = 'n', long, value_parser = clap::value_parser!(u32).range(1..))]
    ranks: Option<u32>,
    #[command(flatten)]
    layers: Layers,
    /// Print the JSON schema of recipes, for editors
    #[arg(long, conflicts_with_all = ["recipe", "ranks", "deepspeed", "set"])]
    schema: bool,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let program = rank_program()?;
    let mut command = Command::new(&program);
    match &options.recipe {
        Some(recipe) => {
            command.arg("config").arg(absolute(recipe));
            if let Some(ranks) = options.ranks {
                command.arg("--ranks").arg(ranks.to_string());
            }
            add_layers(&mut command, &options.layers);
        }
        None => drop(command.arg("schema")),
    }
    let status = command.status().with_context(|| program.display().to_string())?;
    Ok(exit_code(status))
}
