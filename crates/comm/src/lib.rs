//! Groups of ranks, and the verbs they do together.
//!
//! A [`Group`] is an ordered set of ranks. Its verbs (all-gather, reduce-scatter, all-reduce, all-to-all, broadcast, send,
//! receive, barrier) take their buffers by value and return a [`Pending`] at once; [`Pending::wait`] gives the buffers
//! back. Between the two the buffers are nowhere to be touched, which is what makes it safe that a second thread, the
//! network or a GPU works on them. A call that blocks is a call followed by `wait`.
//!
//! ```
//! # use shardwise_comm::{single, Reduce};
//! let group = single::group();
//! let pending = group.all_reduce("loss", Reduce::Sum, vec![2.5f32]);
//! // … other work …
//! assert_eq!(pending.wait()?, [2.5]);
//! # Ok::<(), shardwise_comm::Error>(())
//! ```
//!
//! Three back ends carry the verbs: [`single`] (a group of one is a real group), [`mpi`] between CPU ranks, and `nccl`
//! between GPU ranks (cargo feature). They share what stands in front of them: the checks of lengths and types, the
//! labels, the [`Meter`] that counts what is sent, and the [`Record`] of the last calls that says, when ranks stop
//! agreeing, who is where ([`Record::standing`]). Over MPI, ranks can also compare every collective before they send anything
//! ([`mpi::Options::checked`]), and make a mistake on demand ([`CallFault`]) to test what is said of it.
//!
//! # Note: numbers do not move
//! A reduction adds contributions in rank order, in f32 (f64 for f64, i64 for i64), and rounds once at the
//! end. Its bits depend on the inputs and the size of the group, not on timing, message sizes or who else is running.
//!
//! What is not here: tensors' shapes, what a buffer means, when to call what. That is `zero`'s.

mod buffer;
mod call;
mod error;
mod fault;
mod group;
mod instruments;
pub mod mpi;
#[cfg(feature = "nccl")]
pub mod nccl;
mod pending;
mod reduce;
pub mod single;
mod transport;

pub use buffer::{Part, Payload, PayloadMut};
pub use call::{Call, Verb};
pub use error::{Error, Result, Side};
pub use fault::{CallFault, Fault};
pub use group::Group;
pub use instruments::{Count, Entry, Kept, Meter, Outcome, Record, Standing, Tally};
pub use pending::Pending;
pub use reduce::Reduce;
