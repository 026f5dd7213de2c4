//! What can go wrong between ranks.

use std::time::Duration;

use shardwise_plan::{Dtype, MeshError};
use shardwise_torch::tch::Device;

use crate::Call;

/// The result of a verb.
pub type Result<T> = std::result::Result<T, Error>;

/// What went wrong, with the call and the ranks at fault.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// A buffer of the wrong length.
    #[error("{call}: the {what} has {found} elements, and {expected} are needed")]
    Length {
        /// The call at fault.
        call: Box<Call>,
        /// Which buffer or list.
        what: &'static str,
        /// How long it should be.
        expected: usize,
        /// How long it is.
        found: usize,
    },
    /// Two buffers of different types.
    #[error("{call}: the input is {input} and the output {output}; both must be of one type")]
    Dtype {
        /// The call at fault.
        call: Box<Call>,
        /// What is sent.
        input: Dtype,
        /// What is received into.
        output: Dtype,
    },
    /// A reduction that the element type does not have.
    #[error("{call}: {reason}")]
    Reduction {
        /// The call at fault.
        call: Box<Call>,
        /// Why not, and what to do instead.
        reason: &'static str,
    },
    /// A rank that the group does not have.
    #[error("{call}: there is no rank {rank} in a group of {size}")]
    Rank {
        /// The call at fault.
        call: Box<Call>,
        /// The rank asked for.
        rank: usize,
        /// The size of the group.
        size: usize,
    },
    /// Memory that the back end cannot reach.
    #[error("{call}: the buffer is on {device:?}, and this group moves memory of {reached:?}")]
    Device {
        /// The call at fault.
        call: Box<Call>,
        /// Where the buffer is.
        device: Device,
        /// What the group's back end can reach.
        reached: Device,
    },
    /// Nothing has moved for the time limit.
    #[error("{call} made no progress for {limit:?}{waiting_for}; its buffers are lost")]
    TimedOut {
        /// The call that stands still.
        call: Box<Call>,
        /// The limit.
        limit: Duration,
        /// Who is missing, where that is known.
        waiting_for: String,
    },
    /// The library underneath reported a failure.
    #[error("{call} failed: {message}; its buffers are lost")]
    Transport {
        /// The call at fault.
        call: Box<Call>,
        /// What the library says.
        message: String,
    },
    /// An earlier call on the group failed.
    #[error("{call} was not started: the group is out of step since {cause}")]
    Broken {
        /// The call that was not started.
        call: Box<Call>,
        /// The call that broke the group.
        cause: String,
    },
    /// The communication thread is gone.
    #[error("the communication thread has stopped; its last words are above")]
    Stopped,
    /// Start-up or the making of a group failed.
    #[error("{0}")]
    Setup(String),
    /// A mesh that does not fit the group.
    #[error(transparent)]
    Mesh(#[from] MeshError),
}
