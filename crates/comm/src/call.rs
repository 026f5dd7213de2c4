//! How a call is described in errors, the flight recorder and the meter.

use std::fmt;
use std::sync::Arc;

use shardwise_plan::Dtype;

/// A collective or point-to-point operation (torch.distributed: `OpType`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Verb {
    /// Concatenates the parts of all ranks on every rank.
    AllGather,
    /// Reduces the buffers of all ranks, and leaves one part of the result on each.
    ReduceScatter,
    /// Reduces the buffers of all ranks, and leaves the result on every rank.
    AllReduce,
    /// Sends a part from every rank to every rank.
    AllToAll,
    /// Copies one rank's buffer to all ranks.
    Broadcast,
    /// Sends to one rank.
    Send,
    /// Receives from one rank.
    Receive,
    /// Waits until all ranks have arrived.
    Barrier,
}

impl Verb {
    /// All operations, in declaration order.
    pub const ALL: [Verb; 8] = [
        Verb::AllGather,
        Verb::ReduceScatter,
        Verb::AllReduce,
        Verb::AllToAll,
        Verb::Broadcast,
        Verb::Send,
        Verb::Receive,
        Verb::Barrier,
    ];

    /// Returns whether all ranks of the group take part.
    pub fn is_collective(self) -> bool {
        !matches!(self, Verb::Send | Verb::Receive)
    }
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Verb::AllGather => "all-gather",
            Verb::ReduceScatter => "reduce-scatter",
            Verb::AllReduce => "all-reduce",
            Verb::AllToAll => "all-to-all",
            Verb::Broadcast => "broadcast",
            Verb::Send => "send",
            Verb::Receive => "receive",
            Verb::Barrier => "barrier",
        })
    }
}

/// One collective, or one side of a message. All ranks of a group number their collectives in the same way, so `number`
/// identifies the same collective on all ranks.
#[derive(Clone, Debug)]
pub struct Call {
    /// The operation.
    pub verb: Verb,
    /// What the caller says the call is for: a unit or a quantity.
    pub label: Arc<str>,
    /// The group's name and ranks.
    pub group: Arc<str>,
    /// The sequence number in the group, from 1. Collectives and messages are numbered separately.
    pub number: u64,
    /// The length of the larger of the two buffers.
    pub elements: usize,
    /// The element type.
    pub dtype: Dtype,
    /// The number of elements that this rank sends to others.
    pub elements_sent: usize,
}

impl fmt::Display for Call {
    /// Writes, for example, `reduce-scatter #412 of 'block.7' (3145728 × f32, shard 0-3)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Call { verb, label, group, number, elements, dtype, .. } = self;
        write!(f, "{verb} #{number} of '{label}' ({elements} × {dtype}, {group})")
    }
}
