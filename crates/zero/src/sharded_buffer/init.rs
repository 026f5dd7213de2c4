//! The initial contents of a buffer: parameters, and the optimizer state of a checkpoint. Each rank initializes only what it keeps.

use std::ops::Range;

use shardwise_plan::program::Buffer;
use shardwise_plan::{Dtype, FloatsMut};
use shardwise_torch::tch::{Device, TchError, Tensor};
use shardwise_torch::{Block, kind_of, storage};

use super::{
    InitFn, Layout, LocalGrads, OptimizerShard, ParameterSpan, ParameterSpec, ReducedGrads, ShardedBuffer, StateInitFn,
    intersection,
};
use crate::error::{InitError, UnitErrors};
use crate::flat_parameter::FlatParameter;
use crate::offload::Offloaded;
use crate::{Error, OffloadTarget, Result};

/// The number of elements that are initialized at once: few enough to stay in the cache, and in memory that is already mapped.
const INIT_CHUNK: usize = 1 << 18;

impl ShardedBuffer {
    /// Creates a unit with these parameters. `init` is called for the elements that this rank keeps, and for no others.
    pub(crate) fn new(name: &str, specs: &[ParameterSpec], layout: Layout, init: &mut InitFn<'_>) -> Result<Self> {
        let errors = UnitErrors::new(name);
        let [mut trainable_len, mut frozen_len] = [0, 0];
        let ranges: Vec<Range<usize>> = specs
            .iter()
            .map(|spec| {
                let end = if spec.trainable { &mut trainable_len } else { &mut frozen_len };
                let start = *end;
                *end += spec.shape.iter().product::<i64>() as usize;
                start..*end
            })
            .collect();
        let flat = |len| {
            let (group, pool) = (layout.groups.shard.clone(), layout.pool.clone());
            FlatParameter::new(name, group, pool, layout.precision.param_dtype, len, layout.sharding.parameters)
        };
        let (mut trainable, mut frozen) = (flat(trainable_len)?, flat(frozen_len)?);
        let views = ranges
            .iter()
            .zip(specs)
            .map(|(range, spec)| {
                let flat = if spec.trainable { &trainable } else { &frozen };
                flat.view(range.clone(), &spec.shape).set_requires_grad(spec.trainable)
            })
            .collect();
        let trainable_ranges: Vec<Option<Range<usize>>> =
            ranges.iter().zip(specs).map(|(range, spec)| spec.trainable.then(|| range.clone())).collect();
        let frozen_ranges =
            ranges.iter().zip(specs).map(|(range, spec)| (!spec.trainable).then(|| range.clone())).collect();

        if let Some(target) = &layout.offload.parameters {
            trainable.offload_to(target)?;
            frozen.offload_to(target)?;
        }
        let group = &layout.groups.shard;
        let masters = usize::from(layout.precision.has_masters());
        let owners = if layout.sharding.optimizer { group.rank()..group.rank() + 1 } else { 0..group.size() };
        let shards = owners
            .map(|owner| {
                let range = trainable.partition().range(owner);
                let zeros = || zeros(&errors, layout.precision.state_dtype(), range.len(), layout.pool.device());
                let master = layout.precision.has_masters().then(zeros).transpose()?;
                let state = (0..layout.states).map(|_| zeros()).collect::<Result<_>>()?;
                let spans = trainable_ranges.iter().zip(specs).enumerate().filter_map(|(parameter, (whole, spec))| {
                    let inside = intersection(whole.as_ref()?, &range)?;
                    let range = inside.start - range.start..inside.end - range.start;
                    Some(ParameterSpan { parameter, range, decays: spec.decays })
                });
                let tensors = vec![(layout.precision.state_dtype(), range.len()); masters + layout.states];
                let offloaded = reserve(&errors, layout.offload.optimizer.as_ref(), "optimizer state", tensors)?;
                Ok(OptimizerShard { owner, master, state, spans: spans.collect(), detached: Vec::new(), offloaded })
            })
            .collect::<Result<_>>()?;
        let reduced_len = match layout.sharding.gradients {
            true => trainable.partition().part_len(group.rank()),
            false => trainable.partition().len(),
        };
        let gradients = vec![(layout.precision.reduce_dtype, reduced_len)];
        let offloaded_grads = reserve(&errors, layout.offload.gradients.as_ref(), "gradients", gradients)?;
        let mut unit = ShardedBuffer {
            errors,
            local_dtype: layout.precision.reduce_dtype,
            layout,
            trainable,
            frozen,
            views,
            received: vec![false; trainable_ranges.len()],
            trainable_ranges,
            frozen_ranges,
            local_grads: LocalGrads::None,
            reduced_grads: ReducedGrads::None,
            offloaded_grads,
            shards,
            steps: 0,
        };
        for (parameter, range) in ranges.into_iter().enumerate() {
            unit.init_parameter(parameter, range, specs[parameter].trainable, init)?;
        }
        // The states start at zero.
        unit.for_offloaded(Buffer::Optimizer, |offloaded, tensors| offloaded.forget_zeros(tensors, masters))?;
        unit.store(Buffer::Optimizer)?;
        unit.store(Buffer::Parameters)?;
        Ok(unit)
    }

    /// Initializes the elements of a parameter that this rank keeps, a chunk at a time. `whole` is the parameter's range in its
    /// flat buffer.
    fn init_parameter(
        &mut self,
        parameter: usize,
        whole: Range<usize>,
        trainable: bool,
        init: &mut InitFn<'_>,
    ) -> Result<()> {
        let flat = if trainable { &self.trainable } else { &self.frozen };
        let local_range = flat.local_range();
        let Some(wanted) = intersection(&whole, &local_range) else { return Ok(()) };
        let mut targets = vec![(flat.local_elements(), local_range)];
        if trainable {
            let masters = self.shards.iter().filter_map(|shard| Some((shard.master.as_ref()?, shard.owner)));
            targets.extend(masters.map(|(master, owner)| (master.shallow_clone(), flat.partition().range(owner))));
        }
        if let [(target, target_range)] = &targets[..]
            && (flat.dtype(), self.layout.pool.device()) == (self.layout.precision.state_dtype(), Device::Cpu)
        {
            let inside = wanted.start - target_range.start..wanted.end - target_range.start;
            return self.init_in_place(parameter, target, inside, wanted.start - whole.start, init);
        }
        for from in wanted.clone().step_by(INIT_CHUNK) {
            let range = from..wanted.end.min(from + INIT_CHUNK);
            let within = range.start - whole.start..range.end - whole.start;
            let chunk = self.init_chunk(range.len(), |elements| init(parameter, within, elements))?;
            for (target, target_range) in &targets {
                self.errors.tch(copy_overlap(&chunk, &range, target, target_range))?;
            }
        }
        Ok(())
    }

    /// Initializes the elements `inside` of `target`, which are those of the parameter from `first` on, without a copy.
    fn init_in_place(
        &self,
        parameter: usize,
        target: &Tensor,
        inside: Range<usize>,
        first: usize,
        init: &mut InitFn<'_>,
    ) -> Result<()> {
        let mut memory = self.errors.torch(storage::take(target, "it is being initialized"))?;
        let elements = self.errors.torch(floats_mut(&mut memory))?;
        let mut initialized = Ok(());
        for (index, chunk) in elements.slice(inside).chunks(INIT_CHUNK).enumerate() {
            let from = first + index * INIT_CHUNK;
            initialized = initialized.and_then(|()| init(parameter, from..from + chunk.len(), chunk));
        }
        self.errors.torch(storage::put(target, memory).map_err(|failure| failure.error))?;
        initialized.map_err(|error| Error::Init { unit: self.name().to_string(), error })
    }

    /// Creates a tensor for `len` parameters or values of optimizer state, which `init` writes.
    fn init_chunk(
        &self,
        len: usize,
        init: impl FnOnce(FloatsMut<'_>) -> std::result::Result<(), InitError>,
    ) -> Result<Tensor> {
        let mut memory = self.errors.torch(Block::new(self.layout.precision.state_dtype(), len, Device::Cpu))?;
        init(self.errors.torch(floats_mut(&mut memory))?)
            .map_err(|error| Error::Init { unit: self.name().to_string(), error })?;
        self.errors.torch(memory.into_tensor())
    }

    /// Restores the number of updates, and the optimizer state of the shards that this rank updates, which `init` supplies.
    pub(crate) fn resume(&mut self, updates: u32, init: &mut StateInitFn<'_>) -> Result<()> {
        self.steps = updates;
        self.start_fetch(Buffer::Optimizer)?;
        self.finish_fetch(Buffer::Optimizer)?;
        for shard in &self.shards {
            let first = self.partition().range(shard.owner).start;
            for span in &shard.spans {
                let whole =
                    self.trainable_ranges[span.parameter].as_ref().expect("shards have trainable parameters only");
                for (index, state) in shard.state.iter().enumerate() {
                    for from in span.range.clone().step_by(INIT_CHUNK) {
                        let range = from..span.range.end.min(from + INIT_CHUNK);
                        // The same elements, as a range of the parameter.
                        let within = first + range.start - whole.start..first + range.end - whole.start;
                        let chunk =
                            self.init_chunk(range.len(), |elements| init(span.parameter, index, within, elements))?;
                        self.errors.tch(copy_overlap(&chunk, &range, state, &(0..state.numel())))?;
                    }
                }
            }
        }
        self.store(Buffer::Optimizer)
    }

    /// Stores a buffer, if it is offloaded.
    fn store(&mut self, buffer: Buffer) -> Result<()> {
        self.start_store(buffer)?;
        self.finish_store(buffer)
    }
}

/// Makes room for tensors at a target, if there is one.
fn reserve(
    errors: &UnitErrors,
    target: Option<&OffloadTarget>,
    what: &'static str,
    tensors: Vec<(Dtype, usize)>,
) -> Result<Option<Offloaded>> {
    let reserve = |target| {
        let offloaded = Offloaded::new(target, tensors.into_iter(), format!("the {what} of {}", errors.unit()));
        offloaded.map_err(|problem| errors.offload(what, target, problem))
    };
    target.map(reserve).transpose()
}

/// Allocates zeros. On the CPU this touches no page, so moments become resident in the first update, not at startup.
fn zeros(errors: &UnitErrors, dtype: Dtype, len: usize, device: Device) -> Result<Tensor> {
    match device {
        Device::Cpu => errors.torch(Block::zeros(dtype, len).and_then(Block::into_tensor)),
        device => errors.tch(Tensor::f_zeros([len as i64], (kind_of(dtype), device))),
    }
}

/// The elements of f32 or f64 memory, to write.
fn floats_mut(memory: &mut Block) -> shardwise_torch::Result<FloatsMut<'_>> {
    match memory.dtype() {
        Dtype::F64 => memory.as_mut_slice().map(FloatsMut::F64),
        _ => memory.as_mut_slice().map(FloatsMut::F32),
    }
}

/// Copies the overlap of two tensors that hold the given ranges of a flat buffer.
fn copy_overlap(
    from: &Tensor,
    from_range: &Range<usize>,
    to: &Tensor,
    to_range: &Range<usize>,
) -> std::result::Result<(), TchError> {
    let Some(both) = intersection(from_range, to_range) else { return Ok(()) };
    let part = |tensor: &Tensor, range: &Range<usize>| {
        tensor.f_narrow(0, (both.start - range.start) as i64, both.len() as i64)
    };
    part(to, to_range)?.f_copy_(&part(from, from_range)?)
}
