//! The error type of this crate.

use std::path::Path;

/// The result of reading or writing data.
pub type Result<T> = std::result::Result<T, Error>;

/// An error in reading text, tokenizing it, or reading a corpus.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An I/O error.
    #[error("{path}: {error}")]
    Io {
        /// The file that was read or written.
        path: String,
        /// The error from the operating system.
        error: std::io::Error,
    },
    /// An invalid corpus.
    #[error("{path}: {problem}")]
    Corpus {
        /// The file.
        path: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A document that cannot be read.
    #[error("{path}, document {document}: {problem}")]
    Document {
        /// The file that contains the document.
        path: String,
        /// The number of the document or line in its file, counted from 1.
        document: u64,
        /// What is wrong with it.
        problem: String,
    },
    /// A tokenizer that is invalid, or that failed.
    #[error("{path}: {problem}")]
    Tokenizer {
        /// The tokenizer's file.
        path: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A chat template that is invalid, or that failed on a conversation.
    #[error("{path}: {problem}")]
    Template {
        /// The template's file.
        path: String,
        /// What is wrong with it.
        problem: String,
    },
    /// Interrupted work that cannot be resumed, because its inputs or its files have changed.
    #[error("{path}: {problem}")]
    Resume {
        /// The file with the state of the work.
        path: String,
        /// What differs, and what to do.
        problem: String,
    },
    /// An invalid argument.
    #[error("{problem}")]
    InvalidArgument {
        /// What is wrong with the argument.
        problem: String,
    },
    /// The caller's progress function stopped the work. Repeating the call resumes it.
    #[error("stopped; the same call resumes from {path}")]
    Stopped {
        /// The file with the state of the work.
        path: String,
    },
}

impl Error {
    /// Adds the path to an I/O error.
    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Error {
        move |error| Error::Io { path: path.display().to_string(), error }
    }

    pub(crate) fn corpus(path: &Path, problem: impl Into<String>) -> Error {
        Error::Corpus { path: path.display().to_string(), problem: problem.into() }
    }

    pub(crate) fn document(path: &Path, document: u64, problem: impl ToString) -> Error {
        Error::Document { path: path.display().to_string(), document, problem: problem.to_string() }
    }

    pub(crate) fn tokenizer(path: &Path, problem: impl ToString) -> Error {
        Error::Tokenizer { path: path.display().to_string(), problem: problem.to_string() }
    }

    pub(crate) fn invalid_argument(problem: impl Into<String>) -> Error {
        Error::InvalidArgument { problem: problem.into() }
    }
}
