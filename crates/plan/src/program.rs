//! The order of a step as a value.
//!
//! A [`Program`] is what one rank does in one step: a list of instructions over units and micro-batches. [`build`] makes it from a
//! [`Policy`], `train` executes it, and whoever wants to know what a step sends, holds or waits for reads it. It prints as text, one
//! instruction per line, and parses back:
//!
//! ```
//! use shardwise_plan::program::{Policy, Program, UnitSpec, build};
//!
//! let units = [UnitSpec::new("embedding", 64, false), UnitSpec::new("head", 64, true)];
//! let program = build::train_step(&units, &Policy::stage(3, 1));
//! let text = program.to_string();
//! assert!(text.starts_with("units embedding head\ncount-tokens\nstart-gather embedding\nwait-gather embedding\n"));
//! assert_eq!(text.parse(), Ok(program));
//! ```

pub mod build;
mod check;
mod collectives;
mod costs;
mod policy;
mod simulate;
mod text;
mod traffic;

pub use check::{Programs, Rule, Violation, check};
pub use collectives::{Call, CallOp, Collective, CollectiveKind, GroupKind, calls, collectives_of};
pub use costs::{Costs, LinkCost, UnitCost};
pub use policy::{ActivationCheckpointing, Policy, Sharding, StageError, UnitSpec};
pub use simulate::{CommunicationTime, Lane, Memory, MemoryKind, MemoryUse, Simulation, Span, WaitingTime, memory_use, simulate};
pub use text::ParseError;
pub use traffic::{Layout, Sent, Traffic, traffic};

/// What one rank does in one step, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// The names of the units, in the model's order. Instructions refer to them by index.
    pub units: Vec<String>,
    /// The instructions.
    pub instructions: Vec<Instruction>,
}

/// One instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Instruction {
    /// Counts the targets of all ranks: an all-gather of a few integers in the world.
    CountTokens,
    /// Starts to all-gather a unit's parameters.
    StartGather(usize),
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
    /// Adds the gradients of the backward pass before it to those of earlier micro-batches.
    Accumulate {
        /// The unit.
        unit: usize,
        /// The micro-batch.
        micro_batch: usize,
    },
    /// Starts to reduce a unit's accumulated gradients over all ranks.
    StartReduce(usize),
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

impl Program {
    /// The instructions before the update: the passes, and the reduction of gradients.
    pub fn gradients(&self) -> &[Instruction] {
        &self.instructions[..self.first_update()]
    }

    /// The instructions of the update.
    pub fn update(&self) -> &[Instruction] {
        &self.instructions[self.first_update()..]
    }

    fn first_update(&self) -> usize {
        let is_update = |instruction: &Instruction| matches!(instruction, Instruction::Update(_));
        self.instructions.iter().position(is_update).unwrap_or(self.instructions.len())
    }
}

impl Instruction {
    /// The unit that the instruction works on, if it works on one.
    pub fn unit(&self) -> Option<usize> {
        match *self {
            Instruction::CountTokens | Instruction::ReduceTotals => None,
            Instruction::StartGather(unit)
            | Instruction::WaitGather(unit)
            | Instruction::Release(unit)
            | Instruction::StartReduce(unit)
            | Instruction::WaitReduceScatter(unit)
            | Instruction::WaitReduce(unit)
            | Instruction::Norm(unit)
            | Instruction::Update(unit)
            | Instruction::Forward { unit, .. }
            | Instruction::Recompute { unit, .. }
            | Instruction::Backward { unit, .. }
            | Instruction::Accumulate { unit, .. } => Some(unit),
        }
    }
}
