//! What the order of a step depends on, by unit.

use shardwise_model::{Activations, Model, Parameter, PassShape, Unit, may_use_flash_attention};
use shardwise_plan::program::{ActivationCheckpointing, ElementCounts, ModelParallel, UnitSpec};
use shardwise_plan::{Dtype, LayerPlace};
use shardwise_torch::tch::Device;
use shardwise_zero::Precision;

use crate::options::Options;

/// The micro-batches of a step on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepShape {
    /// The sequences of a micro-batch.
    pub sequences: usize,
    /// The length of a sequence.
    pub positions: usize,
    /// The number of micro-batches.
    pub micro_batches: usize,
}

impl StepShape {
    /// The number of tokens that a rank has of a micro-batch, if ranks divide sequences.
    pub fn tokens(&self, place: &ModelParallel) -> usize {
        self.sequences * place.context.own_positions(self.positions)
    }
}

/// What the order of a step depends on, by unit, on a rank at this place.
pub fn unit_specs(model: &Model, options: &Options, place: &ModelParallel, shape: StepShape) -> Vec<UnitSpec> {
    let shape = pass_shape(options, place, shape, options.activation_checkpointing.into());
    let is_trained = |unit: &Unit| unit.parameters().iter().any(|parameter| parameter.trainable);
    let first_trainable = model.units().iter().position(is_trained).unwrap_or(model.units().len());
    let spec = |(index, unit): (usize, &Unit)| UnitSpec {
        tied_elements: unit
            .tied()
            .map_or(0, |tied| model.units()[tied.unit].parameters()[tied.parameter].kept_elements(place.layer())),
        ..unit_spec(unit, options, &PassShape { input_has_grad: index > first_trainable, ..shape })
    };
    model.units().iter().enumerate().map(spec).collect()
}

/// The shape of a pass that keeps these activations.
pub(crate) fn pass_shape(
    options: &Options,
    place: &ModelParallel,
    shape: StepShape,
    activations: Activations,
) -> PassShape {
    PassShape {
        tokens: shape.tokens(place),
        positions: shape.positions,
        element_bytes: options.precision.param_dtype.bytes(),
        activations,
        is_recomputed: options.activation_checkpointing == ActivationCheckpointing::Full,
        tensor: place.tensor,
        context: place.context,
        expert: place.expert,
        splits_sequence: options.splits_sequence(place.tensor),
        input_has_grad: true,
        uses_flash_attention: may_use_flash_attention(options.device, options.precision.param_dtype),
        overlaps: options.async_tensor_parallel,
    }
}

/// Whether gradients can be sent in 16 bits and summed in f32. NCCL sums them in the dtype in which they travel.
fn sends_narrow_gradients(options: &Options) -> bool {
    let Precision { param_dtype, reduce_dtype } = options.precision;
    matches!(param_dtype, Dtype::Bf16 | Dtype::F16) && reduce_dtype == Dtype::F32 && options.device == Device::Cpu
}

fn unit_spec(unit: &Unit, options: &Options, shape: &PassShape) -> UnitSpec {
    let place = LayerPlace { tensor: shape.tensor, expert: shape.expert };
    let count = |is_counted: &dyn Fn(&Parameter) -> bool| -> usize {
        unit.parameters().iter().filter(|parameter| is_counted(parameter)).map(|p| p.kept_elements(place)).sum()
    };
    let counts = |is_counted: &dyn Fn(&Parameter) -> bool| ElementCounts {
        trainable: count(&|parameter| parameter.trainable && is_counted(parameter)),
        frozen: count(&|parameter| !parameter.trainable && is_counted(parameter)),
    };
    let ElementCounts { trainable, frozen } = counts(&|_| true);
    UnitSpec {
        frozen,
        replicated: counts(&|parameter| parameter.is_replicated(place.tensor)),
        experts: counts(&|parameter| parameter.is_divided_by_expert(place)),
        tied: unit.tied().map(|tied| tied.unit),
        forward_computes_gradients: unit.forward_computes_gradients(),
        update_reads_parameters: !options.precision.has_masters(),
        narrow_gradients: unit.gradients_are_dense() && sends_narrow_gradients(options),
        output_bytes: unit.footprint(shape).output_bytes,
        inner: unit.collectives(shape),
        ..UnitSpec::new(unit.name(), trainable, unit.backward_reads_parameters())
    }
}
