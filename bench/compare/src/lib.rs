//! Comparisons of Shardwise with other frameworks and backends, and the helpers for measuring them.
//!
//! `cargo compare` runs them, and the claims of `cargo xtask show` use them as a library. What runs on ranks is elsewhere: our side
//! in `bench/src`, the peers' in `bench/peers`. This crate builds and starts those programs, and uses neither libtorch nor MPI.

#![forbid(unsafe_code)]

pub mod comm;
pub mod frameworks;
pub mod growth;
pub mod peers;
mod plot;
pub mod workspace;
