//! The error type of this crate, and the distinction between damage and other failures.

use crate::ManifestError;

/// The result of reading or writing a checkpoint.
pub type Result<T> = std::result::Result<T, Error>;

/// A checkpoint that could not be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An invalid address of a store.
    #[error("{address}: {problem}")]
    Address {
        /// The given address.
        address: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The object store reported an error.
    #[error("{path}: {error}")]
    Storage {
        /// The file that was read or written.
        path: String,
        /// The error.
        error: object_store::Error,
    },
    /// The operating system reported an error.
    #[error("{path}: {error}")]
    System {
        /// The file that was written.
        path: String,
        /// The error.
        error: std::io::Error,
    },
    /// An invalid manifest or table.
    #[error("{path}: {error}")]
    Manifest {
        /// The file.
        path: String,
        /// What is wrong with it.
        error: ManifestError,
    },
    /// A missing or corrupt file.
    #[error("{path}: {problem}")]
    Damaged {
        /// The file.
        path: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A checkpoint that does not fit the model or the request.
    #[error("{folder}: {problem}")]
    Mismatch {
        /// The checkpoint.
        folder: String,
        /// What differs.
        problem: String,
    },
}

impl Error {
    /// Returns whether the checkpoint itself is damaged, so that an older one should be used. An unreachable store does not
    /// mean damage, and neither does a different model.
    pub fn is_damage(&self) -> bool {
        match self {
            // A checkpoint of a newer version is not damaged.
            Error::Manifest { error, .. } => !matches!(error, ManifestError::Format(_)),
            Error::Damaged { .. } => true,
            Error::Storage { error, .. } => matches!(error, object_store::Error::NotFound { .. }),
            Error::Address { .. } | Error::System { .. } | Error::Mismatch { .. } => false,
        }
    }
}
