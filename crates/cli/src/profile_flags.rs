//! Flags of `shardwise profile`. `shardwise` parses them from the user, and `shardwise-rank` from `shardwise`.

use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub(crate) struct ProfileFlags {
    /// Trace this many steps, after two warm-up steps
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=100))]
    pub(crate) steps: u64,
    /// Keep the trace in this folder; it opens in ui.perfetto.dev
    #[arg(long, value_name = "FOLDER")]
    pub(crate) keep: Option<PathBuf>,
    /// Draw the last traced step into an SVG file
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) draw: Option<PathBuf>,
    /// Do not try any changes, and suggest only those that need no trial
    #[arg(long)]
    pub(crate) no_tries: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Inject a fault, as in train --fault; several faults all apply at once
    #[arg(long, value_name = "FAULT")]
    pub(crate) fault: Vec<String>,
}

impl ProfileFlags {
    /// Converts the flags back to arguments, with absolute paths.
    #[allow(dead_code, reason = "only one of the two programs passes them on")]
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
