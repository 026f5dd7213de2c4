//! The programs of a step on all ranks of a mesh: one for all of them, or one for each stage of a pipeline.

use shardwise_model::{Model, Unit};
use shardwise_plan::pipeline::{Pipeline, ScheduleError};
use shardwise_plan::program::{Codec, Instruction, Message, Policy, Program, Programs, UnitSpec, build, check};
use shardwise_plan::{Axis, Mesh};

use crate::error::{Error, Result};
use crate::options::Options;

/// The programs of a training step with this many micro-batches, checked for all ranks.
pub fn checked_programs(units: &[UnitSpec], options: &Options, mesh: &Mesh, micro_batches: usize) -> Result<Programs> {
    let programs = build_programs(units, options, mesh, micro_batches, build::train_step, build::pipeline_step)?;
    check_programs(&programs, units, &options.policy(micro_batches), mesh)?;
    Ok(programs)
}

/// Checks programs for all ranks.
pub(crate) fn check_programs(programs: &Programs, units: &[UnitSpec], policy: &Policy, mesh: &Mesh) -> Result<()> {
    let checked = check(programs, units, policy, mesh);
    checked.map_err(|violation| Error::Options(format!("the step's program is invalid: {violation}")))
}

/// The programs of the passes of a step, without accumulation and reduction of gradients.
pub(crate) fn replay_programs(
    units: &[UnitSpec],
    options: &Options,
    mesh: &Mesh,
    micro_batches: usize,
) -> Result<Programs> {
    build_programs(units, options, mesh, micro_batches, build::replay, build::pipeline_replay)
}

/// The programs of a forward pass that keeps nothing, on one micro-batch.
pub(crate) fn inference_programs(units: &[UnitSpec], options: &Options, mesh: &Mesh) -> Result<Programs> {
    build_programs(units, options, mesh, 1, build::inference, build::pipeline_inference)
}

/// The stage of each unit.
pub fn stages_of_units(units: usize, options: &Options, mesh: &Mesh) -> Result<Vec<usize>> {
    Ok(pipeline_of(units, options, mesh)?.map_or_else(|| vec![0; units], |pipeline| pipeline.stages_of_units()))
}

/// Fails if a pipeline has several tied units: a rank keeps one copy of a parameter of another stage.
pub(crate) fn check_ties(model: &Model, mesh: &Mesh) -> Result<()> {
    let tied: Vec<&str> = model.units().iter().filter(|unit| unit.tied().is_some()).map(Unit::name).collect();
    match mesh.size(Axis::Pipeline) > 1 && tied.len() > 1 {
        true => Err(Error::Options(format!(
            "the pipeline: {} are tied; a pipeline supports one tied unit",
            tied.join(", ")
        ))),
        false => Ok(()),
    }
}

/// Whether a program has backward passes in two halves.
pub(crate) fn splits_backward(program: &Program) -> bool {
    program.instructions.iter().any(|instruction| matches!(instruction, Instruction::BackwardInput { .. }))
}

/// Fails if a program has instructions that training cannot execute yet: codecs.
pub(crate) fn check_executable(program: &Program) -> Result<()> {
    let is_unsupported = |instruction: &&Instruction| match instruction {
        Instruction::StartReduce { codec, .. } => !matches!(codec, Codec::None | Codec::ParamDtype),
        Instruction::StartGather { codec, .. } => !matches!(codec, Codec::None | Codec::Int8),
        Instruction::Send(Message { codec, .. }) | Instruction::StartReceive(Message { codec, .. }) => {
            *codec != Codec::None
        }
        _ => false,
    };
    match program.instructions.iter().find(is_unsupported) {
        Some(instruction) => {
            let text = program.describe(instruction);
            Err(Error::Options(format!("training cannot execute the instruction '{text}' yet")))
        }
        None => Ok(()),
    }
}

/// Builds one program for all ranks with `whole`, or one for each stage of the pipeline with `staged`.
fn build_programs(
    units: &[UnitSpec],
    options: &Options,
    mesh: &Mesh,
    micro_batches: usize,
    whole: fn(&[UnitSpec], &Policy) -> Program,
    staged: fn(&[UnitSpec], &Policy, &Pipeline) -> std::result::Result<Programs, ScheduleError>,
) -> Result<Programs> {
    let policy = options.policy(micro_batches);
    match pipeline_of(units.len(), options, mesh)? {
        None => Ok(Programs::uniform(whole(units, &policy))),
        Some(pipeline) => staged(units, &policy, &pipeline).map_err(refuse),
    }
}

/// The pipeline of a model with this many units, if the mesh has several stages.
fn pipeline_of(units: usize, options: &Options, mesh: &Mesh) -> Result<Option<Pipeline>> {
    let stages = mesh.size(Axis::Pipeline);
    if stages == 1 {
        return Ok(None);
    }
    let pipeline = match &options.pipeline_chunks {
        Some(chunks) => Pipeline::new(stages, chunks.clone(), options.pipeline_schedule.clone()),
        None => Pipeline::even(units, stages, options.pipeline_schedule.clone()),
    };
    let pipeline = pipeline.map_err(refuse)?;
    // See the note in `message_groups`.
    let stages_of_chunks: Vec<usize> = (0..pipeline.chunks.len()).map(|chunk| pipeline.stage_of_chunk(chunk)).collect();
    let is_apart =
        |pair: &[usize]| !matches!(pair[0].abs_diff(pair[1]), 0 | 1) && pair[0].abs_diff(pair[1]) + 1 != stages;
    if options.device.is_cuda() && stages_of_chunks.windows(2).any(is_apart) {
        let problem =
            "the pipeline: on GPUs, consecutive chunks must be on neighboring stages; place them in a ring or a V";
        return Err(Error::Options(problem.to_string()));
    }
    Ok(Some(pipeline))
}

fn refuse(error: ScheduleError) -> Error {
    Error::Options(format!("the pipeline: {error}"))
}
