//! The sharding of a model: which rank keeps which elements of its parameters.

use std::sync::Arc;

use shardwise_model::{Model, Parameter, Unit};
use shardwise_plan::program::Place;
use shardwise_plan::{Axis, FloatsMut};
use shardwise_zero::{Groups, Layout, ParameterSpec, Pool, ShardedUnit};

use crate::error::{Error, Result};
use crate::init::{ParameterInit, for_each_run};
use crate::options::{Options, Ranks};
use crate::own_units::OwnUnits;

/// The index of the layout of parameters that tensor-parallel ranks split: those with the same part shard it.
const SPLIT: usize = 0;
/// The index of the layout of parameters that tensor-parallel ranks replicate: all ranks of a replica shard them.
const REPLICATED: usize = 1;

/// Shards the units of a model that are on this rank's stage. `init` is called only for the elements that this rank keeps.
pub(crate) fn shard_model(
    model: &Model,
    ranks: &Ranks,
    options: &Options,
    stage_of_unit: &[usize],
    pool: &Arc<Pool>,
    init: &mut ParameterInit<'_>,
) -> Result<OwnUnits> {
    load_units(model, stage_of_unit, ranks.pipeline.rank())?;
    let layouts = layouts(ranks, options, pool);
    let place = ranks.mesh().place(ranks.world.rank(), Axis::Tensor);
    let mut shard = |unit: &Unit| -> Result<ShardedUnit> {
        let specs: Vec<ParameterSpec> =
            unit.parameters().iter().map(|parameter| parameter_spec(parameter, options, place)).collect();
        let mut init_parameter = |index: usize, range, elements: FloatsMut<'_>| {
            let parameter = &unit.parameters()[index];
            let slice = parameter.kept_slice(place);
            for_each_run(parameter, slice.as_ref(), range, elements, &mut |range, elements| {
                init(parameter, range, elements)
            })
        };
        Ok(ShardedUnit::new(unit.name(), &specs, &layouts, &mut init_parameter)?)
    };
    let own_stage = ranks.pipeline.rank();
    let is_own = |(unit, stage): (_, &usize)| (*stage == own_stage).then_some(unit);
    let units = model.units().iter().zip(stage_of_unit).map(is_own);
    Ok(OwnUnits::new(units.map(|unit| unit.map(&mut shard).transpose()).collect::<Result<_>>()?))
}

/// Loads what the passes of this stage's units need besides parameters, before anything is allocated.
fn load_units(model: &Model, stage_of_unit: &[usize], stage: usize) -> Result<()> {
    let mut own = model.units().iter().zip(stage_of_unit).filter(|(_, of_unit)| **of_unit == stage);
    own.try_for_each(|(unit, _)| unit.load().map_err(|error| Error::of_model(unit.name(), error)))
}

/// The layouts of every unit, [`SPLIT`] and [`REPLICATED`].
fn layouts(ranks: &Ranks, options: &Options, pool: &Arc<Pool>) -> [Layout; 2] {
    let layout = |groups: &Groups, tensor| Layout {
        groups: groups.clone(),
        tensor,
        sharding: options.sharding,
        precision: options.precision,
        states: options.optimizer.states(),
        pool: pool.clone(),
    };
    let tensor = Some(ranks.tensor.clone()).filter(|tensor| tensor.size() > 1);
    [layout(&ranks.groups, tensor), layout(&ranks.replicated, None)]
}

fn parameter_spec(parameter: &Parameter, options: &Options, place: Place) -> ParameterSpec {
    let is_replicated = parameter.is_replicated(place);
    let has_same_gradient = parameter.has_same_gradient(options.splits_sequence(place));
    ParameterSpec {
        shape: parameter.kept_shape(place),
        decays: parameter.decays,
        trainable: parameter.trainable,
        layout: if is_replicated { REPLICATED } else { SPLIT },
        adds_gradient: !is_replicated || place.index == 0 || !has_same_gradient,
    }
}
