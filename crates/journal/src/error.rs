//! The error type of the crate.

use crate::files::METRICS;

/// The result of reading or writing a journal.
pub type Result<T> = std::result::Result<T, Error>;

/// An error while reading or writing a journal or a trace.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or folder cannot be read or written.
    #[error("{path}: {error}")]
    File {
        /// The file or folder.
        path: String,
        /// The system's error.
        error: std::io::Error,
    },
    /// The file is not a trace.
    #[error("{path}: not a Shardwise trace: {problem}")]
    Trace {
        /// The file.
        path: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The folder has no journal.
    #[error(
        "{path}: not the folder of a run: it has no {METRICS}. Pass the folder that `shardwise train` prints after `journal in` (run.folder in the recipe)"
    )]
    NoRun {
        /// The folder.
        path: String,
    },
    /// No line of the file can be read.
    #[error(
        "{path}: none of its {lines} lines can be read: the file is damaged, or not a journal. Restore a copy, or remove it to read the run's other file alone"
    )]
    NoJournal {
        /// The file.
        path: String,
        /// The number of lines.
        lines: u64,
    },
}
