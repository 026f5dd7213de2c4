//! Values that are not finite: where they first appear, and what to do about them.

use std::fmt;

/// What to do with a step whose loss or gradients are not finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnNonFinite {
    /// Fail with an error that names the value, leaving the parameters unchanged.
    Stop,
    /// Skip the update, count the step as skipped, lower a dynamic loss scale, and continue.
    Skip,
}

/// The first value that is not finite, in the order of the computation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NonFiniteValue {
    /// The output of a unit's forward pass.
    Output {
        /// The unit that computed it.
        unit: String,
        /// The rank that computed it.
        rank: usize,
        /// The first non-finite parameter of the unit, including frozen and tied ones, if there is one.
        parameter: Option<String>,
    },
    /// A gradient, while all outputs are finite.
    Gradient {
        /// The unit that the parameter belongs to.
        unit: String,
        /// The unit's first parameter whose gradient is not finite.
        parameter: String,
    },
    /// Some gradient of a unit that was updated in the backward pass, while all outputs are finite. On a device, also gradients whose
    /// squares overflow f32.
    UnitNorm {
        /// The unit.
        unit: String,
    },
    /// The loss, while all gradients are finite.
    Loss,
}

impl fmt::Display for NonFiniteValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NonFiniteValue::Output { unit, rank, parameter: None } => {
                write!(f, "the output of unit {unit} on rank {rank} is not finite")
            }
            NonFiniteValue::Output { unit, rank, parameter: Some(parameter) } => {
                write!(
                    f,
                    "the output of unit {unit} on rank {rank} is not finite, and neither is its parameter {parameter}"
                )
            }
            NonFiniteValue::Gradient { unit, parameter } => {
                write!(f, "the gradient of {parameter} in unit {unit} is not finite")
            }
            NonFiniteValue::UnitNorm { unit } => write!(f, "the norm of the gradients of unit {unit} is not finite"),
            NonFiniteValue::Loss => write!(f, "the loss is not finite"),
        }
    }
}
