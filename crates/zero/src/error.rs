//! The error type of this crate, which names the unit at fault.

use shardwise_torch::tch::TchError;

use crate::OffloadTarget;

/// The result of an operation on a sharded unit.
pub type Result<T> = std::result::Result<T, Error>;

/// A failed operation on a unit.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A libtorch operation failed.
    #[error("unit {unit}: {error}")]
    Torch {
        /// The unit at fault.
        unit: String,
        /// The libtorch error.
        error: shardwise_torch::Error,
    },
    /// Communication failed.
    #[error("unit {unit}: {error}")]
    Comm {
        /// The unit at fault.
        unit: String,
        /// The communication error.
        error: shardwise_comm::Error,
    },
    /// The parameters or the optimizer state could not be initialized.
    #[error("unit {unit}: its parameters could not be initialized: {error}")]
    Init {
        /// The unit at fault.
        unit: String,
        /// The error from the caller's init function.
        error: InitError,
    },
    /// A buffer could not be fetched from a disk or host memory, or stored there.
    #[error("unit {unit}: its {what} in {target}: {problem}")]
    Offload {
        /// The unit at fault.
        unit: String,
        /// What could not be moved.
        what: &'static str,
        /// The folder of the file, or "host memory".
        target: String,
        /// What went wrong.
        problem: String,
    },
    /// A gradient whose shape is not its parameter's.
    #[error(
        "unit {unit}: a gradient of parameter {parameter} has the shape {found:?}, but the parameter has {expected:?}"
    )]
    GradientShape {
        /// The unit at fault.
        unit: String,
        /// The index of the parameter in the unit.
        parameter: usize,
        /// The parameter's shape.
        expected: Vec<i64>,
        /// The gradient's shape.
        found: Vec<i64>,
    },
}

/// An error from an [`InitFn`](crate::InitFn) or [`StateInitFn`](crate::StateInitFn).
pub type InitError = Box<dyn std::error::Error + Send + Sync>;

/// Adds a unit's name to errors.
pub(crate) struct UnitErrors(String);

impl UnitErrors {
    pub(crate) fn new(unit: &str) -> Self {
        UnitErrors(unit.to_string())
    }

    pub(crate) fn unit(&self) -> &str {
        &self.0
    }

    pub(crate) fn torch<T>(&self, result: shardwise_torch::Result<T>) -> Result<T> {
        result.map_err(|error| Error::Torch { unit: self.0.clone(), error })
    }

    pub(crate) fn tch<T>(&self, result: std::result::Result<T, TchError>) -> Result<T> {
        self.torch(result.map_err(shardwise_torch::Error::from))
    }

    pub(crate) fn offload(&self, what: &'static str, target: &OffloadTarget, problem: String) -> Error {
        Error::Offload { unit: self.0.clone(), what, target: target.name(), problem }
    }

    pub(crate) fn comm<T>(&self, result: shardwise_comm::Result<T>) -> Result<T> {
        result.map_err(|error| Error::Comm { unit: self.0.clone(), error })
    }
}
