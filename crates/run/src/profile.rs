//! Profiles a recipe: traces a few steps, measures the machine, and recommends the changes that would help most.
//!
//! The trace suggests changes to the recipe, which are then tried: their gain is measured on real steps. The gain of changes that
//! cannot be tried (faster hosts, a faster disk) is estimated from the trace. No checkpoint is saved.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;
use shardwise_comm::{Group, ReduceOp};
use shardwise_journal::Profile;
use shardwise_journal::spans::Trace;
use shardwise_plan::Dtype;
use shardwise_plan::program::{Layout, ModelParallel, UnitSpec};
use shardwise_recipe::Recipe;
use shardwise_torch::tch::Device;
use shardwise_train::Trainer;
use shardwise_zero::Moved;

use crate::advice::{Candidate, Facts, Recommendation, candidates, recommend_outside_recipe, simulate_saving_s};
use crate::build;
use crate::build::step_shape;
use crate::data::Data;
use crate::device_counts::{DeviceCounts, count_step};
use crate::error::{Error, Result};
use crate::host;
use crate::memory_estimate::{MemoryEstimate, StepMemory, simulate_memory};
use crate::memory_limit::{MemoryLimit, memory_now_and_peak};
use crate::memory_probe::{MemoryProbe, PhaseMemory, compare_memory};
use crate::peak_flops::measure_peak_flops;
use crate::phase::Phase;
use crate::position::PositionTracker;
use crate::requests::{PlannedTrace, Requests, StepRange};
use crate::run_probe::RunProbe;
use crate::setup::{init_trainer, place_ranks};
use crate::step_costs::{MeasuredStep, StepCosts, unit_times};
use crate::trace::Tracer;

/// The number of warm-up steps.
const WARM_UP: u64 = 2;

/// The number of changes that are tried, and the steps of each trial.
const TRIALS: usize = 4;
const TRIAL_STEPS: u64 = 3;

/// If a step takes longer, no changes are tried.
const TRIAL_STEP_S_MAX: f64 = 30.;

/// The maximum number of recommendations.
const RECOMMENDED_MAX: usize = 3;

/// The options of a profile.
#[derive(Clone, Debug)]
pub struct ProfileOptions {
    /// The number of steps to trace.
    pub steps: u64,
    /// Whether to try changes to the recipe, and measure their gain.
    pub try_changes: bool,
    /// The folder for the trace.
    pub folder: PathBuf,
    /// A file for the measured costs of a step.
    pub costs: Option<PathBuf>,
    /// The number of ranks on this host.
    pub ranks_here: usize,
}

/// The result of a profile.
#[derive(Clone, Debug, Serialize)]
pub struct ProfileReport {
    /// The number of ranks.
    pub ranks: usize,
    /// The number of hosts.
    pub hosts: usize,
    /// The ZeRO stage.
    pub stage: u8,
    /// The type in which units compute.
    pub precision: String,
    /// The number of parameters.
    pub parameters: u64,
    /// The tokens of a step on all ranks.
    pub tokens: u64,
    /// The mean time of the traced steps.
    pub step_s: f64,
    /// The shortest step, which changes are compared with: other work on the machine only makes steps longer.
    pub least_step_s: f64,
    /// Where the time goes, according to the trace.
    pub profile: Profile,
    /// The model FLOPs of a step on all ranks, without recomputation.
    pub flops: f64,
    /// The FLOP/s of all ranks in a large matrix product, in the type in which units compute.
    pub peak_flops_per_s: f64,
    /// The bandwidth of a rank in a large all-gather.
    pub peak_bytes_per_s: f64,
    /// The time of the smallest all-reduce.
    pub latency_s: f64,
    /// The peak memory of any rank.
    pub memory_peak_bytes: usize,
    /// The estimate of the peak memory, made before the run.
    pub memory_estimate_bytes: usize,
    /// The memory of rank 0's tensors, phase by phase.
    pub memory: Vec<PhaseMemory>,
    /// What a step asks of rank 0's device, unless that is the CPU.
    pub device: Option<DeviceCounts>,
    /// What rank 0 moves between memory and disks in a step, if it offloads anything.
    pub offload: Option<OffloadedBytes>,
    /// The measured costs of a step.
    pub costs: StepCosts,
    /// The time of a step, simulated from these costs.
    pub simulated_step_s: f64,
    /// The simulated time of each unit, in the model's order: what it computes, and what it waits for before that.
    pub simulated_unit_s: Vec<f64>,
    /// The memory limit of a rank, if known.
    pub memory_limit_bytes: Option<usize>,
    /// The trace file.
    pub trace: PathBuf,
    /// The changes most likely to help, best first.
    pub changes: Vec<Recommendation>,
}

/// What a rank moves between memory and disks in a step.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct OffloadedBytes {
    /// The bytes that it reads.
    pub read_bytes: f64,
    /// The bytes that it writes.
    pub written_bytes: f64,
    /// The bandwidth while it reads.
    pub read_bytes_per_s: f64,
    /// The bandwidth while it writes.
    pub write_bytes_per_s: f64,
    /// The time that the threads that read and write spend on checksums.
    pub checksum_s: f64,
}

impl OffloadedBytes {
    fn per_step(moved: Moved, steps: u64) -> Self {
        let Moved { read_bytes, read_s, written_bytes, write_s, checksum_s } = moved;
        OffloadedBytes {
            read_bytes: read_bytes as f64 / steps as f64,
            written_bytes: written_bytes as f64 / steps as f64,
            read_bytes_per_s: read_bytes as f64 / read_s.max(1e-9),
            write_bytes_per_s: written_bytes as f64 / write_s.max(1e-9),
            checksum_s: checksum_s / steps as f64,
        }
    }
}

/// Profiles a recipe. All ranks call it together; rank 0 gets the report.
pub fn profile(
    recipe: &Recipe,
    world: &Arc<Group>,
    position: &Arc<PositionTracker>,
    options: &ProfileOptions,
) -> Result<Option<ProfileReport>> {
    let mut recipe = recipe.clone();
    (recipe.checkpoints, recipe.evaluation) = (None, None);
    recipe.run.steps = recipe.run.steps.max(WARM_UP + options.steps);
    let (device, baseline) = trace_steps(&recipe, world, position, options)?;
    // Read the peak now: the measurements below use memory of their own.
    let [_, peak] = memory_now_and_peak(device);
    let peak = world.all_reduce("memory", ReduceOp::Max, vec![peak as i64]).wait()?[0] as usize;
    let machine = Machine::measure(&recipe, world)?;
    let hosts = count_hosts(world)?;
    let costs = measure_costs(&recipe, world, position, options, hosts, machine.latency_s)?;
    let simulated = costs.as_ref().map(|costs| costs.simulate(&recipe, world.size(), 1.)).transpose()?;
    let room = MemoryLimit::of(device, options.ranks_here).map(|limit| limit.bytes);
    // The host with the least memory decides.
    let room = room.map_or(i64::MAX, |bytes| bytes as i64);
    let room = -world.all_reduce("room", ReduceOp::Max, vec![-room]).wait()?[0] as usize;
    let changes = candidates(&recipe, world.size(), hosts, room)?;
    let estimate = MemoryEstimate::of(&recipe, world.size())?;
    let tokens = recipe.batch(world.size())?.global_batch_size * recipe.batch.seq_len;
    let measured = baseline.zip(costs).zip(simulated);
    let mut report = measured.map(|((baseline, costs), simulated)| ProfileReport {
        simulated_step_s: simulated.step_s,
        simulated_unit_s: unit_times(costs.units.len(), &simulated),
        costs,
        ranks: world.size(),
        hosts,
        stage: recipe.zero.stage,
        precision: machine.dtype.to_string(),
        parameters: baseline.parameters as u64,
        tokens: tokens as u64,
        step_s: baseline.step_s,
        least_step_s: baseline.least_step_s,
        profile: baseline.profile,
        flops: baseline.flops_per_token * tokens as f64,
        peak_flops_per_s: machine.flops_per_s,
        peak_bytes_per_s: machine.bytes_per_s,
        latency_s: machine.latency_s,
        memory_peak_bytes: peak,
        memory_estimate_bytes: estimate.total(),
        memory: baseline.memory,
        device: baseline.device,
        offload: baseline.moved.map(|moved| OffloadedBytes::per_step(moved, options.steps)),
        memory_limit_bytes: (room < i64::MAX as usize).then_some(room),
        trace: baseline.trace,
        changes: Vec::new(),
    });
    let facts = report.as_ref().map(|report| gather_facts(report, &recipe, &machine));
    let mut times = Vec::new();
    if let (Some(report), Some(path)) = (&report, &options.costs) {
        report.costs.write(path)?;
    }
    for index in choose(world, &changes, facts.as_ref(), options.try_changes)? {
        times.push((&changes[index], time_steps(&changes[index].recipe, world, position)? / changes[index].tokens));
    }
    // Measure the baseline again: the machine may have been busier before.
    let again = if times.is_empty() { f64::INFINITY } else { time_steps(&recipe, world, position)? };
    let facts = facts.map(|facts| Facts { step_s: facts.step_s.min(again), ..facts });
    let mut found = Vec::new();
    if let Some(facts) = &facts {
        found = recommend_outside_recipe(facts);
        found.extend(times.iter().map(|(candidate, step_s)| candidate.recommend(facts, *step_s)));
    }
    let least_step_s = facts.map_or(0., |facts| facts.step_s);
    if let Some(report) = &mut report {
        found.retain(|change| change.gain >= if change.tried { 1.03 } else { 1.05 });
        found.sort_by(|a, b| b.gain.total_cmp(&a.gain));
        found.truncate(RECOMMENDED_MAX);
        report.least_step_s = least_step_s;
        report.changes = found;
    }
    Ok(report)
}

/// Chooses the most promising candidates for trials. Rank 0 chooses for all ranks.
fn choose(world: &Group, all: &[Candidate], facts: Option<&Facts<'_>>, try_changes: bool) -> Result<Vec<usize>> {
    let mut chosen = vec![-1i64; TRIALS];
    if let Some(facts) = facts.filter(|facts| try_changes && facts.step_s < TRIAL_STEP_S_MAX) {
        let mut promising: Vec<(f64, usize)> =
            all.iter().enumerate().map(|(index, candidate)| (simulate_saving_s(candidate, facts), index)).collect();
        promising.retain(|(saved, _)| *saved > 0.03 * facts.step_s);
        promising.sort_by(|a, b| b.0.total_cmp(&a.0));
        chosen.iter_mut().zip(promising).for_each(|(slot, (_, index))| *slot = index as i64);
    }
    let chosen = world.broadcast("trials", 0, chosen).wait()?;
    Ok(chosen.into_iter().filter_map(|index| usize::try_from(index).ok()).filter(|index| *index < all.len()).collect())
}

fn gather_facts<'a>(report: &'a ProfileReport, recipe: &Recipe, machine: &Machine) -> Facts<'a> {
    let batch =
        recipe.batch(report.ranks).map_or((1, 1), |batch| (batch.micro_batch_size, batch.gradient_accumulation_steps));
    Facts {
        ranks: report.ranks,
        costs: &report.costs,
        simulated_step_s: report.simulated_step_s,
        profile: &report.profile,
        step_s: report.least_step_s,
        hosts: report.hosts,
        micro_batches: batch.1,
        micro_batch_tokens: batch.0 * recipe.batch.seq_len.div_ceil(recipe.parallel.context),
        arithmetic_s: report.flops / report.peak_flops_per_s.max(1.),
        other_dtype_speedup: machine.other_flops_per_s / machine.flops_per_s.max(1.),
        threads: machine.threads,
        bytes_per_s: machine.bytes_per_s,
    }
}

/// The measurements of the unchanged recipe, on rank 0.
struct Baseline {
    profile: Profile,
    step_s: f64,
    least_step_s: f64,
    trace: PathBuf,
    memory: Vec<PhaseMemory>,
    device: Option<DeviceCounts>,
    /// In all traced steps.
    moved: Option<Moved>,
    units: Vec<UnitSpec>,
    layout: Layout,
    parameters: usize,
    flops_per_token: f64,
}

/// Runs and traces steps of a recipe.
fn trace_steps(
    recipe: &Recipe,
    world: &Arc<Group>,
    position: &Arc<PositionTracker>,
    options: &ProfileOptions,
) -> Result<(Device, Option<Baseline>)> {
    let (data, mut trainer) = set_up(recipe, world, position)?;
    let device = trainer.options().device;
    let memory_probe = observe_memory(&mut trainer, position);
    let planned =
        PlannedTrace { steps: Some(StepRange(WARM_UP + 1..=WARM_UP + options.steps)), ..PlannedTrace::default() };
    let requests = Requests { planned_trace: planned, ..Requests::default() };
    let mut tracer = Tracer::new(world, position, &requests, options.folder.clone());
    let (mut times, mut trace, mut counts) = (Vec::new(), None, None);
    let mut moved_before = None;
    for step in 1..=WARM_UP + options.steps {
        if step == WARM_UP + 1 {
            moved_before = trainer.moved();
        }
        tracer.before_step(step)?;
        let began = Instant::now();
        match step == WARM_UP {
            true => counts = count_step(device, || run_step(&data, &mut trainer, position))?,
            false => run_step(&data, &mut trainer, position)?,
        }
        if step > WARM_UP {
            times.push(began.elapsed().as_secs_f64());
        }
        trace = tracer.after_step(step, false)?.or(trace);
    }
    let peaks = memory_probe.take_peaks();
    let path = trace.map_or(Err("no step was traced".to_string()), |trace| trace.path).map_err(Error::Options)?;
    if world.rank() != 0 {
        return Ok((device, None));
    }
    let read = Trace::read(&path).map_err(|error| Error::Options(error.to_string()))?;
    let StepMemory { program, memory: simulated, .. } =
        simulate_memory(recipe, trainer.model(), trainer.options(), world.size())?;
    let baseline = Baseline {
        memory: compare_memory(&program, &simulated, &peaks),
        device: counts,
        moved: trainer.moved().zip(moved_before).map(|(after, before)| after.since(before)),
        units: trainer.unit_specs().to_vec(),
        layout: trainer.ranks().layout(trainer.options().precision),
        profile: Profile::from_trace(&read),
        step_s: times.iter().sum::<f64>() / times.len().max(1) as f64,
        least_step_s: minimum(&times),
        trace: path,
        parameters: trainer.model().elements(),
        flops_per_token: trainer.model().flops_per_token(recipe.batch.seq_len),
    };
    Ok((device, Some(baseline)))
}

/// Measures what a step costs, on rank 0. Nothing is prefetched, and layers wait for their collectives, so that computation and
/// communication do not compete for cores; only the turns of ring attention and the exchanges of experts overlap as always. The model is not
/// cut into the stages of a pipeline, so that every rank computes every unit and no rank waits for another stage.
fn measure_costs(
    recipe: &Recipe,
    world: &Arc<Group>,
    position: &Arc<PositionTracker>,
    options: &ProfileOptions,
    hosts: usize,
    latency_s: f64,
) -> Result<Option<StepCosts>> {
    let mut recipe = recipe.clone();
    (recipe.zero.prefetch, recipe.parallel.async_tensor) = (0, false);
    let batch = recipe.batch(world.size())?;
    recipe.batch.global_batch_size = None;
    recipe.batch.micro_batch_size = Some(batch.micro_batch_size);
    recipe.batch.gradient_accumulation_steps = Some(batch.gradient_accumulation_steps);
    recipe.parallel.pipeline = 1;
    let folder = options.folder.join("without-prefetch");
    let options = ProfileOptions { folder, ..options.clone() };
    let (_, baseline) = trace_steps(&recipe, world, position, &options)?;
    let Some(Baseline { profile, units, layout, least_step_s, moved, .. }) = baseline else {
        return Ok(None);
    };
    let shape = step_shape(&recipe, world.size())?;
    let measured = MeasuredStep {
        units: &units,
        layout,
        shards_optimizer: recipe.zero.stage >= 1,
        micro_batches: shape.micro_batches,
        micro_batch_tokens: shape.tokens(&ModelParallel::of_rank(&recipe.mesh(world.size())?, 0)),
        tensor: recipe.parallel.tensor,
        expert: recipe.parallel.expert,
        hosts,
        ranks_per_host: options.ranks_here,
        cores_per_host: std::thread::available_parallelism().map_or(1, usize::from),
        threads_per_rank: usize::try_from(shardwise_torch::tch::get_num_threads()).unwrap_or(1),
        latency_s,
        least_step_s,
        moved,
    };
    Ok(Some(StepCosts::from_profile(&profile, &measured)))
}

fn set_up(recipe: &Recipe, world: &Arc<Group>, position: &Arc<PositionTracker>) -> Result<(Data, Trainer)> {
    let (ranks, options) = place_ranks(recipe, world.clone())?;
    let data = Data::open(recipe, world.size())?;
    let mut trainer = init_trainer(recipe, build::model(recipe)?, ranks, options)?;
    Arc::new(RunProbe::new(position.clone(), Arc::default())).attach(&mut trainer);
    Ok((data, trainer))
}

/// Also measures memory from now on.
fn observe_memory(trainer: &mut Trainer, position: &Arc<PositionTracker>) -> Arc<MemoryProbe> {
    let probe =
        Arc::new(MemoryProbe::new(trainer.options().device, Arc::new(RunProbe::new(position.clone(), Arc::default()))));
    trainer.set_probe(probe.clone());
    probe
}

fn run_step(data: &Data, trainer: &mut Trainer, position: &PositionTracker) -> Result<()> {
    position.enter(Phase::Data);
    let ranks = trainer.ranks();
    let own = data.step_part(trainer.steps() + 1, ranks.data_rank(), ranks.data_size(), ranks.context.place())?;
    trainer.step(&own)?;
    position.enter(Phase::Between);
    Ok(())
}

/// The time of the shortest of a few steps, after a warm-up step.
fn time_steps(recipe: &Recipe, world: &Arc<Group>, position: &Arc<PositionTracker>) -> Result<f64> {
    let (data, mut trainer) = set_up(recipe, world, position)?;
    let mut times = Vec::new();
    for step in 0..=TRIAL_STEPS {
        let began = Instant::now();
        run_step(&data, &mut trainer, position)?;
        if step > 0 {
            times.push(began.elapsed().as_secs_f64());
        }
    }
    Ok(minimum(&times))
}

fn minimum(times: &[f64]) -> f64 {
    times.iter().copied().min_by(f64::total_cmp).unwrap_or(0.)
}

/// Counts the hosts of all ranks.
fn count_hosts(world: &Group) -> Result<usize> {
    // The only cost that grows with the world size is this all-gather of one word per rank.
    let mut hosts = host::hosts_of_ranks(world)?;
    hosts.sort_unstable();
    hosts.dedup();
    Ok(hosts.len())
}

/// The measured performance of the machine.
struct Machine {
    dtype: Dtype,
    /// The FLOP/s of all ranks together, in the type in which units compute.
    flops_per_s: f64,
    /// The FLOP/s in bf16 if that type is f32, and in f32 otherwise.
    other_flops_per_s: f64,
    bytes_per_s: f64,
    latency_s: f64,
    /// A better number of threads, and the speedup of a matrix product with it.
    threads: Option<(usize, f64)>,
}

/// The largest all-gather to measure, and the time after which the result is meaningful: at first, buffers hide the bandwidth of a link.
const GATHER_BYTES_MAX: usize = 64 << 20;
const GATHER_S: f64 = 0.5;

impl Machine {
    fn measure(recipe: &Recipe, world: &Arc<Group>) -> Result<Self> {
        let (ranks, options) = place_ranks(recipe, world.clone())?;
        let (dtype, device) = (options.precision.param_dtype, options.device);
        let other = if dtype == Dtype::F32 { Dtype::Bf16 } else { Dtype::F32 };
        let product = |dtype: Dtype| measure_peak_flops(world, dtype, device);
        let (reached, other_flops_per_s) = (product(dtype)?, product(other)?);
        Ok(Machine {
            dtype,
            flops_per_s: reached,
            other_flops_per_s,
            bytes_per_s: measure_gather(&ranks.groups.shard, world, device)?,
            latency_s: measure_latency(world)?,
            threads: try_threads(world, reached, &|| product(dtype))?,
        })
    }
}

/// Measures the bytes per second that a rank sends in an all-gather, which is enlarged until it takes long enough.
fn measure_gather(group: &Group, world: &Group, device: Device) -> Result<f64> {
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
        let took = world.all_reduce("gathers", ReduceOp::Max, vec![(took * 1e9) as i64]).wait()?[0] as f64 / 1e9;
        if took > GATHER_S || bytes >= GATHER_BYTES_MAX {
            return Ok(bytes as f64 * (group.size() - 1) as f64 / group.size() as f64 / took.max(1e-9));
        }
        bytes *= 4;
    }
}

fn measure_latency(world: &Group) -> Result<f64> {
    let mut best = f64::INFINITY;
    for _ in 0..10 {
        let began = Instant::now();
        world.all_reduce("latency", ReduceOp::Sum, vec![0i64]).wait()?;
        best = best.min(began.elapsed().as_secs_f64());
    }
    Ok(best)
}

/// Tries whether matrix products are faster with one thread per core of this rank's fair share.
fn try_threads(world: &Group, now: f64, product: &dyn Fn() -> Result<f64>) -> Result<Option<(usize, f64)>> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let fair = (cores / host::ranks_here(world.size()).max(1)).max(1);
    let used = shardwise_torch::tch::get_num_threads();
    // Either all ranks try it or none does.
    let differs = world.all_reduce("threads", ReduceOp::Max, vec![i64::from(used != fair as i32)]).wait()?[0] != 0;
    if !differs {
        return Ok(None);
    }
    shardwise_torch::tch::set_num_threads(fair as i32);
    let then = product();
    shardwise_torch::tch::set_num_threads(used);
    let gain = then? / now.max(1.);
    Ok((gain > 1.1).then_some((fair, gain)))
}
