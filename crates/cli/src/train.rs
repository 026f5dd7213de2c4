//! `shardwise train`: looks whether the run fits, and starts its ranks.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};

use crate::launch::{absolute, launcher, prepared, rank_program};
use crate::launched::{Launched, launched};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// What to train, and how
    recipe: PathBuf,
    /// The number of ranks to start on this host; under mpirun or srun the launcher says it
    #[arg(short = 'n', long, value_parser = clap::value_parser!(u32).range(1..))]
    ranks: Option<u32>,
    /// Say what it needs of memory, and do not start
    #[arg(long)]
    dry_run: bool,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let program = rank_program()?;
    let recipe = absolute(&options.recipe);
    let asked = options.ranks.map(|ranks| ranks as usize);
    if let Some(Launched { ranks, ranks_here }) = launched() {
        if let (Some(asked), Some(ranks)) = (asked, ranks.filter(|&ranks| Some(ranks) != asked)) {
            bail!("-n {asked} contradicts the launcher, which has started {ranks} ranks; leave -n out");
        }
        if options.dry_run {
            bail!("--dry-run needs no launcher: shardwise train {} -n RANKS --dry-run", options.recipe.display());
        }
        // This process is a rank: from here on it is the program for ranks.
        let mut rank = prepared(Command::new(&program), ranks_here.or(ranks).unwrap_or(1));
        rank.arg("train").arg(&recipe);
        return Err(rank.exec()).with_context(|| program.display().to_string());
    }
    let ranks = asked.unwrap_or(1);
    let checked = Command::new(&program).arg("check").arg(&recipe).arg(ranks.to_string()).status();
    if !checked.with_context(|| program.display().to_string())?.success() {
        return Ok(ExitCode::from(2));
    }
    if options.dry_run {
        return Ok(ExitCode::SUCCESS);
    }
    let (launcher, _) = launcher(ranks).map_err(anyhow::Error::msg).context("scripts/setup installs it")?;
    let mut launcher = prepared(launcher, ranks);
    launcher.arg(&program).arg("train").arg(&recipe);
    let status = launcher.status().with_context(|| launcher.get_program().display().to_string())?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}
