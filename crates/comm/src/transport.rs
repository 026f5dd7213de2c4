//! What a back end is asked to do: calls whose lengths and types have been checked, with plain addresses.

use std::ops::Range;
use std::sync::Arc;

use shardwise_plan::{Partition, RankSet};
use shardwise_torch::tch::Device;

use crate::instruments::Ticket;
use crate::pending::{Completion, Luggage};
use crate::{Call, Reduce, Result};

/// A back end's part of one group.
pub(crate) trait Transport: Send + Sync {
    /// The device whose memory it moves.
    fn device(&self) -> Device;

    /// Starts a call after all that were started before it, and says how to wait for it.
    fn start(&self, job: Job) -> Completion;

    /// The same back end for a sub-group; all of its ranks ask for it, in the same order.
    fn split(&self, ranks: RankSet, name: &Arc<str>) -> Result<Arc<dyn Transport>>;

    /// Ends the processes of all ranks, where the back end can reach them. It returns only where it cannot.
    fn abort(&self) {}
}

/// One call on its way.
pub(crate) struct Job {
    pub(crate) call: Call,
    pub(crate) work: Work,
    /// The owners of all memory that `work` points to.
    pub(crate) luggage: Luggage,
    pub(crate) ticket: Ticket,
    /// Whether the communication thread is to panic in the middle of it, for tests of what happens then.
    pub(crate) panics: bool,
}

/// The addresses and lengths of a call.
pub(crate) enum Work {
    AllGather { part: *const u8, whole: *mut u8, partition: Partition },
    ReduceScatter { whole: *const u8, part: *mut u8, partition: Partition, reduce: Reduce },
    AllReduce { buffer: *mut u8, partition: Partition, reduce: Reduce },
    AllToAll { send: *const u8, sends: Cuts, receive: *mut u8, receives: Cuts },
    Broadcast { buffer: *mut u8, len: usize, root: usize },
    Send { buffer: *const u8, len: usize, to: usize },
    Receive { buffer: *mut u8, len: usize, from: usize },
    Barrier,
}

// SAFETY: the addresses point into the job's luggage, which is owned, `Send`, and travels with them.
unsafe impl Send for Work {}

impl Work {
    /// How many elements this rank hands to other ranks. Relaying for others (in a broadcast's tree) does not count.
    pub(crate) fn elements_sent(&self, rank: usize, size: usize) -> usize {
        match self {
            Work::AllGather { partition, .. } => partition.part_len(rank) * (size - 1),
            Work::ReduceScatter { partition, .. } => partition.len() - partition.part_len(rank),
            Work::AllReduce { partition, .. } => {
                partition.len() - partition.part_len(rank) + partition.part_len(rank) * (size - 1)
            }
            Work::AllToAll { sends, .. } => sends.len() - sends.range(rank).len(),
            Work::Broadcast { len, root, .. } if *root == rank && size > 1 => *len,
            Work::Send { len, .. } => *len,
            Work::Broadcast { .. } | Work::Receive { .. } | Work::Barrier => 0,
        }
    }
}

/// For calls that are made too short on purpose.
impl Work {
    /// The same without the last element of each buffer, as rank `rank` would do it whose buffers were that long. Every part
    /// still lies in the memory that the whole call has: a part of a shorter whole is no longer, and ends no later.
    pub(crate) fn shortened(self, rank: usize, element_bytes: usize) -> Self {
        let shorter = |partition: Partition| Partition::new(partition.len().saturating_sub(1), partition.parts());
        // A part that stands in its place in the whole moves with its place.
        let place = |whole: *const u8, partition: Partition| {
            whole.wrapping_add(partition.range(rank).start * element_bytes).cast_mut()
        };
        let moved = |part: *const u8, whole: *const u8, partition: Partition| match part == place(whole, partition) {
            true => place(whole, shorter(partition)),
            false => part.cast_mut(),
        };
        let cut = |cuts: Cuts| match cuts {
            Cuts::Even(partition) => Cuts::Even(shorter(partition)),
            Cuts::Listed(ends) => {
                let end = ends.last().map_or(0, |end| end.saturating_sub(1));
                Cuts::Listed(ends.into_iter().map(|other| other.min(end)).collect())
            }
        };
        match self {
            Work::AllGather { part, whole, partition } => {
                Work::AllGather { part: moved(part, whole, partition), whole, partition: shorter(partition) }
            }
            Work::ReduceScatter { whole, part, partition, reduce } => Work::ReduceScatter {
                whole,
                part: moved(part, whole, partition),
                partition: shorter(partition),
                reduce,
            },
            Work::AllReduce { buffer, partition, reduce } => {
                Work::AllReduce { buffer, partition: shorter(partition), reduce }
            }
            Work::AllToAll { send, sends, receive, receives } => {
                Work::AllToAll { send, sends: cut(sends), receive, receives: cut(receives) }
            }
            Work::Broadcast { buffer, len, root } => Work::Broadcast { buffer, len: len.saturating_sub(1), root },
            Work::Send { buffer, len, to } => Work::Send { buffer, len: len.saturating_sub(1), to },
            Work::Receive { buffer, len, from } => Work::Receive { buffer, len: len.saturating_sub(1), from },
            Work::Barrier => Work::Barrier,
        }
    }
}

/// How a buffer is cut into one piece per rank.
pub(crate) enum Cuts {
    Even(Partition),
    /// The ends of the pieces.
    Listed(Vec<usize>),
}

impl Cuts {
    pub(crate) fn listed(counts: &[usize]) -> Self {
        let ends = counts.iter().scan(0, |end, count| {
            *end += count;
            Some(*end)
        });
        Cuts::Listed(ends.collect())
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Cuts::Even(partition) => partition.len(),
            Cuts::Listed(ends) => ends.last().copied().unwrap_or(0),
        }
    }

    pub(crate) fn range(&self, index: usize) -> Range<usize> {
        match self {
            Cuts::Even(partition) => partition.range(index),
            Cuts::Listed(ends) => index.checked_sub(1).map_or(0, |previous| ends[previous])..ends[index],
        }
    }
}
