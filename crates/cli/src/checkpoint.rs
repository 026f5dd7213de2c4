//! `shardwise checkpoint`: what is in a folder of checkpoints, and whether it is what was written.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, bail};
use shardwise_checkpoint::hugging_face::{self, Export, Weights};
use shardwise_checkpoint::{Checkpoint, Keep, Store, UnitReader, elements, folder_of};
use shardwise_plan::Dtype;

#[derive(clap::Subcommand)]
pub(crate) enum Command {
    /// List checkpoints, the newest first
    #[command(after_help = "Example:\n  shardwise checkpoint ls runs/small")]
    Ls {
        /// Where they are
        folder: String,
    },
    /// Read checkpoints whole, and compare everything with its hash
    ///
    /// The exit code is 1 if anything is damaged.
    #[command(
        after_help = "Examples:\n  shardwise checkpoint verify runs/small\n  shardwise checkpoint verify runs/small --step 100"
    )]
    Verify {
        /// Where they are
        folder: String,
        /// One step alone
        #[arg(long)]
        step: Option<u64>,
    },
    /// Compare two checkpoints, tensor by tensor
    ///
    /// The exit code is 1 if they differ.
    #[command(
        after_help = "Examples:\n  shardwise checkpoint diff runs/small 100 200\n  shardwise checkpoint diff runs/small 100 100 --other runs/again"
    )]
    Diff {
        /// Where they are
        folder: String,
        /// The one step
        one: u64,
        /// The other step
        two: u64,
        /// Where the other one is, if it is elsewhere
        #[arg(long, value_name = "FOLDER")]
        other: Option<String>,
    },
    /// Remove all but some
    #[command(
        after_help = "Example:\n  shardwise checkpoint prune runs/small --keep-last 2 --keep-every 1000 --dry-run"
    )]
    Prune {
        /// Where they are
        folder: String,
        /// How many of the last whole ones stay
        #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
        keep_last: u32,
        /// Those of every so manieth step stay as well
        #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
        keep_every: Option<u64>,
        /// Say which would be removed, and remove none
        #[arg(long)]
        dry_run: bool,
    },
    /// Write the parameters of a checkpoint as Hugging Face does
    ///
    /// config.json, safetensors files with their index, and what the checkpoint that the run began with has of tokenizer and
    /// generation settings. Only a few megabytes are in memory at a time.
    #[command(after_help = "Example:\n  shardwise checkpoint export runs/small exported --dtype bf16")]
    Export {
        /// Where checkpoints are
        folder: String,
        /// Where to write
        to: String,
        /// Which step; the newest unless said otherwise
        #[arg(long)]
        step: Option<u64>,
        /// The type of elements: f32, bf16 or f16
        #[arg(long, default_value = "f32", value_parser = dtype)]
        dtype: Dtype,
        /// How long a file may become
        #[arg(long, default_value_t = 5000, value_name = "MB", value_parser = clap::value_parser!(u64).range(1..))]
        file_mb: u64,
        /// A Hugging Face checkpoint whose tokenizer and generation settings are handed on
        #[arg(long, value_name = "FOLDER")]
        like: Option<String>,
        /// Write over an export or another model that is there
        #[arg(long)]
        force: bool,
    },
    /// Make a checkpoint of a Hugging Face checkpoint, at step 0
    #[command(after_help = "Example:\n  shardwise checkpoint import models/llama runs/small")]
    Import {
        /// The folder with config.json and safetensors files
        from: String,
        /// Where checkpoints are to be
        folder: String,
    },
}

fn dtype(text: &str) -> std::result::Result<Dtype, String> {
    let known = [Dtype::F32, Dtype::Bf16, Dtype::F16];
    known.into_iter().find(|dtype| dtype.to_string() == text).ok_or_else(|| "use f32, bf16 or f16".to_string())
}

pub(crate) fn run(command: &Command) -> Result<ExitCode> {
    match command {
        Command::Ls { folder } => ls(&opened(folder)?),
        Command::Verify { folder, step } => verify(&opened(folder)?, *step),
        Command::Diff { folder, one, two, other } => {
            let one = Checkpoint::open(&opened(folder)?, *one)?;
            let two = Checkpoint::open(&opened(other.as_ref().unwrap_or(folder))?, *two)?;
            diff(&one, &two)
        }
        Command::Prune { folder, keep_last, keep_every, dry_run } => {
            prune(&opened(folder)?, *keep_last as usize, *keep_every, *dry_run)
        }
        Command::Export { folder, to, step, dtype, file_mb, like, force } => {
            if !force {
                refuse_to_overwrite(to)?;
            }
            let how = Export { dtype: *dtype, file_bytes: file_mb * 1_000_000 };
            export(&opened(folder)?, to, *step, &how, like.as_deref())
        }
        Command::Import { from, folder } => import(from, folder),
    }
}

fn opened(folder: &str) -> Result<Arc<Store>> {
    Ok(Arc::new(Store::open(folder)?))
}

fn ls(store: &Arc<Store>) -> Result<ExitCode> {
    let steps = store.steps()?;
    if steps.is_empty() {
        println!("there is no checkpoint in {}", store.display(""));
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
        bail!("there is no checkpoint in {}", store.display(""));
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
            Ok(bytes) => println!("step {step}: whole, {:.1} MB", bytes as f64 / 1e6),
            Err(error) => {
                println!("step {step}: damaged: {error}");
                code = ExitCode::FAILURE;
            }
        }
    }
    Ok(code)
}

fn prune(store: &Arc<Store>, keep_last: usize, keep_every: Option<u64>, dry_run: bool) -> Result<ExitCode> {
    let kept = Keep { last: Some(keep_last), every: keep_every }.steps(store)?;
    for step in store.steps()?.into_iter().filter(|step| !kept.contains(step)) {
        match dry_run {
            true => println!("step {step} would be removed"),
            false => {
                store.remove_step(step)?;
                println!("step {step} is removed");
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// A model that is there is not lost to an export without being asked for.
fn refuse_to_overwrite(to: &str) -> Result<()> {
    // Where there is no folder yet there is nothing to lose.
    let Ok(store) = Store::open(to) else { return Ok(()) };
    if let Some(file) = hugging_face::existing(&store)? {
        bail!("{} is there already: name another folder, or say --force", store.display(file));
    }
    Ok(())
}

fn export(store: &Arc<Store>, to: &str, step: Option<u64>, how: &Export, like: Option<&str>) -> Result<ExitCode> {
    let newest = || store.steps().map(|steps| steps.first().copied());
    let Some(step) = step.map_or_else(newest, |step| Ok(Some(step)))? else {
        bail!("there is no checkpoint in {}", store.display(""));
    };
    let checkpoint = Checkpoint::open(store, step)?;
    let training = &checkpoint.manifest().training;
    let config = &training["model"];
    if !config.is_object() {
        bail!("{}: its model is of no family that Hugging Face knows", checkpoint.name());
    }
    // What the run began with may be gone; its tokenizer is worth a try.
    let began_with = training["began_with"].as_str().and_then(|folder| Store::open(folder).ok());
    let like = like.map(Store::open).transpose()?.or(began_with);
    let out = Store::create(to)?;
    let mut progress = Progress::new("exported".to_string(), 0);
    hugging_face::export(&checkpoint, &out, config, like.as_ref(), how, &mut |more| progress.add(more))?;
    progress.end();
    println!("{} is exported to {to}, {:.1} MB in {}", checkpoint.name(), progress.done as f64 / 1e6, how.dtype);
    Ok(ExitCode::SUCCESS)
}

fn import(from: &str, folder: &str) -> Result<ExitCode> {
    let weights = Weights::open(from)?;
    let store = Arc::new(Store::create(folder)?);
    if let Some(step) = store.steps()?.first() {
        bail!("{folder} has checkpoints already, the newest of step {step}: give another folder");
    }
    let mut progress = Progress::new("imported".to_string(), 0);
    hugging_face::import(&weights, &store, &mut |more| progress.add(more))?;
    progress.end();
    println!("{from} is imported as {}, {:.1} MB", store.display(&folder_of(0)), progress.done as f64 / 1e6);
    Ok(ExitCode::SUCCESS)
}

/// Elements that are compared at once.
const COMPARED: u64 = 1 << 20;

/// What a checkpoint has of each tensor: its unit and its shape.
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
        let (mut count, mut most) = (0u64, 0f32);
        let len = elements(shape).unwrap_or(0);
        for from in (0..len).step_by(COMPARED as usize) {
            let range = from..len.min(from + COMPARED);
            let room = || vec![0f32; (range.end - range.start) as usize];
            let (mut a, mut b) = (room(), room());
            reader.read_f32(name, shape, range.clone(), &mut a)?;
            other.read_f32(name, shape, range.clone(), &mut b)?;
            for (a, b) in a.iter().zip(&b).filter(|(a, b)| a.to_bits() != b.to_bits()) {
                count += 1;
                most = most.max((a - b).abs());
            }
            progress.add(4 * (range.end - range.start));
        }
        if count > 0 {
            println!("{name}: {count} of {len} elements differ, by at most {most:e}");
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

/// A line that says how far long work is, where somebody looks at it.
struct Progress {
    what: String,
    /// Of how many bytes; 0 where that is not known.
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
