//! Shardwise's side of the comparison with its peers: `mpirun -n 2 bench-train SIDE RECIPE`.
//!
//! SIDE is stage-0 to stage-3, or bare: the same model in bare libtorch, with no word between the ranks. Prints a line of JSON
//! for each step, and one at the end; `bench/peers/train.py` prints the same. `bench-train weights RECIPE` writes the file
//! that the recipe names as its weights, so that all sides begin alike.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use rustix::time::{ClockId, clock_gettime};
use serde_json::json;
use shardwise_comm::{Group, Reduce, mpi};
use shardwise_model::Batch;
use shardwise_torch::exclusive;
use shardwise_torch::tch::{Device, Kind, Tensor};
use shardwise_train::data::Data;
use shardwise_train::start::{Weights, from_seed};
use shardwise_train::{Ranks, Recipe, Trainer};
use shardwise_zero::Optimizer;

mod bare;
use bare::Bare;

const USAGE: &str = "usage: mpirun -n RANKS bench-train bare|stage-0|stage-1|stage-2|stage-3|weights RECIPE";

/// One of the sides.
enum Side {
    Bare(Box<Bare>),
    Stage(Box<Trainer>),
}

impl Side {
    fn new(name: &str, recipe: &mut Recipe, world: &Arc<Group>) -> Result<Self> {
        let path = recipe.start.weights.clone().context("the recipe names no weights")?;
        let weights = Weights::open(&path).map_err(anyhow::Error::from_boxed)?;
        let mut read = |parameter: &_, range, elements: &mut [f32]| weights.read(parameter, range, elements);
        if let Some(stage) = name.strip_prefix("stage-") {
            recipe.sharding.stage = stage.parse().context(USAGE)?;
            let (ranks, options) = (Ranks::sharded(world.clone()), recipe.options(Device::Cpu)?);
            return Ok(Side::Stage(Box::new(Trainer::new(recipe.model()?, ranks, options, &mut read)?)));
        }
        let options = recipe.options(Device::Cpu)?;
        let Optimizer::AdamW(adamw) = options.optimizer.at(recipe.optimizer.rate, None) else {
            bail!("bare is AdamW's")
        };
        Ok(Side::Bare(Box::new(Bare::new(recipe.model()?, options.precision.parameters, adamw, &mut read)?)))
    }

    /// One step, and the mean loss of a token: on all ranks, or on this one where no word goes between them.
    fn step(&mut self, micro_batches: &[Batch]) -> Result<f64> {
        match self {
            Side::Bare(bare) => bare.step(&micro_batches[0]),
            Side::Stage(trainer) => Ok(trainer.step(micro_batches)?.loss),
        }
    }
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [name, path] = &arguments[..] else { bail!(USAGE) };
    let mut recipe = Recipe::read(Path::new(path))?;
    if name == "weights" {
        return write_weights(&recipe);
    }
    shardwise_torch::keep_freed_memory();
    let world = Arc::new(mpi::world(mpi::Options::default())?);
    let mut side = Side::new(name, &mut recipe, &world)?;
    let data = Data::open(&recipe)?;
    let launched: f64 = std::env::var("SHARDWISE_LAUNCHED").context("SHARDWISE_LAUNCHED")?.parse()?;
    let ready_s = all(&world, Reduce::Max, SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64() - launched)?;
    let say = |line: serde_json::Value| {
        if world.rank() == 0 {
            println!("{line}");
        }
    };
    for step in 1..=recipe.run.steps {
        let micro_batches = data.step(step, world.rank(), world.size())?;
        world.barrier("start").wait()?;
        world.meter().reset();
        let calls_before = world.record().read().last().map_or(Duration::ZERO, |call| call.queued);
        let (started, cpu_started) = (Instant::now(), cpu());
        let loss = side.step(&micro_batches)?;
        let (seconds, cpu_s) = (started.elapsed().as_secs_f64(), (cpu() - cpu_started).as_secs_f64());
        let sent = world.meter().total(|_| true).bytes as f64;
        let calls = world.record().read().into_iter().filter(|call| call.queued > calls_before);
        let (talked, waited) = calls.fold((0., 0.), |(talked, waited), call| {
            let took = call.ended.zip(call.started).map_or(0., |(ended, started)| (ended - started).as_secs_f64());
            (talked + took, waited + call.waited.map_or(0., |waited| waited.as_secs_f64()))
        });
        let mean = |figure: f64| Ok::<f64, anyhow::Error>(all(&world, Reduce::Sum, figure)? / world.size() as f64);
        say(json!({
            "step": step, "loss": mean(loss)?, "seconds": all(&world, Reduce::Max, seconds)?, "cpu_seconds": mean(cpu_s)?,
            "sent_bytes": mean(sent)?, "talked_seconds": mean(talked)?, "waited_seconds": mean(waited)?,
        }));
    }
    let peak = all(&world, Reduce::Max, kernel_bytes("/proc/self/status", "VmHWM:")?)?;
    let pss = all(&world, Reduce::Max, kernel_bytes("/proc/self/smaps_rollup", "Pss:")?)?;
    say(json!({ "ready_seconds": ready_s, "peak_bytes": peak, "pss_bytes": pss }));
    Ok(())
}

/// What all ranks say together.
fn all(world: &Group, reduce: Reduce, figure: f64) -> Result<f64> {
    Ok(world.all_reduce("figure", reduce, vec![figure]).wait()?[0])
}

/// The time that this process's threads have spent computing.
fn cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// A figure of this process's, as the system counts it.
fn kernel_bytes(file: &str, key: &str) -> Result<f64> {
    let text = std::fs::read_to_string(file).with_context(|| file.to_string())?;
    let line = text.lines().find(|line| line.starts_with(key)).with_context(|| format!("{file} has no {key}"))?;
    let kib: f64 = line.split_whitespace().nth(1).context("a figure")?.parse()?;
    Ok(kib * 1024.)
}

fn write_weights(recipe: &Recipe) -> Result<()> {
    let model = recipe.model()?;
    let mut begin = from_seed(1);
    let mut tensors = Vec::new();
    for parameter in model.units().iter().flat_map(|unit| unit.parameters()) {
        let mut tensor = Tensor::zeros(&parameter.shape[..], (Kind::Float, Device::Cpu));
        begin(parameter, 0..parameter.elements(), exclusive::<f32>(&mut tensor)?).map_err(anyhow::Error::from_boxed)?;
        tensors.push((&parameter.name, tensor));
    }
    let path = recipe.start.weights.as_ref().context("the recipe names no weights")?;
    Tensor::write_safetensors(&tensors, path)?;
    Ok(())
}
