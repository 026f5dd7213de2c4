//! Runs a test function on several ranks.
//!
//! A test specifies the number of ranks, and what each of them runs:
//!
//! ```no_run
//! # use shardwise_harness::ranks;
//! #[test]
//! fn everyone_arrives() {
//!     ranks!(4, || { /* start communication, assert what holds on every rank */ });
//! }
//! ```
//!
//! The process that `cargo test` or `cargo nextest` started runs `mpirun`, which starts the same test program on every rank
//! with the name of this test; there `ranks!` runs the closure. Each rank's output is captured separately. The test fails if a
//! rank panics, exits, is killed, or does not finish within the timeout, and shows the last lines of the first rank that
//! failed. Only one test launches ranks at a time, because tests that share two cores disturb each other.
//!
//! [`Hosts`] puts the ranks on several hosts: network namespaces of this machine, with links of a given rate and delay.

#![forbid(unsafe_code)]

mod hosts;
mod launch;
mod processes;
mod python;
mod readme;
mod slurm;
mod stopwatch;

pub use hosts::{Hosts, Network};
pub use launch::{Exit, Failure, Launch, Rank, Report, launcher, run};
pub use processes::rank_pids;
pub use python::{packages, python, run_with_tensorboard, run_with_transformers};
pub use readme::readme_commands;
pub use slurm::Slurm;
pub use stopwatch::{Stopwatch, check_speed, scale_timeout, slowdown};

/// Runs a closure on every rank, and panics with an explanation if a rank fails. The first argument is a number of ranks or a
/// [`Launch`].
#[macro_export]
macro_rules! ranks {
    ($launch:expr, $body:expr) => {
        if let Err(failure) = $crate::try_ranks!($launch, $body) {
            panic!("{failure}");
        }
    };
}

/// Runs a closure on every rank, and returns the outcome. It must be in the test function itself, because the ranks find it by
/// the test's name; a test may have several.
#[macro_export]
macro_rules! try_ranks {
    ($launch:expr, $body:expr) => {{
        fn here() {}
        let site = concat!(file!(), ":", line!(), ":", column!());
        $crate::run($launch, std::any::type_name_of_val(&here), site, $body)
    }};
}
