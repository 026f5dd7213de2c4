//! Parameters of a unit that are sharded among the same ranks, with their gradients and optimizer state.
//!
//! Here they are gathered, reduced and updated. How they are initialized is `init`, how they are saved `checkpoint`, and how they
//! are offloaded `offload`.

mod checkpoint;
mod init;
mod offload;

use std::ops::Range;
use std::sync::Arc;

use shardwise_comm::{Group, Part, Pending, ReduceOp};
use shardwise_plan::program::Codec;
use shardwise_plan::{Dtype, FloatsMut, Partition};
use shardwise_torch::tch::{Device, Kind, TchError, Tensor, no_grad};
use shardwise_torch::{Block, kind_of, storage};

use crate::error::{InitError, UnitErrors};
use crate::flat_parameter::FlatParameter;
use crate::offload::Offloaded;
use crate::optimizer::{Run, Squares, sum_of_squares, sum_of_squares_on_device};
use crate::{Error, Groups, Lamb, Moved, OffloadTarget, Optimizer, Pool, Precision, Result, Sharding};

pub use checkpoint::CheckpointTensor;

/// The declaration of a parameter of a unit.
#[derive(Clone, Debug)]
pub struct ParameterSpec {
    /// The unsharded shape on this rank.
    pub shape: Vec<i64>,
    /// Whether weight decay applies.
    pub decays: bool,
    /// Whether it is trained (PyTorch: `requires_grad`). A frozen parameter has no gradient, master or optimizer state.
    pub trainable: bool,
    /// The index of the layout of its unit that it has; see [`ShardedUnit::new`](crate::ShardedUnit::new).
    pub layout: usize,
    /// Whether this rank's gradient of it counts. Otherwise another rank of its group has computed the same one.
    pub adds_gradient: bool,
}

/// How a flat buffer of parameters is sharded and stored.
#[derive(Clone)]
pub struct Layout {
    /// The ranks that shard and replicate the parameters.
    pub groups: Groups,
    /// The ranks that hold the other parts of the parameters, if tensor or expert parallelism divides them.
    pub parts: Option<Arc<Group>>,
    /// What is sharded.
    pub sharding: Sharding,
    /// The dtypes of parameters and gradients.
    pub precision: Precision,
    /// The number of values that the optimizer keeps per element: [`Optimizer::states`].
    pub states: usize,
    /// The memory for unsharded parameters and gradients; its device is the unit's.
    pub pool: Arc<Pool>,
    /// Where buffers are while they are not needed, if not in the device's memory.
    pub offload: OffloadTargets,
}

/// Where a unit's buffers are while they are not needed. Those without a target stay in the device's memory.
#[derive(Clone, Default)]
pub struct OffloadTargets {
    /// For masters and optimizer state, between updates.
    pub optimizer: Option<OffloadTarget>,
    /// For shards of parameters, until they are gathered.
    pub parameters: Option<OffloadTarget>,
    /// For reduced gradients, until the update.
    pub gradients: Option<OffloadTarget>,
    /// For the inputs of units, until they are recomputed.
    pub activations: Option<OffloadTarget>,
}

impl OffloadTargets {
    /// What has been moved from and to disks so far, if there are any.
    pub fn moved(&self) -> Option<Moved> {
        let OffloadTargets { optimizer, parameters, gradients, activations } = self;
        let targets = [optimizer, parameters, gradients, activations].into_iter().flatten();
        let moved = targets.filter_map(|target| match target {
            OffloadTarget::Disk(file) => Some(file.moved()),
            OffloadTarget::Host(_) => None,
        });
        moved.reduce(Moved::plus)
    }
}

/// Initializes some elements of a parameter. Arguments: the parameter's index, the range of its elements, the output.
pub type InitFn<'a> = dyn FnMut(usize, Range<usize>, FloatsMut<'_>) -> std::result::Result<(), InitError> + 'a;

/// Initializes some elements of the optimizer state. Arguments: the parameter's index, the index of the state, the range of
/// the parameter's elements, the output.
pub type StateInitFn<'a> =
    dyn FnMut(usize, usize, Range<usize>, FloatsMut<'_>) -> std::result::Result<(), InitError> + 'a;

/// The memory that a rank holds for a unit, by purpose. Excludes memory of the pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bytes {
    /// Parameters, in the dtype of the computation.
    pub parameters: usize,
    /// Gradients, from the backward pass to the update. Unsharded gradients that will be sharded are in the pool.
    pub gradients: usize,
    /// Masters and optimizer state.
    pub optimizer: usize,
}

impl Bytes {
    /// The sum of both, by purpose.
    #[must_use]
    pub fn plus(self, other: Bytes) -> Bytes {
        Bytes {
            parameters: self.parameters + other.parameters,
            gradients: self.gradients + other.gradients,
            optimizer: self.optimizer + other.optimizer,
        }
    }
}

/// Parameters of a unit that are sharded among the same ranks, as one of these ranks holds them.
pub(crate) struct ShardedBuffer {
    errors: UnitErrors,
    layout: Layout,
    trainable: FlatParameter,
    frozen: FlatParameter,
    /// All parameters in order: views of one of the flat buffers, and autograd leaves.
    views: Vec<Tensor>,
    /// The range of each trainable parameter in `trainable`.
    trainable_ranges: Vec<Option<Range<usize>>>,
    /// The range of each frozen parameter in `frozen`.
    frozen_ranges: Vec<Option<Range<usize>>>,
    /// Which parameters have ever had a gradient on this rank.
    received: Vec<bool>,
    local_grads: LocalGrads,
    /// The dtype in which gradients are accumulated and sent.
    local_dtype: Dtype,
    reduced_grads: ReducedGrads,
    /// Where the reduced gradients are until the update, if not in memory.
    offloaded_grads: Option<Offloaded>,
    /// The shards that this rank updates.
    shards: Vec<OptimizerShard>,
    steps: u32,
}

/// This rank's gradients until they are fully reduced. The variants say what memory they hold.
enum LocalGrads {
    /// No gradients.
    None,
    /// Gradients of the whole unit, accumulated over micro-batches (FSDP2: `unsharded_accumulated_grad`).
    Accumulating {
        /// In memory of the pool if gradients are sharded; otherwise it becomes the memory of the reduced gradients.
        whole: Tensor,
        /// Which parameters have a gradient already.
        has_grad: Vec<bool>,
    },
    /// The reduction in the shard group is running: memory as before, plus that of the reduced gradients.
    ReduceScatter(ReduceScatter),
    /// Reduced in the shard group, while the all-reduce between replicas is running: memory of the reduced gradients.
    AllReduce(AllReduce),
}

enum ReduceScatter {
    Whole(Pending<Block>),
    Sharded(Pending<(Block, Block)>),
}

enum AllReduce {
    Whole(Pending<Part<Block>>),
    Sharded(Pending<Block>),
}

/// Gradients summed over all ranks: this rank's shard if gradients are sharded; otherwise a buffer for the whole unit, of
/// which only the shards that this rank updates are valid.
enum ReducedGrads {
    /// No gradients. The next step allocates their memory again. Until then it is free for activations, which lowers the peak
    /// of a step, in the head's forward pass, by the size of all gradients.
    None,
    /// The sum over all micro-batches that were reduced since the last update.
    Sum(Tensor),
}

/// The optimizer state of one shard. A rank has one for its own shard or, if optimizer state is not sharded, for each rank's.
struct OptimizerShard {
    owner: usize,
    /// The master parameters, if the unit computes in a different dtype than the optimizer.
    master: Option<Tensor>,
    state: Vec<Tensor>,
    spans: Vec<ParameterSpan>,
    /// The contents of tensors that were detached since the last update, by their index in a checkpoint. The next update reads them
    /// here and writes its results to the unit's own tensors, whose contents are unspecified until then.
    detached: Vec<(usize, Tensor)>,
    /// Where the master and the state are between updates, if not in memory.
    offloaded: Option<Offloaded>,
}

impl OptimizerShard {
    /// The master, if there is one, and the state.
    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.master.iter().chain(&self.state)
    }
}

/// The range of a shard that belongs to one parameter.
struct ParameterSpan {
    parameter: usize,
    range: Range<usize>,
    decays: bool,
}

impl ShardedBuffer {
    /// The unit's name, which is also the label of its collectives.
    pub(crate) fn name(&self) -> &str {
        self.errors.unit()
    }

    /// The parameters, as autograd leaves. They can be read while the unit is gathered; otherwise, reading them is an error that
    /// names the unit.
    pub(crate) fn parameters(&self) -> &[Tensor] {
        &self.views
    }

    /// Whether any parameter is trainable.
    pub(crate) fn is_trainable(&self) -> bool {
        !self.trainable.partition().is_empty()
    }

    /// The memory that this rank holds for the unit.
    pub(crate) fn bytes(&self) -> Bytes {
        let state_bytes = |shard: &OptimizerShard| match &shard.offloaded {
            Some(offloaded) => offloaded.bytes_in_memory(),
            None => {
                let elements: usize = shard.tensors().map(Tensor::numel).sum();
                elements * self.layout.precision.state_dtype().bytes()
            }
        };
        let gradient_bytes = self.layout.precision.reduce_dtype.bytes();
        Bytes {
            parameters: self.trainable.bytes() + self.frozen.bytes(),
            gradients: match (&self.reduced_grads, &self.local_grads) {
                (ReducedGrads::Sum(sums), _) => match &self.offloaded_grads {
                    Some(offloaded) => offloaded.bytes_in_memory(),
                    None => sums.numel() * gradient_bytes,
                },
                (ReducedGrads::None, LocalGrads::None) => 0,
                // In the pool.
                (ReducedGrads::None, LocalGrads::Accumulating { .. }) if self.layout.sharding.gradients => 0,
                // The memory holds this rank's gradients, or is being written by a reduction.
                (ReducedGrads::None, _) => self.reduced_len() * gradient_bytes,
            },
            optimizer: self.shards.iter().map(state_bytes).sum(),
        }
    }

    // ---- parameters ---------------------------------------------------------------------------------------------------

    /// Starts an all-gather of the parameters, if they are sharded: a prefetch (FSDP2: `unshard(async_op=True)`).
    pub(crate) fn start_gather(&mut self, codec: Codec) -> Result<()> {
        self.trainable.start_gather(codec)?;
        self.frozen.start_gather(codec)
    }

    /// Starts an exact all-gather of the parameters, unless one is running.
    pub(crate) fn start_gather_unless_started(&mut self) -> Result<()> {
        self.trainable.start_gather_unless_started()?;
        self.frozen.start_gather_unless_started()
    }

    /// Makes the parameters available: all-gathers them if they are sharded (FSDP2: `unshard`); otherwise waits for the
    /// all-gather after the last update, if there is one.
    pub(crate) fn gather(&mut self) -> Result<()> {
        self.trainable.gather()?;
        self.frozen.gather()
    }

    /// Frees the unsharded parameters and keeps the shard (FSDP2: `reshard`). Does nothing if parameters are not sharded.
    ///
    /// # Panics
    /// If the unit is not gathered: it was released already, or updated since.
    pub(crate) fn release(&mut self) -> Result<()> {
        self.trainable.release()?;
        self.frozen.release()
    }

    // ---- gradients ----------------------------------------------------------------------------------------------------

    /// See [`ShardedUnit::set_gradient_codec`](crate::ShardedUnit::set_gradient_codec).
    pub(crate) fn set_gradient_codec(&mut self, codec: Codec) {
        assert!(matches!(self.local_grads, LocalGrads::None), "{}: it has gradients of another dtype", self.name());
        let Precision { param_dtype, reduce_dtype } = self.layout.precision;
        self.local_dtype = match codec {
            Codec::None => reduce_dtype,
            Codec::ParamDtype if self.layout.sharding.gradients => param_dtype,
            other => panic!("{}: its gradients cannot travel as {other:?}", self.name()),
        };
    }

    /// Whether gradients are accumulated in fewer digits than sums have.
    fn has_narrow_gradients(&self) -> bool {
        self.local_dtype != self.layout.precision.reduce_dtype
    }

    /// Adds a gradient of one parameter to its sum over micro-batches. A gradient of another shape is an error, and is not added.
    /// The gradient may be sparse (COO with one sparse dimension), as that of an embedding: only its rows are then added, in order.
    ///
    /// # Panics
    /// If the parameter is frozen, if gradients are being reduced, or if gradients are not sharded and were already reduced in
    /// this step.
    pub(crate) fn add_gradient(&mut self, parameter: usize, grad: &Tensor) -> Result<()> {
        let range = self.trainable_ranges[parameter].clone().expect("only trainable parameters have gradients");
        let (expected, found) = (self.views[parameter].size(), grad.size());
        if expected != found {
            return Err(Error::GradientShape { unit: self.name().to_string(), parameter, expected, found });
        }
        if let LocalGrads::None = self.local_grads {
            self.start_accumulating()?;
        }
        let is_narrow = self.has_narrow_gradients();
        let LocalGrads::Accumulating { whole, has_grad } = &mut self.local_grads else {
            panic!("{}: a gradient cannot be added while gradients are being reduced", self.errors.unit());
        };
        let is_lossless = !has_grad[parameter] && !grad.is_sparse() && grad.kind() == whole.kind();
        assert!(!is_narrow || is_lossless, "{}: the sum of its gradients would be rounded", self.errors.unit());
        let added = no_grad(|| {
            let mut sum = whole.f_narrow(0, range.start as i64, range.len() as i64)?;
            match (grad.is_sparse(), has_grad[parameter]) {
                (true, false) => add_rows(&sum.f_zero_()?, grad),
                (true, true) => add_rows(&sum, grad),
                (false, false) => sum.f_copy_(&grad.f_reshape(-1)?),
                (false, true) => sum.f_add_(&grad.f_reshape(-1)?).map(drop),
            }
        });
        self.errors.tch(added)?;
        has_grad[parameter] = true;
        Ok(())
    }

    fn start_accumulating(&mut self) -> Result<()> {
        let memory = self.allocate_local_grads()?;
        let whole = self.errors.torch(memory.into_tensor())?;
        self.local_grads = LocalGrads::Accumulating { whole, has_grad: vec![false; self.trainable_ranges.len()] };
        Ok(())
    }

    /// Notes that a parameter has a gradient, which another rank adds.
    pub(crate) fn note_gradient(&mut self, parameter: usize) {
        self.received[parameter] = true;
    }

    /// The trainable parameters that have never received a gradient on this rank.
    pub(crate) fn parameters_without_gradient(&self) -> impl Iterator<Item = usize> + '_ {
        let missing = |(range, received): (&Option<Range<usize>>, &bool)| range.is_some() && !received;
        self.trainable_ranges
            .iter()
            .zip(&self.received)
            .enumerate()
            .filter(move |(_, pair)| missing(*pair))
            .map(|(index, _)| index)
    }

    /// Allocates memory to accumulate gradients: from the pool if they will be sharded; otherwise it will hold the reduced
    /// gradients too.
    fn allocate_local_grads(&self) -> Result<Block> {
        let (dtype, len) = (self.local_dtype, self.partition().len());
        match (&self.reduced_grads, self.layout.sharding.gradients) {
            (_, true) => self.errors.torch(self.layout.pool.allocate(dtype, len)),
            (ReducedGrads::None, false) => self.allocate_reduced(),
            (ReducedGrads::Sum(_), false) => {
                panic!("{}: gradients that are not sharded can be reduced only once per step", self.name())
            }
        }
    }

    /// The number of reduced gradients that this rank keeps.
    fn reduced_len(&self) -> usize {
        match self.layout.sharding.gradients {
            true => self.partition().part_len(self.layout.groups.shard.rank()),
            false => self.partition().len(),
        }
    }

    /// Allocates memory for reduced gradients.
    fn allocate_reduced(&self) -> Result<Block> {
        self.errors.torch(Block::new(self.layout.precision.reduce_dtype, self.reduced_len(), self.layout.pool.device()))
    }

    /// Starts to reduce the accumulated gradients over all ranks: a reduce-scatter at stages 1 to 3, an all-reduce at stage 0.
    /// The result is added to the gradients reduced since the last update. A parameter without a gradient on this rank
    /// contributes zeros, because it may have one on other ranks.
    ///
    /// # Panics
    /// If a reduction is running, or if gradients are not sharded and were already reduced in this step.
    pub(crate) fn start_reduce(&mut self) -> Result<()> {
        if !self.is_trainable() {
            return Ok(());
        }
        if let LocalGrads::None = self.local_grads {
            self.start_accumulating()?;
        }
        let LocalGrads::Accumulating { whole, has_grad } = std::mem::replace(&mut self.local_grads, LocalGrads::None)
        else {
            panic!("{}: its gradients are already being reduced", self.name());
        };
        for ((range, received), has_grad) in self.trainable_ranges.iter().zip(&mut self.received).zip(has_grad) {
            *received |= has_grad;
            if let (Some(range), false) = (range, has_grad) {
                let mut unused = whole.narrow(0, range.start as i64, range.len() as i64);
                self.errors.tch(unused.f_zero_().map(drop))?;
            }
        }
        let whole = self.errors.torch(storage::take(&whole, "the gradients are being reduced"))?;
        let part = match (&self.reduced_grads, self.layout.sharding.gradients) {
            (_, false) => None,
            (ReducedGrads::None, true) => Some(self.allocate_reduced()?),
            // Temporary: it will be added to the existing sum.
            (ReducedGrads::Sum(_), true) => Some(
                self.errors.torch(self.layout.pool.allocate(self.layout.precision.reduce_dtype, self.reduced_len()))?,
            ),
        };
        let (group, label) = (&self.layout.groups.shard, self.errors.unit());
        self.local_grads = LocalGrads::ReduceScatter(if let Some(part) = part {
            ReduceScatter::Sharded(group.reduce_scatter(label, ReduceOp::Sum, whole, part))
        } else if self.layout.sharding.optimizer {
            ReduceScatter::Whole(group.reduce_scatter_in_place(label, ReduceOp::Sum, whole))
        } else {
            ReduceScatter::Whole(group.all_reduce(label, ReduceOp::Sum, whole))
        });
        Ok(())
    }

    /// Waits for the reduce-scatter, and starts the all-reduce between replicas.
    pub(crate) fn finish_reduce_scatter(&mut self) -> Result<()> {
        let (group, label) = (&self.layout.groups.replicate, self.errors.unit());
        self.local_grads = match std::mem::replace(&mut self.local_grads, LocalGrads::None) {
            LocalGrads::ReduceScatter(ReduceScatter::Sharded(pending)) => {
                let (whole, part) = self.errors.comm(pending.wait())?;
                self.layout.pool.free(whole);
                LocalGrads::AllReduce(AllReduce::Sharded(group.all_reduce(label, ReduceOp::Sum, part)))
            }
            LocalGrads::ReduceScatter(ReduceScatter::Whole(pending)) => {
                let whole = self.errors.comm(pending.wait())?;
                let summed = match self.layout.sharding.optimizer {
                    true => self.partition().range(self.layout.groups.shard.rank()),
                    false => 0..self.partition().len(),
                };
                let part = Part::new(whole, summed);
                LocalGrads::AllReduce(AllReduce::Whole(group.all_reduce(label, ReduceOp::Sum, part)))
            }
            other => other,
        };
        Ok(())
    }

    /// Waits for the whole reduction that [`ShardedBuffer::start_reduce`] started. Does nothing if there are no gradients.
    ///
    /// # Panics
    /// If there are gradients whose reduction was not started.
    pub(crate) fn finish_reduce(&mut self) -> Result<()> {
        self.finish_reduce_scatter()?;
        let summed = match std::mem::replace(&mut self.local_grads, LocalGrads::None) {
            LocalGrads::AllReduce(AllReduce::Sharded(pending)) => self.errors.comm(pending.wait())?,
            LocalGrads::AllReduce(AllReduce::Whole(pending)) => self.errors.comm(pending.wait())?.into_whole(),
            LocalGrads::None => return Ok(()),
            _ => panic!("{}: no reduction is running", self.name()),
        };
        let summed = self.errors.torch(summed.into_tensor())?;
        self.reduced_grads = match std::mem::replace(&mut self.reduced_grads, ReducedGrads::None) {
            ReducedGrads::None => ReducedGrads::Sum(summed),
            ReducedGrads::Sum(mut sums) => {
                self.errors.tch(sums.f_add_(&summed).map(drop))?;
                let memory = self.errors.torch(storage::take(&summed, "the sums have been added"))?;
                self.layout.pool.free(memory);
                ReducedGrads::Sum(sums)
            }
        };
        Ok(())
    }

    /// The sum of squares of this rank's shard of the reduced gradients.
    ///
    /// # Panics
    /// If there are no reduced gradients, or some are not reduced yet.
    pub(crate) fn grad_norm_squared(&self) -> Result<f64> {
        if !self.is_trainable() {
            return Ok(0.);
        }
        // On a device, they may be offloaded by then.
        self.errors.tch(sum_of_squares(&self.read_reduced_shard(self.layout.groups.shard.rank())?))
    }

    /// The same as an f64 tensor on the device, so that nobody has to wait for it; `None` if nothing is trained.
    pub(crate) fn grad_norm_squared_on_device(&self) -> Result<Option<Tensor>> {
        let squares =
            || self.errors.tch(sum_of_squares_on_device(&self.reduced_shard(self.layout.groups.shard.rank())));
        self.is_trainable().then(squares).transpose()
    }

    /// The first parameter with a non-finite gradient in this rank's shard.
    ///
    /// # Panics
    /// If there are no reduced gradients, or some are not reduced yet.
    pub(crate) fn first_nonfinite_gradient(&self) -> Result<Option<usize>> {
        if !self.is_trainable() {
            return Ok(None);
        }
        self.first_nonfinite(|shard| self.read_reduced_shard(shard.owner))
    }

    /// The first parameter, trainable or frozen, with a non-finite element in this rank's shard.
    pub(crate) fn first_nonfinite_parameter(&self) -> Result<Option<usize>> {
        for parameter in 0..self.trainable_ranges.len() {
            if !self.is_parameter_finite(parameter)? {
                return Ok(Some(parameter));
            }
        }
        Ok(None)
    }

    /// Whether all elements of a parameter in this rank's shard are finite: in the copy that is updated, if it is trainable.
    pub(crate) fn is_parameter_finite(&self, parameter: usize) -> Result<bool> {
        let part = match &self.frozen_ranges[parameter] {
            Some(whole) => {
                let local = self.frozen.local_range();
                let inside = intersection(whole, &local);
                inside
                    .map(|inside| {
                        let elements = self.frozen.read_local_elements()?;
                        Ok((elements, inside.start - local.start..inside.end - local.start))
                    })
                    .transpose()?
            }
            None => {
                let own = self.own_shard();
                let span = own.spans.iter().find(|span| span.parameter == parameter);
                let read = |span: &ParameterSpan| Ok((self.read_updated_parameters(own)?, span.range.clone()));
                span.map(read).transpose()?
            }
        };
        let Some((elements, range)) = part else { return Ok(true) };
        self.errors.tch(is_finite(&elements.narrow(0, range.start as i64, range.len() as i64)))
    }

    /// The first parameter with a non-finite value in `elements` of this rank's shard.
    fn first_nonfinite(&self, elements: impl Fn(&OptimizerShard) -> Result<Tensor>) -> Result<Option<usize>> {
        let own = self.own_shard();
        let elements = elements(own)?;
        for span in &own.spans {
            let part = elements.narrow(0, span.range.start as i64, span.range.len() as i64);
            if !self.errors.tch(is_finite(&part))? {
                return Ok(Some(span.parameter));
            }
        }
        Ok(None)
    }

    // ---- the update ---------------------------------------------------------------------------------------------------

    /// Takes an optimizer step on the shards that this rank updates, with the gradients multiplied by `factor`, and discards the
    /// gradients. If optimizer state is sharded and parameters are not, starts an all-gather of the updated parameters.
    ///
    /// # Panics
    /// If there are no reduced gradients, or some are not reduced yet; if sharded parameters are gathered; if the parameters of
    /// the last update are still being gathered; or if the optimizer keeps another number of states than the layout.
    pub(crate) fn update(&mut self, optimizer: &Optimizer, factor: f64) -> Result<()> {
        if !self.is_trainable() {
            return Ok(());
        }
        let (kept, needed) = (self.layout.states, optimizer.states());
        assert_eq!(kept, needed, "{}: the layout's states per element differ from the optimizer's", self.name());
        self.prepare_shard_for_update()?;
        self.steps += 1;
        // Made on the device: the host would wait for a copy.
        let no_dimensions: [i64; 0] = [];
        let step = Tensor::full(no_dimensions, f64::from(self.steps), (Kind::Float, self.layout.pool.device()));
        let mut runs: Vec<Vec<Run<'_>>> =
            self.shards.iter().map(|shard| self.runs(shard, &step, factor)).collect::<Result<_>>()?;
        let mut every = runs.iter().flatten();
        match optimizer {
            Optimizer::AdamW(adamw) if self.is_on_device() => {
                self.errors.torch(runs.iter_mut().try_for_each(|shard| Run::adamw_together(shard, *adamw)))?;
            }
            Optimizer::AdamW(adamw) => self.errors.torch(every.try_for_each(|run| run.adamw(*adamw)))?,
            Optimizer::Sgd(sgd) => self.errors.torch(every.try_for_each(|run| run.sgd(*sgd)))?,
            Optimizer::Lamb(lamb) => self.update_by_lamb(*lamb, &runs)?,
            Optimizer::Custom(custom) => self.errors.torch(every.try_for_each(|run| run.custom(custom)))?,
        }
        drop(runs);
        if self.is_on_device() {
            self.shards.iter().try_for_each(|shard| self.round_masters(shard))?;
        }
        self.shards.iter_mut().for_each(|shard| shard.detached.clear());
        self.discard_gradients();
        if self.layout.sharding.optimizer { self.trainable.start_update_gather() } else { Ok(()) }
    }

    // ---- parts of the update ------------------------------------------------------------------------------------------

    /// LAMB's update: the moments, then the norms of whole parameters, summed over all owners, then the step.
    fn update_by_lamb(&self, lamb: Lamb, runs: &[Vec<Run<'_>>]) -> Result<()> {
        let moments = |run: &Run<'_>| self.errors.torch(run.lamb_moments(lamb));
        let squares: Vec<Vec<Squares>> =
            runs.iter().map(|shard| shard.iter().map(moments).collect()).collect::<Result<_>>()?;
        let total = self.sum_squares(&squares)?;
        for (shard, runs) in self.shards.iter().zip(runs) {
            for (span, run) in shard.spans.iter().zip(runs) {
                self.errors.torch(run.lamb_step(lamb, &total[span.parameter]))?;
            }
        }
        Ok(())
    }

    /// Frees the gradients, reduced or accumulated, after an update or to skip one.
    ///
    /// # Panics
    /// If a reduction is running.
    pub(crate) fn discard_gradients(&mut self) {
        let is_reducing = matches!(self.local_grads, LocalGrads::ReduceScatter(_) | LocalGrads::AllReduce(_));
        assert!(!is_reducing, "{}: gradients cannot be discarded while they are being reduced", self.name());
        if let LocalGrads::Accumulating { whole, .. } = std::mem::replace(&mut self.local_grads, LocalGrads::None)
            && self.layout.sharding.gradients
            // If this fails, the tensor frees the memory.
            && let Ok(memory) = storage::take(&whole, "the gradients have been discarded")
        {
            self.layout.pool.free(memory);
        }
        self.reduced_grads = ReducedGrads::None;
        self.offloaded_grads.iter_mut().for_each(Offloaded::reset);
    }

    /// Whether every operation costs a launch, so that a shard is worked on at once if possible. On the CPU, it is worked on in chunks
    /// that stay in the cache.
    fn is_on_device(&self) -> bool {
        self.layout.pool.device() != Device::Cpu
    }

    /// Rounds updated masters to the dtype of the computation.
    fn round_masters(&self, shard: &OptimizerShard) -> Result<()> {
        let round = |master: &Tensor| self.errors.tch(self.trainable.shard(shard.owner).f_copy_(master));
        shard.master.as_ref().map_or(Ok(()), round)
    }

    /// The gradients of a shard in the dtype of the optimizer, multiplied by `factor`: in place, because an update discards them.
    fn scale_gradients(&self, shard: &OptimizerShard, factor: f64) -> Result<Tensor> {
        let scale = || {
            let mut grads = self.reduced_shard(shard.owner).f_to_kind(kind_of(self.layout.precision.state_dtype()))?;
            if factor == 1. { Ok(grads) } else { grads.f_mul_scalar_(factor) }
        };
        self.errors.tch(scale())
    }

    fn runs<'a>(&self, shard: &OptimizerShard, step: &'a Tensor, factor: f64) -> Result<Vec<Run<'a>>> {
        let parameters = self.updated_parameters(shard);
        let (grads, factor, rounded) = match self.is_on_device() {
            true => (self.scale_gradients(shard, factor)?, 1., None),
            false => {
                let rounded = shard.master.as_ref().map(|_| self.trainable.shard(shard.owner));
                (self.reduced_shard(shard.owner), factor, rounded)
            }
        };
        let run = |span: &ParameterSpan| {
            let part = |whole: &Tensor| whole.narrow(0, span.range.start as i64, span.range.len() as i64);
            let moved = shard.detached.iter().map(|(index, from)| {
                let to = if *index == 0 { &parameters } else { &shard.state[index - 1] };
                (part(to), part(from))
            });
            Run {
                parameters: part(&parameters),
                grads: part(&grads),
                state: shard.state.iter().map(part).collect(),
                moved: moved.collect(),
                step,
                step_number: self.steps,
                decays: span.decays,
                factor,
                rounded: rounded.as_ref().map(part),
            }
        };
        Ok(shard.spans.iter().map(run).collect())
    }

    /// The parameters of a shard that the optimizer updates: the masters, if there are any.
    fn updated_parameters(&self, shard: &OptimizerShard) -> Tensor {
        match &shard.master {
            Some(master) => master.shallow_clone(),
            None => self.trainable.shard(shard.owner),
        }
    }

    /// The same to read, also if the masters are offloaded.
    fn read_updated_parameters(&self, shard: &OptimizerShard) -> Result<Tensor> {
        match (&shard.master, &shard.offloaded) {
            (Some(master), Some(offloaded)) => self.errors.torch(offloaded.read(0, master)),
            (Some(master), None) => Ok(master.shallow_clone()),
            (None, _) => self.trainable.read_shard(shard.owner),
        }
    }

    /// The sums of squares per parameter, over all shards in the order of their owners.
    fn sum_squares(&self, squares: &[Vec<Squares>]) -> Result<Vec<Squares>> {
        let zeros = || self.errors.tch(Squares::zeros(self.layout.pool.device()));
        let mut totals = self.trainable_ranges.iter().map(|_| zeros()).collect::<Result<Vec<Squares>>>()?;
        for (shard, squares) in self.shards.iter().zip(squares) {
            for (span, squares) in shard.spans.iter().zip(squares) {
                totals[span.parameter] = self.errors.tch(totals[span.parameter].plus(squares))?;
            }
        }
        if self.layout.sharding.optimizer {
            totals = self.sum_over(&self.layout.groups.shard, totals)?;
        }
        if let Some(parts) = &self.layout.parts {
            totals = self.sum_over(parts, totals)?;
        }
        Ok(totals)
    }

    /// The sums of LAMB's squares over the ranks of a group.
    fn sum_over(&self, group: &Group, own: Vec<Squares>) -> Result<Vec<Squares>> {
        let flat: Vec<&Tensor> = own.iter().flat_map(|squares| [&squares.parameter, &squares.direction]).collect();
        let flat = self.errors.tch(Tensor::f_stack(&flat, 0))?;
        let flat = self.errors.torch(storage::take(&flat, "LAMB's norms are being summed"))?;
        let all = self.errors.comm(group.all_reduce("LAMB's norms", ReduceOp::Sum, flat).wait())?;
        let all = self.errors.torch(all.into_tensor())?;
        let squares_at =
            |index: usize| Squares { parameter: all.get(2 * index as i64), direction: all.get(2 * index as i64 + 1) };
        Ok((0..own.len()).map(squares_at).collect())
    }

    fn own_shard(&self) -> &OptimizerShard {
        let own = self.shards.iter().find(|shard| shard.owner == self.layout.groups.shard.rank());
        own.expect("a rank always updates its own shard")
    }

    fn partition(&self) -> Partition {
        self.trainable.partition()
    }

    /// The reduced gradients of `owner`'s shard. A sum that lacks some of this step's gradients is refused.
    fn reduced_shard(&self, owner: usize) -> Tensor {
        let is_complete = matches!(self.local_grads, LocalGrads::None);
        assert!(is_complete, "{}: its gradients are not reduced yet; finish the reduction first", self.name());
        match &self.reduced_grads {
            ReducedGrads::Sum(sums) => self.shard_of(sums, owner),
            ReducedGrads::None => panic!("{}: there are no reduced gradients", self.name()),
        }
    }

    /// The same to read, also if they are offloaded.
    fn read_reduced_shard(&self, owner: usize) -> Result<Tensor> {
        match (&self.reduced_grads, &self.offloaded_grads) {
            (ReducedGrads::Sum(sums), Some(offloaded)) => {
                let sums = self.errors.torch(offloaded.read(0, sums))?;
                Ok(self.shard_of(&sums, owner))
            }
            _ => Ok(self.reduced_shard(owner)),
        }
    }

    /// The part of reduced gradients that is `owner`'s shard: all, if gradients are sharded.
    fn shard_of(&self, sums: &Tensor, owner: usize) -> Tensor {
        match self.layout.sharding.gradients {
            true => sums.shallow_clone(),
            false => {
                let range = self.partition().range(owner);
                sums.narrow(0, range.start as i64, range.len() as i64)
            }
        }
    }
}

/// Adds the rows of a sparse gradient to its parameter's sum, in order.
fn add_rows(sum: &Tensor, grad: &Tensor) -> std::result::Result<(), TchError> {
    let rows = grad.f_internal_values()?.f_to_kind(sum.kind())?;
    sum.f_view(&grad.size()[..])?.f_index_add_(0, &grad.f_internal_indices()?.f_select(0, 0)?, &rows).map(drop)
}

fn is_finite(elements: &Tensor) -> std::result::Result<bool, TchError> {
    Ok(elements.f_isfinite()?.f_all()?.f_int64_value(&[])? != 0)
}

fn intersection(a: &Range<usize>, b: &Range<usize>) -> Option<Range<usize>> {
    let both = a.start.max(b.start)..a.end.min(b.end);
    (both.start < both.end).then_some(both)
}
