//! Builds programs from a policy, and from the order of a pipeline.
//!
//! Everything about when parameters are gathered, activations recomputed, messages exchanged and gradients reduced is decided here,
//! and only here.

mod receives;
mod stage;

use std::slice::from_ref;

use super::Program;
use super::policy::{Policy, UnitSpec};
use super::programs::Programs;
use crate::pipeline::{Action, Actions, Pipeline, ScheduleError};
use receives::start_receives;
use stage::{Goal, Stage};

/// A training step: for each micro-batch a forward and a backward pass, then the update.
pub fn train_step(units: &[UnitSpec], policy: &Policy) -> Program {
    let (model, stages) = (0..units.len(), vec![0; units.len()]);
    let stage = Stage::new(units, policy, from_ref(&model), (&stages, 0), Goal::Training);
    let run = |stage: &mut Stage<'_>| {
        for micro_batch in 0..policy.micro_batches {
            stage.run(&[Action::forward(0, micro_batch), Action::backward(0, micro_batch)]);
        }
    };
    training_step(stage, policy, run).finish().program
}

/// A training step whose passes `run` adds.
fn training_step<'a>(stage: Stage<'a>, policy: &Policy, run: impl Fn(&mut Stage<'a>)) -> Stage<'a> {
    let step = |mut stage: Stage<'a>, last: Option<&Stage<'a>>| {
        stage.count_tokens();
        if let Some(last) = last {
            stage.defer_updates_of(last);
        }
        run(&mut stage);
        stage.update();
        stage
    };
    match policy.update_in_forward {
        true => step(stage.clone(), Some(&step(stage, None))),
        false => step(stage, None),
    }
}

/// The passes of a step, without accumulation and reduction of gradients.
pub fn replay(units: &[UnitSpec], policy: &Policy) -> Program {
    let (model, stages) = (0..units.len(), vec![0; units.len()]);
    let mut stage = Stage::new(units, policy, from_ref(&model), (&stages, 0), Goal::Replay);
    for micro_batch in 0..policy.micro_batches {
        stage.run(&[Action::forward(0, micro_batch), Action::backward(0, micro_batch)]);
    }
    stage.finish().program
}

/// A forward pass that keeps nothing, on one micro-batch: evaluation and generation.
pub fn inference(units: &[UnitSpec], policy: &Policy) -> Program {
    let (model, stages) = (0..units.len(), vec![0; units.len()]);
    let mut stage = Stage::new(units, policy, from_ref(&model), (&stages, 0), Goal::Inference);
    stage.run(&[Action::forward(0, 0)]);
    stage.finish().program
}

/// A training step of a pipeline: what its schedule says, then the update.
///
/// A custom schedule may be wrong: [`check`](super::check) the result.
pub fn pipeline_step(units: &[UnitSpec], policy: &Policy, pipeline: &Pipeline) -> Result<Programs, ScheduleError> {
    let actions = pipeline.actions(policy.micro_batches)?;
    build_stages(units, policy, pipeline, &actions, Goal::Training)
}

/// The passes of a step of a pipeline, without accumulation and reduction of gradients.
pub fn pipeline_replay(units: &[UnitSpec], policy: &Policy, pipeline: &Pipeline) -> Result<Programs, ScheduleError> {
    let actions = pipeline.actions(policy.micro_batches)?;
    build_stages(units, policy, pipeline, &actions, Goal::Replay)
}

/// A forward pass of a pipeline that keeps nothing, on one micro-batch, chunk after chunk.
pub fn pipeline_inference(units: &[UnitSpec], policy: &Policy, pipeline: &Pipeline) -> Result<Programs, ScheduleError> {
    let mut actions = Actions { stages: vec![Vec::new(); pipeline.stages] };
    for chunk in 0..pipeline.chunks.len() {
        actions.stages[pipeline.stage_of_chunk(chunk)].push(Action::forward(chunk, 0));
    }
    build_stages(units, policy, pipeline, &actions, Goal::Inference)
}

fn build_stages(
    units: &[UnitSpec],
    policy: &Policy,
    pipeline: &Pipeline,
    actions: &Actions,
    goal: Goal,
) -> Result<Programs, ScheduleError> {
    let stages = pipeline.stages_of_units();
    if stages.len() != units.len() {
        return Err(ScheduleError::Units { chunks: stages.len(), model: units.len() });
    }
    check_tied(units, policy, pipeline, &stages)?;
    let build = |(index, actions): (usize, &Vec<Action>)| {
        let mut stage = Stage::new(units, policy, &pipeline.chunks, (&stages, index), goal);
        let run = |stage: &mut Stage<'_>| {
            stage.send_tied_parameters(actions);
            stage.run(actions);
        };
        match goal {
            Goal::Training => stage = training_step(stage, policy, run),
            Goal::Replay | Goal::Inference => run(&mut stage),
        }
        stage.finish()
    };
    let drafts = actions.stages.iter().enumerate().map(build).collect();
    Ok(Programs::pipeline(start_receives(drafts, units, &stages)))
}

/// Whether what tied units exchange can be ordered.
fn check_tied(units: &[UnitSpec], policy: &Policy, pipeline: &Pipeline, stages: &[usize]) -> Result<(), ScheduleError> {
    let chunk_of = |unit: usize| pipeline.chunks.iter().position(|chunk| chunk.contains(&unit));
    for (unit, spec) in units.iter().enumerate() {
        let Some(owner) = spec.tied else { continue };
        let tied_to_it = || (0..units.len()).filter(|&other| units[other].tied == Some(owner));
        if tied_to_it().count() > 1 && tied_to_it().any(|other| stages[other] != stages[owner]) {
            return Err(ScheduleError::TiedTwice { tied: units[owner].name.clone() });
        }
        if policy.reduce_each_micro_batch && stages[unit] == stages[owner] && chunk_of(unit) != chunk_of(owner) {
            return Err(ScheduleError::TiedChunks { tied: units[owner].name.clone(), unit: spec.name.clone() });
        }
    }
    Ok(())
}
