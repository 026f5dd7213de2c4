//! `shardwise report`: what runs wrote down of themselves, as one page to read, print and keep.
//!
//! It reads a run's folder and nothing else, so it works on any machine, while the run goes on or years later. It measures
//! nothing; charts are drawn here and not by a library, because labels at curves' ends, hatchings and a page that bears any
//! width are most of the work.

mod bars;
mod chart;
mod facts;
mod figures;
mod history;
mod page;
mod scale;
mod text;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use shardwise_journal::words::{amount, counted};

use history::History;

/// As many runs as a chart can tell apart.
const RUNS_MAX: usize = 12;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// The folders that runs wrote to (run.folder in the recipe); two or more are laid side by side
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// The file to write; report.html in the first run's folder unless given
    #[arg(long, value_name = "FILE")]
    to: Option<PathBuf>,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    ensure!(
        options.runs.len() <= RUNS_MAX,
        "{} runs are more than a page can tell apart: give at most {RUNS_MAX}",
        options.runs.len()
    );
    let runs: Vec<History> = options.runs.iter().map(|folder| History::read(folder)).collect::<Result<_>>()?;
    let page = page::page(&runs);
    let to = options.to.clone().unwrap_or_else(|| options.runs[0].join("report.html"));
    write(&to, &page).with_context(|| format!("{} cannot be written; --to FILE says where else", to.display()))?;
    for run in runs.iter().filter(|run| run.unknown > 0) {
        let are = if run.unknown == 1 { "is" } else { "are" };
        eprintln!("{} of {} could not be read and {are} left out.", counted(run.unknown, "line"), run.folder);
    }
    println!("{}: {}, {}", to.display(), counted(runs.len() as u64, "run"), amount(page.len() as f64));
    Ok(ExitCode::SUCCESS)
}

/// Whole or not at all: somebody may be looking at the one before.
fn write(to: &Path, page: &str) -> std::io::Result<()> {
    let mut name = to.as_os_str().to_os_string();
    name.push(".part");
    std::fs::write(&name, page)?;
    std::fs::rename(&name, to).inspect_err(|_| drop(std::fs::remove_file(&name)))
}
