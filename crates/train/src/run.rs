//! A run: the loop around the step, and what it prints.

use std::fmt;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use shardwise_checkpoint::Store;
use shardwise_checkpoint::hugging_face::Weights;
use shardwise_comm::{Group, Reduce};
use shardwise_model::Model;
use shardwise_model::init::mixed;
use shardwise_torch::tch::Device;

use crate::data::{Data, HeldOut};
use crate::fit::gib;
use crate::plot::Range;
use crate::recipe::{DeviceRecipe, Recipe};
use crate::resume::resumed;
use crate::saving::{Next, Saver, about, agreed};
use crate::start::{from_seed, from_weights};
use crate::trained::figures;
use crate::{Asked, Error, Kind, Options, Ranks, Report, Result, Trainer};

/// What is printed for a step.
#[derive(Clone, Debug)]
pub struct Line {
    /// What the step did.
    pub report: Report,
    /// Of how many steps.
    pub steps: u64,
    /// Tokens that all ranks together trained on, per second.
    pub tokens_per_s: f64,
    /// Resident memory of the rank that has the most, now.
    pub memory_bytes: usize,
    /// And the most that a rank ever had.
    pub memory_peak_bytes: usize,
    /// What the rank that sent the most has sent in this step.
    pub sent_bytes: usize,
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { step, loss, gradient_norm, rate, .. } = self.report;
        write!(
            f,
            "step {step:>width$}/{}  loss {loss:.4}  norm {gradient_norm:.3}  rate {rate:.2e}  {:.0} tokens/s  \
             memory {} (peak {})  sent {:.1} MB",
            self.steps,
            self.tokens_per_s,
            gib(self.memory_bytes),
            gib(self.memory_peak_bytes),
            self.sent_bytes as f64 / 1e6,
            width = self.steps.to_string().len(),
        )?;
        if self.report.loss_scale != 1. {
            write!(f, "  scale {}", self.report.loss_scale)?;
        }
        if self.report.skipped_so_far > 0 {
            write!(f, "  skipped {}", self.report.skipped_so_far)?;
        }
        if let Some(fault) = &self.report.skipped {
            write!(f, "\n  skipped: {fault}")?;
        }
        Ok(())
    }
}

/// Runs a recipe, and does what it is asked for meanwhile. The first rank prints to `out`.
pub fn run(recipe: &Recipe, world: &Arc<Group>, asked: &Asked, out: &mut dyn Write) -> Result<()> {
    let (ranks, options) = placed(recipe, world.clone())?;
    let data = Data::open(recipe, world.size())?;
    let model = recipe.model()?;
    let say = |out: &mut dyn Write, text: &dyn fmt::Display| {
        if world.rank() == 0 {
            // Whoever reads the output may be gone; the run goes on.
            drop(writeln!(out, "{text}").and_then(|()| out.flush()));
        }
    };
    say(out, &heading(recipe, &options, model.elements(), &ranks)?);
    data.heading().iter().for_each(|heading| say(out, heading));
    let held_out = recipe.evaluation.as_ref().map(|held_out| HeldOut::of(recipe, held_out)).transpose()?;
    let order = data.order(world.size());
    same_everywhere(world, &format!("{order}{:?}", held_out.as_ref().map(HeldOut::about)))?;
    let store = recipe.checkpoints.as_ref().map(|checkpoints| opened(&checkpoints.folder, world)).transpose()?;
    let found = match &store {
        Some(store) => resumed(recipe, &order, store, &ranks, options, &mut |text| say(out, &text))?,
        None => None,
    };
    let mut trainer = match found {
        Some(trainer) => trainer,
        None => begun(recipe, model, ranks, options)?,
    };
    let first = trainer.progress().step + 1;
    let about = about(recipe, order);
    let mut saver = store
        .zip(recipe.checkpoints.clone())
        .map(|(store, checkpoints)| Saver::new(store, world.clone(), checkpoints, about, asked.clone(), first - 1));
    if first > recipe.run.steps {
        say(out, &format!("there is nothing left to do: run.steps is {}", recipe.run.steps));
    }
    let is_range_test = matches!(options.schedule.kind, Kind::RangeTest { .. });
    let mut range = Range::default();
    let mut meter = Meter::new(world);
    for step in first..=recipe.run.steps {
        let micro_batches = meter.loading(|| data.step(step, world.rank(), world.size()))?;
        let report = match trainer.step(&micro_batches) {
            // A range test ends where numbers do: that is what it is for.
            Err(Error::NotFinite { step, fault }) if is_range_test => {
                say(out, &format!("step {step}: {fault}; the test ends here"));
                break;
            }
            // What was to be saved before is still worth having.
            Err(error) if error.is_everyones() => {
                if let Some(saver) = &mut saver {
                    saver.finish(&mut |text| say(out, &text))?;
                }
                return Err(error);
            }
            report => report?,
        };
        meter.tokens += report.tokens;
        range.add(report.rate, report.loss);
        let printed = step % recipe.run.print_every == 0 || step == recipe.run.steps || report.skipped.is_some();
        if printed {
            say(out, &meter.line(report, recipe.run.steps)?);
        }
        if let Some(held_out) = held_out.as_ref().filter(|held_out| held_out.is_due(step, recipe.run.steps)) {
            let sequences = recipe.batch(world.size())?.sequences;
            let figures = meter.apart(|| figures(&mut trainer, held_out, sequences))?;
            say(out, &format!("held out after step {step}: {figures}"));
        }
        if let Some(saver) = &mut saver {
            let last = step == recipe.run.steps;
            if saver.after_step(&mut trainer, last, &mut |text| say(out, &text))? == Next::End {
                say(out, &format!("ends after step {step}, as it was asked to"));
                break;
            }
        }
        meter.sent_before = sent_bytes(world);
    }
    if first <= recipe.run.steps {
        say(out, &format!("data took {:.3}% of the time", 100. * meter.share_of_loading()?));
    }
    if let Some(why) = saver.and_then(Saver::given_up) {
        return Err(Error::Checkpoint(format!("the last checkpoint is not saved: {why}")));
    }
    if is_range_test && world.rank() == 0 {
        say(out, &range.verdict());
        if let Some(path) = &recipe.schedule.plot {
            let fail =
                |problem: Box<dyn std::error::Error>| Error::Data { path: path.clone(), problem: problem.to_string() };
            range.plot(path).map_err(fail)?;
            say(out, &format!("plot: {}", path.display()));
        }
    }
    Ok(())
}

/// What a run counts between the lines that it prints.
struct Meter<'a> {
    world: &'a Group,
    began: Instant,
    loading: Duration,
    /// Since the last line, or later by what was not training.
    since: Instant,
    /// Since the last line.
    tokens: u64,
    /// Before this step.
    sent_before: usize,
}

impl<'a> Meter<'a> {
    fn new(world: &'a Group) -> Self {
        let now = Instant::now();
        Meter { world, began: now, loading: Duration::ZERO, since: now, tokens: 0, sent_before: sent_bytes(world) }
    }

    /// Notes how long data takes.
    fn loading<T>(&mut self, load: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let loaded = load();
        self.loading += began.elapsed();
        loaded
    }

    /// Leaves work that is not training out of the tokens per second.
    fn apart<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let done = work();
        self.since += began.elapsed();
        done
    }

    /// The line for a step; all ranks call it together.
    fn line(&mut self, report: Report, steps: u64) -> Result<Line> {
        let sent = sent_bytes(self.world) - self.sent_before;
        let own = [memory_bytes("VmRSS:"), memory_bytes("VmHWM:"), sent].map(|number| number as i64);
        let most = self.world.all_reduce("memory and traffic", Reduce::Max, own.to_vec()).wait()?;
        let tokens_per_s = self.tokens as f64 / self.since.elapsed().as_secs_f64();
        (self.since, self.tokens) = (Instant::now(), 0);
        let [memory_bytes, memory_peak_bytes, sent_bytes] = [most[0], most[1], most[2]].map(|bytes| bytes as usize);
        Ok(Line { report, steps, tokens_per_s, memory_bytes, memory_peak_bytes, sent_bytes })
    }

    /// The part of the time that data took, on the rank where it was the most.
    fn share_of_loading(&self) -> Result<f64> {
        let share = self.loading.as_secs_f64() / self.began.elapsed().as_secs_f64().max(1e-9);
        let most = self.world.all_reduce("time for data", Reduce::Max, vec![(share * 1e9) as i64]).wait()?[0];
        Ok(most as f64 / 1e9)
    }
}

/// Files are each host's own: where they differ, ranks would train on something else than they say.
pub(crate) fn same_everywhere(world: &Group, about: &str) -> Result<()> {
    let own = about.bytes().fold(0u64, |hash, byte| mixed(hash ^ u64::from(byte))) as i64;
    let first = world.broadcast("data", 0, vec![own]).wait()?[0];
    let differs = "its corpora or checkpoints are not those of rank 0: give all hosts the same files".to_string();
    agreed(world, if own == first { Ok(()) } else { Err(differs) })?.map_err(Error::Options)
}

/// The place for checkpoints, which every rank can reach or none uses.
pub(crate) fn opened(folder: &str, world: &Group) -> Result<Arc<Store>> {
    let store = Store::create(folder).map(Arc::new).map_err(|error| error.to_string());
    agreed(world, store)?.map_err(Error::Checkpoint)
}

/// A trainer whose parameters begin as the recipe says.
pub(crate) fn begun(recipe: &Recipe, model: Model, ranks: Ranks, options: Options) -> Result<Trainer> {
    let Some(address) = recipe.weights() else {
        return Trainer::new(model, ranks, options, &mut from_seed(recipe.start.seed.unwrap_or(1)));
    };
    let weights = Weights::open(address).map_err(|error| error.to_string());
    let weights = agreed(&ranks.world, weights)?.map_err(Error::Checkpoint)?;
    Trainer::new(model, ranks, options, &mut from_weights(&weights))
}

/// The groups, and the options with the device of this rank.
pub(crate) fn placed(recipe: &Recipe, world: Arc<Group>) -> Result<(Ranks, Options)> {
    match recipe.run.device {
        DeviceRecipe::Cpu => Ok((Ranks::hybrid(world, recipe.sharding.replicas)?, recipe.options(Device::Cpu)?)),
        DeviceRecipe::Cuda => on_gpu(recipe, world),
    }
}

#[cfg(feature = "cuda")]
fn on_gpu(recipe: &Recipe, world: Arc<Group>) -> Result<(Ranks, Options)> {
    let local = ["OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"];
    let device = local.iter().find_map(|name| std::env::var(name).ok()?.parse().ok()).unwrap_or(0);
    let ranks = Ranks::on_gpu(world, recipe.sharding.replicas, device)?;
    Ok((ranks, recipe.options(Device::Cuda(device))?))
}

#[cfg(not(feature = "cuda"))]
fn on_gpu(_: &Recipe, _: Arc<Group>) -> Result<(Ranks, Options)> {
    Err(Error::Options(crate::recipe::NO_CUDA.to_string()))
}

/// What is about to happen, with the type of everything that is reduced.
fn heading(recipe: &Recipe, options: &Options, elements: usize, ranks: &Ranks) -> Result<String> {
    let tokens = recipe.batch(ranks.world.size())?.global * recipe.batch.positions;
    Ok(format!(
        "{:.1} million parameters, stage {} on {} ranks ({} × {}), {tokens} tokens a step\n\
         parameters in {}; gradients kept and reduced in {}, summed in f32; loss and norm in f64; masters and optimizer in f32",
        elements as f64 / 1e6,
        recipe.sharding.stage,
        ranks.world.size(),
        ranks.groups.replicate.size(),
        ranks.groups.shard.size(),
        options.precision.parameters,
        options.precision.gradients,
    ))
}

fn sent_bytes(world: &Group) -> usize {
    world.meter().total(|_| true).bytes as usize
}

/// A figure of this process's, as the system counts it.
fn memory_bytes(key: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with(key));
    line.and_then(|line| line.split_whitespace().nth(1)?.parse::<usize>().ok()).map_or(0, |kib| kib << 10)
}
