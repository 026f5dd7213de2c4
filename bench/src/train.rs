//! Shardwise's side of the comparison with other frameworks: `mpirun -n 2 bench-train SIDE RECIPE`.
//!
//! SIDE is stage-0 to stage-3, or bare: the same model in bare libtorch, without communication. Steps run back to back, as in
//! training: a step waits for communication that the previous one left running. Prints a line of JSON for each step, and one at
//! the end; `bench/peers/train.py` prints the same. `bench-train weights RECIPE` writes the weights file that the recipe names,
//! so that all sides start from the same weights; `bench-train config RECIPE` prints the model's Hugging Face config.
//!
//! With `--tensor T`, T consecutive ranks share each layer, with sequence parallelism, and read the same batch. The side 'bare'
//! shares nothing, but reads that batch too.
//!
//! With `--pipeline P`, P ranks hold the stages of a pipeline with the schedule of `--schedule`, and read the same batch; 'bare'
//! trains the whole model on it. `bench-train split-points RECIPE` with these arguments prints the units with which the chunks
//! after the first begin, so that all sides cut the model alike.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;
use shardwise_checkpoint::hugging_face::Weights;
use shardwise_comm::{Entry, Group, ReduceOp, mpi};
use shardwise_model::Batch;
use shardwise_plan::FloatsMut;
use shardwise_recipe::Recipe;
use shardwise_run::build;
use shardwise_run::data::Data;
use shardwise_torch::exclusive;
use shardwise_torch::tch::{Device, Kind, Tensor};
use shardwise_train::init::{from_seed, from_weights};
use shardwise_train::{Ranks, Trainer};
use shardwise_zero::Optimizer;

mod bare;
use bare::{Bare, cpu};
mod process;
use process::kernel_bytes;

const USAGE: &str = "usage: mpirun -n RANKS bench-train bare|stage-0|stage-1|stage-2|stage-3|weights|config|split-points RECIPE [each] \
                     [--tensor T] [--pipeline P] [--schedule SCHEDULE]";

/// The arguments of the command line.
struct Arguments {
    side: String,
    recipe: PathBuf,
    new_batch_each_step: bool,
    /// The number of ranks that share each layer.
    tensor: usize,
    /// The number of stages of a pipeline.
    pipeline: usize,
    /// The schedule of the pipeline, if it is not the recipe's.
    schedule: Option<String>,
}

impl Arguments {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self> {
        let (side, recipe) = arguments.next().zip(arguments.next()).context(USAGE)?;
        let recipe = recipe.into();
        let mut parsed = Arguments { side, recipe, new_batch_each_step: false, tensor: 1, pipeline: 1, schedule: None };
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "each" => parsed.new_batch_each_step = true,
                "--tensor" => parsed.tensor = arguments.next().and_then(|tensor| tensor.parse().ok()).context(USAGE)?,
                "--pipeline" => {
                    parsed.pipeline = arguments.next().and_then(|stages| stages.parse().ok()).context(USAGE)?
                }
                "--schedule" => parsed.schedule = Some(arguments.next().context(USAGE)?),
                _ => bail!(USAGE),
            }
        }
        Ok(parsed)
    }
}

/// A side of the comparison.
enum Side {
    Bare(Box<Bare>),
    Stage(Box<Trainer>),
}

impl Side {
    fn new(name: &str, recipe: &mut Recipe, world: &Arc<Group>) -> Result<Self> {
        let path = recipe.init.weights.clone().context("the recipe names no weights")?;
        let weights = Weights::open(&path)?;
        let mut read = from_weights(&weights);
        if let Some(stage) = name.strip_prefix("stage-") {
            recipe.zero.stage = stage.parse().context(USAGE)?;
            let ranks = Ranks::on_mesh(world.clone(), recipe.mesh(world.size())?)?;
            let options = build::options(recipe, Device::Cpu)?;
            return Ok(Side::Stage(Box::new(Trainer::new(build::model(recipe)?, ranks, options, &mut read)?)));
        }
        ensure!(name == "bare", USAGE);
        let options = build::options(recipe, Device::Cpu)?;
        let Optimizer::AdamW(adamw) = options.optimizer.with_lr(recipe.optimizer.lr, None) else {
            bail!("the side 'bare' supports only AdamW")
        };
        Ok(Side::Bare(Box::new(Bare::new(build::model(recipe)?, options.precision.param_dtype, adamw, &mut read)?)))
    }

    /// Takes one step, and returns the mean loss per token: over all ranks, or on this rank for bare libtorch.
    fn step(&mut self, micro_batches: &[Batch]) -> Result<f64> {
        match self {
            Side::Bare(bare) => bare.step(micro_batches),
            Side::Stage(trainer) => Ok(trainer.step(micro_batches)?.loss),
        }
    }

    /// The CPU time of all updates so far; 0 if it is not measured.
    fn optimizer_cpu(&self) -> Duration {
        match self {
            Side::Bare(bare) => bare.optimizer_cpu,
            Side::Stage(_) => Duration::ZERO,
        }
    }
}

fn main() -> Result<()> {
    let Arguments { side, recipe, new_batch_each_step, tensor, pipeline, schedule } =
        Arguments::parse(std::env::args().skip(1))?;
    let mut recipe = Recipe::read(&recipe)?;
    recipe.parallel.tensor = tensor;
    recipe.parallel.pipeline = pipeline;
    if let Some(schedule) = schedule {
        recipe.parallel.pipeline_schedule = schedule;
    }
    match side.as_str() {
        "weights" => return write_weights(&recipe),
        "split-points" => return print_split_points(&recipe),
        "config" => {
            println!("{}", recipe.config().context("the model has no Hugging Face config")?);
            return Ok(());
        }
        _ => (),
    }
    shardwise_torch::enable_caching_allocator();
    let world = Arc::new(mpi::world(mpi::Options::default())?);
    recipe.mesh(world.size())?;
    // The ranks that share layers, and those of a pipeline, read the same samples. The stages are the outermost axis of the mesh.
    let stage_ranks = world.size() / pipeline;
    let (data_rank, data_ranks) = (world.rank() % stage_ranks / tensor, stage_ranks / tensor);
    let mut side = Side::new(&side, &mut recipe, &world)?;
    let launched: f64 = variable("SHARDWISE_LAUNCHED")?;
    let ready_s = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64() - launched;
    let data = Data::open(&recipe, world.size())?;
    let (steps, warm_up) = (recipe.run.steps as usize, variable::<usize>("SHARDWISE_WARM_UP")?);
    // By default every step uses the same batch: the loss then changes so fast that differences between the sides show. With
    // `each`, every step uses a new batch, as in a run: a memorized batch has other numbers, and another speed.
    let mut micro_batches = data.step(1, data_rank, data_ranks)?;
    // Reset the peak, so that only training is measured.
    std::fs::write("/proc/self/clear_refs", "5").context("/proc/self/clear_refs")?;

    let mut losses = (0..warm_up).map(|_| side.step(&micro_batches)).collect::<Result<Vec<f64>>>()?;
    world.barrier("start").wait()?;
    world.meter().reset();
    let calls_before = world.flight_recorder().read().len();
    let (started, cpu_started) = (Instant::now(), cpu());
    for step in warm_up..steps {
        if new_batch_each_step {
            micro_batches = data.step(step as u64 + 1, data_rank, data_ranks)?;
        }
        losses.push(side.step(&micro_batches)?);
        if world.rank() == 0 {
            println!("step {}/{steps}", step + 1);
        }
    }
    world.barrier("end").wait()?;
    let per_step = 1. / (steps - warm_up) as f64;
    let (seconds, cpu_s) = (started.elapsed().as_secs_f64() * per_step, (cpu() - cpu_started).as_secs_f64() * per_step);
    let sent = world.meter().total(|_| true).bytes as f64 * per_step;
    let (talked, waited) = call_seconds(&world.flight_recorder().read()[calls_before..]);

    let greatest = |figure: f64| all(&world, ReduceOp::Max, figure);
    let mean = |figure: f64| Ok::<f64, anyhow::Error>(all(&world, ReduceOp::Sum, figure)? / world.size() as f64);
    let print = |line: serde_json::Value| {
        if world.rank() == 0 {
            println!("{line}");
        }
    };
    for (step, &loss) in losses.iter().enumerate() {
        print(json!({ "step": step + 1, "loss": mean(loss)? }));
    }
    print(json!({
        "ready_seconds": greatest(ready_s)?,
        "step_seconds": greatest(seconds)?,
        "cpu_seconds": mean(cpu_s)?,
        "optimizer_cpu_seconds": mean(side.optimizer_cpu().as_secs_f64() / steps as f64)?,
        "sent_bytes": mean(sent)?,
        "talked_seconds": mean(talked * per_step)?,
        "waited_seconds": mean(waited * per_step)?,
        "peak_bytes": greatest(kernel_bytes("/proc/self/status", "VmHWM:")?)?,
        "pss_bytes": greatest(kernel_bytes("/proc/self/smaps_rollup", "Pss:")?)?,
    }));
    Ok(())
}

/// The total duration of calls, including time spent waiting for late ranks, and how long this rank was blocked by them.
fn call_seconds(entries: &[Entry]) -> (f64, f64) {
    entries.iter().fold((0., 0.), |(talked, waited), call| {
        let took = call.ended.zip(call.started).map_or(Duration::ZERO, |(ended, started)| ended - started);
        let blocked = call.waited.unwrap_or_default().min(took);
        (talked + took.as_secs_f64(), waited + blocked.as_secs_f64())
    })
}

fn variable<T: std::str::FromStr>(name: &str) -> Result<T> {
    let text = std::env::var(name).with_context(|| format!("{name} is not set"))?;
    text.parse().ok().with_context(|| format!("{name} is '{text}'"))
}

/// Reduces a figure over all ranks.
fn all(world: &Group, reduce: ReduceOp, figure: f64) -> Result<f64> {
    Ok(world.all_reduce("figure", reduce, vec![figure]).wait()?[0])
}

fn write_weights(recipe: &Recipe) -> Result<()> {
    let model = build::model(recipe)?;
    let mut init = from_seed(1);
    let mut tensors = Vec::new();
    for parameter in model.units().iter().flat_map(|unit| unit.parameters()) {
        let mut tensor = Tensor::zeros(&parameter.shape[..], (Kind::Float, Device::Cpu));
        let elements = FloatsMut::F32(exclusive(&mut tensor)?);
        init(parameter, 0..parameter.elements(), elements).map_err(anyhow::Error::from_boxed)?;
        // The matrices of all experts are one parameter; files have one for each expert.
        match parameter.name.contains('*') {
            true => tensors.extend(
                tensor
                    .unbind(0)
                    .into_iter()
                    .enumerate()
                    .map(|(e, one)| (parameter.name.replace('*', &e.to_string()), one)),
            ),
            false => tensors.push((parameter.name.clone(), tensor)),
        }
    }
    let path = recipe.init.weights.as_ref().context("the recipe names no weights")?;
    Tensor::write_safetensors(&tensors, path)?;
    Ok(())
}

/// Prints the units with which the chunks of the pipeline after the first begin, separated by commas.
fn print_split_points(recipe: &Recipe) -> Result<()> {
    let model = build::model(recipe)?;
    let chunks =
        build::options(recipe, Device::Cpu)?.pipeline_chunks.context("no pipeline, or too few units for its chunks")?;
    let names: Vec<&str> = chunks[1..].iter().map(|units| model.units()[units.start].name()).collect();
    println!("{}", names.join(","));
    Ok(())
}
