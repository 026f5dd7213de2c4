//! The instructions of a step.

use super::codec::Codec;
use super::policy::UnitSpec;
use super::tier::Tier;

/// One instruction. A rank names only units of its own stage of the pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Instruction {
    /// Counts the targets of all ranks: an all-gather of a few integers in the world.
    CountTokens,
    /// Starts to all-gather a unit's parameters.
    StartGather {
        /// The unit.
        unit: usize,
        /// How the parameters travel.
        codec: Codec,
    },
    /// Waits until a unit's parameters are gathered: those of [`Instruction::StartGather`], or those that the last
    /// [`Instruction::Update`] sends.
    WaitGather(usize),
    /// Frees a unit's gathered parameters, and keeps its shard.
    Release(usize),
    /// A unit's forward pass on a micro-batch.
    Forward {
        /// The unit.
        unit: usize,
        /// The micro-batch.
        micro_batch: usize,
        /// What the forward pass keeps for the backward pass.
        keep: Keep,
    },
    /// Repeats a unit's forward pass, this time keeping all activations.
    Recompute {
        /// The unit.
        unit: usize,
        /// The micro-batch.
        micro_batch: usize,
    },
    /// A unit's backward pass on a micro-batch: computes the gradients of its parameters and of its input.
    Backward {
        /// The unit.
        unit: usize,
        /// The micro-batch.
        micro_batch: usize,
    },
    /// The first half of a backward pass: computes the gradient of the unit's input, which the stage before waits for.
    BackwardInput {
        /// The unit.
        unit: usize,
        /// The micro-batch.
        micro_batch: usize,
    },
    /// The second half of a backward pass: computes the gradients of the unit's parameters. It may come much later.
    BackwardWeight {
        /// The unit.
        unit: usize,
        /// The micro-batch.
        micro_batch: usize,
    },
    /// Adds the gradients of the backward pass before it to those of earlier micro-batches.
    Accumulate {
        /// The unit.
        unit: usize,
        /// The micro-batch.
        micro_batch: usize,
    },
    /// Sends a message to the rank that has the neighboring unit, and goes on.
    Send(Message),
    /// Starts to receive a message from the rank that has the neighboring unit.
    StartReceive(Message),
    /// Waits until a message is received.
    WaitReceive(Message),
    /// Starts to reduce a unit's accumulated gradients over all ranks.
    StartReduce {
        /// The unit.
        unit: usize,
        /// How the gradients travel.
        codec: Codec,
    },
    /// Waits until a unit's gradients are reduced within the shard group, and starts to reduce them between replicas.
    WaitReduceScatter(usize),
    /// Waits until a unit's gradients are reduced over all ranks.
    WaitReduce(usize),
    /// Computes the norm of this rank's share of a unit's gradients.
    Norm(usize),
    /// Sums the loss and the norms over all ranks: an all-reduce of a few numbers in the world.
    ReduceTotals,
    /// Updates a unit's parameters. If optimizer state is sharded and parameters are not, starts to all-gather the result.
    Update(usize),
    /// Starts to copy a buffer from its tier to the device.
    StartFetch(Offload),
    /// Waits until a buffer is on the device.
    WaitFetch(Offload),
    /// Starts to copy a buffer from the device to its tier.
    StartStore(Offload),
    /// Waits until a buffer is on its tier, and frees it on the device.
    WaitStore(Offload),
    /// Frees a buffer on the device that has not changed since it was fetched.
    Evict(Offload),
}

/// What a forward pass keeps for the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Keep {
    /// All activations that autograd saves.
    All,
    /// The outputs of linear layers.
    Selective,
    /// Only the input: the backward pass recomputes the rest, or there is none.
    Input,
    /// Nothing.
    Nothing,
}

/// A message between two stages of a pipeline. Who the other rank is follows from the unit.
///
/// # Note: tied units on different stages
/// A head that is tied to an embedding computes with a parameter that another stage owns. Once per step, before the head's first
/// forward pass, the embedding's stage sends it whole: [`Payload::TiedParameters`]. The head's stage accumulates the parameter's
/// gradient, and sends it when the embedding's own gradients are reduced: [`Payload::TiedGradients`], of the last micro-batch, or
/// of each if each is reduced. The embedding's stage adds it when it has arrived, after its own gradients and before the reduction.
/// A parameter that is not trained has no gradients to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Message {
    /// What is sent.
    pub payload: Payload,
    /// The unit of this rank that computes what is sent, or computes with what is received.
    pub unit: usize,
    /// The micro-batch.
    pub micro_batch: usize,
    /// How it travels.
    pub codec: Codec,
}

impl Message {
    /// Activations of a unit and a micro-batch: its output if they are sent, its input if they are received.
    pub fn activations(unit: usize, micro_batch: usize) -> Self {
        Message { payload: Payload::Activations, unit, micro_batch, codec: Codec::None }
    }

    /// Gradients of a unit and a micro-batch: those of its input if they are sent, those of its output if they are received.
    pub fn gradients(unit: usize, micro_batch: usize) -> Self {
        Message { payload: Payload::Gradients, ..Message::activations(unit, micro_batch) }
    }

    /// The parameter that a unit shares with one on another stage. The sender names the unit that owns it, the receiver the one
    /// that is tied to it.
    pub fn tied_parameters(unit: usize) -> Self {
        Message { payload: Payload::TiedParameters, ..Message::activations(unit, 0) }
    }

    /// The gradient of that parameter, accumulated up to a micro-batch. The sender names the unit that is tied, the receiver the
    /// one that owns the parameter.
    pub fn tied_gradients(unit: usize, micro_batch: usize) -> Self {
        Message { payload: Payload::TiedGradients, ..Message::activations(unit, micro_batch) }
    }

    /// The unit on the other rank if this rank sends the message. `None` if there is none.
    pub fn receiving_unit(&self, units: &[UnitSpec]) -> Option<usize> {
        match self.payload {
            Payload::Activations => Some(self.unit + 1),
            Payload::Gradients => self.unit.checked_sub(1),
            Payload::TiedParameters => unit_tied_to(units, self.unit),
            Payload::TiedGradients => units.get(self.unit)?.tied,
        }
    }

    /// The unit on the other rank if this rank receives the message. `None` if there is none.
    pub fn sending_unit(&self, units: &[UnitSpec]) -> Option<usize> {
        match self.payload {
            Payload::Activations => self.unit.checked_sub(1),
            Payload::Gradients => Some(self.unit + 1),
            Payload::TiedParameters => units.get(self.unit)?.tied,
            Payload::TiedGradients => unit_tied_to(units, self.unit),
        }
    }
}

/// What a message carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Payload {
    /// The output of a unit's forward pass, which is the next unit's input.
    Activations,
    /// The gradient of a unit's input, which is that of the output of the unit before.
    Gradients,
    /// A whole parameter, from the unit that owns it to the one that is tied to it.
    TiedParameters,
    /// The gradient of that parameter, back to the unit that owns it.
    TiedGradients,
}

impl Payload {
    /// Whether it goes between tied units, and not between neighbors.
    pub fn is_tied(self) -> bool {
        matches!(self, Payload::TiedParameters | Payload::TiedGradients)
    }

    /// The name in texts, in the plural, such as `tied gradients`.
    pub fn name(self) -> &'static str {
        match self {
            Payload::Activations => "activations",
            Payload::Gradients => "gradients",
            Payload::TiedParameters => "tied parameters",
            Payload::TiedGradients => "tied gradients",
        }
    }
}

/// The first unit that is tied to another. If they are on different stages, it is the only one.
pub(super) fn unit_tied_to(units: &[UnitSpec], owner: usize) -> Option<usize> {
    units.iter().position(|unit| unit.tied == Some(owner))
}

/// A buffer that is kept outside the device for a part of the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Offload {
    /// The unit.
    pub unit: usize,
    /// The buffer.
    pub buffer: Buffer,
    /// Where it is kept.
    pub tier: Tier,
}

/// A buffer of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Buffer {
    /// The parameters that a rank keeps: a shard, or all.
    Parameters,
    /// Masters and optimizer state.
    Optimizer,
    /// Reduced gradients: a shard, or all.
    Gradients,
    /// What a forward pass has kept.
    Activations {
        /// The micro-batch.
        micro_batch: usize,
    },
}

impl Instruction {
    /// Starts to gather a unit, without a codec.
    pub fn start_gather(unit: usize) -> Self {
        Instruction::StartGather { unit, codec: Codec::None }
    }

    /// Starts to reduce a unit's gradients, without a codec.
    pub fn start_reduce(unit: usize) -> Self {
        Instruction::StartReduce { unit, codec: Codec::None }
    }

    /// The unit that the instruction works on, if it works on one.
    pub fn unit(&self) -> Option<usize> {
        match *self {
            Instruction::CountTokens | Instruction::ReduceTotals => None,
            Instruction::WaitGather(unit)
            | Instruction::Release(unit)
            | Instruction::WaitReduceScatter(unit)
            | Instruction::WaitReduce(unit)
            | Instruction::Norm(unit)
            | Instruction::Update(unit)
            | Instruction::StartGather { unit, .. }
            | Instruction::StartReduce { unit, .. }
            | Instruction::Forward { unit, .. }
            | Instruction::Recompute { unit, .. }
            | Instruction::Backward { unit, .. }
            | Instruction::BackwardInput { unit, .. }
            | Instruction::BackwardWeight { unit, .. }
            | Instruction::Accumulate { unit, .. }
            | Instruction::Send(Message { unit, .. })
            | Instruction::StartReceive(Message { unit, .. })
            | Instruction::WaitReceive(Message { unit, .. })
            | Instruction::StartFetch(Offload { unit, .. })
            | Instruction::WaitFetch(Offload { unit, .. })
            | Instruction::StartStore(Offload { unit, .. })
            | Instruction::WaitStore(Offload { unit, .. })
            | Instruction::Evict(Offload { unit, .. }) => Some(unit),
        }
    }
}
