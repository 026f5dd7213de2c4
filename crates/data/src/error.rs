//! What can go wrong between text and batches.

use std::path::Path;

/// The result of reading or writing data.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong between text and batches.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The system did not do what was asked.
    #[error("{path}: {error}")]
    System {
        /// What was read or written.
        path: String,
        /// What it said.
        error: std::io::Error,
    },
    /// A file of tokens or of its index that cannot be believed.
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
        /// The file that it is in.
        path: String,
        /// Which of the file's documents (or lines) it is, from 1.
        document: u64,
        /// What is wrong with it.
        problem: String,
    },
    /// A tokenizer that is none, or that could not do its work.
    #[error("{path}: {problem}")]
    Tokenizer {
        /// The tokenizer's file.
        path: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A chat template that is none, or that does not fit the conversation.
    #[error("{path}: {problem}")]
    Template {
        /// The template's file.
        path: String,
        /// What is wrong with it.
        problem: String,
    },
    /// Work that was begun with something else than it would be continued with.
    #[error("{path}: {problem}")]
    Continuation {
        /// The file that says how far the work was.
        path: String,
        /// What differs, and what to do.
        problem: String,
    },
    /// What was asked for makes no sense.
    #[error("{problem}")]
    Settings {
        /// Why.
        problem: String,
    },
    /// The caller's progress function said so. What is done is kept.
    #[error("stopped; the same call continues from {path}")]
    Stopped {
        /// The file that says how far the work was.
        path: String,
    },
}

impl Error {
    /// Names the file with which the system failed.
    pub(crate) fn system(path: &Path) -> impl FnOnce(std::io::Error) -> Error {
        move |error| Error::System { path: path.display().to_string(), error }
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

    pub(crate) fn settings(problem: impl Into<String>) -> Error {
        Error::Settings { problem: problem.into() }
    }
}
