//! The exit codes of a run.

/// The exit code of a failed run.
pub const FAILED: u8 = 1;

/// The exit code of a run that was refused before it started.
pub const REFUSED: u8 = 2;

/// The exit code of a run that was asked to stop, has saved, and should be started again: EX_TEMPFAIL of sysexits.h.
pub const RESUME: u8 = 75;

/// The exit code of an interrupted run, by the convention of shells.
pub const INTERRUPTED: u8 = 130;
