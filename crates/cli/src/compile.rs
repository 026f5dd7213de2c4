//! `shardwise compile`: compiles a PyTorch model ahead of time, with the Python package `shardwise_compile`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};
use shardwise_supervisor::exit_code;

/// The sources of the Python package, if this program was built from a checkout that still exists.
const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../python");

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Hugging Face folder, config.json, or Python file that defines the model
    model: PathBuf,
    /// Write the package to this folder
    #[arg(long, value_name = "FOLDER")]
    out: PathBuf,
    /// Sequences per micro-batch, for a Hugging Face model
    #[arg(long)]
    micro_batch_size: Option<u32>,
    /// Tokens per sequence, for a Hugging Face model
    #[arg(long)]
    seq_len: Option<u32>,
    /// Type of parameters and activations
    #[arg(long, default_value = "f32", value_parser = ["f32", "bf16"])]
    dtype: String,
    /// Activations to keep for the backward pass: all, or those that are expensive to recompute
    #[arg(long, default_value = "none", value_parser = ["none", "selective"])]
    activation_checkpointing: String,
    /// Tokens whose logits are in memory at once; 0 for all of a micro-batch
    #[arg(long, default_value_t = 256)]
    chunk_rows: u32,
    /// Also write weights.safetensors with the initial values, for init.weights
    #[arg(long)]
    weights: bool,
    /// Python with torch, and with transformers for Hugging Face models [default: $SHARDWISE_PYTHON, or python3]
    #[arg(long)]
    python: Option<PathBuf>,
}

impl Options {
    /// The arguments of the Python package.
    fn arguments(&self) -> Vec<OsString> {
        let Options { model, out, dtype, activation_checkpointing, chunk_rows, .. } = self;
        let mut arguments: Vec<OsString> = vec![model.into(), "--out".into(), out.into()];
        arguments.push(format!("--dtype={dtype}").into());
        arguments.push(format!("--activation-checkpointing={activation_checkpointing}").into());
        arguments.push(format!("--chunk-rows={chunk_rows}").into());
        arguments.extend(self.micro_batch_size.map(|size| format!("--micro-batch-size={size}").into()));
        arguments.extend(self.seq_len.map(|tokens| format!("--seq-len={tokens}").into()));
        arguments.extend(self.weights.then(|| "--weights".into()));
        arguments
    }

    fn python(&self) -> PathBuf {
        let set = || std::env::var_os("SHARDWISE_PYTHON").map(PathBuf::from);
        self.python.clone().or_else(set).unwrap_or_else(|| "python3".into())
    }

    /// A command that runs Python where it finds the package.
    fn command(&self) -> Command {
        let mut command = Command::new(self.python());
        if Path::new(SOURCES).exists() {
            let set = std::env::var_os("PYTHONPATH").unwrap_or_default();
            let all = std::env::split_paths(&set).chain([PathBuf::from(SOURCES)]);
            // A path with a colon cannot be added; Python then says what it does not find.
            command.env("PYTHONPATH", std::env::join_paths(all).unwrap_or(set));
        }
        command
    }
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let python = options.python();
    let python = python.display();
    let found = options.command().args(["-c", "import torch, shardwise_compile"]).output();
    let found =
        found.with_context(|| format!("{python} could not be started; give --python, or set SHARDWISE_PYTHON"))?;
    if !found.status.success() {
        let said = String::from_utf8_lossy(&found.stderr);
        let reason = said.lines().last().unwrap_or("it said nothing");
        bail!(
            "{python} lacks what compiling needs: {reason}\nrun python/setup, which installs it, and set SHARDWISE_PYTHON to the path \
             that it prints"
        );
    }
    let mut command = options.command();
    let status = command.args(["-m", "shardwise_compile"]).args(options.arguments()).status();
    Ok(exit_code(status.with_context(|| python.to_string())?))
}
