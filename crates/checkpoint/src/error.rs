//! What can go wrong with a checkpoint.

use crate::Fault;

/// The result of reading or writing a checkpoint.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong with a checkpoint.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An address that is none.
    #[error("{address}: {problem}")]
    Address {
        /// As it was given.
        address: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The storage did not do what was asked.
    #[error("{path}: {error}")]
    Storage {
        /// What was read or written.
        path: String,
        /// What it said.
        error: object_store::Error,
    },
    /// The system did not do what was asked.
    #[error("{path}: {error}")]
    System {
        /// What was written.
        path: String,
        /// What it said.
        error: std::io::Error,
    },
    /// A manifest or table that cannot be believed.
    #[error("{path}: {fault}")]
    Fault {
        /// The file.
        path: String,
        /// What is wrong with it.
        fault: Fault,
    },
    /// A file that is not what was written.
    #[error("{path}: {problem}")]
    Damaged {
        /// The file.
        path: String,
        /// How that shows.
        problem: String,
    },
    /// A checkpoint of something else.
    #[error("{folder}: {problem}")]
    Other {
        /// The checkpoint.
        folder: String,
        /// What differs.
        problem: String,
    },
}

impl Error {
    /// Whether the checkpoint itself is at fault, so that an older one is the better choice. A storage that does not answer says
    /// nothing about what it holds, and neither does a model that is another one.
    pub fn is_damage(&self) -> bool {
        match self {
            // What a newer program wrote is not damaged.
            Error::Fault { fault, .. } => !matches!(fault, Fault::Format(_)),
            Error::Damaged { .. } => true,
            Error::Storage { error, .. } => matches!(error, object_store::Error::NotFound { .. }),
            Error::Address { .. } | Error::System { .. } | Error::Other { .. } => false,
        }
    }
}
