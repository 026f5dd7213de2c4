//! `shardwise train`: looks whether the run fits, and starts its ranks.

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};

use crate::launch::{Work, absolute, laid, rank_program};
use crate::launched::launched;
use crate::layers::Layers;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// What to train, and how
    recipe: PathBuf,
    /// The number of ranks to start on this host; under mpirun or srun the launcher says it
    #[arg(short = 'n', long, value_parser = clap::value_parser!(u32).range(1..))]
    ranks: Option<u32>,
    #[command(flatten)]
    layers: Layers,
    /// Say what it needs of memory, and do not start
    #[arg(long)]
    dry_run: bool,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let work = Work {
        verb: "train",
        recipe: &options.recipe,
        ranks: options.ranks,
        layers: &options.layers,
        rest: Vec::new(),
    };
    if launched().is_some() {
        if options.dry_run {
            bail!("--dry-run needs no launcher: shardwise train {} -n RANKS --dry-run", options.recipe.display());
        }
        return work.start();
    }
    let program = rank_program()?;
    let mut check = Command::new(&program);
    check.arg("check").arg(absolute(&options.recipe)).arg("--ranks").arg(options.ranks.unwrap_or(1).to_string());
    laid(&mut check, &options.layers);
    if !check.status().with_context(|| program.display().to_string())?.success() {
        return Ok(ExitCode::from(2));
    }
    if options.dry_run { Ok(ExitCode::SUCCESS) } else { work.start() }
}
