//! What a checkpoint has of a buffer: this rank's shard, as tensors that are saved while training continues.

use shardwise_torch::tch::{Device, Tensor};

use super::ShardedBuffer;
use crate::Result;
use crate::error::UnitErrors;
use crate::flat_parameter::FlatParameter;

/// A tensor to save in a checkpoint; see [`ShardedUnit::checkpoint_tensors`](crate::ShardedUnit::checkpoint_tensors).
pub struct CheckpointTensor {
    /// The tensor, which shares its memory with the unit.
    pub tensor: Tensor,
    /// Its index among the unit's tensors on this rank.
    pub index: usize,
    /// Whether the tensor keeps its memory until the next update. If not, an all-gather of the unit borrows the memory.
    pub is_stable: bool,
    /// Whether [`ShardedUnit::detach_checkpoint_tensor`](crate::ShardedUnit::detach_checkpoint_tensor) can detach it.
    pub is_detachable: bool,
}

impl ShardedBuffer {
    /// Waits for the all-gather of updated parameters, if there is one.
    pub(crate) fn wait_for_update(&mut self) -> Result<()> {
        self.trainable.wait_for_update()
    }

    /// Returns this rank's shard for a checkpoint: the updated parameters, the optimizer states, then the frozen parameters in the
    /// dtype of the computation. Call [`ShardedBuffer::wait_for_update`] first.
    ///
    /// # Panics
    /// If a tensor's memory is in use: by sharded parameters that are gathered, or by an all-gather of updated ones; or if a tensor
    /// was detached and not updated since.
    pub(crate) fn checkpoint_tensors(&self) -> Result<Vec<CheckpointTensor>> {
        let (own, rank) = (self.own_shard(), self.layout.groups.shard.rank());
        assert!(own.detached.is_empty(), "{}: its tensors were detached, but not updated", self.name());
        // A gather borrows the memory of a shard, unless it fetches the shard first.
        let is_lent = |parameters: &FlatParameter| self.layout.sharding.parameters && !parameters.is_offloaded();
        let is_on_host = self.layout.pool.device() == Device::Cpu;
        // What is offloaded is read where it is, and not kept in memory.
        let is_in_memory = own.offloaded.is_none();
        let masters = usize::from(own.master.is_some());
        let master = CheckpointTensor {
            index: 0,
            tensor: self.read_updated_parameters(own)?,
            is_stable: own.master.is_some() || !is_lent(&self.trainable),
            is_detachable: match own.master {
                Some(_) => is_on_host && is_in_memory,
                None => is_on_host && self.trainable.keeps_only_own(),
            },
        };
        let read = |(index, state): (usize, &Tensor)| match &own.offloaded {
            Some(offloaded) => self.errors.torch(offloaded.read(masters + index, state)),
            None => Ok(state.shallow_clone()),
        };
        let state = own.state.iter().enumerate().map(|state| {
            Ok(CheckpointTensor {
                index: 0,
                tensor: read(state)?,
                is_stable: true,
                is_detachable: is_on_host && is_in_memory,
            })
        });
        let frozen = CheckpointTensor {
            index: 0,
            tensor: self.frozen.read_shard(rank)?,
            is_stable: !is_lent(&self.frozen),
            is_detachable: false,
        };
        std::iter::once(Ok(master)).chain(state).chain([Ok(frozen)]).collect()
    }

    /// The number of [`ShardedBuffer::checkpoint_tensors`].
    pub(crate) fn checkpoint_tensors_len(&self) -> usize {
        2 + self.layout.states
    }

    /// Detaches a tensor of [`ShardedBuffer::checkpoint_tensors`], by its index, so that the next update does not overwrite it: the
    /// update reads it and writes to new memory, with the same results. Returns the tensor with the old memory. An update must
    /// follow, because until then the unit has no valid contents.
    ///
    /// # Panics
    /// If the tensor is not detachable, or is detached already.
    pub(crate) fn detach_checkpoint_tensor(&mut self, index: usize) -> Result<Tensor> {
        let rank = self.layout.groups.shard.rank();
        let own =
            self.shards.iter_mut().find(|shard| shard.owner == rank).expect("a rank always updates its own shard");
        assert!(own.detached.iter().all(|(known, _)| *known != index), "{}: detached twice", self.errors.unit());
        let old = match (index.checked_sub(1), &mut own.master) {
            (Some(state), _) => replace_with_empty(&self.errors, &mut own.state[state])?,
            (None, Some(master)) => replace_with_empty(&self.errors, master)?,
            (None, None) => {
                assert!(self.trainable.keeps_only_own(), "{}: it cannot be detached", self.errors.unit());
                self.trainable.replace_memory()?
            }
        };
        own.detached.push((index, old.shallow_clone()));
        Ok(old)
    }

    /// The number of updates so far.
    pub(crate) fn updates(&self) -> u32 {
        self.steps
    }
}

/// Replaces a tensor with one of the same shape whose contents are unspecified. Returns the old one.
fn replace_with_empty(errors: &UnitErrors, tensor: &mut Tensor) -> Result<Tensor> {
    let new = errors.tch(tensor.f_empty_like())?;
    Ok(std::mem::replace(tensor, new))
}
