//! The bytes that a rank sends in a step, exactly.
//!
//! With N ranks, a rank sends about Ψ(N−1)/N elements to all-gather a tensor of Ψ elements, as many to reduce-scatter it, and twice
//! as many to all-reduce it. The counts use the actual size of each rank's part. They do not include the control calls: token
//! counts, losses and norms.

use super::Program;
use super::codec::Codec;
use super::collectives::{CallOp, Collective, Element, calls};
use super::groups::{CollectiveKind, GroupKind};
use super::instruction::{Instruction, Message, Payload};
use super::policy::{Policy, UnitSpec};
use crate::context_parallel::ContextPlace;
use crate::mesh::{Axis, LayerPlace, Mesh, Place};
use crate::{Partition, int8_bytes};

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
    /// Where the rank is along the axes that divide the model.
    pub model_parallel: ModelParallel,
}

/// A rank's place along the axes that divide the model. The default is [`ModelParallel::NONE`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelParallel {
    /// Along the stages of the pipeline.
    pub pipeline: Place,
    /// Among the ranks that hold the experts of a layer.
    pub expert: Place,
    /// Among the ranks that hold the parts of a sequence.
    pub context: ContextPlace,
    /// Among the ranks that hold the parts of a matrix.
    pub tensor: Place,
}

impl ModelParallel {
    /// The place among those that hold the parts of a layer's parameters.
    pub fn layer(&self) -> LayerPlace {
        LayerPlace { tensor: self.tensor, expert: self.expert }
    }

    /// A model that is not divided.
    pub const NONE: ModelParallel = ModelParallel {
        pipeline: Place::ALONE,
        expert: Place::ALONE,
        context: ContextPlace::ALONE,
        tensor: Place::ALONE,
    };

    /// The places of a rank of a mesh.
    ///
    /// # Panics
    /// If the mesh has no such rank.
    pub fn of_rank(mesh: &Mesh, rank: usize) -> Self {
        let place = |axis| mesh.place(rank, axis);
        ModelParallel {
            pipeline: place(Axis::Pipeline),
            expert: place(Axis::Expert),
            context: ContextPlace { ring: place(Axis::Ring), ulysses: place(Axis::Ulysses) },
            tensor: place(Axis::Tensor),
        }
    }
}

impl Layout {
    /// The layout of a rank of a mesh.
    ///
    /// # Panics
    /// If the mesh has no such rank.
    pub fn of_rank(mesh: &Mesh, rank: usize, parameter_bytes: usize, gradient_bytes: usize) -> Self {
        let (shard, replicate) = (mesh.place(rank, Axis::Shard), mesh.place(rank, Axis::Replicate));
        Layout {
            shard: shard.size,
            replicate: replicate.size,
            shard_rank: shard.index,
            replicate_rank: replicate.index,
            parameter_bytes,
            gradient_bytes,
            model_parallel: ModelParallel::of_rank(mesh, rank),
        }
    }

    /// The number of ranks in a group.
    pub fn group_size(&self, group: GroupKind) -> usize {
        self.place(group).size
    }

    /// This rank's place in a group.
    fn place(&self, group: GroupKind) -> Place {
        let within = |outer: Place, inner: Place| Place {
            size: outer.size * inner.size,
            index: outer.index * inner.size + inner.index,
        };
        group.axes().iter().map(|&axis| self.place_along(axis)).fold(Place::ALONE, within)
    }

    fn place_along(&self, axis: Axis) -> Place {
        match axis {
            Axis::Pipeline => self.model_parallel.pipeline,
            Axis::Replicate => Place { size: self.replicate, index: self.replicate_rank },
            Axis::Shard => Place { size: self.shard, index: self.shard_rank },
            Axis::Expert => self.model_parallel.expert,
            Axis::Ring => self.model_parallel.context.ring,
            Axis::Ulysses => self.model_parallel.context.ulysses,
            Axis::Tensor => self.model_parallel.tensor,
        }
    }

    /// The bytes that this rank sends in a collective.
    ///
    /// # Panics
    /// If this rank's index is not in its groups.
    pub fn sent_bytes(&self, collective: &Collective) -> usize {
        if let Some(uneven) = collective.uneven {
            return uneven.own;
        }
        self.sent_by(collective, |group| self.place(group).index)
    }

    /// The bytes of a message that a rank sends or receives; 0 if it names a unit that does not exist.
    pub fn message_bytes(&self, message: &Message, sends: bool, units: &[UnitSpec]) -> usize {
        let other = if sends { message.receiving_unit(units) } else { message.sending_unit(units) };
        let (Some(own), Some(other)) = (units.get(message.unit), other.and_then(|unit| units.get(unit))) else {
            return 0;
        };
        let (from, to) = if sends { (own, other) } else { (other, own) };
        let (elements, in_memory) = match message.payload {
            Payload::Activations => (from.output_bytes / self.parameter_bytes, self.parameter_bytes),
            // The gradient of a unit's input is as large as the output of the unit before.
            Payload::Gradients => (to.output_bytes / self.parameter_bytes, self.parameter_bytes),
            Payload::TiedParameters => (to.tied_elements, self.parameter_bytes),
            Payload::TiedGradients => (from.tied_elements, self.gradient_bytes),
        };
        elements * message.codec.element_bytes(in_memory, self.parameter_bytes)
    }

    /// The bytes that the rank sends that sends the most in a collective. All others wait for it.
    pub fn most_sent_bytes(&self, collective: &Collective) -> usize {
        if let Some(uneven) = collective.uneven {
            return uneven.most;
        }
        // The first part is the longest. Who owns the shortest part sends the most of the others'.
        let rank = match collective.kind {
            CollectiveKind::AllGather | CollectiveKind::AllReduce => 0,
            CollectiveKind::ReduceScatter | CollectiveKind::AllToAll => self.group_size(collective.group) - 1,
        };
        self.sent_by(collective, |group| if group == collective.group { rank } else { 0 })
    }

    /// A unit's trainable elements that this rank keeps.
    pub fn kept_trainable(&self, unit: &UnitSpec, sharded: bool) -> usize {
        self.kept(unit.trainable_by_group(), sharded)
    }

    /// A unit's frozen elements that this rank keeps.
    pub fn kept_frozen(&self, unit: &UnitSpec, sharded: bool) -> usize {
        self.kept(unit.frozen_by_group(), sharded)
    }

    fn kept(&self, elements: [(GroupKind, usize); 3], sharded: bool) -> usize {
        let own = |(group, elements)| {
            let Place { size, index } = self.place(group);
            if sharded { Partition::new(elements, size).part_len(index) } else { elements }
        };
        elements.into_iter().map(own).sum()
    }

    /// The bytes that a rank with these indices in its groups sends.
    fn sent_by(&self, collective: &Collective, index_in: impl Fn(GroupKind) -> usize) -> usize {
        let len = match collective.on_shard_of {
            Some(group) => Partition::new(collective.elements, self.group_size(group)).part_len(index_in(group)),
            None => collective.elements,
        };
        let size = self.group_size(collective.group);
        let (rows, row_len) = (len / collective.row_len, collective.row_len);
        let partition = Partition::of_rows(rows, row_len, size);
        if (collective.kind, collective.codec) == (CollectiveKind::AllGather, Codec::Int8) {
            // All parts are as long as the longest.
            return int8_bytes(partition.part_len(0)) * (size - 1);
        }
        let part = partition.part_len(index_in(collective.group));
        let (gathered, scattered) = (part * (size - 1), len - part);
        let elements = match collective.kind {
            CollectiveKind::AllGather => gathered,
            CollectiveKind::ReduceScatter | CollectiveKind::AllToAll => scattered,
            CollectiveKind::AllReduce => scattered + gathered,
        };
        elements * collective.codec.element_bytes(self.element_bytes(collective.element), self.parameter_bytes)
    }

    fn element_bytes(&self, element: Element) -> usize {
        match element {
            Element::Parameter => self.parameter_bytes,
            Element::Gradient => self.gradient_bytes,
            Element::Byte => 1,
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
    /// Also sent in every step to which the one before has left updates.
    pub deferred: Sent,
}

impl Traffic {
    /// The sum over all groups and collectives, with updates.
    pub fn total_bytes(&self) -> u64 {
        self.step.total_bytes() + self.update.total_bytes() + self.deferred.total_bytes()
    }
}

/// Sent bytes by group and collective, and those of messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    bytes: [[u64; CollectiveKind::ALL.len()]; GroupKind::ALL.len()],
    message_bytes: u64,
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

    /// The bytes of the messages to other stages of the pipeline.
    pub fn message_bytes(&self) -> u64 {
        self.message_bytes
    }

    /// The bytes sent in one kind of group by all collectives. Those of the pipeline include messages.
    pub fn group_bytes(&self, group: GroupKind) -> u64 {
        let messages = if group == GroupKind::Pipeline { self.message_bytes } else { 0 };
        CollectiveKind::ALL.iter().map(|&kind| self.bytes(group, kind)).sum::<u64>() + messages
    }

    /// The sum over all groups, collectives and messages.
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
    for (position, call) in calls(program, units, policy) {
        if call.op == CallOp::Issue && call.collective.unit.is_some() {
            let sent = match program.instructions[position] {
                Instruction::Update(unit) if policy.defers_update(unit) => &mut traffic.deferred,
                Instruction::Update(_) => &mut traffic.update,
                _ => &mut traffic.step,
            };
            sent.add(&call.collective, layout.sent_bytes(&call.collective));
        }
    }
    for instruction in &program.instructions {
        if let Instruction::Send(message) = instruction {
            traffic.step.message_bytes += layout.message_bytes(message, true, units) as u64;
        }
    }
    traffic
}
