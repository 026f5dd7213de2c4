//! This crate has a build script and nothing else.
//!
//! The script says which of libtorch and MPI the machine lacks, and how to install it. Every crate of the workspace that a library user
//! builds depends on this one, by way of `shardwise-plan`. So cargo, which starts what most others wait for, runs the script before those
//! of libtorch's and MPI's crates, whose messages are harder to understand.
