//! What can go wrong with sharded state.

use shardwise_torch::tch::TchError;

/// The result of an operation on sharded state.
pub type Result<T> = std::result::Result<T, Error>;

/// What went wrong, and in which unit.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// libtorch refused.
    #[error("unit {unit}: {error}")]
    Torch {
        /// The unit at fault.
        unit: String,
        /// What libtorch says.
        error: shardwise_torch::Error,
    },
    /// Communication failed.
    #[error("unit {unit}: {error}")]
    Comm {
        /// The unit at fault.
        unit: String,
        /// What went wrong.
        error: shardwise_comm::Error,
    },
    /// The parameters could not be begun.
    #[error("unit {unit}: its parameters could not be begun: {error}")]
    Start {
        /// The unit at fault.
        unit: String,
        /// What went wrong.
        error: StartError,
    },
    /// There is no such stage.
    #[error("there is no ZeRO stage {0}; stages are 0 to 3")]
    Stage(u8),
}

/// Why a parameter could not be begun.
pub type StartError = Box<dyn std::error::Error + Send + Sync>;

/// Puts a unit's name to what goes wrong in it.
pub(crate) struct Faults(String);

impl Faults {
    pub(crate) fn of(unit: &str) -> Self {
        Faults(unit.to_string())
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

    pub(crate) fn comm<T>(&self, result: shardwise_comm::Result<T>) -> Result<T> {
        result.map_err(|error| Error::Comm { unit: self.0.clone(), error })
    }
}
