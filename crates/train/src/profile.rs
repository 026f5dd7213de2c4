//! A profile: a few steps of a recipe, traced, beside what the machine can do, and the changes that would help most.
//!
//! A change of the recipe is proposed for what the trace says of it, and then tried: its gain is the time of real steps. What cannot
//! be tried (faster hosts, a faster disk) has its gain from the trace. Nothing is saved and nothing goes on from here.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;
use shardwise_comm::{Group, Reduce};
use shardwise_journal::Profile;
use shardwise_journal::spans::Trace;
use shardwise_plan::Dtype;
use shardwise_torch::tch::Device;

use crate::changes::{Candidate, Facts, candidates, estimated_s, standing};
use crate::data::Data;
use crate::fit::limit;
use crate::host;
use crate::meter::resident_bytes;
use crate::peak::flops_per_s;
use crate::position::{Phase, Position};
use crate::recipe::Recipe;
use crate::run::{begun, placed};
use crate::trace::{PlannedTrace, TracedSteps, Tracer};
use crate::{Asked, Error, Result, Trainer};

/// Steps before the first that counts.
const WARM_UP: u64 = 2;

/// How many changes are tried, and by how many steps.
const TRIES: usize = 4;
const STEPS_OF_A_TRY: u64 = 3;

/// A step that takes longer is not made just to try something.
const TRIED_STEP_S_MAX: f64 = 30.;

/// How many changes are named.
const NAMED: usize = 3;

/// What is to be profiled, and how.
#[derive(Clone, Debug)]
pub struct Profiling {
    /// How many steps are traced.
    pub steps: u64,
    /// Whether changes are tried.
    pub tries: bool,
    /// Where the trace is left.
    pub folder: PathBuf,
    /// The ranks on this host.
    pub ranks_here: usize,
}

/// What came out.
#[derive(Clone, Debug, Serialize)]
pub struct Profiled {
    /// How many ranks.
    pub ranks: usize,
    /// On how many hosts.
    pub hosts: usize,
    /// The ZeRO stage.
    pub stage: u8,
    /// The type in which units compute.
    pub precision: String,
    /// How many parameters.
    pub parameters: u64,
    /// Tokens of a step, on all ranks.
    pub tokens: u64,
    /// A step as the loop's clock has it, the mean of the traced ones.
    pub step_s: f64,
    /// The least of them and of some that were made last, which changes are compared with: others at work on the machine make steps
    /// longer, and none shorter.
    pub least_step_s: f64,
    /// What the trace says.
    pub profile: Profile,
    /// The model's own arithmetic in a step, on all ranks, without what recomputation makes again.
    pub flops: f64,
    /// What all ranks together reach in a large matrix product, in the type in which units compute.
    pub peak_flops_per_s: f64,
    /// What a rank sends in a second of a large gather, in which all ranks take part.
    pub peak_bytes_per_s: f64,
    /// What the shortest call between all ranks takes.
    pub latency_s: f64,
    /// The most memory that a rank had.
    pub memory_peak_bytes: usize,
    /// What it may have, where that is known.
    pub memory_limit_bytes: Option<usize>,
    /// The trace.
    pub trace: PathBuf,
    /// The changes most likely to help, the best first.
    pub changes: Vec<Change>,
}

/// A change that would help.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Change {
    /// What it is about: `data`, `link`, `micro-batch`, `slow rank`, …
    pub cause: &'static str,
    /// What to change, as one would write it.
    pub change: String,
    /// Why.
    pub why: String,
    /// What a step takes, or would with as many tokens, after the change.
    pub step_s: f64,
    /// How many times as fast that is.
    pub gain: f64,
    /// Whether it was tried, and not estimated.
    pub tried: bool,
}

/// Profiles a recipe. All ranks call it together; the first one has the answer.
pub fn profile(
    recipe: &Recipe,
    world: &Arc<Group>,
    position: &Arc<Position>,
    profiling: &Profiling,
) -> Result<Option<Profiled>> {
    let mut recipe = recipe.clone();
    (recipe.checkpoints, recipe.evaluation) = (None, None);
    recipe.run.steps = recipe.run.steps.max(WARM_UP + profiling.steps);
    let base = traced(&recipe, world, position, profiling)?;
    let machine = Machine::measured(&recipe, world)?;
    let hosts = hosts(world)?;
    let room = limit(profiling.ranks_here, resident_bytes("VmRSS:") as usize).map(|limit| limit.bytes);
    // What fits on one rank's host may not on another's.
    let room = room.map_or(i64::MAX, |bytes| bytes as i64);
    let room = -world.all_reduce("room", Reduce::Max, vec![-room]).wait()?[0] as usize;
    let changes = candidates(&recipe, world.size(), hosts, room)?;
    let peak = world.all_reduce("memory", Reduce::Max, vec![resident_bytes("VmHWM:") as i64]).wait()?[0] as usize;
    let tokens = recipe.batch(world.size())?.global * recipe.batch.positions;
    let mut profiled = base.map(|base| Profiled {
        ranks: world.size(),
        hosts,
        stage: recipe.sharding.stage,
        precision: machine.dtype.to_string(),
        parameters: base.parameters as u64,
        tokens: tokens as u64,
        step_s: base.step_s,
        least_step_s: base.least_step_s,
        profile: base.profile,
        flops: base.flops_per_token * tokens as f64,
        peak_flops_per_s: machine.flops_per_s,
        peak_bytes_per_s: machine.bytes_per_s,
        latency_s: machine.latency_s,
        memory_peak_bytes: peak,
        memory_limit_bytes: (room < i64::MAX as usize).then_some(room),
        trace: base.trace,
        changes: Vec::new(),
    });
    let facts = profiled.as_ref().map(|profiled| facts(profiled, &recipe, &machine));
    let mut times = Vec::new();
    for index in chosen(world, &changes, facts.as_ref(), profiling.tries)? {
        times.push((&changes[index], timed(&changes[index].recipe, world, position)? / changes[index].tokens));
    }
    // The machine may be less disturbed, or more, than when it began.
    let again = if times.is_empty() { f64::INFINITY } else { timed(&recipe, world, position)? };
    let facts = facts.map(|facts| Facts { step_s: facts.step_s.min(again), ..facts });
    let mut found = Vec::new();
    if let Some(facts) = &facts {
        found = standing(facts);
        found.extend(times.iter().map(|(candidate, step_s)| candidate.as_change(facts, *step_s)));
    }
    let least_step_s = facts.map_or(0., |facts| facts.step_s);
    if let Some(profiled) = &mut profiled {
        found.retain(|change| change.gain >= if change.tried { 1.03 } else { 1.05 });
        found.sort_by(|a, b| b.gain.total_cmp(&a.gain));
        found.truncate(NAMED);
        profiled.least_step_s = least_step_s;
        profiled.changes = found;
    }
    Ok(profiled)
}

/// Which candidates are tried: those that promise most. The first rank decides.
fn chosen(world: &Group, all: &[Candidate], facts: Option<&Facts<'_>>, tries: bool) -> Result<Vec<usize>> {
    let mut places = vec![-1i64; TRIES];
    if let Some(facts) = facts.filter(|facts| tries && facts.step_s < TRIED_STEP_S_MAX) {
        let mut promising: Vec<(f64, usize)> =
            all.iter().enumerate().map(|(index, candidate)| (estimated_s(candidate, facts), index)).collect();
        promising.retain(|(saved, _)| *saved > 0.03 * facts.step_s);
        promising.sort_by(|a, b| b.0.total_cmp(&a.0));
        places.iter_mut().zip(promising).for_each(|(place, (_, index))| *place = index as i64);
    }
    let places = world.broadcast("tries", 0, places).wait()?;
    Ok(places.into_iter().filter_map(|place| usize::try_from(place).ok()).filter(|place| *place < all.len()).collect())
}

fn facts<'a>(profiled: &'a Profiled, recipe: &Recipe, machine: &Machine) -> Facts<'a> {
    let batch = recipe.batch(profiled.ranks).map_or((1, 1), |batch| (batch.sequences, batch.micro_batches));
    Facts {
        profile: &profiled.profile,
        step_s: profiled.least_step_s,
        hosts: profiled.hosts,
        micro_batches: batch.1,
        micro_batch_tokens: batch.0 * recipe.batch.positions,
        arithmetic_s: profiled.flops / profiled.peak_flops_per_s.max(1.),
        other_type: machine.other_flops_per_s / machine.flops_per_s.max(1.),
        threads: machine.threads,
        bytes_per_s: machine.bytes_per_s,
    }
}

/// What the traced steps show, on the first rank.
struct Base {
    profile: Profile,
    step_s: f64,
    least_step_s: f64,
    trace: PathBuf,
    parameters: usize,
    flops_per_token: f64,
}

/// Makes steps of a recipe and traces them.
fn traced(
    recipe: &Recipe,
    world: &Arc<Group>,
    position: &Arc<Position>,
    profiling: &Profiling,
) -> Result<Option<Base>> {
    let (data, mut trainer) = ready(recipe, world, position)?;
    let planned =
        PlannedTrace { steps: Some(TracedSteps(WARM_UP + 1..=WARM_UP + profiling.steps)), ..PlannedTrace::default() };
    let asked = Asked { planned, ..Asked::default() };
    let mut tracer = Tracer::new(world, position, &asked, profiling.folder.clone());
    let (mut times, mut trace) = (Vec::new(), None);
    for step in 1..=WARM_UP + profiling.steps {
        tracer.before_step(&mut trainer)?;
        let began = Instant::now();
        one(&data, &mut trainer, world)?;
        if step > WARM_UP {
            times.push(began.elapsed().as_secs_f64());
        }
        trace = tracer.after_step(&trainer, false)?.or(trace);
    }
    let path = trace.map_or(Err("no step was traced".to_string()), |trace| trace.path).map_err(Error::Options)?;
    if world.rank() != 0 {
        return Ok(None);
    }
    let read = Trace::read(&path).map_err(|error| Error::Options(error.to_string()))?;
    Ok(Some(Base {
        profile: Profile::of(&read),
        step_s: times.iter().sum::<f64>() / times.len().max(1) as f64,
        least_step_s: least(&times),
        trace: path,
        parameters: trainer.model.elements(),
        flops_per_token: trainer.model.flops_per_token(recipe.batch.positions),
    }))
}

fn ready(recipe: &Recipe, world: &Arc<Group>, position: &Arc<Position>) -> Result<(Data, Trainer)> {
    let (ranks, options) = placed(recipe, world.clone())?;
    let data = Data::open(recipe, world.size())?;
    let mut trainer = begun(recipe, recipe.model()?, ranks, options)?;
    trainer.report_to(position.clone());
    Ok((data, trainer))
}

fn one(data: &Data, trainer: &mut Trainer, world: &Group) -> Result<()> {
    trainer.position.enter(Phase::Data);
    let own = data.step(trainer.steps + 1, world.rank(), world.size())?;
    trainer.step(&own).map(drop)
}

/// The least time of a few steps of a recipe, after one that does not count.
fn timed(recipe: &Recipe, world: &Arc<Group>, position: &Arc<Position>) -> Result<f64> {
    let (data, mut trainer) = ready(recipe, world, position)?;
    let mut times = Vec::new();
    for step in 0..=STEPS_OF_A_TRY {
        let began = Instant::now();
        one(&data, &mut trainer, world)?;
        if step > 0 {
            times.push(began.elapsed().as_secs_f64());
        }
    }
    Ok(least(&times))
}

fn least(times: &[f64]) -> f64 {
    times.iter().copied().min_by(f64::total_cmp).unwrap_or(0.)
}

/// On how many hosts the ranks are.
fn hosts(world: &Group) -> Result<usize> {
    let own = host::name().bytes().fold(1u64, |hash, byte| shardwise_model::init::mixed(hash ^ u64::from(byte))) as i64;
    // By the ranks that are the first of their hosts: nothing grows with the world but one gather of a word.
    let (_, mut all) = world.all_gather("hosts", vec![own], vec![0i64; world.size()]).wait()?;
    all.sort_unstable();
    all.dedup();
    Ok(all.len())
}

/// What the machine can do.
struct Machine {
    dtype: Dtype,
    /// All ranks together, in the type in which units compute.
    flops_per_s: f64,
    /// The same in bf16 where that is f32, and in f32 where it is not.
    other_flops_per_s: f64,
    bytes_per_s: f64,
    latency_s: f64,
    /// A better number of threads than there are, and how many times as fast a matrix product is with it.
    threads: Option<(usize, f64)>,
}

/// The most that a gather makes whole, and how long it has to take: what a link lets pass at first says nothing of it.
const GATHER_BYTES_MAX: usize = 64 << 20;
const GATHER_S: f64 = 0.5;

impl Machine {
    fn measured(recipe: &Recipe, world: &Arc<Group>) -> Result<Self> {
        let (ranks, options) = placed(recipe, world.clone())?;
        let (dtype, device) = (options.precision.parameters, options.device);
        let other = if dtype == Dtype::F32 { Dtype::Bf16 } else { Dtype::F32 };
        let product = |dtype: Dtype| flops_per_s(world, dtype, device);
        let (reached, other_flops_per_s) = (product(dtype)?, product(other)?);
        Ok(Machine {
            dtype,
            flops_per_s: reached,
            other_flops_per_s,
            bytes_per_s: gather_rate(&ranks.groups.shard, world, device)?,
            latency_s: latency(world)?,
            threads: threads(world, reached, &|| product(dtype))?,
        })
    }
}

/// Bytes that a rank sends in a second of gathers that grow until they take long enough to be measured.
fn gather_rate(group: &Group, world: &Group, device: Device) -> Result<f64> {
    if group.size() == 1 || device != Device::Cpu {
        return Ok(0.);
    }
    let mut bytes = 1 << 20;
    loop {
        let elements = bytes / 4;
        let part = vec![0f32; group.partition(elements).part_len(group.rank())];
        let whole = vec![0f32; elements];
        world.barrier("gathers").wait()?;
        let began = Instant::now();
        let gathered = group.all_gather("bandwidth", part, whole).wait()?;
        let took = began.elapsed().as_secs_f64();
        drop(gathered);
        let took = world.all_reduce("gathers", Reduce::Max, vec![(took * 1e9) as i64]).wait()?[0] as f64 / 1e9;
        if took > GATHER_S || bytes >= GATHER_BYTES_MAX {
            return Ok(bytes as f64 * (group.size() - 1) as f64 / group.size() as f64 / took.max(1e-9));
        }
        bytes *= 4;
    }
}

fn latency(world: &Group) -> Result<f64> {
    let mut best = f64::INFINITY;
    for _ in 0..10 {
        let began = Instant::now();
        world.all_reduce("latency", Reduce::Sum, vec![0i64]).wait()?;
        best = best.min(began.elapsed().as_secs_f64());
    }
    Ok(best)
}

/// Whether a matrix product is faster with as many threads as the rank has cores to itself.
fn threads(world: &Group, now: f64, product: &dyn Fn() -> Result<f64>) -> Result<Option<(usize, f64)>> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let fair = (cores / host::ranks_here(world.size()).max(1)).max(1);
    let used = shardwise_torch::tch::get_num_threads();
    // All ranks try it, or none does.
    let differs = world.all_reduce("threads", Reduce::Max, vec![i64::from(used != fair as i32)]).wait()?[0] != 0;
    if !differs {
        return Ok(None);
    }
    shardwise_torch::tch::set_num_threads(fair as i32);
    let then = product();
    shardwise_torch::tch::set_num_threads(used);
    let gain = then? / now.max(1.);
    Ok((gain > 1.1).then_some((fair, gain)))
}
