//! The results of a step, and of its first half.

use crate::nonfinite::NonFiniteValue;

/// The result of a training step, the same on all ranks.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Report {
    /// The step, counted from 1.
    pub step: u64,
    /// The mean loss per target, over all ranks and micro-batches.
    pub loss: f64,
    /// The global gradient norm, before clipping.
    pub grad_norm: f64,
    /// The gradient norm of each unit, before clipping.
    pub unit_norms: Vec<f64>,
    /// The learning rate.
    pub lr: f64,
    /// The number of targets that are not ignored; for a language model, tokens.
    pub tokens: u64,
    /// The tokens that have chosen each expert, by unit; empty for a unit without experts.
    pub expert_tokens: Vec<Vec<u64>>,
    /// How many of them experts had no capacity for, by unit.
    pub dropped_tokens: Vec<u64>,
    /// The loss scale of the backward pass.
    pub loss_scale: f64,
    /// Why the update was skipped, if it was.
    pub skipped: Option<NonFiniteValue>,
    /// The number of skipped steps so far, including this one.
    pub skipped_so_far: u64,
    /// Trainable parameters that no rank's backward pass reached. Only a trainer's first step looks for them.
    pub without_gradient: Vec<String>,
}

impl Report {
    /// The report of a step, before its update.
    pub(crate) fn of(gradients: Gradients) -> Self {
        let Gradients {
            step,
            loss,
            grad_norm,
            unit_norms,
            tokens,
            expert_tokens,
            dropped_tokens,
            loss_scale,
            without_gradient,
            ..
        } = gradients;
        let (lr, skipped, skipped_so_far) = (0., None, 0);
        Report {
            step,
            loss,
            grad_norm,
            unit_norms,
            lr,
            tokens,
            expert_tokens,
            dropped_tokens,
            loss_scale,
            skipped,
            skipped_so_far,
            without_gradient,
        }
    }
}

/// The first half of a step: its loss and gradient norms, the same on all ranks. The gradients themselves stay in the trainer until
/// [`Trainer::apply_update`](crate::Trainer::apply_update).
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct Gradients {
    /// The step, counted from 1.
    pub step: u64,
    /// The mean loss per target, over all ranks and micro-batches.
    pub loss: f64,
    /// The global gradient norm, before clipping.
    pub grad_norm: f64,
    /// The gradient norm of each unit, before clipping.
    pub unit_norms: Vec<f64>,
    /// The number of targets that are not ignored; for a language model, tokens.
    pub tokens: u64,
    /// The tokens that have chosen each expert, by unit; empty for a unit without experts.
    pub expert_tokens: Vec<Vec<u64>>,
    /// How many of them experts had no capacity for, by unit.
    pub dropped_tokens: Vec<u64>,
    /// The loss scale of the backward pass.
    pub loss_scale: f64,
    /// Trainable parameters that no rank's backward pass reached. Only a trainer's first step looks for them.
    pub without_gradient: Vec<String>,
    /// The largest [`Probe::signal`](crate::Probe::signal) of any rank.
    pub largest_signal: u64,
    /// The first unit on this rank whose output is not finite.
    pub(crate) non_finite_output: Option<usize>,
    pub(crate) micro_batches: usize,
}

impl Gradients {
    /// Whether the loss and all gradients are finite.
    pub fn are_finite(&self) -> bool {
        self.loss.is_finite() && self.grad_norm.is_finite()
    }
}
