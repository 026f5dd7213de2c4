//! The sharding of a model: which rank keeps which elements of its parameters.

use std::fmt::Display;
use std::sync::Arc;

use shardwise_comm::Group;
use shardwise_model::{Model, Parameter, Unit};
use shardwise_plan::program::UnitSpec;
use shardwise_plan::{FloatsMut, LayerPlace};
use shardwise_zero::{
    Groups, HostMemory, Layout, OffloadTarget, OffloadTargets, ParameterSpec, Pool, ScratchFile, ShardedUnit,
};

use crate::costs::optimizer_element_bytes;
use crate::error::{Error, Result};
use crate::init::{ParameterInit, for_each_run};
use crate::options::{OffloadPlace, Offloading, Options, Ranks};
use crate::own_units::OwnUnits;

/// The index of the layout of parameters that tensor-parallel ranks split: those with the same part shard it.
const SPLIT: usize = 0;
/// The index of the layout of parameters that tensor-parallel ranks replicate: all ranks of a replica shard them.
const REPLICATED: usize = 1;
/// The index of the layout of experts that ranks divide: those with the same experts shard them.
const EXPERTS: usize = 2;

/// Shards the units of a model that are on this rank's stage. `init` is called only for the elements that this rank keeps.
pub(crate) fn shard_model(
    model: &Model,
    ranks: &Ranks,
    options: &Options,
    stage_of_unit: &[usize],
    pool: &Arc<Pool>,
    offload: &OffloadTargets,
    init: &mut ParameterInit<'_>,
) -> Result<OwnUnits> {
    load_units(model, stage_of_unit, ranks.pipeline.rank())?;
    let layouts = layouts(ranks, options, pool, offload);
    let place = ranks.mesh().layer_place(ranks.world.rank());
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

/// Where this rank offloads to. The disks have room for all of its parameters, optimizer state and gradients.
pub(crate) fn offload_targets(
    units: &[UnitSpec],
    ranks: &Ranks,
    options: &Options,
    stage_of_unit: &[usize],
) -> Result<OffloadTargets> {
    let layout = ranks.layout(options.precision);
    let own = || units.iter().zip(stage_of_unit).filter(|(_, stage)| **stage == ranks.pipeline.rank());
    let elements = |sharded| own().map(|(unit, _)| layout.kept_trainable(unit, sharded)).sum::<usize>();
    let create = |what: &str, place: Option<&OffloadPlace>, bytes: usize| -> Result<Option<OffloadTarget>> {
        let fail = |to: &dyn Display, error: &dyn Display| {
            let gigabytes = bytes as f64 / 1e9;
            Error::Options(format!("{gigabytes:.3} GB of {what} cannot be offloaded to {to}: {error}"))
        };
        Ok(match place {
            None => None,
            Some(OffloadPlace::Host) => {
                let memory = HostMemory::new(options.device, bytes);
                Some(OffloadTarget::Host(Arc::new(memory.map_err(|error| fail(&"host memory", &error))?)))
            }
            Some(OffloadPlace::Disk(folder)) => {
                let file = ScratchFile::create(folder, bytes as u64);
                Some(OffloadTarget::Disk(Arc::new(file.map_err(|error| fail(&folder.display(), &error))?)))
            }
        })
    };
    let (sharding, offload) = (options.sharding, &options.offload);
    let Offloading { optimizer, parameters, gradients, activations } = offload;
    let frozen: usize = own().map(|(unit, _)| layout.kept_frozen(unit, sharding.parameters)).sum();
    let parameter_bytes = (elements(sharding.parameters) + frozen) * options.precision.param_dtype.bytes();
    let state_bytes = elements(sharding.optimizer) * optimizer_element_bytes(options);
    let gradient_bytes = elements(sharding.gradients) * options.precision.reduce_dtype.bytes();
    Ok(OffloadTargets {
        optimizer: create("optimizer state", optimizer.as_ref(), state_bytes)?,
        parameters: create("parameters", parameters.as_ref(), parameter_bytes)?,
        gradients: create("gradients", gradients.as_ref(), gradient_bytes)?,
        // How many there are depends on the batch.
        activations: create("activations", activations.as_ref(), 0)?,
    })
}

/// Loads what the passes of this stage's units need besides parameters, before anything is allocated.
fn load_units(model: &Model, stage_of_unit: &[usize], stage: usize) -> Result<()> {
    let mut own = model.units().iter().zip(stage_of_unit).filter(|(_, of_unit)| **of_unit == stage);
    own.try_for_each(|(unit, _)| unit.load().map_err(|error| Error::of_model(unit.name(), error)))
}

/// The layouts of every unit, [`SPLIT`], [`REPLICATED`] and [`EXPERTS`].
fn layouts(ranks: &Ranks, options: &Options, pool: &Arc<Pool>, offload: &OffloadTargets) -> [Layout; 3] {
    let layout = |groups: &Groups, parts: Option<&Arc<Group>>| Layout {
        groups: groups.clone(),
        parts: parts.filter(|parts| parts.size() > 1).cloned(),
        sharding: options.sharding,
        precision: options.precision,
        states: options.optimizer.states(),
        pool: pool.clone(),
        offload: offload.clone(),
    };
    let experts = &ranks.experts;
    [
        layout(&ranks.groups, Some(&ranks.tensor)),
        layout(&ranks.replicated, None),
        layout(&experts.groups, Some(&experts.parts)),
    ]
}

fn parameter_spec(parameter: &Parameter, options: &Options, place: LayerPlace) -> ParameterSpec {
    let is_replicated = parameter.is_replicated(place.tensor);
    let has_same_gradient = parameter.has_same_gradient(options.splits_sequence(place.tensor));
    ParameterSpec {
        shape: parameter.kept_shape(place),
        decays: parameter.decays,
        trainable: parameter.trainable,
        layout: match (parameter.is_divided_by_expert(place), is_replicated) {
            (true, _) => EXPERTS,
            (false, true) => REPLICATED,
            (false, false) => SPLIT,
        },
        adds_gradient: !is_replicated || place.tensor.index == 0 || !has_same_gradient,
    }
}
