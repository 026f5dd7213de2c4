//! The groups of ranks that communicate, and what they do.

use crate::mesh::{Axis, Mesh, RankSet};

/// The ranks that take part in a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum GroupKind {
    /// All ranks.
    World,
    /// The ranks that hold the shards of one replica, among them those that hold the parts of one sequence.
    Shard,
    /// The ranks that hold the same shard of all replicas.
    Replicate,
    /// The ranks that hold the stages of one pipeline. Messages go from one of them to another.
    Pipeline,
    /// The ranks that hold the experts of one layer, and exchange tokens.
    Expert,
    /// The ranks that hold parts of one sequence and send each other keys and values.
    Ring,
    /// The ranks that hold parts of one sequence and exchange positions for heads.
    Ulysses,
    /// The ranks that hold the parts of one layer's matrices.
    Tensor,
    /// The ranks of one replica: all shards of all parts. They share what tensor parallelism does not split.
    ShardTensor,
    /// The ranks of one replica that hold the shards of the same experts.
    ExpertShard,
}

impl GroupKind {
    /// All kinds, in the order of their indices.
    pub const ALL: [GroupKind; 10] = [
        GroupKind::World,
        GroupKind::Shard,
        GroupKind::Replicate,
        GroupKind::Pipeline,
        GroupKind::Expert,
        GroupKind::Ring,
        GroupKind::Ulysses,
        GroupKind::Tensor,
        GroupKind::ShardTensor,
        GroupKind::ExpertShard,
    ];

    /// The name in texts, such as `world` or `shard`.
    pub fn name(self) -> &'static str {
        match self {
            GroupKind::World => "world",
            GroupKind::Shard => "shard",
            GroupKind::Replicate => "replicate",
            GroupKind::Pipeline => "pipeline",
            GroupKind::Expert => "expert",
            GroupKind::Ring => "ring",
            GroupKind::Ulysses => "ulysses",
            GroupKind::Tensor => "tensor",
            GroupKind::ShardTensor => "shard×tensor",
            GroupKind::ExpertShard => "expert-shard",
        }
    }

    /// The axes of the mesh along which the group lies.
    pub fn axes(self) -> &'static [Axis] {
        match self {
            GroupKind::World => &Axis::ALL,
            GroupKind::Shard => &[Axis::Shard, Axis::Expert, Axis::Ring, Axis::Ulysses],
            GroupKind::Replicate => &[Axis::Replicate],
            GroupKind::Pipeline => &[Axis::Pipeline],
            GroupKind::Expert => &[Axis::Expert],
            GroupKind::Ring => &[Axis::Ring],
            GroupKind::Ulysses => &[Axis::Ulysses],
            GroupKind::Tensor => &[Axis::Tensor],
            GroupKind::ShardTensor => &[Axis::Shard, Axis::Expert, Axis::Ring, Axis::Ulysses, Axis::Tensor],
            GroupKind::ExpertShard => &[Axis::Shard, Axis::Ring, Axis::Ulysses],
        }
    }

    /// The group of a rank.
    ///
    /// # Panics
    /// If the mesh has no such rank.
    pub fn ranks(self, mesh: &Mesh, rank: usize) -> RankSet {
        match self {
            GroupKind::World => RankSet::world(mesh.ranks()),
            _ => mesh.group(rank, self.axes()),
        }
    }

    /// Whether a group of this kind has ranks of several stages of the pipeline.
    pub(super) fn spans_stages(self) -> bool {
        matches!(self, GroupKind::World | GroupKind::Pipeline)
    }
}

/// What a collective does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CollectiveKind {
    /// Every rank receives the parts of all.
    AllGather,
    /// Every rank receives its part of the sum.
    ReduceScatter,
    /// Every rank receives the sum.
    AllReduce,
    /// Every rank sends a part to each rank.
    AllToAll,
}

impl CollectiveKind {
    /// All kinds, in the order of their indices.
    pub const ALL: [CollectiveKind; 4] =
        [CollectiveKind::AllGather, CollectiveKind::ReduceScatter, CollectiveKind::AllReduce, CollectiveKind::AllToAll];

    /// The name in texts, such as `all-gather`.
    pub fn name(self) -> &'static str {
        match self {
            CollectiveKind::AllGather => "all-gather",
            CollectiveKind::ReduceScatter => "reduce-scatter",
            CollectiveKind::AllReduce => "all-reduce",
            CollectiveKind::AllToAll => "all-to-all",
        }
    }
}
