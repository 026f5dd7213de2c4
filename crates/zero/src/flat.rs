//! Parameters of one type, one after the other: whole, sliced, or on their way from the one to the other.

use std::ops::Range;
use std::sync::Arc;

use shardwise_comm::{Group, Pending};
use shardwise_plan::{Dtype, Partition};
use shardwise_torch::tch::Tensor;
use shardwise_torch::{Block, kind_of, storage};

use crate::error::Faults;
use crate::{Pool, Result};

/// The flat buffer of a unit's parameters, as one rank of a group holds it.
pub(crate) struct Flat {
    faults: Faults,
    group: Arc<Group>,
    pool: Arc<Pool>,
    dtype: Dtype,
    partition: Partition,
    /// Its storage has memory only while the parameters are whole.
    whole: Tensor,
    state: State,
}

/// Where the parameters are. `bytes` below are those of their type.
enum State {
    /// All of them here, for good: `bytes` for each element.
    Kept,
    /// As `Kept`, and the other ranks' updates are on their way.
    Updating(Pending<Block>),
    /// This rank's slice alone: `bytes` for each of its elements.
    Sliced { slice: Tensor },
    /// As `Sliced`, and the memory for all of them, into which they are on their way.
    Gathering { slice: Tensor, pending: Pending<(Block, Block)> },
    /// As `Sliced`, and all of them, in the pool's memory.
    Whole { slice: Tensor },
    /// Being moved from one of the others to the next.
    Moving,
}

impl Flat {
    /// Room for `len` elements, with arbitrary contents. They are sliced between uses, or kept whole.
    pub(crate) fn new(
        unit: &str,
        group: Arc<Group>,
        pool: Arc<Pool>,
        dtype: Dtype,
        len: usize,
        sliced: bool,
    ) -> Result<Self> {
        let faults = Faults::of(unit);
        let partition = group.partition(len);
        let empty = |len: usize| faults.tch(Tensor::f_empty([len as i64], (kind_of(dtype), pool.device())));
        // Where it is sliced: never touched, so it never becomes resident.
        let whole = empty(len)?;
        let state = if sliced && len > 0 {
            drop(faults.torch(storage::take(&whole, &released(unit)))?);
            State::Sliced { slice: empty(partition.part_len(group.rank()))? }
        } else {
            State::Kept
        };
        Ok(Flat { faults, group, pool, dtype, partition, whole, state })
    }

    /// How the elements are cut.
    pub(crate) fn partition(&self) -> Partition {
        self.partition
    }

    /// A view of some elements; it can be read while the parameters are whole.
    pub(crate) fn view(&self, place: Range<usize>, dimensions: &[i64]) -> Tensor {
        self.whole.narrow(0, place.start as i64, place.len() as i64).view(dimensions).detach()
    }

    /// What a rank of the group may write to between uses, among the elements that this rank keeps.
    ///
    /// # Panics
    /// While parameters that are sliced between uses are whole: what is written to the slice would not be in the whole, and
    /// the next pass would compute with stale parameters.
    pub(crate) fn slice(&self, owner: usize) -> Tensor {
        match &self.state {
            State::Sliced { slice } => {
                assert_eq!(owner, self.group.rank(), "{}: a rank keeps its own slice", self.faults.unit());
                slice.shallow_clone()
            }
            State::Kept => {
                let range = self.partition.range(owner);
                self.whole.narrow(0, range.start as i64, range.len() as i64)
            }
            State::Updating(_) | State::Gathering { .. } | State::Whole { .. } | State::Moving => {
                panic!("{}: its slice is in use; release the parameters before they are updated", self.faults.unit())
            }
        }
    }

    /// What this rank keeps between uses.
    pub(crate) fn kept_elements(&self) -> Tensor {
        match &self.state {
            State::Kept => self.whole.shallow_clone(),
            _ => self.slice(self.group.rank()),
        }
    }

    /// Which elements that is.
    pub(crate) fn kept(&self) -> Range<usize> {
        match self.state {
            State::Kept | State::Updating(_) => 0..self.partition.len(),
            _ => self.partition.range(self.group.rank()),
        }
    }

    /// The memory that it holds beside the pool's.
    pub(crate) fn bytes(&self) -> usize {
        self.kept().len() * self.dtype.bytes()
    }

    /// Starts to make the parameters whole, if they are not.
    pub(crate) fn begin_gather(&mut self) -> Result<()> {
        self.state = match self.take_state() {
            State::Sliced { slice } => {
                let part = self.faults.torch(storage::take(&slice, "the slice is being gathered"))?;
                let whole = self.faults.torch(self.pool.lend(self.dtype, self.partition.len()))?;
                State::Gathering { slice, pending: self.group.all_gather(self.faults.unit(), part, whole) }
            }
            already => already,
        };
        Ok(())
    }

    /// Makes the parameters whole.
    pub(crate) fn gather(&mut self) -> Result<()> {
        self.begin_gather()?;
        self.state = match self.take_state() {
            State::Gathering { slice, pending } => {
                let (part, whole) = self.faults.comm(pending.wait())?;
                self.put(&slice, part)?;
                self.put(&self.whole, whole)?;
                State::Whole { slice }
            }
            already => already,
        };
        self.settle()
    }

    /// Waits for the other ranks' updates, if they are on their way.
    pub(crate) fn settle(&mut self) -> Result<()> {
        self.state = match self.take_state() {
            State::Updating(pending) => {
                let whole = self.faults.comm(pending.wait())?;
                self.put(&self.whole, whole)?;
                State::Kept
            }
            settled => settled,
        };
        Ok(())
    }

    /// Gives the memory of the whole back, where parameters are sliced.
    pub(crate) fn release(&mut self) -> Result<()> {
        self.state = match self.take_state() {
            State::Whole { slice } => {
                let memory = self.faults.torch(storage::take(&self.whole, &released(self.faults.unit())))?;
                self.pool.give_back(memory);
                State::Sliced { slice }
            }
            State::Kept => State::Kept,
            _ => panic!("{}: parameters that are not whole cannot be released", self.faults.unit()),
        };
        Ok(())
    }

    /// Every rank has updated its slice of what all ranks keep whole: starts to gather the others'.
    pub(crate) fn begin_update(&mut self) -> Result<()> {
        self.state = match self.take_state() {
            State::Kept if !self.partition.is_empty() => {
                let whole = self.faults.torch(storage::take(&self.whole, "updated parameters are being gathered"))?;
                State::Updating(self.group.all_gather_in_place(self.faults.unit(), whole))
            }
            sliced => sliced,
        };
        Ok(())
    }

    fn take_state(&mut self) -> State {
        std::mem::replace(&mut self.state, State::Moving)
    }

    fn put(&self, tensor: &Tensor, block: Block) -> Result<()> {
        self.faults.torch(storage::put(tensor, block).map_err(|refused| refused.error))
    }
}

fn released(unit: &str) -> String {
    format!("the parameters of {unit} are released; gather them before they are used")
}
