//! What a run writes down of itself, and how it is read again.
//!
//! A run has a folder. In it are two files of JSON lines, each an [`Entry`]: `metrics.jsonl`, which the first rank writes, and
//! `events.jsonl`, which the supervisor writes, so that a rank that dies takes nothing with it. Both are only ever added to, by
//! every attempt and by every resumption, and [`Run`] makes one story of them: steps that were made again count once, as they
//! were made last.
//!
//! The same figures are written for others' programs: [`TensorBoard`] events as they come, and [`prometheus`] text when it is asked for.
//!
//! It knows neither libtorch nor MPI: what was written can be read anywhere, while the run writes it or years later. It does not
//! measure either; it is handed figures.

#![forbid(unsafe_code)]

mod drawing;
mod entry;
mod profile;
pub mod prometheus;
mod reader;
mod run;
pub mod spans;
mod story;
mod tensorboard;
pub mod words;
mod writer;

pub use drawing::svg;
pub use entry::{
    Entry, HeldOut, Launch, RANKS_KEPT_MAX, RankMemory, Saved, Setback, Start, Step, StepTraffic, VerbTraffic, What,
};
pub use profile::{Communication, KindTime, Profile, RankTime, UnitTime, VerbRate};
pub use reader::Reader;
pub use run::{Run, replay};
pub use story::{Attempt, End, Event, Kind, Outcome, Story};
pub use tensorboard::TensorBoard;
pub use writer::Journal;

/// What the first rank writes.
pub const METRICS: &str = "metrics.jsonl";

/// What the supervisor writes.
pub const EVENTS: &str = "events.jsonl";

/// The result of reading or writing.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong with a journal.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or folder that cannot be read or written.
    #[error("{path}: {error}")]
    File {
        /// Which.
        path: String,
        /// Why not.
        error: std::io::Error,
    },
    /// A file that is no trace.
    #[error("{path}: this is no trace of shardwise's: {problem}")]
    Trace {
        /// Which.
        path: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A folder in which no run has written.
    #[error(
        "{path}: no run has written here: there is no {METRICS}. Give the folder that `shardwise train` names in its first lines (run.folder in the recipe)"
    )]
    NoRun {
        /// The folder.
        path: String,
    },
    /// A file of which no line is a run's.
    #[error(
        "{path}: not one of its {lines} lines can be read: it is damaged, or not a run's. Put back a copy, or take it away to see what the run's other file says"
    )]
    NoJournal {
        /// The file.
        path: String,
        /// How many lines it has.
        lines: u64,
    },
}
