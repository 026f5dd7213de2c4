//! The values of a step that its instructions hand to each other: activations, gradients, sums.

use shardwise_model::Batch;
use shardwise_torch::tch::{Device, Tensor};
use shardwise_zero::{Optimizer, ShardedUnit};

use crate::error::Result;
use crate::report::Gradients;

/// A unit's index, a parameter's index in the unit, and the parameter's gradient.
pub(crate) type ParameterGradient = (usize, usize, Tensor);

/// Called before a unit is updated, with the unit and its index. See
/// [`Trainer::apply_update_with`](crate::Trainer::apply_update_with).
pub type BeforeUpdate<'a> = dyn FnMut(&mut ShardedUnit, usize) -> Result<()> + 'a;

/// What a unit's forward pass keeps for its backward pass. Each unit has its own autograd graph: its input is a leaf.
pub(crate) struct UnitPass {
    pub(crate) input: Option<Tensor>,
    /// The shape of the input, if this rank keeps only its own rows of it until the unit is recomputed (ZeRO-R: partitioned
    /// activations).
    pub(crate) partitioned: Option<Vec<i64>>,
    /// Without a graph if the unit is recomputed in the backward pass.
    pub(crate) output: Tensor,
}

/// The values of a step, from one instruction to the next.
pub(crate) struct StepValues<'a> {
    pub(crate) micro_batches: &'a [Batch],
    /// The micro-batch that is computed, on this rank's device.
    batch: Option<(usize, Batch)>,
    /// By micro-batch and unit.
    pub(crate) passes: Vec<Vec<Option<UnitPass>>>,
    /// By micro-batch: the gradient of the output of the unit whose backward pass is next.
    pub(crate) output_grads: Vec<Option<Tensor>>,
    /// The gradients of the last backward pass.
    pub(crate) grads: Vec<ParameterGradient>,
    pub(crate) tokens: u64,
    pub(crate) largest_signal: u64,
    pub(crate) loss_scale: f64,
    /// This rank's sum of losses.
    pub(crate) loss: f64,
    pub(crate) non_finite_output: Option<usize>,
    /// The sum of squares of this rank's gradients, by unit.
    pub(crate) squares: Vec<f64>,
    pub(crate) totals: Option<Gradients>,
    /// The optimizer of this step, the factor of its gradients, and what to call before each unit is updated.
    pub(crate) update: Option<(Optimizer, f64, &'a mut BeforeUpdate<'a>)>,
}

impl<'a> StepValues<'a> {
    pub(crate) fn new(micro_batches: &'a [Batch], units: usize, loss_scale: f64) -> Self {
        StepValues {
            micro_batches,
            batch: None,
            passes: micro_batches.iter().map(|_| (0..units).map(|_| None).collect()).collect(),
            output_grads: micro_batches.iter().map(|_| None).collect(),
            grads: Vec::new(),
            tokens: 0,
            largest_signal: 0,
            loss_scale,
            loss: 0.,
            non_finite_output: None,
            squares: vec![0.; units],
            totals: None,
            update: None,
        }
    }

    /// A micro-batch on this rank's device.
    pub(crate) fn batch(&mut self, micro_batch: usize, device: Device) -> &Batch {
        if self.batch.as_ref().is_none_or(|(known, _)| *known != micro_batch) {
            self.batch = Some((micro_batch, self.micro_batches[micro_batch].to_device(device)));
        }
        &self.batch.as_ref().expect("set above").1
    }
}
