//! `shardwise profile`: a few steps of a recipe, where their time goes, and what would make them faster.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;

use crate::launch::{Work, absolute};
use crate::launched::launched;
use crate::layers::Layers;
use crate::rank_count::RankCount;
use crate::train::check;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// What to profile
    recipe: PathBuf,
    /// The number of ranks to start on this host; under mpirun or srun the launcher says it
    #[arg(short = 'n', long, value_parser = clap::value_parser!(u32).range(1..))]
    ranks: Option<u32>,
    #[command(flatten)]
    layers: Layers,
    #[command(flatten)]
    profiling: crate::profiling::Profiling,
    /// The width of the table; the terminal's unless said otherwise
    #[arg(long)]
    width: Option<usize>,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let Options { recipe, ranks, layers, profiling, width } = options;
    if launched().is_none() {
        let ranks = ranks.unwrap_or(1) as usize;
        if let Err(code) = check(recipe, RankCount { least: ranks, most: ranks }, layers, &[])? {
            return Ok(code);
        }
    }
    let mut rest = profiling.arguments(absolute);
    let columns = width.or_else(|| std::env::var("COLUMNS").ok()?.parse().ok()).or_else(terminal_width);
    rest.extend(columns.map(|columns| format!("--width={columns}")));
    Work { verb: "profile", recipe, ranks: *ranks, layers, rest }.start()
}

/// Of the terminal that it is printed on, if it is one.
fn terminal_width() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok()?;
    Some(usize::from(size.ws_col)).filter(|columns| *columns > 0)
}
