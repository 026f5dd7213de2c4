//! The bytes that a rank sends in a step, exactly.
//!
//! With N ranks, a rank sends about Ψ(N−1)/N elements to all-gather a tensor of Ψ elements, as many to reduce-scatter it, and twice
//! as many to all-reduce it. The counts use the actual size of each rank's part. They do not include the control calls: token
//! counts, losses and norms.

use super::Program;
use super::collectives::{CallOp, Collective, CollectiveKind, GroupKind, calls};
use super::policy::{Policy, UnitSpec};
use crate::Partition;

/// Where a rank is among the others, and the size of the elements that they send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The number of ranks that shard a replica.
    pub shard: usize,
    /// The number of replicas.
    pub replicate: usize,
    /// This rank's index in its shard group.
    pub shard_rank: usize,
    /// This rank's index in its replicate group.
    pub replicate_rank: usize,
    /// The bytes of a parameter, in the dtype of the computation.
    pub parameter_bytes: usize,
    /// The bytes of a gradient, in the dtype of the reduction.
    pub gradient_bytes: usize,
}

impl Layout {
    /// The number of ranks in a group.
    pub fn group_size(&self, group: GroupKind) -> usize {
        match group {
            GroupKind::World => self.shard * self.replicate,
            GroupKind::Shard => self.shard,
            GroupKind::Replicate => self.replicate,
        }
    }

    /// The bytes that this rank sends in a collective.
    ///
    /// # Panics
    /// If this rank's index is not in its groups.
    pub fn sent_bytes(&self, collective: &Collective) -> usize {
        let rank = match collective.group {
            GroupKind::World => self.replicate_rank * self.shard + self.shard_rank,
            GroupKind::Shard => self.shard_rank,
            GroupKind::Replicate => self.replicate_rank,
        };
        self.sent_by(collective, self.shard_rank, rank)
    }

    /// The bytes that the rank sends that sends the most in a collective. All others wait for it.
    pub fn most_sent_bytes(&self, collective: &Collective) -> usize {
        // The first part is the longest. Who owns the shortest part sends the most of the others'.
        let rank = match collective.kind {
            CollectiveKind::AllGather | CollectiveKind::AllReduce => 0,
            CollectiveKind::ReduceScatter => self.group_size(collective.group) - 1,
        };
        self.sent_by(collective, 0, rank)
    }

    /// The elements of a tensor that this rank keeps.
    pub(super) fn kept(&self, elements: usize, sharded: bool) -> usize {
        if sharded { Partition::new(elements, self.shard).part_len(self.shard_rank) } else { elements }
    }

    /// The bytes that rank `rank` of the collective's group sends, if its index in its shard group is `shard_rank`.
    fn sent_by(&self, collective: &Collective, shard_rank: usize, rank: usize) -> usize {
        let len = match collective.on_shard {
            true => Partition::new(collective.elements, self.shard).part_len(shard_rank),
            false => collective.elements,
        };
        let size = self.group_size(collective.group);
        let part = Partition::new(len, size).part_len(rank);
        let (gathered, scattered) = (part * (size - 1), len - part);
        match collective.kind {
            CollectiveKind::AllGather => gathered * self.parameter_bytes,
            CollectiveKind::ReduceScatter => scattered * self.gradient_bytes,
            CollectiveKind::AllReduce => (scattered + gathered) * self.gradient_bytes,
        }
    }
}

/// The bytes that a rank sends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Sent in every step.
    pub step: Sent,
    /// Also sent in every step whose update is not skipped.
    pub update: Sent,
}

impl Traffic {
    /// The sum over all groups and collectives, with the update.
    pub fn total_bytes(&self) -> u64 {
        self.step.total_bytes() + self.update.total_bytes()
    }
}

/// Sent bytes by group and collective.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    bytes: [[u64; CollectiveKind::ALL.len()]; GroupKind::ALL.len()],
}

impl Sent {
    /// The bytes sent in one kind of group by one kind of collective.
    pub fn bytes(&self, group: GroupKind, kind: CollectiveKind) -> u64 {
        self.bytes[group as usize][kind as usize]
    }

    /// The bytes sent by one kind of collective in all groups.
    pub fn kind_bytes(&self, kind: CollectiveKind) -> u64 {
        GroupKind::ALL.iter().map(|&group| self.bytes(group, kind)).sum()
    }

    /// The bytes sent in one kind of group by all collectives.
    pub fn group_bytes(&self, group: GroupKind) -> u64 {
        CollectiveKind::ALL.iter().map(|&kind| self.bytes(group, kind)).sum()
    }

    /// The sum over all groups and collectives.
    pub fn total_bytes(&self) -> u64 {
        GroupKind::ALL.iter().map(|&group| self.group_bytes(group)).sum()
    }

    fn add(&mut self, collective: &Collective, bytes: usize) {
        self.bytes[collective.group as usize][collective.kind as usize] += bytes as u64;
    }
}

/// The bytes that a rank sends when it executes a program.
///
/// # Panics
/// If the rank's index is not in its groups.
pub fn traffic(program: &Program, units: &[UnitSpec], policy: &Policy, layout: &Layout) -> Traffic {
    let mut traffic = Traffic::default();
    let first_update = program.gradients().len();
    for (position, call) in calls(program, units, policy) {
        if call.op == CallOp::Issue && call.collective.unit.is_some() {
            let sent = if position < first_update { &mut traffic.step } else { &mut traffic.update };
            sent.add(&call.collective, layout.sent_bytes(&call.collective));
        }
    }
    traffic
}
