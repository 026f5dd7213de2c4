//! `shardwise report`: one HTML page with the results of a run, or of several runs side by side.
//!
//! It reads the runs' folders and nothing else, so it works on any machine, during the run or years later. The charts are drawn without a
//! library, because most of the work is in details: labels at the ends of curves, hatch patterns, and a layout for any width.

mod bars;
mod chart;
mod facts;
mod figures;
mod page;
mod run_data;
mod scale;
mod text;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use shardwise_journal::format::{format_bytes, format_count_of};

use run_data::RunData;

/// The maximum number of runs that a chart can distinguish.
const RUNS_MAX: usize = 12;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Folders of runs (run.folder in the recipe); two or more are compared side by side
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// Write the page to this file [default: report.html in the first run's folder]
    #[arg(long, value_name = "FILE")]
    to: Option<PathBuf>,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    ensure!(
        options.runs.len() <= RUNS_MAX,
        "{} runs are too many for one page; give at most {RUNS_MAX}",
        options.runs.len()
    );
    let runs: Vec<RunData> = options.runs.iter().map(|folder| RunData::read(folder)).collect::<Result<_>>()?;
    let page = page::page(&runs);
    let to = options.to.clone().unwrap_or_else(|| options.runs[0].join("report.html"));
    write(&to, &page)
        .with_context(|| format!("{} cannot be written; choose another file with --to FILE", to.display()))?;
    for run in runs.iter().filter(|run| run.unreadable > 0) {
        let were = if run.unreadable == 1 { "was" } else { "were" };
        eprintln!(
            "{} of {} could not be read and {were} skipped.",
            format_count_of(run.unreadable, "line"),
            run.folder
        );
    }
    println!("{}: {}, {}", to.display(), format_count_of(runs.len() as u64, "run"), format_bytes(page.len() as f64));
    Ok(ExitCode::SUCCESS)
}

/// Writes the page atomically, because somebody may be reading the previous one.
fn write(to: &Path, page: &str) -> std::io::Result<()> {
    let mut name = to.as_os_str().to_os_string();
    name.push(".part");
    std::fs::write(&name, page)?;
    std::fs::rename(&name, to).inspect_err(|_| drop(std::fs::remove_file(&name)))
}
