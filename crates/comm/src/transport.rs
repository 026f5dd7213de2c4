//! The interface to a backend, which gets calls as raw addresses, with lengths and dtypes already checked.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use shardwise_plan::{Dtype, Partition, RankSet};
use shardwise_torch::tch::Device;

use crate::instruments::EntryHandle;
use crate::pending::{Buffers, Completion};
use crate::{Call, ReduceOp, Result};

/// A backend's implementation of a group.
pub(crate) trait Transport: Send + Sync {
    /// The device whose memory this backend communicates.
    fn device(&self) -> Device;

    /// Queues a call behind those started before it, and returns a way to wait for it.
    fn start(&self, job: Job) -> Completion;

    /// Creates a subgroup on the same backend; all of its ranks must call this, in the same order.
    fn split(&self, ranks: RankSet, name: &Arc<str>) -> Result<Arc<dyn Transport>>;

    /// How long a call may make no progress before it fails.
    fn timeout(&self) -> Duration;

    /// Fails if a call has failed after its completion was returned, which only happens on a device.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Ends the processes of all ranks. Returns only if the backend cannot do that.
    fn abort(&self) {}
}

/// A call to execute.
pub(crate) struct Job {
    pub(crate) call: Call,
    pub(crate) operation: Operation,
    /// The owners of all memory that `operation` points to.
    pub(crate) buffers: Buffers,
    pub(crate) handle: EntryHandle,
    /// An injected fault: makes the communication thread panic in the middle of the call.
    pub(crate) panics: bool,
}

/// The operation of a call, with its addresses and lengths.
pub(crate) enum Operation {
    AllGather { part: *const u8, whole: *mut u8, partition: Partition },
    ReduceScatter { whole: *const u8, part: *mut u8, part_dtype: Dtype, partition: Partition, reduce: ReduceOp },
    AllReduce { buffer: *mut u8, partition: Partition, reduce: ReduceOp },
    AllToAll { send: *const u8, sends: Splits, receive: *mut u8, receives: Splits },
    Broadcast { buffer: *mut u8, len: usize, root: usize },
    Send { buffer: *const u8, len: usize, to: usize },
    Receive { buffer: *mut u8, len: usize, from: usize },
    Barrier,
}

// SAFETY: the addresses point into the job's buffers, which are owned, `Send`, and travel with them.
unsafe impl Send for Operation {}

impl Operation {
    /// The number of elements that this rank sends to others. Relaying for others (in a broadcast's tree) does not count.
    pub(crate) fn elements_sent(&self, rank: usize, size: usize) -> usize {
        match self {
            Operation::AllGather { partition, .. } => partition.part_len(rank) * (size - 1),
            Operation::ReduceScatter { partition, .. } => partition.len() - partition.part_len(rank),
            Operation::AllReduce { partition, .. } => {
                partition.len() - partition.part_len(rank) + partition.part_len(rank) * (size - 1)
            }
            Operation::AllToAll { sends, .. } => sends.len() - sends.range(rank).len(),
            Operation::Broadcast { len, root, .. } if *root == rank && size > 1 => *len,
            Operation::Send { len, .. } => *len,
            Operation::Broadcast { .. } | Operation::Receive { .. } | Operation::Barrier => 0,
        }
    }
}

/// Fault injection.
impl Operation {
    /// Drops the last element (or row) of each buffer, as if rank `rank` had made the call with shorter buffers. Every part still lies
    /// within the call's memory: a part of a shorter whole never gets longer, and never ends later.
    pub(crate) fn shorten(self, rank: usize, element_bytes: usize) -> Self {
        let shorter = Partition::without_last_row;
        // The part of an in-place call moves to its new position in the whole.
        let in_place = |whole: *const u8, partition: Partition| {
            whole.wrapping_add(partition.range(rank).start * element_bytes).cast_mut()
        };
        let moved = |part: *const u8, whole: *const u8, partition: Partition| match part == in_place(whole, partition) {
            true => in_place(whole, shorter(partition)),
            false => part.cast_mut(),
        };
        let cut = |splits: Splits| match splits {
            Splits::Even(partition) => Splits::Even(shorter(partition)),
            Splits::Ends(ends) => {
                let end = ends.last().map_or(0, |end| end.saturating_sub(1));
                Splits::Ends(ends.into_iter().map(|other| other.min(end)).collect())
            }
        };
        match self {
            Operation::AllGather { part, whole, partition } => {
                Operation::AllGather { part: moved(part, whole, partition), whole, partition: shorter(partition) }
            }
            Operation::ReduceScatter { whole, part, part_dtype, partition, reduce } => Operation::ReduceScatter {
                whole,
                part: moved(part, whole, partition),
                part_dtype,
                partition: shorter(partition),
                reduce,
            },
            Operation::AllReduce { buffer, partition, reduce } => {
                Operation::AllReduce { buffer, partition: shorter(partition), reduce }
            }
            Operation::AllToAll { send, sends, receive, receives } => {
                Operation::AllToAll { send, sends: cut(sends), receive, receives: cut(receives) }
            }
            Operation::Broadcast { buffer, len, root } => {
                Operation::Broadcast { buffer, len: len.saturating_sub(1), root }
            }
            Operation::Send { buffer, len, to } => Operation::Send { buffer, len: len.saturating_sub(1), to },
            Operation::Receive { buffer, len, from } => Operation::Receive { buffer, len: len.saturating_sub(1), from },
            Operation::Barrier => Operation::Barrier,
        }
    }
}

/// How the buffer of an all-to-all is split among the ranks (torch.distributed: `input_split_sizes`).
pub(crate) enum Splits {
    Even(Partition),
    /// The end of each rank's range.
    Ends(Vec<usize>),
}

impl Splits {
    pub(crate) fn from_counts(counts: &[usize]) -> Self {
        let ends = counts.iter().scan(0, |end, count| {
            *end += count;
            Some(*end)
        });
        Splits::Ends(ends.collect())
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Splits::Even(partition) => partition.len(),
            Splits::Ends(ends) => ends.last().copied().unwrap_or(0),
        }
    }

    pub(crate) fn range(&self, index: usize) -> Range<usize> {
        match self {
            Splits::Even(partition) => partition.range(index),
            Splits::Ends(ends) => index.checked_sub(1).map_or(0, |previous| ends[previous])..ends[index],
        }
    }
}
