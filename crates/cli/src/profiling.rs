//! How a recipe is profiled. Both programs read it: `shardwise` from people, `shardwise-rank` from `shardwise`.

use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub(crate) struct Profiling {
    /// How many steps are traced, after two that warm up
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=100))]
    pub(crate) steps: u64,
    /// Keep the trace, in this folder; it opens in ui.perfetto.dev
    #[arg(long, value_name = "FOLDER")]
    pub(crate) keep: Option<PathBuf>,
    /// Draw the last traced step as a picture (SVG)
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) draw: Option<PathBuf>,
    /// Do not try changes; those that would have to be tried are not named
    #[arg(long)]
    pub(crate) no_tries: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Let something go wrong, as in train --fault; all of it at once
    #[arg(long, value_name = "FAULT")]
    pub(crate) fault: Vec<String>,
}

impl Profiling {
    /// The same as arguments, with paths that mean the same in another folder.
    #[allow(dead_code, reason = "one of the two programs reads them only")]
    pub(crate) fn arguments(&self, absolute: impl Fn(&Path) -> PathBuf) -> Vec<String> {
        let mut arguments = vec![format!("--steps={}", self.steps)];
        arguments.extend(self.keep.iter().map(|folder| format!("--keep={}", absolute(folder).display())));
        arguments.extend(self.draw.iter().map(|file| format!("--draw={}", absolute(file).display())));
        arguments.extend(self.no_tries.then(|| "--no-tries".to_string()));
        arguments.extend(self.json.then(|| "--json".to_string()));
        arguments.extend(self.fault.iter().map(|fault| format!("--fault={fault}")));
        arguments
    }
}
