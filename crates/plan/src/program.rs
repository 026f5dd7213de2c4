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
    /// The instructions of the first half of a step: the passes, the reduction of gradients, updates in the backward pass, and those that
    /// the step before has left.
    pub fn gradients(&self) -> &[Instruction] {
        &self.instructions[..self.first_update()]
    }

    /// The instructions of the second half of a step: the update, or what is left of updates in the backward pass. Nothing, if updates are
    /// left to the next step.
    pub fn update(&self) -> &[Instruction] {
        &self.instructions[self.first_update()..]
    }

    /// The program without the updates that the step before has left to it, for a step to which nothing was left: the first one, or
    /// one whose predecessor was skipped or has been finished.
    pub fn without_deferred_updates(&self, policy: &Policy) -> Program {
        self.part(policy, false)
    }

    /// The updates that the step before has left to this one, for whoever cannot wait for the next step.
    pub fn only_deferred_updates(&self, policy: &Policy) -> Program {
        self.part(policy, true)
    }

    /// The instructions that belong to deferred updates, or the others.
    fn part(&self, policy: &Policy, of_deferred_updates: bool) -> Program {
        let deferred = self.deferred_updates(policy);
        let part =
            self.instructions.iter().zip(deferred).filter(|&(_, is_deferred)| is_deferred == of_deferred_updates);
        Program { units: self.units.clone(), instructions: part.map(|(instruction, _)| *instruction).collect() }
    }

    /// By instruction: whether it belongs to an update that the step before has left to this one, or waits for what that step stores.
    fn deferred_updates(&self, policy: &Policy) -> Vec<bool> {
        let position = |unit: usize| self.instructions.iter().position(|i| *i == Instruction::Update(unit));
        let updated_at: Vec<Option<usize>> = (0..self.units.len()).map(position).collect();
        let of_update = |(position, instruction): (usize, &Instruction)| {
            let unit = instruction.unit()?;
            let (updated_at, is_deferred) = (updated_at.get(unit).copied().flatten()?, policy.defers_update(unit));
            let is_stored_before =
                |offload: Offload| self.instructions[..position].contains(&Instruction::StartStore(offload));
            Some(match *instruction {
                Instruction::Update(_) => is_deferred,
                Instruction::WaitStore(offload) if offload.buffer == Buffer::Optimizer => {
                    is_deferred || !is_stored_before(offload)
                }
                Instruction::StartFetch(Offload { buffer, .. })
                | Instruction::WaitFetch(Offload { buffer, .. })
                | Instruction::StartStore(Offload { buffer, .. })
                | Instruction::WaitStore(Offload { buffer, .. }) => {
                    is_deferred
                        && (buffer == Buffer::Optimizer || (buffer == Buffer::Gradients && position < updated_at))
                }
                _ => false,
            })
        };
        self.instructions.iter().enumerate().map(|at| of_update(at).unwrap_or(false)).collect()
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
