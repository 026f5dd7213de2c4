//! Moves the buffers of a unit to where they are while they are not needed, and back.

use shardwise_plan::program::Buffer;
use shardwise_torch::tch::Tensor;

use super::{ReducedGrads, ShardedBuffer};
use crate::Result;
use crate::offload::Offloaded;

impl ShardedBuffer {
    /// Starts to fetch a buffer, if it is offloaded.
    pub(crate) fn start_fetch(&mut self, buffer: Buffer) -> Result<()> {
        self.for_offloaded(buffer, Offloaded::start_fetch)
    }

    /// Waits until a buffer is in memory.
    pub(crate) fn finish_fetch(&mut self, buffer: Buffer) -> Result<()> {
        self.for_offloaded(buffer, Offloaded::finish_fetch)
    }

    /// Starts to store a buffer, if it is offloaded.
    pub(crate) fn start_store(&mut self, buffer: Buffer) -> Result<()> {
        if buffer == Buffer::Parameters {
            self.trainable.for_offloaded(Offloaded::start_store)?;
            return self.frozen.for_offloaded(Offloaded::start_store_once);
        }
        self.for_offloaded(buffer, Offloaded::start_store)
    }

    /// Waits until a buffer is stored, and frees its memory.
    pub(crate) fn finish_store(&mut self, buffer: Buffer) -> Result<()> {
        self.for_offloaded(buffer, Offloaded::finish_store)
    }

    /// Frees parameters that have not changed since they were fetched, if they are offloaded.
    ///
    /// # Panics
    /// If the buffer is another one: nobody knows whether that has changed.
    pub(crate) fn evict(&mut self, buffer: Buffer) -> Result<()> {
        assert_eq!(buffer, Buffer::Parameters, "{}: only parameters can be evicted", self.name());
        self.for_offloaded(buffer, Offloaded::evict)
    }

    /// An update changes the shard of the parameters. If there are masters, it overwrites the shard.
    pub(super) fn prepare_shard_for_update(&mut self) -> Result<()> {
        let has_masters = self.layout.precision.has_masters();
        self.trainable.for_offloaded(|offloaded, shard| {
            offloaded.mark_changed();
            if has_masters { offloaded.allocate(shard) } else { Ok(()) }
        })
    }

    pub(super) fn for_offloaded(
        &mut self,
        buffer: Buffer,
        mut move_tensors: impl FnMut(&mut Offloaded, &[&Tensor]) -> std::result::Result<(), String>,
    ) -> Result<()> {
        if buffer == Buffer::Parameters {
            self.trainable.for_offloaded(&mut move_tensors)?;
            return self.frozen.for_offloaded(&mut move_tensors);
        }
        let errors = &self.errors;
        let mut work = |what, offloaded: &mut Offloaded, tensors: &[&Tensor]| {
            move_tensors(offloaded, tensors).map_err(|problem| errors.offload(what, offloaded.target(), problem))
        };
        match (buffer, &self.reduced_grads, &mut self.offloaded_grads) {
            (Buffer::Optimizer, ..) => self.shards.iter_mut().try_for_each(|shard| {
                let tensors: Vec<&Tensor> = shard.master.iter().chain(&shard.state).collect();
                let offloaded = shard.offloaded.as_mut();
                offloaded.map_or(Ok(()), |offloaded| work("optimizer state", offloaded, &tensors))
            }),
            (Buffer::Gradients, ReducedGrads::Sum(sums), Some(offloaded)) => work("gradients", offloaded, &[sums]),
            (Buffer::Gradients, ..) => Ok(()),
            (buffer, ..) => panic!("{}: {buffer:?} cannot be offloaded by a unit", errors.unit()),
        }
    }
}
