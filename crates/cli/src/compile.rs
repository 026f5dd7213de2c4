//! `shardwise compile`: compiles a PyTorch model ahead of time, with the Python package `shardwise_compile`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};
use shardwise_recipe::{ActivationCheckpointingRecipe, DeviceRecipe, Recipe};
use shardwise_supervisor::{Environment, exit_code};

use crate::flags::Layers;

/// The sources of the Python package, if this program was built from a checkout that still exists.
const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../python");

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Hugging Face folder, config.json, Python file that defines the model, or recipe of a built-in model
    model: PathBuf,
    /// Write the package to this folder [default for a recipe: its model.package]
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
    #[command(flatten)]
    shape: Shape,
    #[command(flatten)]
    layers: Layers,
    /// Also write weights.safetensors with the initial values, for init.weights
    #[arg(long)]
    weights: bool,
    /// Python with torch, and with transformers for Hugging Face models [default: $SHARDWISE_PYTHON, the one that Shardwise is installed in, or python3]
    #[arg(long)]
    python: Option<PathBuf>,
}

/// What to compile for. A recipe says it already.
#[derive(clap::Args)]
struct Shape {
    /// Sequences per micro-batch, for a Hugging Face model
    #[arg(long)]
    micro_batch_size: Option<usize>,
    /// Tokens per sequence, for a Hugging Face model
    #[arg(long)]
    seq_len: Option<usize>,
    /// Type of parameters and activations [default: f32]
    #[arg(long, value_parser = ["f32", "bf16", "f16"])]
    dtype: Option<String>,
    /// Device to compile for, which must be present [default: cpu]
    #[arg(long, value_parser = ["cpu", "cuda"])]
    device: Option<String>,
    /// Activations to keep for the backward pass: all, or those that are expensive to recompute [default: none]
    #[arg(long, value_parser = ["none", "selective"])]
    activation_checkpointing: Option<String>,
    /// Tokens whose logits are in memory at once; 0 for all of a micro-batch [default: 256]
    #[arg(long)]
    chunk_rows: Option<usize>,
}

impl Shape {
    /// The flags that are given, with their values.
    fn given(&self) -> Vec<(&'static str, String)> {
        let Shape { micro_batch_size, seq_len, dtype, device, activation_checkpointing, chunk_rows } = self;
        let number = |number: &Option<usize>| number.map(|number| number.to_string());
        let flags = [
            ("--micro-batch-size", number(micro_batch_size)),
            ("--seq-len", number(seq_len)),
            ("--dtype", dtype.clone()),
            ("--device", device.clone()),
            ("--activation-checkpointing", activation_checkpointing.clone()),
            ("--chunk-rows", number(chunk_rows)),
        ];
        flags.into_iter().filter_map(|(flag, value)| Some((flag, value?))).collect()
    }

    /// What a recipe trains with.
    fn of_recipe(recipe: &Recipe) -> Result<Self> {
        let Some(micro_batch_size) = recipe.batch.micro_batch_size else {
            bail!("batch.micro_batch_size is not in the recipe; a package is compiled for one size");
        };
        let chunk_rows = match (&recipe.model.llama, &recipe.model.gpt2) {
            (Some(llama), _) => llama.loss_chunk_tokens,
            (_, Some(gpt2)) => gpt2.loss_chunk_tokens,
            _ => None,
        };
        let is_selective = recipe.activation_checkpointing == ActivationCheckpointingRecipe::Selective;
        Ok(Shape {
            micro_batch_size: Some(micro_batch_size),
            seq_len: Some(recipe.batch.seq_len),
            dtype: Some(recipe.precision.param_dtype.dtype().to_string()),
            device: Some(if recipe.run.device == DeviceRecipe::Cuda { "cuda" } else { "cpu" }.to_string()),
            activation_checkpointing: Some(if is_selective { "selective" } else { "none" }.to_string()),
            chunk_rows,
        })
    }
}

impl Options {
    fn python(&self) -> PathBuf {
        let set = || std::env::var_os("SHARDWISE_PYTHON").map(PathBuf::from);
        let installed = || Some(Environment::current()?.python());
        self.python.clone().or_else(set).or_else(installed).unwrap_or_else(|| "python3".into())
    }

    /// A command that runs Python where it finds the package.
    fn command(&self) -> Command {
        let mut command = Command::new(self.python());
        // A program from pip has the package in its environment.
        if Environment::current().is_none() && Path::new(SOURCES).exists() {
            let set = std::env::var_os("PYTHONPATH").unwrap_or_default();
            let all = std::env::split_paths(&set).chain([PathBuf::from(SOURCES)]);
            // A path with a colon cannot be added; Python then says what it does not find.
            command.env("PYTHONPATH", std::env::join_paths(all).unwrap_or(set));
        }
        command
    }

    /// Fails if Python lacks what compiling needs.
    fn check_python(&self) -> Result<()> {
        let python = self.python();
        let python = python.display();
        let found = self.command().args(["-c", "import torch, shardwise_compile"]).output();
        let found =
            found.with_context(|| format!("{python} could not be started; give --python, or set SHARDWISE_PYTHON"))?;
        if !found.status.success() {
            let said = String::from_utf8_lossy(&found.stderr);
            let reason = said.lines().last().unwrap_or("it said nothing");
            bail!(
                "{python} lacks what compiling needs: {reason}\nrun 'pip install shardwise[compile]', or python/setup in a checkout, and set \
                 SHARDWISE_PYTHON to the Python that has it"
            );
        }
        Ok(())
    }

    /// Runs the Python package.
    fn compile(&self, model: &Path, out: &Path, shape: &Shape) -> Result<ExitCode> {
        let mut arguments: Vec<OsString> = vec![model.into(), "--out".into(), out.into()];
        arguments.extend(shape.given().into_iter().map(|(flag, value)| format!("{flag}={value}").into()));
        arguments.extend(self.weights.then(|| "--weights".into()));
        let status = self.command().args(["-m", "shardwise_compile"]).args(arguments).status();
        Ok(exit_code(status.with_context(|| self.python().display().to_string())?))
    }

    /// Compiles the built-in model of a recipe, for what the recipe trains with.
    fn compile_recipe(&self) -> Result<ExitCode> {
        if let Some((flag, _)) = self.shape.given().first() {
            bail!("{flag}: a recipe says what to compile for; change it there, or with --set");
        }
        let recipe = Recipe::read_uncompiled(&self.model, self.layers.deepspeed.as_deref(), &self.layers.set)?;
        if recipe.model_config()?.moe().is_some() {
            bail!("a mixture of experts cannot be compiled yet");
        }
        let shape = Shape::of_recipe(&recipe)?;
        let config =
            recipe.config().context("Hugging Face has no model with these settings, and so it cannot be compiled")?;
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("config.json");
        std::fs::write(&file, config.to_string())?;
        let named = || recipe.model.package.clone();
        let default = || self.model.with_file_name("packages").join(recipe.name());
        let out = self.out.clone().or_else(named).unwrap_or_else(default);
        let code = self.compile(&file, &out, &shape)?;
        if code == ExitCode::SUCCESS && !recipe.model.compiled {
            println!("set model.compiled = true in {} to train with it", self.model.display());
        }
        Ok(code)
    }
}

pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    options.check_python()?;
    if options.model.extension().is_some_and(|extension| extension == "toml") {
        return options.compile_recipe();
    }
    if options.layers.deepspeed.is_some() || !options.layers.set.is_empty() {
        bail!("--set and --deepspeed change a recipe, and {} is none", options.model.display());
    }
    let Some(out) = &options.out else { bail!("give --out, the folder to write the package to") };
    options.compile(&options.model, out, &options.shape)
}
