//! `shardwise profile`: shows where the time of a few steps goes, and what would make them faster.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use shardwise_supervisor::launcher_env::launcher_env;
use shardwise_supervisor::{RankCommand, RankCount};

use crate::flags::{Layers, ProfileFlags};
use crate::train::check;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// The recipe to profile
    recipe: PathBuf,
    /// Start this many ranks on this host; not needed under mpirun or srun
    #[arg(short = 'n', long, value_parser = clap::value_parser!(u32).range(1..))]
    ranks: Option<u32>,
    #[command(flatten)]
    layers: Layers,
    #[command(flatten)]
    profiling: ProfileFlags,
    /// Print tables of this width instead of the terminal's
    #[arg(long)]
    width: Option<usize>,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let Options { recipe, ranks, layers, profiling, width } = options;
    if launcher_env().is_none() {
        let ranks = ranks.unwrap_or(1) as usize;
        if let Err(code) = check(recipe, RankCount { min: ranks, max: ranks }, layers, &[])? {
            return Ok(code);
        }
    }
    let mut arguments = [layers.arguments(), profiling.arguments()].concat();
    let columns = width.or_else(|| std::env::var("COLUMNS").ok()?.parse().ok()).or_else(terminal_width);
    arguments.extend(columns.map(|columns| OsString::from(format!("--width={columns}"))));
    Ok(RankCommand { subcommand: "profile", recipe, ranks: *ranks, arguments }.run()?)
}

/// The width of the terminal, if standard output is one.
fn terminal_width() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok()?;
    Some(usize::from(size.ws_col)).filter(|columns| *columns > 0)
}
