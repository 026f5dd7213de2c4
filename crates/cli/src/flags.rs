//! The flags that `shardwise` passes on to `shardwise-rank`. `shardwise` parses them from the user, and `shardwise-rank` from
//! `shardwise`.

use std::ffi::OsString;
use std::path::PathBuf;

use shardwise_supervisor::absolute;

/// Flags that change a recipe.
#[derive(clap::Args)]
pub struct Layers {
    /// Apply a DeepSpeed configuration on top of the recipe; refuse to start if a key has no counterpart
    #[arg(long, value_name = "DS_CONFIG.JSON")]
    pub deepspeed: Option<PathBuf>,
    /// Set a key of the recipe, such as optimizer.lr=1e-3; can be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

impl Layers {
    /// Converts the flags back to arguments, with absolute paths. Each setting is one argument, since a value may start with a dash.
    pub(crate) fn arguments(&self) -> Vec<OsString> {
        let deepspeed =
            self.deepspeed.iter().flat_map(|file| [OsString::from("--deepspeed"), absolute(file).into_os_string()]);
        deepspeed.chain(self.set.iter().map(|set| OsString::from(format!("--set={set}")))).collect()
    }
}

/// Flags of `shardwise generate`.
#[derive(clap::Args)]
pub struct GenerateFlags {
    /// Continue this text
    #[arg(long, default_value = "")]
    pub prompt: String,
    /// Generate at most this many tokens
    #[arg(long, default_value_t = 200)]
    pub tokens: usize,
    /// Sample at this temperature; 0 always takes the most likely token
    #[arg(long, default_value_t = 0.8)]
    pub temperature: f64,
    /// Sample only from this many of the most likely tokens
    #[arg(long)]
    pub top_k: Option<usize>,
    /// Sample only from the most likely tokens whose probabilities add up to this
    #[arg(long)]
    pub top_p: Option<f64>,
    /// Seed the sampling; the same seed gives the same text
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

impl GenerateFlags {
    /// Converts the flags back to arguments, each as one `--flag=value`, since a prompt may start with a dash.
    pub(crate) fn arguments(&self) -> Vec<OsString> {
        let GenerateFlags { prompt, tokens, temperature, top_k, top_p, seed } = self;
        let mut arguments = vec![
            format!("--prompt={prompt}"),
            format!("--tokens={tokens}"),
            format!("--temperature={temperature}"),
            format!("--seed={seed}"),
        ];
        arguments.extend(top_k.map(|count| format!("--top-k={count}")));
        arguments.extend(top_p.map(|part| format!("--top-p={part}")));
        arguments.into_iter().map(OsString::from).collect()
    }
}

/// Flags of `shardwise profile`.
#[derive(clap::Args)]
pub struct ProfileFlags {
    /// Trace this many steps, after two warm-up steps
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=100))]
    pub steps: u64,
    /// Keep the trace in this folder; it opens in ui.perfetto.dev
    #[arg(long, value_name = "FOLDER")]
    pub keep: Option<PathBuf>,
    /// Draw the last traced step into an SVG file
    #[arg(long, value_name = "FILE.svg")]
    pub draw: Option<PathBuf>,
    /// Write the measured costs of a step into a file, for train --dry-run --costs
    #[arg(long, value_name = "FILE.json")]
    pub costs: Option<PathBuf>,
    /// Do not try any changes, and suggest only those that need no trial
    #[arg(long)]
    pub no_tries: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Inject a fault, as in train --fault; several faults all apply at once
    #[arg(long, value_name = "FAULT")]
    pub fault: Vec<String>,
}

impl ProfileFlags {
    /// Converts the flags back to arguments, with absolute paths.
    pub(crate) fn arguments(&self) -> Vec<OsString> {
        let mut arguments = vec![format!("--steps={}", self.steps)];
        arguments.extend(self.keep.iter().map(|folder| format!("--keep={}", absolute(folder).display())));
        arguments.extend(self.draw.iter().map(|file| format!("--draw={}", absolute(file).display())));
        arguments.extend(self.costs.iter().map(|file| format!("--costs={}", absolute(file).display())));
        arguments.extend(self.no_tries.then(|| "--no-tries".to_string()));
        arguments.extend(self.json.then(|| "--json".to_string()));
        arguments.extend(self.fault.iter().map(|fault| format!("--fault={fault}")));
        arguments.into_iter().map(OsString::from).collect()
    }
}

/// Flags of `shardwise plan`.
#[derive(clap::Args)]
pub struct PlanFlags {
    /// Read what units and links cost from this file, which profile --costs has written
    #[arg(long, value_name = "FILE.json")]
    pub costs: PathBuf,
    /// Cut the model into this many stages, instead of as many as are fastest
    #[arg(long, value_name = "STAGES", value_parser = clap::value_parser!(u32).range(1..))]
    pub pipeline: Option<u32>,
    /// Use at most this much memory on each rank for parameters, gradients, optimizer state and activations
    #[arg(long, value_name = "MIB")]
    pub memory: Option<usize>,
    /// Draw the step in this many columns
    #[arg(long, value_name = "COLUMNS", default_value_t = 100, value_parser = clap::value_parser!(u16).range(20..=1000))]
    pub width: u16,
}

impl PlanFlags {
    /// Converts the flags back to arguments, with absolute paths.
    pub(crate) fn arguments(&self) -> Vec<OsString> {
        let mut arguments =
            vec![format!("--costs={}", absolute(&self.costs).display()), format!("--width={}", self.width)];
        arguments.extend(self.pipeline.map(|stages| format!("--pipeline={stages}")));
        arguments.extend(self.memory.map(|mib| format!("--memory={mib}")));
        arguments.into_iter().map(OsString::from).collect()
    }
}

/// Flags of `shardwise train` that its ranks get, too.
#[derive(clap::Args)]
pub struct TrainFlags {
    /// Trace these steps into a file next to the checkpoints; it opens in ui.perfetto.dev
    #[arg(long, value_name = "FIRST..LAST")]
    pub trace: Option<String>,
    /// Trace these ranks in addition to the first 16
    #[arg(long, value_name = "RANK", value_delimiter = ',', requires = "trace")]
    pub trace_ranks: Vec<usize>,
    /// Start even if the memory estimate exceeds the limit
    #[arg(long)]
    pub force: bool,
}

impl TrainFlags {
    /// Converts the flags back to arguments.
    pub(crate) fn arguments(&self) -> Vec<OsString> {
        let steps = self.trace.iter().map(|steps| format!("--trace={steps}"));
        let ranks = self.trace_ranks.iter().map(|rank| format!("--trace-ranks={rank}"));
        let force = self.force.then(|| "--force".to_string());
        steps.chain(ranks).chain(force).map(OsString::from).collect()
    }
}
