//! Where to cut a model into the stages of a pipeline, from measured costs: `shardwise plan`.
//!
//! The stages come from `shardwise_plan::pipeline_partition`, which balances the slowest one. Then every schedule is simulated with
//! these stages, and the fastest is drawn: one line for each stage, from left to right.

use std::fmt::Write;

use shardwise_plan::pipeline::PipelineSchedule;
use shardwise_plan::pipeline_partition::{
    Constraints, GradientReduction, PartitionError, Replication, StagePlan, StateBytes, UnitProfile, Workers,
    partition_stages,
};
use shardwise_plan::program::{Instruction, Lane, ModelParallel, Programs, StepSimulation};
use shardwise_recipe::Recipe;
use shardwise_torch::tch::Device;
use shardwise_train::{ActivationCheckpointing, Options, memory_costs, unit_specs};

use crate::build::{self, step_shape};
use crate::error::{Error, Result};
use crate::step_costs::{SimulatedStep, StepCosts};

/// What to plan for.
#[derive(Clone, Copy, Debug)]
pub struct PlanRequest {
    /// The number of ranks.
    pub ranks: usize,
    /// The number of stages; if absent, every number that divides the ranks is tried.
    pub stages: Option<usize>,
    /// The memory of a rank for parameters, gradients, optimizer state and activations, if it is limited.
    pub memory_bytes_max: Option<usize>,
    /// The number of columns of the drawing.
    pub width: usize,
}

/// Finds the stages of a recipe's model, simulates a step of each schedule, and describes all that as text.
pub fn plan_pipeline(recipe: &Recipe, costs: &StepCosts, request: &PlanRequest) -> Result<String> {
    if recipe.parallel.expert > 1 {
        let problem = "`shardwise plan` does not support parallel.expert yet; set it to 1";
        return Err(Error::Options(problem.to_string()));
    }
    // What the recipe says about stages and replicas is what this finds.
    let mut recipe = recipe.clone();
    (recipe.parallel.pipeline, recipe.parallel.replicate) = (request.stages.unwrap_or(1), 1);
    recipe.parallel.pipeline_split_points = None;
    let recipe = &recipe;
    // Ranks that share layers or divide sequences work as one.
    let together = recipe.parallel.tensor * recipe.parallel.context;
    if request.ranks == 0 || !request.ranks.is_multiple_of(together) {
        recipe.mesh(request.ranks)?;
    }
    let workers = request.ranks / together;
    let units = unit_profiles(recipe, costs, request)?;
    let links = links(costs, request.ranks, together, workers);
    let constraints = constraints(recipe, request, Replication::Grid { stages: request.stages })?;
    let plan = partition_stages(&units, &links, &constraints).map_err(refuse)?;
    let mut text = plan.to_string();
    let uneven = Constraints { replication: Replication::Uneven, ..constraints };
    if let Ok(uneven) = partition_stages(&units, &links, &uneven)
        && uneven.bottleneck_s < 0.99 * plan.bottleneck_s
    {
        let what = match uneven.is_runnable {
            true => "with another number of stages, it would be faster:",
            false => "with unevenly replicated stages, which no mesh can run, it would be faster:",
        };
        text += &format!("\n{what}\n{uneven}");
    }
    if plan.stages.len() == 1 {
        text += "\na pipeline would not be faster: one stage is best";
        return Ok(text);
    }
    let found = simulate_schedules(recipe, costs, request, &plan, &units)?;
    text += &describe_schedules(&found, plan.stages.len(), request.width);
    text += &format!("\n\n[parallel]\nreplicate = 1\npipeline = {}\n", plan.stages.len());
    if let Some(best) = found.first() {
        let points: Vec<String> = best.split_points.iter().map(|unit| format!("\"{unit}\"")).collect();
        let (schedule, points) = (&best.schedule, points.join(", "));
        text += &format!("pipeline_schedule = \"{schedule}\"\npipeline_split_points = [{points}]\n");
    }
    Ok(text)
}

/// A schedule and its simulated step.
struct SimulatedSchedule {
    schedule: PipelineSchedule,
    /// The first unit of each chunk but the first.
    split_points: Vec<String>,
    step: SimulatedStep,
    programs: Programs,
}

/// Simulates a step of each schedule that the model has enough units for, the fastest first. Schedules with several chunks per stage
/// are cut by their FLOPs.
fn simulate_schedules(
    recipe: &Recipe,
    costs: &StepCosts,
    request: &PlanRequest,
    plan: &StagePlan,
    units: &[UnitProfile],
) -> Result<Vec<SimulatedSchedule>> {
    let stages = plan.stages.len();
    let mut found = Vec::new();
    let mut refused = None;
    for schedule in PipelineSchedule::BUILT_IN {
        let mut staged = recipe.clone();
        let has_planned_stages = schedule.chunks(stages) == stages;
        staged.parallel.pipeline = stages;
        staged.parallel.pipeline_schedule = schedule.to_string();
        staged.parallel.pipeline_split_points = has_planned_stages.then(|| first_units(plan, units));
        match simulate_schedule(&staged, costs, request.ranks, units) {
            Ok((step, programs, split_points)) => {
                found.push(SimulatedSchedule { schedule, split_points, step, programs });
            }
            // A model with few units has no room for several chunks per stage.
            Err(_) if !has_planned_stages => {}
            Err(error) => refused = Some(error),
        }
    }
    found.sort_by(|a, b| a.step.step_s.total_cmp(&b.step.step_s));
    match (found.is_empty(), refused) {
        (true, Some(error)) => Err(error),
        _ => Ok(found),
    }
}

/// A table of the schedules, and a drawing of the fastest.
fn describe_schedules(found: &[SimulatedSchedule], stages: usize, width: usize) -> String {
    let mut text = format!("\na simulated step on {stages} stages:");
    for SimulatedSchedule { schedule, step, .. } in found {
        let idle = |stage: &shardwise_plan::program::Simulation| stage.waiting.bubble_s / step.step_s.max(1e-12);
        let most_idle = step.simulation.programs.iter().map(idle).fold(0., f64::max);
        let peak = |stage: &shardwise_plan::program::Simulation| stage.memory.peak().total_bytes();
        let peak_bytes = step.simulation.programs.iter().map(peak).max().unwrap_or(0);
        let (schedule, step_s, idle, mib) = (schedule.to_string(), step.step_s, 100. * most_idle, peak_bytes >> 20);
        let _ = write!(text, "\n  {schedule:20}{step_s:8.3} s, stages idle up to {idle:2.0}%, {mib:6} MiB of tensors");
    }
    if let Some(best) = found.first() {
        let _ = write!(text, "\n\n{}\n{}", best.schedule, draw(&best.programs, &best.step.simulation, width));
    }
    text
}

/// Draws the passes of each stage as a line of text. A forward pass has the last digit of its micro-batch, a backward pass a letter:
/// `a` for micro-batch 0, in capitals for the half that computes the gradients of weights. Waiting is a dot.
fn draw(programs: &Programs, simulation: &StepSimulation, width: usize) -> String {
    let column = |time_s: f64| (time_s / simulation.step_s.max(1e-12) * width as f64).round() as usize;
    let mut lines = Vec::new();
    for (index, (stage, program)) in simulation.programs.iter().zip(&programs.stages).enumerate() {
        let mut line = vec!['.'; width];
        for span in stage.timeline.iter().filter(|span| span.lane == Lane::Compute) {
            let Some(mark) = program.instructions.get(span.position).and_then(mark) else { continue };
            let (start, end) = (column(span.start_s).min(width), column(span.end_s).min(width));
            line[start..end].fill(mark);
        }
        lines.push(format!("stage {index:<3} {}", line.into_iter().collect::<String>()));
    }
    lines.push(
        "(0 1 2: forward passes; a b c: backward passes of micro-batches 0 1 2; A B C: weights; .: waiting)".into(),
    );
    lines.join("\n")
}

/// The character that stands for a pass.
fn mark(instruction: &Instruction) -> Option<char> {
    let letter = |first: u8, micro_batch: usize| char::from(first + (micro_batch % 26) as u8);
    match *instruction {
        Instruction::Forward { micro_batch, .. } => char::from_digit((micro_batch % 10) as u32, 10),
        Instruction::Backward { micro_batch, .. }
        | Instruction::BackwardInput { micro_batch, .. }
        | Instruction::Recompute { micro_batch, .. } => Some(letter(b'a', micro_batch)),
        Instruction::BackwardWeight { micro_batch, .. } => Some(letter(b'A', micro_batch)),
        Instruction::Update(_) => Some('u'),
        _ => None,
    }
}

/// Simulates a step of a recipe with a pipeline. Also returns its programs and split points.
fn simulate_schedule(
    recipe: &Recipe,
    costs: &StepCosts,
    ranks: usize,
    units: &[UnitProfile],
) -> Result<(SimulatedStep, Programs, Vec<String>)> {
    let programs = build::programs(recipe, ranks)?;
    let chunks = build::options(recipe, Device::Cpu)?.pipeline_chunks.unwrap_or_default();
    let split_points = chunks.iter().skip(1).map(|chunk| units[chunk.start].name.clone()).collect();
    Ok((costs.simulate(recipe, ranks, 1.)?, programs, split_points))
}

/// The first units of all stages but the first.
fn first_units(plan: &StagePlan, units: &[UnitProfile]) -> Vec<String> {
    plan.stages.iter().skip(1).map(|stage| units[stage.units.start].name.clone()).collect()
}

/// What each unit costs per micro-batch.
fn unit_profiles(recipe: &Recipe, costs: &StepCosts, request: &PlanRequest) -> Result<Vec<UnitProfile>> {
    let (model, options) = (build::model(recipe)?, build::options(recipe, Device::Cpu)?);
    let shape = step_shape(recipe, request.ranks)?;
    let place = ModelParallel::of_rank(&recipe.mesh(request.ranks)?, 0);
    let specs = unit_specs(&model, &options, &place, shape);
    costs.check_units(&specs)?;
    let memory = memory_costs(&model, &options, &place, shape);
    let scale = costs.scale_pass(shape.tokens(&place), place.tensor.size);
    let profile = |index: usize| {
        let (spec, times, bytes) = (&specs[index], &costs.units[index], &memory.units[index]);
        let recomputed_s = if recomputes(&options) { times.forward_s } else { 0. };
        UnitProfile {
            name: spec.name.clone(),
            forward_s: scale * times.forward_s,
            backward_s: scale * (times.backward_s + recomputed_s),
            output_bytes: spec.output_bytes,
            parameter_bytes: (spec.trainable + spec.frozen) * options.precision.param_dtype.bytes(),
            kept_bytes: match options.activation_checkpointing {
                ActivationCheckpointing::None => bytes.kept_bytes,
                ActivationCheckpointing::Selective => bytes.selective_bytes,
                ActivationCheckpointing::Full => bytes.output_bytes,
            },
        }
    };
    Ok((0..specs.len()).map(profile).collect())
}

fn recomputes(options: &Options) -> bool {
    options.activation_checkpointing == ActivationCheckpointing::Full
}

/// The links between workers: groups of `together` ranks that share layers or divide sequences. The bandwidths of the costs are those of all ranks of a host together.
fn links(costs: &StepCosts, ranks: usize, together: usize, workers: usize) -> Workers {
    let ranks_per_host = costs.ranks_per_host.unwrap_or(ranks).clamp(1, ranks);
    let per_rank = |link: f64| link / ranks_per_host as f64;
    let [within, between] = [costs.within_host, costs.between_hosts].map(|link| per_rank(link.bytes_per_s));
    Workers::on_hosts(workers, (ranks_per_host / together).max(1), within, between)
}

/// What the stages must respect.
fn constraints(recipe: &Recipe, request: &PlanRequest, replication: Replication) -> Result<Constraints> {
    let options = build::options(recipe, Device::Cpu)?;
    let batch = recipe.batch(request.ranks)?;
    let (param_bytes, grad_bytes) =
        (options.precision.param_dtype.bytes() as f64, options.precision.reduce_dtype.bytes() as f64);
    let states = usize::from(options.precision.has_masters()) + options.optimizer.states();
    let state_bytes = (states * options.precision.state_dtype().bytes()) as f64;
    let parts = [
        (1., options.sharding.parameters),
        (grad_bytes / param_bytes, options.sharding.gradients),
        (state_bytes / param_bytes, options.sharding.optimizer),
    ];
    let sum =
        |sharded: bool| parts.iter().filter(|(_, is_sharded)| *is_sharded == sharded).map(|(bytes, _)| bytes).sum();
    Ok(Constraints {
        replication,
        reduction: GradientReduction::EachStep {
            micro_batches: (batch.global_batch_size / batch.micro_batch_size.max(1)).max(1),
        },
        state: StateBytes { replicated: sum(false), sharded: sum(true) },
        memory_bytes_max: request.memory_bytes_max,
    })
}

fn refuse(error: PartitionError) -> Error {
    Error::Options(format!("the pipeline: {error}"))
}
