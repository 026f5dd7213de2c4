//! The names of the files that make up a journal.

/// The file that rank 0 writes.
pub const METRICS: &str = "metrics.jsonl";

/// The file that the supervisor writes.
pub const EVENTS: &str = "events.jsonl";
