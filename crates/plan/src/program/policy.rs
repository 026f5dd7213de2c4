//! The decisions that a program is built from.

use std::fmt;

use super::codec::Codec;
use super::groups::{CollectiveKind, GroupKind};
use super::tier::Tier;

/// What is sharded. A rank keeps only its own shard of everything that is selected here. The ZeRO stages are presets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sharding {
    /// The optimizer state. Costs no communication: the owner of a shard needs no other rank's state.
    pub optimizer: bool,
    /// The gradients, once they are reduced.
    pub gradients: bool,
    /// The parameters. Costs an all-gather before each use.
    pub parameters: bool,
}

impl Sharding {
    /// The preset for ZeRO stage 0 (nothing is sharded), 1 (optimizer state), 2 (plus gradients) or 3 (plus parameters).
    pub fn stage(stage: u8) -> Result<Self, StageError> {
        match stage {
            0..=3 => Ok(Sharding { optimizer: stage >= 1, gradients: stage >= 2, parameters: stage >= 3 }),
            _ => Err(StageError(stage)),
        }
    }
}

/// A ZeRO stage that does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageError(pub u8);

impl fmt::Display for StageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "there is no ZeRO stage {}; stages are 0 to 3", self.0)
    }
}

impl std::error::Error for StageError {}

/// Which activations a unit's forward pass keeps for its backward pass. All choices give bitwise identical results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActivationCheckpointing {
    /// Keep everything that autograd saves, except what is cheap to recompute.
    None,
    /// Keep the outputs of linear layers; recompute norms, attention and activation functions. About 30% less memory for a few
    /// percent more work.
    Selective,
    /// Keep only the unit's input; recompute the rest. The least memory, for about a third more work.
    Full,
}

/// How a step is carried out. No choice changes the result, except for [`Policy::gather_codec`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// What is sharded; corresponds to the ZeRO stage.
    pub sharding: Sharding,
    /// How many units to gather ahead of the one that computes, and to reduce behind it; also how many to fetch ahead of the one that is
    /// updated, and to store behind it.
    pub prefetch: usize,
    /// Which activations the forward pass keeps for the backward pass.
    pub activation_checkpointing: ActivationCheckpointing,
    /// Whether to reduce gradients after each micro-batch instead of once per step.
    pub reduce_each_micro_batch: bool,
    /// The number of micro-batches per step.
    pub micro_batches: usize,
    /// Whether to update each unit as soon as its gradients are reduced, in the backward pass, instead of after the totals.
    pub update_in_backward: bool,
    /// Whether updates wait for the next step, where each unit is updated before its forward pass. Next to updates in the backward
    /// pass, only those of some units wait.
    pub update_in_forward: bool,
    /// How parameters travel when they are gathered for the passes of a training step. Any codec but [`Codec::None`] changes the numbers
    /// that passes compute with, and needs sharded parameters.
    pub gather_codec: Codec,
    /// Where masters and optimizer state are between updates, if not in memory.
    pub optimizer_tier: Option<Tier>,
    /// Where this rank's shards of parameters are until they are gathered, if not in memory. Needs sharded parameters.
    pub parameter_tier: Option<Tier>,
    /// Where reduced gradients are until the update, if not in memory.
    pub gradient_tier: Option<Tier>,
    /// Where the inputs of recomputed units are until their backward passes, if not in memory.
    pub activation_tier: Option<Tier>,
}

impl Policy {
    /// A ZeRO stage with one unit of prefetch and no activation checkpointing.
    ///
    /// # Panics
    /// If there is no such stage.
    pub fn stage(stage: u8, micro_batches: usize) -> Self {
        Policy {
            sharding: Sharding::stage(stage).expect("a stage from 0 to 3"),
            prefetch: 1,
            activation_checkpointing: ActivationCheckpointing::None,
            reduce_each_micro_batch: false,
            micro_batches,
            update_in_backward: false,
            update_in_forward: false,
            gather_codec: Codec::None,
            optimizer_tier: None,
            parameter_tier: None,
            gradient_tier: None,
            activation_tier: None,
        }
    }

    /// Whether the update of a unit waits for the next step's forward pass. If other units are updated in the backward pass, those that
    /// wait are spread evenly over the model: one of three, as forward passes take a third of the time, or one of four if they are repeated.
    pub fn defers_update(&self, unit: usize) -> bool {
        let passes = match self.activation_checkpointing {
            ActivationCheckpointing::Full => 4,
            ActivationCheckpointing::None | ActivationCheckpointing::Selective => 3,
        };
        self.update_in_forward && (!self.update_in_backward || unit % passes == passes - 1)
    }
}

/// What the order of a step depends on, of one unit.
#[derive(Clone, Debug, PartialEq)]
pub struct UnitSpec {
    /// The unit's name.
    pub name: String,
    /// The number of trainable elements on one of the ranks that share its layers, including those that all of these ranks have.
    pub trainable: usize,
    /// The number of frozen elements on one of the ranks that share its layers, including those that all of these ranks have.
    pub frozen: usize,
    /// Those of them that all tensor-parallel ranks have. They are sharded among all ranks of a replica.
    pub replicated: ElementCounts,
    /// Those of them that belong to this rank's experts, if ranks hold different ones. They are sharded among the ranks that hold the same
    /// experts.
    pub experts: ElementCounts,
    /// The unit whose parameter this unit also computes with, as a head does with a tied embedding.
    pub tied: Option<usize>,
    /// The number of elements of that parameter on one tensor-parallel rank. If its unit is on another stage of the pipeline, the
    /// parameter is sent from there once per step, and its gradient comes back.
    pub tied_elements: usize,
    /// Whether the backward pass reads the parameters.
    pub backward_reads_parameters: bool,
    /// Whether an update reads the parameters that the passes compute with. If there are masters, it only writes them.
    pub update_reads_parameters: bool,
    /// Whether the forward pass computes gradients of parameters, as that of a head with a fused loss does, and holds them until the
    /// backward pass. A pipeline then delays the forward pass until just before the backward pass.
    pub forward_computes_gradients: bool,
    /// Whether its backward pass computes the gradients in a dtype that is narrower than the one in which they are reduced, and each of
    /// them once. If no others are added, they are sent as they are.
    pub narrow_gradients: bool,
    /// The bytes of its output for one micro-batch, which are sent if the next unit is on another stage of the pipeline. The
    /// gradient of the output, which comes back, has as many.
    pub output_bytes: usize,
    /// The collectives inside its passes.
    pub inner: InnerCollectives,
}

impl UnitSpec {
    /// A unit with trainable parameters only, not tied to another, whose passes do not communicate.
    pub fn new(name: &str, trainable: usize, backward_reads_parameters: bool) -> Self {
        UnitSpec {
            name: name.to_string(),
            trainable,
            frozen: 0,
            replicated: ElementCounts::default(),
            experts: ElementCounts::default(),
            tied: None,
            tied_elements: 0,
            backward_reads_parameters,
            update_reads_parameters: true,
            forward_computes_gradients: false,
            narrow_gradients: false,
            output_bytes: 0,
            inner: InnerCollectives::default(),
        }
    }

    /// The trainable elements by the group that shards them: what tensor-parallel ranks split, what they all have, and experts.
    pub fn trainable_by_group(&self) -> [(GroupKind, usize); 3] {
        by_group(self.trainable, self.replicated.trainable, self.experts.trainable)
    }

    /// The frozen elements by the group that shards them.
    pub fn frozen_by_group(&self) -> [(GroupKind, usize); 3] {
        by_group(self.frozen, self.replicated.frozen, self.experts.frozen)
    }
}

fn by_group(all: usize, replicated: usize, experts: usize) -> [(GroupKind, usize); 3] {
    [
        (GroupKind::Shard, all - replicated - experts),
        (GroupKind::ShardTensor, replicated),
        (GroupKind::ExpertShard, experts),
    ]
}

/// The number of some of a unit's elements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ElementCounts {
    /// The number of trainable ones.
    pub trainable: usize,
    /// The number of frozen ones.
    pub frozen: usize,
}

/// The collectives inside a unit's passes, in order: tensor, context and expert parallelism need them. Each pass issues and awaits
/// them one after the other.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct InnerCollectives {
    /// Those of a forward pass.
    pub forward: Vec<InnerCollective>,
    /// Those of recomputing it.
    pub recompute: Vec<InnerCollective>,
    /// Those of a backward pass. If it has two halves, they belong to the first.
    pub backward: Vec<InnerCollective>,
}

/// A collective inside a unit's pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InnerCollective {
    /// The ranks that take part.
    pub group: GroupKind,
    /// What it does.
    pub kind: CollectiveKind,
    /// The bytes of the tensor: over all parts of an all-gather or a reduce-scatter, and of one rank's buffer otherwise.
    pub bytes: usize,
    /// The bytes that stay together when the tensor is divided among the ranks: those of a row, or of an element.
    pub row_bytes: usize,
    /// The share of the pass's computation that is done while the collective is under way (async tensor parallelism, ring attention).
    pub overlap: f64,
    /// What ranks send, if they do not send equal parts of `bytes`.
    pub uneven: Option<UnevenBytes>,
}

/// The bytes that ranks send in a collective in which they do not send equal parts of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UnevenBytes {
    /// What this rank sends.
    pub own: usize,
    /// What the rank sends that sends the most.
    pub most: usize,
}
