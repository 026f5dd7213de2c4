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
mod error;
mod files;
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
    Entry, EntryKind, Evaluation, ExpertLoad, JOURNAL_VERSION, Launch, RANKS_KEPT_MAX, RankMemory, Resumed, Saved,
    Start, Step, StepTraffic, VerbTraffic,
};
pub use error::{Error, Result};
pub use files::{EVENTS, METRICS};
pub use profile::{Communication, GroupCommunication, KindTime, Profile, RankTime, UnitTime, VerbRate};
pub use reader::Reader;
pub use run::{Run, replay};
pub use tensorboard::TensorBoard;
pub use timeline::{Attempt, AttemptEnd, Event, EventKind, Outcome, Timeline};
pub use trace_svg::trace_svg;
pub use writer::Journal;
