//! The values of a step that its instructions hand to each other: activations, gradients, sums.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use shardwise_comm::Pending;
use shardwise_model::{Batch, DeferredGradients, ExpertTokens};
use shardwise_plan::program::{Message, Payload, Program};
use shardwise_torch::tch::{Device, Tensor};
use shardwise_torch::{Block, Stream};
use shardwise_zero::{Optimizer, ShardedUnit};

use crate::error::Result;
use crate::offloaded_inputs::OffloadedInputs;
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
    /// Where the backward pass puts the gradients of weights aside, if it has two halves.
    pub(crate) deferred: Option<DeferredGradients>,
}

/// What the first half of a backward pass leaves for the second.
pub(crate) struct HalfBackward {
    /// The gradients that are computed already.
    pub(crate) grads: Vec<ParameterGradient>,
    pub(crate) deferred: Option<DeferredGradients>,
}

/// The messages that are being received, each with the shape of its tensor.
#[derive(Default)]
pub(crate) struct Receiving(HashMap<(Payload, usize, usize), PendingTensor>);

type PendingTensor = (Pending<Block>, Vec<i64>);

impl Receiving {
    pub(crate) fn insert(&mut self, message: &Message, pending: PendingTensor) {
        self.0.insert((message.payload, message.unit, message.micro_batch), pending);
    }

    pub(crate) fn remove(&mut self, message: &Message) -> PendingTensor {
        let started = self.0.remove(&(message.payload, message.unit, message.micro_batch));
        started.expect("a receive is started before it is awaited")
    }
}

/// What a value on the device is for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Unread {
    /// The loss of a micro-batch.
    Loss,
    /// The sum of squares of a unit's gradients.
    Squares(usize),
}

/// The values of a step, from one instruction to the next.
pub(crate) struct StepValues<'a> {
    /// The micro-batches as they were passed, usually in the host's memory.
    pub(crate) micro_batches: &'a [Batch],
    /// The micro-batches on this rank's device.
    pub(crate) batches: Vec<Batch>,
    /// By micro-batch and unit.
    pub(crate) passes: Vec<Vec<Option<UnitPass>>>,
    /// By micro-batch: the gradient of the output of the unit whose backward pass is next.
    pub(crate) output_grads: Vec<Option<Tensor>>,
    /// By micro-batch and unit: backward passes whose second half is still to come.
    pub(crate) halves: HashMap<(usize, usize), HalfBackward>,
    /// The gradients of the last backward pass.
    pub(crate) grads: Vec<ParameterGradient>,
    /// By the unit that owns a tied parameter, and the parameter: the sum of other units' share of its gradient, if it is summed apart.
    pub(crate) tied_sums: BTreeMap<(usize, usize), Tensor>,
    /// By unit and micro-batch: inputs that another stage has sent.
    pub(crate) received: HashMap<(usize, usize), Tensor>,
    /// Messages that are being received.
    pub(crate) receiving: Receiving,
    /// Whether backward passes have two halves, so that weights' gradients are put aside.
    pub(crate) splits_backward: bool,
    pub(crate) tokens: u64,
    pub(crate) largest_signal: u64,
    pub(crate) loss_scale: f64,
    /// This rank's sum of losses.
    pub(crate) loss: f64,
    pub(crate) non_finite_output: Option<usize>,
    /// The sum of squares of this rank's gradients, by unit.
    pub(crate) squares: Vec<f64>,
    /// The tokens of each expert, by unit: those that this rank has routed.
    pub(crate) expert_tokens: Vec<ExpertTokens>,
    /// Values on the device that nobody has waited for yet.
    pub(crate) unread: Vec<(Unread, Tensor)>,
    pub(crate) totals: Option<Gradients>,
    /// How units are updated with the gradients of this step.
    pub(crate) update: Option<Update>,
    /// How units are updated with those that the step before has left to this one.
    pub(crate) deferred_update: Option<DeferredUpdate>,
    /// What to call before each unit is updated.
    pub(crate) before_update: Option<&'a mut BeforeUpdate<'a>>,
}

/// How the units of a step are updated.
pub(crate) struct Update {
    pub(crate) optimizer: Optimizer,
    /// What gradients are multiplied by: it clips them, and undoes the loss scale.
    pub(crate) factor: f64,
}

/// An update of which units are left, with the program of the step that has left them.
pub(crate) struct DeferredUpdate {
    pub(crate) update: Update,
    pub(crate) program: Arc<Program>,
}

impl<'a> StepValues<'a> {
    pub(crate) fn new(micro_batches: &'a [Batch], units: usize, loss_scale: f64) -> Self {
        StepValues {
            micro_batches,
            batches: Vec::new(),
            passes: micro_batches.iter().map(|_| (0..units).map(|_| None).collect()).collect(),
            output_grads: micro_batches.iter().map(|_| None).collect(),
            halves: HashMap::new(),
            grads: Vec::new(),
            tied_sums: BTreeMap::new(),
            received: HashMap::new(),
            receiving: Receiving::default(),
            splits_backward: false,
            tokens: 0,
            largest_signal: 0,
            loss_scale,
            loss: 0.,
            non_finite_output: None,
            squares: vec![0.; units],
            expert_tokens: (0..units).map(|_| ExpertTokens::default()).collect(),
            unread: Vec::new(),
            totals: None,
            update: None,
            deferred_update: None,
            before_update: None,
        }
    }

    /// The weight of a target's loss in the loss of the step, times the loss scale.
    pub(crate) fn loss_weight(&self) -> f64 {
        self.loss_scale / self.tokens as f64
    }

    /// Notes the first unit of this rank whose output for a micro-batch is not finite, unless there was one before.
    pub(crate) fn find_non_finite_output(&mut self, micro_batch: usize, offloaded: &OffloadedInputs) {
        let is_wrong = |(unit, pass): (usize, &Option<UnitPass>)| {
            let output = pass.as_ref().map(|pass| offloaded.read_output(unit, micro_batch, &pass.output));
            output.and_then(|output| output.ok()).is_some_and(|output| !is_finite(&output))
        };
        let found = || self.passes[micro_batch].iter().enumerate().position(is_wrong);
        self.non_finite_output = self.non_finite_output.or_else(found);
    }
}

/// Copies micro-batches to a device, on `copy_stream` if it has one, so that the copies run next to what is queued already. The host
/// does not wait; the current stream does.
pub(crate) fn copy_batches(batches: &[Batch], device: Device, copy_stream: Option<&Stream>) -> Result<Vec<Batch>> {
    let copy = || batches.iter().map(|batch| batch.to_device(device)).collect::<Vec<_>>();
    let Some(copy_stream) = copy_stream else { return Ok(copy()) };
    let copies = copy_stream.run(copy)?;
    let current = Stream::current(device)?;
    current.wait_for(copy_stream)?;
    for batch in &copies {
        // They are freed while passes may still read them.
        for tensor in batch.tensors() {
            current.record(tensor)?;
        }
    }
    Ok(copies)
}

/// Whether all elements of a tensor are finite.
pub(crate) fn is_finite(tensor: &Tensor) -> bool {
    tensor.isfinite().all().int64_value(&[]) != 0
}
