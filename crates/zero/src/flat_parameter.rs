//! A unit's parameters as one flat buffer, sharded or unsharded (FSDP1: `FlatParameter`; FSDP2: `FSDPParam` and its
//! `ShardedState`).

use std::ops::Range;
use std::sync::Arc;

use shardwise_comm::{Group, Pending};
use shardwise_plan::program::Codec;
use shardwise_plan::{Dtype, Partition, int8_bytes};
use shardwise_torch::tch::{self, Tensor};
use shardwise_torch::{Block, decode_int8, encode_int8, kind_of, storage};

use crate::error::UnitErrors;
use crate::offload::Offloaded;
use crate::{OffloadTarget, Pool, Result};

/// A flat buffer of parameters, as one rank of a group holds it.
pub(crate) struct FlatParameter {
    errors: UnitErrors,
    group: Arc<Group>,
    pool: Arc<Pool>,
    dtype: Dtype,
    partition: Partition,
    /// All parameters. Its storage has memory only while they are unsharded.
    whole: Tensor,
    state: State,
    /// Where the shard is while it is not needed, if not in memory.
    offloaded: Option<Offloaded>,
}

/// The memory that this rank holds.
enum State {
    /// All parameters, always: they are not sharded (stages 0 to 2).
    Whole,
    /// Like `Whole`, while an all-gather fetches the other ranks' updates.
    Updating(Pending<Block>),
    /// This rank's shard only.
    Sharded { shard: Tensor },
    /// Like `Sharded`, plus memory of the pool, which an all-gather is filling.
    Unsharding { shard: Tensor, gather: Gather },
    /// Like `Sharded`, plus all parameters, in memory of the pool.
    Unsharded { shard: Tensor },
    /// Between two of the other states. An error in the transition leaves the parameters here for good.
    Moving,
}

/// An all-gather of sharded parameters.
enum Gather {
    /// Of the shards themselves, whose memory it borrows, into memory for all parameters.
    Exact(Pending<(Block, Block)>),
    /// Of quantized shards, in memory of the pool. Memory for all parameters is allocated when they are decoded.
    Int8(Pending<(Block, Block)>),
}

impl Gather {
    fn codec(&self) -> Codec {
        match self {
            Gather::Exact(_) => Codec::None,
            Gather::Int8(_) => Codec::Int8,
        }
    }
}

impl FlatParameter {
    /// Allocates `len` uninitialized elements, sharded or whole.
    pub(crate) fn new(
        unit: &str,
        group: Arc<Group>,
        pool: Arc<Pool>,
        dtype: Dtype,
        len: usize,
        sharded: bool,
    ) -> Result<Self> {
        let errors = UnitErrors::new(unit);
        let partition = group.partition(len);
        let empty = |len: usize| errors.tch(Tensor::f_empty([len as i64], (kind_of(dtype), pool.device())));
        // If sharded, this is never touched, so it never becomes resident.
        let whole = empty(len)?;
        let state = if sharded && len > 0 {
            drop(errors.torch(storage::take(&whole, &freed_message(unit)))?);
            State::Sharded { shard: empty(partition.part_len(group.rank()))? }
        } else {
            State::Whole
        };
        Ok(FlatParameter { errors, group, pool, dtype, partition, whole, state, offloaded: None })
    }

    /// Makes room for the shard at a target, if parameters are sharded. It stays in memory until it is stored.
    pub(crate) fn offload_to(&mut self, target: &OffloadTarget) -> Result<()> {
        if let State::Sharded { shard } = &self.state {
            let (tensors, what) = ([(self.dtype, shard.numel())], format!("the shard of {}", self.errors.unit()));
            let offloaded = Offloaded::new(target, tensors.into_iter(), what);
            self.offloaded = Some(offloaded.map_err(|problem| self.errors.offload("parameters", target, problem))?);
        }
        Ok(())
    }

    /// Moves the shard, if it is offloaded.
    ///
    /// # Panics
    /// If the shard is being gathered.
    pub(crate) fn for_offloaded(
        &mut self,
        mut work: impl FnMut(&mut Offloaded, &[&Tensor]) -> std::result::Result<(), String>,
    ) -> Result<()> {
        let Some(offloaded) = &mut self.offloaded else { return Ok(()) };
        let (State::Sharded { shard } | State::Unsharded { shard }) = &self.state else {
            panic!("{}: its shard is being gathered", self.errors.unit());
        };
        work(offloaded, &[shard]).map_err(|problem| self.errors.offload("parameters", offloaded.target(), problem))
    }

    /// The type of the elements.
    pub(crate) fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The partition of the elements among the ranks.
    pub(crate) fn partition(&self) -> Partition {
        self.partition
    }

    /// Returns a view of some elements, which can be read while the parameters are unsharded.
    pub(crate) fn view(&self, range: Range<usize>, shape: &[i64]) -> Tensor {
        self.whole.narrow(0, range.start as i64, range.len() as i64).view(shape).detach()
    }

    /// Returns the shard of `owner`, for the optimizer to update. If the parameters are sharded, `owner` must be this rank.
    ///
    /// # Panics
    /// If sharded parameters are currently unsharded: an update of the shard would not reach the unsharded copy, and the next
    /// pass would compute with stale parameters.
    pub(crate) fn shard(&self, owner: usize) -> Tensor {
        match &self.state {
            State::Sharded { shard } => {
                assert_eq!(owner, self.group.rank(), "{}: a rank keeps its own shard", self.errors.unit());
                shard.shallow_clone()
            }
            State::Whole => {
                let range = self.partition.range(owner);
                self.whole.narrow(0, range.start as i64, range.len() as i64)
            }
            State::Updating(_) | State::Unsharding { .. } | State::Unsharded { .. } | State::Moving => {
                panic!("{}: its shard is in use; release the parameters before they are updated", self.errors.unit())
            }
        }
    }

    /// Moves the memory out of the parameters, and gives them new memory with unspecified contents. Returns a tensor with the old
    /// memory. The next update must write all elements.
    pub(crate) fn replace_memory(&mut self) -> Result<Tensor> {
        match &mut self.state {
            State::Sharded { shard } => {
                let new = self.errors.tch(shard.f_empty_like())?;
                Ok(std::mem::replace(shard, new))
            }
            // Parameters are views of this storage, so the memory is replaced, not the tensor.
            State::Whole => {
                let new = self.errors.tch(self.whole.f_empty_like())?;
                let message = "its memory is being replaced";
                let (old_memory, new_memory) = (
                    self.errors.torch(storage::take(&self.whole, message))?,
                    self.errors.torch(storage::take(&new, message))?,
                );
                self.put(&self.whole, new_memory)?;
                self.put(&new, old_memory)?;
                Ok(new)
            }
            _ => panic!("{}: its shard is in use; release the parameters before they are updated", self.errors.unit()),
        }
    }

    /// Whether this rank keeps no other elements in memory than its own shard, so that the shard is all memory of a tensor.
    pub(crate) fn keeps_only_own(&self) -> bool {
        self.offloaded.is_none() && self.local_range() == self.partition.range(self.group.rank())
    }

    /// The elements that this rank keeps: all of them, or its shard.
    pub(crate) fn local_elements(&self) -> Tensor {
        match &self.state {
            State::Whole => self.whole.shallow_clone(),
            _ => self.shard(self.group.rank()),
        }
    }

    /// Whether the shard is offloaded.
    pub(crate) fn is_offloaded(&self) -> bool {
        self.offloaded.is_some()
    }

    /// The shard of `owner`, to read: from its target, if it is there.
    pub(crate) fn read_shard(&self, owner: usize) -> Result<Tensor> {
        match &self.offloaded {
            Some(offloaded) => self.errors.torch(offloaded.read(0, &self.shard(owner))),
            None => Ok(self.shard(owner)),
        }
    }

    /// The elements that this rank keeps, to read: from their target, if they are there.
    pub(crate) fn read_local_elements(&self) -> Result<Tensor> {
        match &self.state {
            State::Whole => Ok(self.whole.shallow_clone()),
            _ => self.read_shard(self.group.rank()),
        }
    }

    /// The range of the elements that this rank keeps.
    pub(crate) fn local_range(&self) -> Range<usize> {
        match self.state {
            State::Whole | State::Updating(_) => 0..self.partition.len(),
            _ => self.partition.range(self.group.rank()),
        }
    }

    /// The size of the memory that this rank keeps, excluding memory of the pool.
    pub(crate) fn bytes(&self) -> usize {
        match &self.offloaded {
            Some(offloaded) => offloaded.bytes_in_memory(),
            None => self.local_range().len() * self.dtype.bytes(),
        }
    }

    /// Starts an all-gather of sharded parameters (FSDP2: `unshard(async_op=True)`).
    ///
    /// # Panics
    /// If the shard is not in memory, if parameters cannot travel like this, or if they are being gathered in another way.
    pub(crate) fn start_gather(&mut self, codec: Codec) -> Result<()> {
        let unit = self.errors.unit();
        if let State::Unsharding { gather, .. } = &self.state {
            assert_eq!(gather.codec(), codec, "{unit}: it is being gathered in another way already");
        }
        let State::Sharded { shard } = &self.state else { return Ok(()) };
        let is_in_memory = self.offloaded.as_ref().is_none_or(Offloaded::is_in_memory);
        assert!(is_in_memory, "{unit}: its shard is offloaded; fetch it before it is gathered");
        let gather = match codec {
            Codec::None => Gather::Exact(self.gather_exactly(shard)?),
            Codec::Int8 => Gather::Int8(self.gather_as_int8(shard)?),
            other => panic!("{unit}: its parameters cannot travel as {other:?}"),
        };
        let State::Sharded { shard } = self.take_state() else { unreachable!("it was sharded") };
        self.state = State::Unsharding { shard, gather };
        Ok(())
    }

    /// Starts an exact all-gather of sharded parameters, unless one is running.
    pub(crate) fn start_gather_unless_started(&mut self) -> Result<()> {
        if let State::Sharded { .. } = self.state { self.start_gather(Codec::None) } else { Ok(()) }
    }

    fn gather_exactly(&self, shard: &Tensor) -> Result<Pending<(Block, Block)>> {
        // Allocate before taking the shard: if there is no memory, the unit is as it was.
        let whole = self.errors.torch(self.pool.allocate(self.dtype, self.partition.len()))?;
        let part = self.errors.torch(storage::take(shard, "the shard is being gathered"))?;
        Ok(self.group.all_gather(self.errors.unit(), part, whole))
    }

    /// Every rank sends the same number of bytes: those of the longest shard.
    fn gather_as_int8(&self, shard: &Tensor) -> Result<Pending<(Block, Block)>> {
        let bytes = int8_bytes(self.partition.part_len(0));
        let mut part = self.errors.torch(self.pool.allocate(Dtype::U8, bytes))?;
        let whole = self.errors.torch(self.pool.allocate(Dtype::U8, bytes * self.group.size()))?;
        let exact = self.errors.torch(storage::take(shard, "the shard is being quantized"))?;
        let encoded = encode_int8(&exact, &mut part, threads());
        self.put(shard, exact)?;
        self.errors.torch(encoded)?;
        Ok(self.group.all_gather(self.errors.unit(), part, whole))
    }

    /// All-gathers sharded parameters (FSDP2: `unshard`), and waits for updates of whole ones.
    pub(crate) fn gather(&mut self) -> Result<()> {
        self.start_gather_unless_started()?;
        self.state = match self.take_state() {
            State::Unsharding { shard, gather } => {
                let whole = match gather {
                    Gather::Exact(pending) => {
                        let (part, whole) = self.errors.comm(pending.wait())?;
                        self.put(&shard, part)?;
                        whole
                    }
                    Gather::Int8(pending) => self.decode(self.errors.comm(pending.wait())?)?,
                };
                self.put(&self.whole, whole)?;
                State::Unsharded { shard }
            }
            other => other,
        };
        self.wait_for_update()
    }

    /// Decodes the parameters of all ranks, this one's own as well, so that all compute with the same.
    fn decode(&self, (part, encoded): (Block, Block)) -> Result<Block> {
        let mut whole = self.errors.torch(self.pool.allocate(self.dtype, self.partition.len()))?;
        let bytes = self.errors.torch(encoded.as_slice::<u8>())?;
        for (rank, bytes) in bytes.chunks(part.len().max(1)).enumerate() {
            let range = self.partition.range(rank);
            self.errors.torch(decode_int8(&bytes[..int8_bytes(range.len())], &mut whole, range, threads()))?;
        }
        self.pool.free(part);
        self.pool.free(encoded);
        Ok(whole)
    }

    /// Waits for the all-gather of the other ranks' updates, if there is one.
    pub(crate) fn wait_for_update(&mut self) -> Result<()> {
        self.state = match self.take_state() {
            State::Updating(pending) => {
                let whole = self.errors.comm(pending.wait())?;
                self.put(&self.whole, whole)?;
                State::Whole
            }
            other => other,
        };
        Ok(())
    }

    /// Frees the unsharded copy of sharded parameters (FSDP2: `reshard`).
    pub(crate) fn release(&mut self) -> Result<()> {
        self.state = match self.take_state() {
            State::Unsharded { shard } => {
                let memory = self.errors.torch(storage::take(&self.whole, &freed_message(self.errors.unit())))?;
                self.pool.free(memory);
                State::Sharded { shard }
            }
            State::Whole => State::Whole,
            _ => panic!("{}: only unsharded parameters can be released", self.errors.unit()),
        };
        Ok(())
    }

    /// Starts an all-gather of whole parameters after every rank has updated its shard.
    pub(crate) fn start_update_gather(&mut self) -> Result<()> {
        self.state = match self.take_state() {
            State::Whole if !self.partition.is_empty() => {
                let whole = self.errors.torch(storage::take(&self.whole, &updating_message(self.errors.unit())))?;
                State::Updating(self.group.all_gather_in_place(self.errors.unit(), whole))
            }
            other => other,
        };
        Ok(())
    }

    fn take_state(&mut self) -> State {
        std::mem::replace(&mut self.state, State::Moving)
    }

    fn put(&self, tensor: &Tensor, block: Block) -> Result<()> {
        self.errors.torch(storage::put(tensor, block).map_err(|failure| failure.error))
    }
}

fn updating_message(unit: &str) -> String {
    format!("the updated parameters of {unit} are being gathered; gather the unit before they are used")
}

fn freed_message(unit: &str) -> String {
    format!("the parameters of {unit} are released; gather them before they are used")
}

/// The number of threads that a rank computes with.
fn threads() -> usize {
    tch::get_num_threads().try_into().unwrap_or(1)
}
