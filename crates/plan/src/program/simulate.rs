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

use super::Program;
use super::collectives::{GroupKind, calls};
use super::costs::Costs;
use super::policy::{Policy, UnitSpec};
use super::traffic::{Layout, Traffic, traffic};

pub use memory::{Memory, MemoryKind, MemoryUse};

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

/// Where work is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lane {
    /// The rank's device.
    Compute,
    /// The link of a group.
    Group(GroupKind),
}

/// Work in a lane: an instruction that computes, or a call.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// The lane.
    pub lane: Lane,
    /// The position of the instruction that computes, or that issued the call. If the call is an all-gather that the step before
    /// has issued, it has the same position there.
    pub position: usize,
    /// The start; 0 if the step before has started it.
    pub start_s: f64,
    /// The end. The last all-gathers of an update may end after the step.
    pub end_s: f64,
    /// The instruction as text, or the collective and its unit.
    pub label: String,
}

/// The communication of units: all-gathers and reductions, without control calls.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CommunicationTime {
    /// The time during which any call was in progress.
    pub total_s: f64,
    /// The part of `total_s` during which the compute lane was busy.
    pub hidden_s: f64,
    /// The time during which the compute lane waited for a call.
    pub exposed_s: f64,
}

impl CommunicationTime {
    /// The fraction that is hidden behind computation; 1 if there is no communication.
    pub fn hidden_share(&self) -> f64 {
        if self.total_s > 0. { self.hidden_s / self.total_s } else { 1. }
    }
}

/// The time that the compute lane waits, by instruction.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WaitingTime {
    /// For the token counts of other ranks.
    pub count_tokens_s: f64,
    /// For parameters.
    pub gather_s: f64,
    /// For reductions within the shard group, so that gradients can be freed.
    pub reduce_scatter_s: f64,
    /// For complete reductions, at the end of the backward pass.
    pub reduce_s: f64,
    /// For the sums of losses and norms.
    pub reduce_totals_s: f64,
}

impl WaitingTime {
    /// The sum of all causes.
    pub fn total_s(&self) -> f64 {
        self.count_tokens_s + self.gather_s + self.reduce_scatter_s + self.reduce_s + self.reduce_totals_s
    }
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
        memory: memory::track(program, units, policy, layout, costs),
    }
}
