//! `shardwise config`: prints the resolved recipe, with the source of each value.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use shardwise_recipe::{Recipe, schema};
use shardwise_supervisor::absolute;
use shardwise_supervisor::exit_codes::REFUSED;

use crate::flags::Layers;

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
    /// Print only the folder in which a run of this recipe keeps its metrics
    #[arg(long)]
    folder: bool,
    /// Print the JSON schema of recipes, for editors
    #[arg(long, conflicts_with_all = ["recipe", "ranks", "deepspeed", "set", "folder"])]
    schema: bool,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let text = match &options.recipe {
        Some(recipe) => resolve(recipe, options),
        None => Ok(format!("{:#}", schema())),
    };
    Ok(match text {
        Ok(text) => {
            // A closed standard output is not an error.
            drop(writeln!(std::io::stdout(), "{}", text.trim_end()));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(REFUSED)
        }
    })
}

/// The resolved recipe as TOML, or its folder.
fn resolve(recipe: &Path, options: &Options) -> shardwise_recipe::Result<String> {
    let Layers { deepspeed, set } = &options.layers;
    let deepspeed = deepspeed.as_deref().map(absolute);
    let recipe = Recipe::read_layered(&absolute(recipe), deepspeed.as_deref(), set)?;
    if options.folder {
        return Ok(recipe.folder().display().to_string());
    }
    recipe.resolved_toml(options.ranks.map(|ranks| ranks as usize))
}
