//! What a simulation reports about time.

use super::super::groups::GroupKind;

/// Where work is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lane {
    /// The rank's device.
    Compute,
    /// The link of a group. That of the pipeline has the messages between stages.
    Group(GroupKind),
    /// Copies between the device and other tiers.
    Copy,
}

/// Work in a lane: an instruction that computes, a call, a message or a copy.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// The rank: the lowest one, if several have the program.
    pub rank: usize,
    /// The lane.
    pub lane: Lane,
    /// The position of the instruction that computes, or that started the rest. If a call is an all-gather that the step before
    /// has issued, it has the same position there.
    pub position: usize,
    /// The start; 0 if the step before has started it.
    pub start_s: f64,
    /// The end. The last all-gathers of an update may end after the step.
    pub end_s: f64,
    /// The unit, if the work belongs to one.
    pub unit: Option<usize>,
    /// The instruction as text, or the collective and its unit.
    pub label: String,
}

/// The communication of units: all-gathers, reductions, collectives inside units and messages, without control calls.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CommunicationTime {
    /// The time during which any call was in progress.
    pub total_s: f64,
    /// The part of `total_s` during which the compute lane was busy.
    pub hidden_s: f64,
    /// The time during which the compute lane waited for a call or a message, other than for another rank to be ready for it.
    pub exposed_s: f64,
}

impl CommunicationTime {
    /// The fraction that is hidden behind computation; 1 if there is no communication.
    pub fn hidden_share(&self) -> f64 {
        if self.total_s > 0. { self.hidden_s / self.total_s } else { 1. }
    }
}

/// The time that the compute lane waits, by cause.
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
    /// For collectives inside units.
    pub inner_s: f64,
    /// For messages of other stages that are on their way.
    pub messages_s: f64,
    /// For copies between tiers.
    pub copies_s: f64,
    /// For other ranks, which do something else: the bubbles of a pipeline, and differences between ranks.
    pub bubble_s: f64,
}

impl WaitingTime {
    /// The sum of all causes.
    pub fn total_s(&self) -> f64 {
        let WaitingTime { count_tokens_s, gather_s, reduce_scatter_s, reduce_s, reduce_totals_s, .. } = self;
        let WaitingTime { inner_s, messages_s, copies_s, bubble_s, .. } = self;
        let for_calls_s = count_tokens_s + gather_s + reduce_scatter_s + reduce_s + reduce_totals_s + inner_s;
        for_calls_s + messages_s + copies_s + bubble_s
    }
}
