//! The journal of a run: writing it, reading it back, and exporting it.
//!
//! A run has a folder with two files of JSON lines, each line an [`Entry`]: rank 0 writes `metrics.jsonl` and the supervisor writes
//! `events.jsonl`, so that nothing is lost when a rank dies. Every attempt appends to both. [`Run`] merges them: a step that was
//! repeated after a restart counts once, with its latest figures. [`Timeline`] turns them into attempts and dated events.
//!
//! The same figures are exported as [`TensorBoard`] events while they are written, and as [`prometheus`] text on request.
//!
//! The crate depends on neither libtorch nor MPI, so a journal can be read on any machine, during the run or years later. It measures
//! nothing; callers pass the figures in.

#![forbid(unsafe_code)]

mod entry;
pub mod format;
mod profile;
pub mod prometheus;
mod reader;
mod run;
pub mod spans;
mod tensorboard;
mod timeline;
mod trace_svg;
mod writer;

pub use entry::{
    Entry, EntryKind, Evaluation, JOURNAL_VERSION, Launch, RANKS_KEPT_MAX, RankMemory, Resumed, Saved, Start, Step,
    StepTraffic, VerbTraffic,
};
pub use profile::{Communication, KindTime, Profile, RankTime, UnitTime, VerbRate};
pub use reader::Reader;
pub use run::{Run, replay};
pub use tensorboard::TensorBoard;
pub use timeline::{Attempt, AttemptEnd, Event, EventKind, Outcome, Timeline};
pub use trace_svg::trace_svg;
pub use writer::Journal;

/// The file that rank 0 writes.
pub const METRICS: &str = "metrics.jsonl";

/// The file that the supervisor writes.
pub const EVENTS: &str = "events.jsonl";

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
