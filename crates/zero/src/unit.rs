//! A unit of a model, as one rank holds it (FSDP2: `FSDPParamGroup`).

use shardwise_plan::FloatsMut;
use shardwise_plan::program::{Buffer, Codec};
use shardwise_torch::tch::Tensor;

use crate::sharded_buffer::{Bytes, CheckpointTensor, InitFn, Layout, ParameterSpec, ShardedBuffer, StateInitFn};
use crate::{Optimizer, Result};

/// A unit of a model, as one rank holds it: parameters that are gathered, used and reduced together (FSDP2: `FSDPParamGroup`).
///
/// Parameters that are sharded among the same ranks are in one flat buffer. Most units have one. With tensor parallelism, the parts
/// of a parameter that is split are sharded among the ranks that have the same part, and a parameter that is not split is sharded
/// among all ranks of a replica. So no two ranks of a replica keep the same element of the optimizer state.
pub struct ShardedUnit {
    name: String,
    buffers: Vec<ShardedBuffer>,
    /// The buffer of each parameter, its index there, and whether this rank's gradient of it counts.
    places: Vec<Place>,
    /// All parameters, in order.
    views: Vec<Tensor>,
}

#[derive(Clone, Copy)]
struct Place {
    buffer: usize,
    index: usize,
    adds_gradient: bool,
}

impl ShardedUnit {
    /// Creates a unit with these parameters, each in a buffer with one of `layouts`. `init` is called for the elements that this
    /// rank keeps, and for no others.
    pub fn new(name: &str, specs: &[ParameterSpec], layouts: &[Layout], init: &mut InitFn<'_>) -> Result<Self> {
        let mut unit =
            ShardedUnit { name: name.to_string(), buffers: Vec::new(), places: Vec::new(), views: Vec::new() };
        let unplaced = Place { buffer: 0, index: 0, adds_gradient: true };
        unit.places = specs.iter().map(|spec| Place { adds_gradient: spec.adds_gradient, ..unplaced }).collect();
        for (layout, settings) in layouts.iter().enumerate() {
            let own: Vec<usize> = (0..specs.len()).filter(|&parameter| specs[parameter].layout == layout).collect();
            // A unit without parameters still has a buffer, and one that has some has no empty ones.
            if own.is_empty() && (layout > 0 || !specs.is_empty()) {
                continue;
            }
            let own_specs: Vec<ParameterSpec> = own.iter().map(|&parameter| specs[parameter].clone()).collect();
            let mut init_own = |index: usize, range, elements: FloatsMut<'_>| init(own[index], range, elements);
            for (index, &parameter) in own.iter().enumerate() {
                (unit.places[parameter].buffer, unit.places[parameter].index) = (unit.buffers.len(), index);
            }
            unit.buffers.push(ShardedBuffer::new(name, &own_specs, settings.clone(), &mut init_own)?);
        }
        let view = |place: &Place| unit.buffers[place.buffer].parameters()[place.index].shallow_clone();
        unit.views = unit.places.iter().map(view).collect();
        Ok(unit)
    }

    /// The unit's name, which is also the label of its collectives.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The parameters, as autograd leaves. They can be read while the unit is gathered; otherwise, reading them is an error that
    /// names the unit.
    pub fn parameters(&self) -> &[Tensor] {
        &self.views
    }

    /// Whether any parameter is trainable.
    pub fn is_trainable(&self) -> bool {
        self.buffers.iter().any(ShardedBuffer::is_trainable)
    }

    /// The memory that this rank holds for the unit.
    pub fn bytes(&self) -> Bytes {
        self.buffers.iter().map(ShardedBuffer::bytes).fold(Bytes::default(), Bytes::plus)
    }

    // ---- parameters ---------------------------------------------------------------------------------------------------

    /// Starts an all-gather of the parameters, if they are sharded: a prefetch (FSDP2: `unshard(async_op=True)`).
    pub fn start_gather(&mut self) -> Result<()> {
        self.start_gather_as(Codec::None)
    }

    /// Like [`ShardedUnit::start_gather`], with parameters that travel like this. [`Codec::Int8`] quantizes what is gathered, on all ranks
    /// alike, and leaves the shards as they are. It fails for other dtypes than f32 and bf16, and on other devices than CPUs.
    ///
    /// # Panics
    /// If parameters cannot travel like this, or are being gathered in another way already.
    pub fn start_gather_as(&mut self, codec: Codec) -> Result<()> {
        self.buffers.iter_mut().try_for_each(|buffer| buffer.start_gather(codec))
    }

    /// Makes the parameters available: all-gathers them if they are sharded (FSDP2: `unshard`); otherwise waits for the
    /// all-gather after the last update, if there is one.
    pub fn gather(&mut self) -> Result<()> {
        self.buffers.iter_mut().try_for_each(ShardedBuffer::start_gather_unless_started)?;
        self.buffers.iter_mut().try_for_each(ShardedBuffer::gather)
    }

    /// Frees the unsharded parameters and keeps the shard (FSDP2: `reshard`). Does nothing if parameters are not sharded.
    ///
    /// # Panics
    /// If the unit is not gathered: it was released already, or updated since.
    pub fn release(&mut self) -> Result<()> {
        self.buffers.iter_mut().try_for_each(ShardedBuffer::release)
    }

    // ---- gradients ----------------------------------------------------------------------------------------------------

    /// Sets how gradients travel in the next reductions: in the dtype of the reduction, or in that of the parameters, for units whose
    /// gradients are sharded, dense, and added only once before they are reduced. Sums have the same bits either way.
    ///
    /// # Panics
    /// If there are gradients that are not reduced yet, or the codec is another one.
    pub fn set_gradient_codec(&mut self, codec: Codec) {
        self.buffers.iter_mut().for_each(|buffer| buffer.set_gradient_codec(codec));
    }

    /// Adds a gradient of one parameter to its sum over micro-batches. A gradient of another shape is an error, and is not added.
    /// The gradient may be sparse (COO with one sparse dimension), as that of an embedding: only its rows are then added, in order.
    ///
    /// # Panics
    /// If the parameter is frozen, if gradients are being reduced, or if gradients are not sharded and were already reduced in
    /// this step.
    pub fn add_gradient(&mut self, parameter: usize, grad: &Tensor) -> Result<()> {
        let Place { buffer, index, adds_gradient } = self.places[parameter];
        match adds_gradient {
            true => self.buffers[buffer].add_gradient(index, grad),
            false => {
                self.buffers[buffer].note_gradient(index);
                Ok(())
            }
        }
    }

    /// The trainable parameters that have never received a gradient on this rank.
    pub fn parameters_without_gradient(&self) -> impl Iterator<Item = usize> + '_ {
        let missing = |place: &Place| {
            self.buffers[place.buffer].parameters_without_gradient().any(|parameter| parameter == place.index)
        };
        (0..self.places.len()).filter(move |&parameter| missing(&self.places[parameter]))
    }

    /// Starts to reduce the accumulated gradients over all ranks: a reduce-scatter at stages 1 to 3, an all-reduce at stage 0.
    /// The result is added to the gradients reduced since the last update. A parameter without a gradient on this rank
    /// contributes zeros, because it may have one on other ranks.
    ///
    /// # Panics
    /// If a reduction is running, or if gradients are not sharded and were already reduced in this step.
    pub fn start_reduce(&mut self) -> Result<()> {
        self.buffers.iter_mut().try_for_each(ShardedBuffer::start_reduce)
    }

    /// Waits for the reduce-scatter, and starts the all-reduce between replicas.
    pub fn finish_reduce_scatter(&mut self) -> Result<()> {
        self.buffers.iter_mut().try_for_each(ShardedBuffer::finish_reduce_scatter)
    }

    /// Waits for the whole reduction that [`ShardedUnit::start_reduce`] started. Does nothing if there are no gradients.
    ///
    /// # Panics
    /// If there are gradients whose reduction was not started.
    pub fn finish_reduce(&mut self) -> Result<()> {
        self.finish_reduce_scatter()?;
        self.buffers.iter_mut().try_for_each(ShardedBuffer::finish_reduce)
    }

    /// The sum of squares of this rank's shard of the reduced gradients. Every element of a replica is in one rank's shard.
    ///
    /// # Panics
    /// If there are no reduced gradients, or some are not reduced yet.
    pub fn grad_norm_squared(&self) -> Result<f64> {
        self.buffers.iter().map(ShardedBuffer::grad_norm_squared).sum()
    }

    /// The same as an f64 tensor on the device, so that nobody has to wait for it; `None` if nothing is trained. Squares that overflow
    /// f32 make it infinite, and only [`ShardedUnit::grad_norm_squared`] then has the sum.
    ///
    /// # Panics
    /// If there are no reduced gradients, or some are not reduced yet.
    pub fn grad_norm_squared_on_device(&self) -> Result<Option<Tensor>> {
        let buffers = self.buffers.iter().filter_map(|buffer| buffer.grad_norm_squared_on_device().transpose());
        let squares = buffers.collect::<Result<Vec<Tensor>>>()?;
        Ok(squares.into_iter().reduce(|sum, squares| sum + squares))
    }

    /// The first parameter with a non-finite gradient in this rank's shard.
    ///
    /// # Panics
    /// If there are no reduced gradients, or some are not reduced yet.
    pub fn first_nonfinite_gradient(&self) -> Result<Option<usize>> {
        self.first_in_buffers(ShardedBuffer::first_nonfinite_gradient)
    }

    /// The first parameter, trainable or frozen, with a non-finite element in this rank's shard.
    pub fn first_nonfinite_parameter(&self) -> Result<Option<usize>> {
        self.first_in_buffers(ShardedBuffer::first_nonfinite_parameter)
    }

    /// Whether all elements of a parameter in this rank's shard are finite: in the copy that is updated, if it is trainable.
    pub fn is_parameter_finite(&self, parameter: usize) -> Result<bool> {
        let Place { buffer, index, .. } = self.places[parameter];
        self.buffers[buffer].is_parameter_finite(index)
    }

    /// The first of the parameters that `find` returns for each buffer.
    fn first_in_buffers(&self, find: impl Fn(&ShardedBuffer) -> Result<Option<usize>>) -> Result<Option<usize>> {
        let found = self.buffers.iter().map(find).collect::<Result<Vec<_>>>()?;
        let is_found = |place: &Place| found[place.buffer] == Some(place.index);
        Ok(self.places.iter().position(is_found))
    }

    // ---- the update ---------------------------------------------------------------------------------------------------

    /// Takes an optimizer step on the shards that this rank updates, with the gradients multiplied by `factor`, and discards the
    /// gradients. If optimizer state is sharded and parameters are not, starts an all-gather of the updated parameters.
    ///
    /// # Panics
    /// If there are no reduced gradients, or some are not reduced yet; if sharded parameters are gathered; if the parameters of
    /// the last update are still being gathered; or if the optimizer keeps another number of states than the layout.
    pub fn update(&mut self, optimizer: &Optimizer, factor: f64) -> Result<()> {
        self.buffers.iter_mut().try_for_each(|buffer| buffer.update(optimizer, factor))
    }

    /// Starts to fetch a buffer, if it is offloaded. A gather needs parameters in memory, and an update everything that it reads.
    pub fn start_fetch(&mut self, buffer: Buffer) -> Result<()> {
        self.buffers.iter_mut().try_for_each(|part| part.start_fetch(buffer))
    }

    /// Waits until a buffer is in memory.
    pub fn finish_fetch(&mut self, buffer: Buffer) -> Result<()> {
        self.buffers.iter_mut().try_for_each(|part| part.finish_fetch(buffer))
    }

    /// Starts to store a buffer, if it is offloaded.
    pub fn start_store(&mut self, buffer: Buffer) -> Result<()> {
        self.buffers.iter_mut().try_for_each(|part| part.start_store(buffer))
    }

    /// Waits until a buffer is stored, and frees its memory.
    pub fn finish_store(&mut self, buffer: Buffer) -> Result<()> {
        self.buffers.iter_mut().try_for_each(|part| part.finish_store(buffer))
    }

    /// Frees parameters that have not changed since they were fetched, if they are offloaded. Fails if they have.
    ///
    /// # Panics
    /// If the buffer is another one, or the parameters are being gathered.
    pub fn evict(&mut self, buffer: Buffer) -> Result<()> {
        self.buffers.iter_mut().try_for_each(|part| part.evict(buffer))
    }

    /// Frees the gradients, reduced or accumulated, after an update or to skip one.
    ///
    /// # Panics
    /// If a reduction is running.
    pub fn discard_gradients(&mut self) {
        self.buffers.iter_mut().for_each(ShardedBuffer::discard_gradients);
    }

    // ---- checkpoints --------------------------------------------------------------------------------------------------

    /// Waits for the all-gather of updated parameters, if there is one.
    pub fn wait_for_update(&mut self) -> Result<()> {
        self.buffers.iter_mut().try_for_each(ShardedBuffer::wait_for_update)
    }

    /// Returns this rank's shard for a checkpoint. For each buffer: the updated parameters, the optimizer states, then the frozen
    /// parameters in the dtype of the computation. Call [`ShardedUnit::wait_for_update`] first.
    ///
    /// # Panics
    /// If a tensor's memory is in use: by sharded parameters that are gathered, or by an all-gather of updated ones; or if a tensor
    /// was detached and not updated since.
    pub fn checkpoint_tensors(&self) -> Result<Vec<CheckpointTensor>> {
        let tensors = self.buffers.iter().map(ShardedBuffer::checkpoint_tensors).collect::<Result<Vec<_>>>()?;
        let numbered = tensors.into_iter().flatten().enumerate();
        Ok(numbered.map(|(index, tensor)| CheckpointTensor { index, ..tensor }).collect())
    }

    /// Detaches a tensor of [`ShardedUnit::checkpoint_tensors`], by its index, so that the next update does not overwrite it: the
    /// update reads it and writes to new memory, with the same results. Returns the tensor with the old memory. An update must
    /// follow, because until then the unit has no valid contents.
    ///
    /// # Panics
    /// If the tensor is not detachable, or is detached already.
    pub fn detach_checkpoint_tensor(&mut self, index: usize) -> Result<Tensor> {
        let in_buffer = self.buffers[0].checkpoint_tensors_len();
        self.buffers[index / in_buffer].detach_checkpoint_tensor(index % in_buffer)
    }

    /// The number of updates so far.
    pub fn updates(&self) -> u32 {
        self.buffers.iter().map(ShardedBuffer::updates).max().unwrap_or(0)
    }

    /// Restores the number of updates, and the optimizer state of the shards that this rank updates, which `init` supplies.
    pub fn resume(&mut self, updates: u32, init: &mut StateInitFn<'_>) -> Result<()> {
        for (number, buffer) in self.buffers.iter_mut().enumerate() {
            let own: Vec<usize> =
                (0..self.places.len()).filter(|&parameter| self.places[parameter].buffer == number).collect();
            buffer.resume(updates, &mut |index, state, range, elements| init(own[index], state, range, elements))?;
        }
        Ok(())
    }
}
