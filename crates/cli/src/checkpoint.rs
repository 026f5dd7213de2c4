//! `shardwise checkpoint`: lists, verifies, compares, prunes, exports and imports checkpoints.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, bail};
use shardwise_checkpoint::hugging_face::{self, ExportOptions, Weights};
use shardwise_checkpoint::{Checkpoint, RetentionPolicy, Store, UnitReader, elements, step_folder};
use shardwise_plan::{Dtype, FloatsMut};

#[derive(clap::Subcommand)]
pub(crate) enum Command {
    /// List checkpoints, newest first
    #[command(after_help = "Example:\n  shardwise checkpoint ls runs/small")]
    Ls {
        /// The checkpoint folder
        folder: String,
    },
    /// Read all checkpoints and verify their hashes
    ///
    /// Exits with code 1 if anything is damaged.
    #[command(
        after_help = "Examples:\n  shardwise checkpoint verify runs/small\n  shardwise checkpoint verify runs/small --step 100"
    )]
    Verify {
        /// The checkpoint folder
        folder: String,
        /// Verify only the checkpoint of this step
        #[arg(long)]
        step: Option<u64>,
    },
    /// Compare two checkpoints tensor by tensor
    ///
    /// Exits with code 1 if they differ.
    #[command(
        after_help = "Examples:\n  shardwise checkpoint diff runs/small 100 200\n  shardwise checkpoint diff runs/small 100 100 --other runs/again"
    )]
    Diff {
        /// The checkpoint folder
        folder: String,
        /// The step of the first checkpoint
        one: u64,
        /// The step of the second checkpoint
        two: u64,
        /// Read the second checkpoint from this folder
        #[arg(long, value_name = "FOLDER")]
        other: Option<String>,
    },
    /// Remove old checkpoints
    #[command(
        after_help = "Example:\n  shardwise checkpoint prune runs/small --keep-last 2 --keep-every 1000 --dry-run"
    )]
    Prune {
        /// The checkpoint folder
        folder: String,
        /// Keep this many of the newest intact checkpoints
        #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
        keep_last: u32,
        /// Also keep every checkpoint whose step is a multiple of this
        #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
        keep_every: Option<u64>,
        /// Print what would be removed, and remove nothing
        #[arg(long)]
        dry_run: bool,
    },
    /// Export the parameters of a checkpoint in Hugging Face's format
    ///
    /// Writes config.json and safetensors files with their index, and copies the tokenizer and generation settings of the model that the
    /// run started from. Needs only a few megabytes of memory.
    #[command(after_help = "Example:\n  shardwise checkpoint export runs/small exported --dtype bf16")]
    Export {
        /// The checkpoint folder
        folder: String,
        /// The folder to write to
        to: String,
        /// Export the checkpoint of this step instead of the newest
        #[arg(long)]
        step: Option<u64>,
        /// Convert the parameters to this type: f32, bf16, f16 or f64
        #[arg(long, default_value = "f32", value_parser = parse_dtype)]
        dtype: Dtype,
        /// Start a new file after this many megabytes
        #[arg(long, default_value_t = 5000, value_name = "MB", value_parser = clap::value_parser!(u64).range(1..))]
        file_mb: u64,
        /// Copy the tokenizer and generation settings from this Hugging Face checkpoint
        #[arg(long, value_name = "FOLDER")]
        like: Option<String>,
        /// Overwrite an existing model
        #[arg(long)]
        force: bool,
    },
    /// Import a Hugging Face checkpoint as the checkpoint of step 0
    #[command(after_help = "Example:\n  shardwise checkpoint import models/llama runs/small")]
    Import {
        /// The folder with config.json and safetensors files
        from: String,
        /// The checkpoint folder to create
        folder: String,
    },
}

fn parse_dtype(text: &str) -> std::result::Result<Dtype, String> {
    let known = [Dtype::F32, Dtype::Bf16, Dtype::F16, Dtype::F64];
    known.into_iter().find(|dtype| dtype.to_string() == text).ok_or_else(|| "use f32, bf16, f16 or f64".to_string())
}

pub(crate) fn run(command: &Command) -> Result<ExitCode> {
    match command {
        Command::Ls { folder } => ls(&open_store(folder)?),
        Command::Verify { folder, step } => verify(&open_store(folder)?, *step),
        Command::Diff { folder, one, two, other } => {
            let one = Checkpoint::open(&open_store(folder)?, *one)?;
            let two = Checkpoint::open(&open_store(other.as_ref().unwrap_or(folder))?, *two)?;
            diff(&one, &two)
        }
        Command::Prune { folder, keep_last, keep_every, dry_run } => {
            prune(&open_store(folder)?, *keep_last as usize, *keep_every, *dry_run)
        }
        Command::Export { folder, to, step, dtype, file_mb, like, force } => {
            if !force {
                refuse_to_overwrite(to)?;
            }
            let how = ExportOptions { dtype: *dtype, file_bytes: file_mb * 1_000_000 };
            export(&open_store(folder)?, to, *step, &how, like.as_deref())
        }
        Command::Import { from, folder } => import(from, folder),
    }
}

fn open_store(folder: &str) -> Result<Arc<Store>> {
    Ok(Arc::new(Store::open(folder)?))
}

fn ls(store: &Arc<Store>) -> Result<ExitCode> {
    let steps = store.steps()?;
    if steps.is_empty() {
        println!("there are no checkpoints in {}", store.display(""));
    }
    for step in steps {
        let line = Checkpoint::open(store, step).and_then(|checkpoint| Ok((checkpoint.bytes()?, checkpoint)));
        match line {
            Ok((bytes, checkpoint)) => {
                let manifest = checkpoint.manifest();
                println!(
                    "step {step:>9}  {:>9.1} MB  {} units  {}",
                    bytes as f64 / 1e6,
                    manifest.units.len(),
                    manifest.written_by
                );
            }
            Err(error) => println!("step {step:>9}  damaged: {error}"),
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn verify(store: &Arc<Store>, step: Option<u64>) -> Result<ExitCode> {
    let steps = step.map_or_else(|| store.steps(), |step| Ok(vec![step]))?;
    if steps.is_empty() {
        bail!("there are no checkpoints in {}", store.display(""));
    }
    let mut code = ExitCode::SUCCESS;
    for step in steps {
        let verified = Checkpoint::open(store, step).and_then(|checkpoint| {
            let bytes = checkpoint.bytes()?;
            let mut progress = Progress::new(format!("step {step}"), bytes);
            checkpoint.verify(&mut |more| progress.add(more))?;
            progress.end();
            Ok(bytes)
        });
        match verified {
            Ok(bytes) => println!("step {step}: intact, {:.1} MB", bytes as f64 / 1e6),
            Err(error) => {
                println!("step {step}: damaged: {error}");
                code = ExitCode::FAILURE;
            }
        }
    }
    Ok(code)
}

fn prune(store: &Arc<Store>, keep_last: usize, keep_every: Option<u64>, dry_run: bool) -> Result<ExitCode> {
    let kept = RetentionPolicy { last: Some(keep_last), every: keep_every }.steps_to_keep(store)?;
    for step in store.steps()?.into_iter().filter(|step| !kept.contains(step)) {
        match dry_run {
            true => println!("would remove step {step}"),
            false => {
                store.remove_step(step)?;
                println!("removed step {step}");
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Fails if the folder already holds a model.
fn refuse_to_overwrite(to: &str) -> Result<()> {
    // A folder that does not exist yet holds no model.
    let Ok(store) = Store::open(to) else { return Ok(()) };
    if let Some(file) = hugging_face::first_existing_file(&store)? {
        bail!("{} already exists: choose another folder or pass --force", store.display(file));
    }
    Ok(())
}

fn export(
    store: &Arc<Store>,
    to: &str,
    step: Option<u64>,
    how: &ExportOptions,
    like: Option<&str>,
) -> Result<ExitCode> {
    let newest = || store.steps().map(|steps| steps.first().copied());
    let Some(step) = step.map_or_else(newest, |step| Ok(Some(step)))? else {
        bail!("there are no checkpoints in {}", store.display(""));
    };
    let checkpoint = Checkpoint::open(store, step)?;
    let training = &checkpoint.manifest().training;
    let config = &training["model"];
    if !config.is_object() {
        bail!("{}: Hugging Face has no format for this model", checkpoint.name());
    }
    if training["progress"]["expert_biases"].is_array() {
        bail!(
            "{}: a bias is added to scores when tokens choose experts (router_bias_update_rate), and Hugging Face has no format for it",
            checkpoint.name()
        );
    }
    // The model that the run started from may no longer exist.
    let started_from = training["began_with"].as_str().and_then(|folder| Store::open(folder).ok());
    let like = like.map(Store::open).transpose()?.or(started_from);
    let out = Store::create(to)?;
    let mut progress = Progress::new("exported".to_string(), 0);
    hugging_face::export(&checkpoint, &out, config, like.as_ref(), how, &mut |more| progress.add(more))?;
    progress.end();
    println!("exported {} to {to}: {:.1} MB in {}", checkpoint.name(), progress.done as f64 / 1e6, how.dtype);
    Ok(ExitCode::SUCCESS)
}

fn import(from: &str, folder: &str) -> Result<ExitCode> {
    let weights = Weights::open(from)?;
    let store = Arc::new(Store::create(folder)?);
    if let Some(step) = store.steps()?.first() {
        bail!("{folder} already has checkpoints, the newest of step {step}: choose another folder");
    }
    let mut progress = Progress::new("imported".to_string(), 0);
    hugging_face::import(&weights, &store, &mut |more| progress.add(more))?;
    progress.end();
    println!("imported {from} as {}: {:.1} MB", store.display(&step_folder(0)), progress.done as f64 / 1e6);
    Ok(ExitCode::SUCCESS)
}

/// The number of elements that are compared at once.
const CHUNK: u64 = 1 << 20;

/// The unit and the shape of each tensor in a checkpoint.
fn tensors(checkpoint: &Checkpoint) -> Result<BTreeMap<String, (String, Vec<u64>)>> {
    let mut all = BTreeMap::new();
    for unit in &checkpoint.manifest().units {
        for tensor in &checkpoint.unit(&unit.name)?.table().tensors {
            all.insert(tensor.name.clone(), (unit.name.clone(), tensor.shape.clone()));
        }
    }
    Ok(all)
}

fn diff(one: &Checkpoint, two: &Checkpoint) -> Result<ExitCode> {
    let (ones, twos) = (tensors(one)?, tensors(two)?);
    let mut differ = 0;
    let biases = |checkpoint: &Checkpoint| checkpoint.manifest().training["progress"]["expert_biases"].clone();
    if biases(one) != biases(two) {
        println!("the biases of experts (expert_biases) are different");
        differ += 1;
    }
    let mut progress = Progress::new("compared".to_string(), one.bytes()?);
    let mut readers: Option<(String, String, UnitReader, UnitReader)> = None;
    let mut by_unit: Vec<_> = ones.iter().collect();
    by_unit.sort_by_key(|(name, (unit, _))| (unit.clone(), (*name).clone()));
    for (name, (unit, shape)) in by_unit {
        let Some((other_unit, other_shape)) = twos.get(name) else {
            println!("{name}: only in {}", one.name());
            differ += 1;
            continue;
        };
        if shape != other_shape {
            println!("{name}: {shape:?} and {other_shape:?}");
            differ += 1;
            continue;
        }
        if readers.as_ref().is_none_or(|(a, b, ..)| a != unit || b != other_unit) {
            readers = Some((unit.clone(), other_unit.clone(), one.unit(unit)?, two.unit(other_unit)?));
        }
        let Some((_, _, reader, other)) = &mut readers else { continue };
        let (mut count, mut most) = (0u64, 0f64);
        let len = elements(shape).unwrap_or(0);
        for from in (0..len).step_by(CHUNK as usize) {
            let range = from..len.min(from + CHUNK);
            let buffer = || vec![0f64; (range.end - range.start) as usize];
            let (mut a, mut b) = (buffer(), buffer());
            reader.read_floats(name, shape, range.clone(), FloatsMut::F64(&mut a))?;
            other.read_floats(name, shape, range.clone(), FloatsMut::F64(&mut b))?;
            for (a, b) in a.iter().zip(&b).filter(|(a, b)| a.to_bits() != b.to_bits()) {
                count += 1;
                most = most.max((a - b).abs());
            }
            progress.add(4 * (range.end - range.start));
        }
        if count > 0 {
            println!("{name}: {count} of {len} elements differ, by at most {:e}", most as f32);
            differ += 1;
        }
    }
    for name in twos.keys().filter(|name| !ones.contains_key(*name)) {
        println!("{name}: only in {}", two.name());
        differ += 1;
    }
    progress.end();
    match differ {
        0 => println!("{} tensors, the same to the last bit", ones.len()),
        _ => println!("{differ} of {} tensors differ", ones.len().max(twos.len())),
    }
    Ok(if differ == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A progress line on standard error, shown only on a terminal.
struct Progress {
    what: String,
    /// The total number of bytes, or 0 if it is not known.
    all: u64,
    done: u64,
    shown: Instant,
    visible: bool,
}

impl Progress {
    fn new(what: String, all: u64) -> Self {
        Progress { what, all, done: 0, shown: Instant::now(), visible: std::io::stderr().is_terminal() }
    }

    fn add(&mut self, bytes: u64) {
        self.done += bytes;
        if self.visible && self.shown.elapsed().as_millis() >= 200 {
            let part = match self.all {
                0 => String::new(),
                all => format!(", {:.0}%", 100. * self.done as f64 / all as f64),
            };
            eprint!("\r{}: {:.1} MB{part} ", self.what, self.done as f64 / 1e6);
            drop(std::io::stderr().flush());
            self.shown = Instant::now();
        }
    }

    fn end(&self) {
        if self.visible {
            eprint!("\r\x1b[K");
        }
    }
}
