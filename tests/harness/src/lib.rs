//! Runs a test function on several ranks.
//!
//! A test states its ranks and what each does:
//!
//! ```no_run
//! # use shardwise_harness::ranks;
//! #[test]
//! fn everyone_arrives() {
//!     ranks!(4, || { /* start communication, assert what holds on every rank */ });
//! }
//! ```
//!
//! The process that `cargo test` or `cargo nextest` started runs `mpirun`, which starts this same test program on every
//! rank with the name of this one test; there `ranks!` runs the closure. Each rank's output is kept apart. The test fails,
//! with the name and the last lines of the rank that was first to fail, when a rank panics, exits, is killed, or is not
//! done within the time limit. Runs take turns, because tests that share two cores measure each other.
//!
//! [`Hosts`] puts the ranks on several hosts: network namespaces of this machine, with links of a given rate and delay.

#![forbid(unsafe_code)]

mod hosts;
mod launch;
mod pace;
mod processes;
mod python;
mod readme;
mod slurm;

pub use hosts::{Hosts, Network};
pub use launch::{Exit, Failure, Launch, Rank, Report, launcher, run};
pub use pace::{Stopwatch, check_speed, patience, slowness};
pub use processes::ranks_of;
pub use python::{python, tensorboard, transformers};
pub use readme::readme_commands;
pub use slurm::Slurm;

/// Runs a closure on every rank, and panics with an explanation where a rank fails. The first argument is a number of
/// ranks or a [`Launch`].
#[macro_export]
macro_rules! ranks {
    ($launch:expr, $body:expr) => {
        if let Err(failure) = $crate::try_ranks!($launch, $body) {
            panic!("{failure}");
        }
    };
}

/// Runs a closure on every rank, and returns what became of them. It stands in the test function itself, because the ranks
/// find their way to it by the test's name; a test may have several.
#[macro_export]
macro_rules! try_ranks {
    ($launch:expr, $body:expr) => {{
        fn here() {}
        let site = concat!(file!(), ":", line!(), ":", column!());
        $crate::run($launch, std::any::type_name_of_val(&here), site, $body)
    }};
}
