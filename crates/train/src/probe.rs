//! The seam between the step and those who watch it.

use shardwise_plan::program::Instruction;
use shardwise_torch::tch::Tensor;

/// A phase of a step. Each works on one unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepPhase {
    /// All-gathering the unit's parameters.
    Gather,
    /// The unit's forward pass.
    Forward,
    /// Recomputing the unit's activations for its backward pass.
    Recompute,
    /// The unit's backward pass.
    Backward,
    /// Reducing the unit's gradients.
    Reduce,
    /// Fetching what the unit keeps on a disk.
    Fetch,
    /// Updating the unit's parameters.
    Optimizer,
    /// Storing what the unit keeps on a disk.
    Store,
}

impl StepPhase {
    /// The phase that the trainer enters when it executes an instruction. All others belong to the phase before them.
    pub fn of(instruction: &Instruction) -> Option<Self> {
        match instruction {
            Instruction::WaitGather(_) => Some(StepPhase::Gather),
            Instruction::Forward { .. } => Some(StepPhase::Forward),
            Instruction::Recompute { .. } => Some(StepPhase::Recompute),
            Instruction::Backward { .. } | Instruction::BackwardInput { .. } | Instruction::BackwardWeight { .. } => {
                Some(StepPhase::Backward)
            }
            Instruction::StartReduce { .. } | Instruction::WaitReduceScatter(_) | Instruction::WaitReduce(_) => {
                Some(StepPhase::Reduce)
            }
            Instruction::WaitFetch(_) => Some(StepPhase::Fetch),
            Instruction::Update(_) => Some(StepPhase::Optimizer),
            Instruction::WaitStore(_) => Some(StepPhase::Store),
            _ => None,
        }
    }
}

/// Observes a trainer from inside its step. Progress reports, traces, fault injection and spot checks live behind it. Every method
/// has a default that does nothing.
pub trait Probe: Send + Sync {
    /// A step starts. Steps are counted from 1.
    fn start_step(&self, _step: u64) {}

    /// The trainer enters a phase of a unit.
    fn enter(&self, _phase: StepPhase, _unit: usize) {}

    /// The backward pass of a unit has computed the gradient of one of its parameters, which is not reduced yet.
    /// The gradient of an embedding may be sparse.
    fn observe_gradient(&self, _unit: usize, _gradient: &Tensor) -> shardwise_torch::Result<()> {
        Ok(())
    }

    /// A number to compare with that of the other ranks at the start of a step. The largest is part of
    /// [`Gradients`](crate::Gradients), so that ranks can agree on something without another collective.
    fn signal(&self) -> u64 {
        0
    }
}

/// Observes nothing.
impl Probe for () {}
