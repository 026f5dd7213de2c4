//! What the units of a model cost in bytes, from their shapes.

use shardwise_model::{Activations, Model, Unit};
use shardwise_plan::program::{Costs, GroupKind, LinkCost, ModelParallel, Tier, UnitCost};

use crate::options::Options;
use crate::unit_specs::{StepShape, pass_shape};

/// The costs of a step in bytes on a rank at this place, from the shapes of the model. Nothing takes any time.
pub fn memory_costs(model: &Model, options: &Options, place: &ModelParallel, shape: StepShape) -> Costs {
    Costs {
        units: model.units().iter().map(|unit| unit_cost(model, unit, options, place, shape)).collect(),
        links: [LinkCost::FREE; GroupKind::ALL.len()],
        tiers: [LinkCost::FREE; Tier::ALL.len()],
        optimizer_element_bytes: optimizer_element_bytes(options),
    }
}

/// The bytes of masters and optimizer state per trainable element.
pub(crate) fn optimizer_element_bytes(options: &Options) -> usize {
    let masters = usize::from(options.precision.has_masters());
    (masters + options.optimizer.states()) * options.precision.state_dtype().bytes()
}

fn unit_cost(model: &Model, unit: &Unit, options: &Options, place: &ModelParallel, shape: StepShape) -> UnitCost {
    let element_bytes = options.precision.param_dtype.bytes();
    let footprint = |activations| unit.footprint(&pass_shape(options, place, shape, activations));
    let (all, selective) = (footprint(Activations::All), footprint(Activations::Selective));
    let tied = unit.tied().map(|tied| &model.units()[tied.unit].parameters()[tied.parameter]);
    UnitCost {
        name: unit.name().to_string(),
        kept_bytes: all.kept_bytes,
        selective_bytes: selective.kept_bytes,
        output_bytes: all.output_bytes,
        forward_temporary_bytes: all.forward_temporary_bytes,
        selective_forward_temporary_bytes: selective.forward_temporary_bytes,
        no_grad_temporary_bytes: all.no_grad_temporary_bytes,
        temporary_bytes: all.temporary_bytes,
        selective_temporary_bytes: selective.temporary_bytes,
        tied_gradient_bytes: tied
            .filter(|tied| tied.trainable)
            .map_or(0, |tied| tied.kept_elements(place.layer()) * element_bytes),
        sparse_gradient_bytes: all.sparse_gradient_bytes,
        ..UnitCost::default()
    }
}
