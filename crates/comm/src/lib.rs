//! Process groups, collectives and point-to-point messages.
//!
//! A [`Group`] is an ordered set of ranks (torch.distributed: a `ProcessGroup`). Its calls (all-gather, reduce-scatter,
//! all-reduce, all-to-all, broadcast, send, receive, barrier) are asynchronous: they take their buffers by value and return a
//! [`Pending`] at once; [`Pending::wait`] returns the buffers. Until then nobody can touch them, so another thread, the network
//! or a GPU can safely work on them. To block, call `wait` right away.
//!
//! ```
//! # use shardwise_comm::{single, ReduceOp};
//! let group = single::group();
//! let pending = group.all_reduce("loss", ReduceOp::Sum, vec![2.5f32]);
//! // … other work …
//! assert_eq!(pending.wait()?, [2.5]);
//! # Ok::<(), shardwise_comm::Error>(())
//! ```
//!
//! There are three backends: [`single`] for a group of one rank, [`mpi`] between CPU ranks, and [`nccl`] between GPU ranks. They
//! share a front end, which adds checks of lengths and dtypes, labels, the [`Meter`] that counts sent bytes, and the
//! [`FlightRecorder`], which shows where each rank is when a run hangs ([`FlightRecorder::group_status`]). Over MPI, ranks can also
//! compare every collective before they send anything ([`mpi::Options::verify_collectives`]), and inject faults to test how mismatches
//! and hangs are reported ([`CallFault`]).
//!
//! # Note: deterministic reductions
//! Over MPI, a reduction adds contributions in rank order, in f32 (f64 for f64, i64 for i64), and rounds once at the end. The bits of
//! the result depend on the inputs and the size of the group, not on timing, message sizes or load.
//!
//! This crate knows nothing about tensor shapes, what a buffer means, or when to call which collective; `shardwise-zero` does.

mod buffer;
mod call;
mod error;
mod fault;
mod group;
mod instruments;
pub mod mpi;
pub mod nccl;
mod pending;
mod reduce;
pub mod single;
mod transport;

pub use buffer::{Part, Payload, PayloadMut};
pub use call::{Call, Verb};
pub use error::{CallVariant, Error, Result};
pub use fault::{CallFault, CallFaultKind};
pub use group::Group;
pub use instruments::{CallStatus, Count, Entry, FlightRecorder, GroupStatus, Meter, MeterKey, RecordedCalls};
pub use pending::Pending;
pub use reduce::ReduceOp;
