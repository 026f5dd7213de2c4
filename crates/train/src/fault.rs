//! Numbers that are not finite: where they came from, and what to do about them.

use std::fmt;

/// What to do with a step whose loss or gradients are not finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnNotFinite {
    /// End with an error that names the fault. Parameters are as they were before the step.
    Stop,
    /// Leave parameters as they were, count the step as skipped, make the loss scale smaller if there is one, and go on.
    Skip,
}

/// What was first not to be finite, in the order of the computation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The output of a unit's forward pass.
    Output {
        /// The unit.
        unit: String,
        /// The rank.
        rank: usize,
        /// The first of the parameters that it computes with, frozen and tied ones included, that is itself not finite, if one is.
        parameter: Option<String>,
    },
    /// Gradients, while all outputs were finite.
    Gradient {
        /// The unit, the first in the backward pass.
        unit: String,
        /// The first of its parameters whose gradient is not finite.
        parameter: String,
    },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Output { unit, rank, parameter: None } => {
                write!(f, "the output of unit {unit} on rank {rank} is not finite")
            }
            Fault::Output { unit, rank, parameter: Some(parameter) } => {
                write!(f, "the output of unit {unit} on rank {rank} is not finite, as is its parameter {parameter}")
            }
            Fault::Gradient { unit, parameter } => {
                write!(f, "the gradient of {parameter} in unit {unit} is not finite")
            }
        }
    }
}
