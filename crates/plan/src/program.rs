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
mod codec;
mod collectives;
mod costs;
mod execution;
mod groups;
mod instruction;
mod policy;
mod programs;
mod simulate;
mod text;
mod tier;
mod topology;
mod traffic;

pub use check::{Rule, Violation, check};
pub use codec::Codec;
pub use collectives::{Call, CallOp, Collective, Element, calls, collectives_of};
pub use costs::{Costs, LinkCost, UnitCost};
pub use groups::{CollectiveKind, GroupKind};
pub use instruction::{Buffer, Instruction, Keep, Message, Offload, Payload};
pub use policy::{
    ActivationCheckpointing, ElementCounts, InnerCollective, InnerCollectives, Policy, Sharding, StageError,
    UnevenBytes, UnitSpec,
};
pub use programs::Programs;
pub use simulate::{
    CommunicationTime, Lane, Memory, MemoryKind, MemoryUse, Simulation, Span, StepSimulation, WaitingTime, memory_use,
    simulate, simulate_rank, tier_bytes,
};
pub use text::ParseError;
pub use tier::Tier;
pub use topology::{SharedLink, Topology};
pub use traffic::{Layout, ModelParallel, Sent, Traffic, traffic};

pub use crate::mesh::Place;

/// What one rank does in one step, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// The names of the units, in the model's order. Instructions refer to them by index.
    pub units: Vec<String>,
    /// The instructions.
    pub instructions: Vec<Instruction>,
}

impl Program {
    /// The instructions of the first half of a step: the passes, the reduction of gradients, and updates in the backward pass.
    pub fn gradients(&self) -> &[Instruction] {
        &self.instructions[..self.first_update()]
    }

    /// The instructions of the second half of a step: the update, or what is left of updates in the backward pass.
    pub fn update(&self) -> &[Instruction] {
        &self.instructions[self.first_update()..]
    }

    /// By unit: how its gradients travel when they are reduced.
    pub fn gradient_codecs(&self, units: usize) -> Vec<Codec> {
        let mut codecs = vec![Codec::None; units];
        for instruction in &self.instructions {
            if let Instruction::StartReduce { unit, codec } = *instruction
                && let Some(known) = codecs.get_mut(unit)
            {
                *known = codec;
            }
        }
        codecs
    }

    fn first_update(&self) -> usize {
        let is_before = |instruction: &Instruction| matches!(instruction, Instruction::ReduceTotals);
        self.instructions.iter().position(is_before).map_or(self.instructions.len(), |before| before + 1)
    }
}
