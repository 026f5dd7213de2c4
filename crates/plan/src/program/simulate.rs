//! Simulates a program: how long a step takes, what it waits for, and what it holds.
//!
//! The simulation is a discrete-event run of one rank among equals. A rank has a lane for computation and one for each group. The
//! calls of a group run one at a time, in the order in which they are issued; different groups run at the same time. A wait blocks
//! the compute lane. All ranks issue their calls at the same time, so a call takes as long as the rank that sends the most.
//!
//! The step is one of many: an all-gather that the update of one step starts may still run in the next, and the pool has the
//! buffers of earlier steps.

mod lanes;
mod memory;
mod spans;

use super::Program;
use super::collectives::calls;
use super::costs::Costs;
use super::policy::{Policy, UnitSpec};
use super::traffic::{Layout, Traffic, traffic};

pub use memory::{Memory, MemoryKind, MemoryUse, memory_use};
pub use spans::{CommunicationTime, Lane, Span, WaitingTime};

/// The result of a simulation. Times are seconds since the start of the step.
#[derive(Clone, Debug, PartialEq)]
pub struct Simulation {
    /// The time of the step.
    pub step_s: f64,
    /// The work that the step could not be shorter without, in order. Each span starts when the one before it ends.
    pub critical_path: Vec<Span>,
    /// The communication of units, and how much of it is hidden.
    pub communication: CommunicationTime,
    /// The time that the compute lane waits, by cause.
    pub waiting: WaitingTime,
    /// The bytes that the rank sends.
    pub traffic: Traffic,
    /// All work, by start. Time in which the compute lane has no span is spent waiting.
    pub timeline: Vec<Span>,
    /// The memory that the rank holds.
    pub memory: MemoryUse,
}

/// Simulates a step of one rank. All ranks execute the same program.
///
/// # Panics
/// If there are costs of another number of units, or if the rank's index is not in its groups.
pub fn simulate(program: &Program, units: &[UnitSpec], policy: &Policy, layout: &Layout, costs: &Costs) -> Simulation {
    assert_eq!(units.len(), costs.units.len(), "every unit needs costs");
    let calls = calls(program, units, policy);
    let before = lanes::run(program, &calls, layout, costs, &[]);
    let step = lanes::run(program, &calls, layout, costs, &before.unfinished());
    Simulation {
        step_s: step.step_s(),
        critical_path: step.critical_path(),
        communication: step.communication(),
        waiting: step.waiting(),
        traffic: traffic(program, units, policy, layout),
        timeline: step.timeline(),
        memory: memory_use(program, units, policy, layout, costs),
    }
}
