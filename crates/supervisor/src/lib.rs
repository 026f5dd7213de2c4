//! The supervisor of a run: launches its ranks, monitors them, explains what went wrong, and restarts them.
//!
//! [`supervise()`] runs attempt after attempt until the run is complete, stops on request, or keeps failing. [`RankCommand`] starts
//! ranks through an MPI launcher, with or without a supervisor. [`EventLog`] records what happens in the run's folder, and forwards it
//! to the [`Screen`], the viewers and the metrics [`Endpoint`].
//!
//! The supervisor is a separate process, which depends on neither libtorch nor MPI, so it survives whatever happens to a rank. It reads
//! no recipe: the caller passes the [`Settings`] that it needs.

#![forbid(unsafe_code)]

mod attempt;
mod endpoint;
mod error;
mod event_log;
pub mod exit_codes;
mod faults;
mod hosts;
mod installation;
mod launch;
pub mod launcher_env;
mod launcher_stderr;
mod launcher_stdout;
mod metrics;
mod rank_count;
mod remote;
mod screen;
mod signals;
mod supervise;
mod supervisor_file;

pub use endpoint::{Address, Endpoint};
pub use error::{Error, Result};
pub use event_log::EventLog;
pub use faults::plan_faults;
pub use hosts::Host;
pub use installation::{Environment, Installation, MPI, TORCH_VERSION};
pub use launch::{RankCommand, absolute, exit_code, find_launcher, rank_command, rank_program};
pub use metrics::Metrics;
pub use rank_count::RankCount;
pub use remote::{daemon_command, start_daemon};
pub use screen::{PlainLines, Screen};
pub use supervise::{Placement, Settings, supervise};
pub use supervisor_file::{find_supervisor, read_secret};
