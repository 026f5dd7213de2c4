//! What identifies one call of one verb, in errors, records and figures.

use std::fmt;
use std::sync::Arc;

use shardwise_plan::Dtype;

/// The verbs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Verb {
    /// Everyone's part becomes everyone's whole.
    AllGather,
    /// Everyone's whole is reduced, and everyone keeps one part of the result.
    ReduceScatter,
    /// Everyone's buffer is reduced, and everyone has the result.
    AllReduce,
    /// Everyone sends a part to everyone.
    AllToAll,
    /// One rank's buffer becomes everyone's.
    Broadcast,
    /// To one rank.
    Send,
    /// From one rank.
    Receive,
    /// Everyone has arrived.
    Barrier,
}

impl Verb {
    /// Every verb, for tables and tests.
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

    /// Whether all ranks of the group take part.
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

/// One call. All ranks of a group number their collectives alike, so the number says which calls belong together.
#[derive(Clone, Debug)]
pub struct Call {
    /// What is done.
    pub verb: Verb,
    /// For whom: the unit or quantity that the caller named.
    pub label: Arc<str>,
    /// The group's name and ranks.
    pub group: Arc<str>,
    /// The how-manieth call of this kind (collective, or not) in this group, from 1.
    pub number: u64,
    /// The larger of the two buffers.
    pub elements: usize,
    /// Its elements.
    pub dtype: Dtype,
}

impl fmt::Display for Call {
    /// As in `reduce-scatter #412 of 'block.7' (3145728 × f32, shard 0-3)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Call { verb, label, group, number, elements, dtype } = self;
        write!(f, "{verb} #{number} of '{label}' ({elements} × {dtype}, {group})")
    }
}
