//! Communication errors.

use std::time::Duration;

use shardwise_plan::{Dtype, MeshError};
use shardwise_torch::tch::Device;

use crate::Call;

/// The result of a collective or point-to-point call.
pub type Result<T> = std::result::Result<T, Error>;

/// A failed call, with the call and the ranks at fault.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A buffer of the wrong length.
    #[error("{call}: the {what} has {found} elements, but {expected} are needed")]
    Length {
        /// The call at fault.
        call: Box<Call>,
        /// The buffer or list with the wrong length.
        what: &'static str,
        /// The required length.
        expected: usize,
        /// The actual length.
        found: usize,
    },
    /// Input and output have different element types.
    #[error("{call}: the input is {input} and the output is {output}; both must have the same dtype")]
    Dtype {
        /// The call at fault.
        call: Box<Call>,
        /// The input's dtype.
        input: Dtype,
        /// The output's dtype.
        output: Dtype,
    },
    /// A reduction that the element type does not support.
    #[error("{call}: {reason}")]
    Reduction {
        /// The call at fault.
        call: Box<Call>,
        /// Why not, and what to do instead.
        reason: &'static str,
    },
    /// A rank outside the group.
    #[error("{call}: there is no rank {rank} in a group of {size}")]
    Rank {
        /// The call at fault.
        call: Box<Call>,
        /// The requested rank.
        rank: usize,
        /// The size of the group.
        size: usize,
    },
    /// A buffer on a device that the backend cannot access.
    #[error("{call}: the buffer is on {device:?}, but this group communicates {reached:?} memory")]
    Device {
        /// The call at fault.
        call: Box<Call>,
        /// The buffer's device.
        device: Device,
        /// The backend's device.
        reached: Device,
    },
    /// The call made no progress within the timeout.
    #[error("{call} made no progress for {timeout:?}{waiting_for}; its buffers are lost")]
    TimedOut {
        /// The stalled call.
        call: Box<Call>,
        /// The timeout.
        timeout: Duration,
        /// The missing ranks, as the end of the message; empty if they are not known.
        waiting_for: String,
    },
    /// Ranks made different calls where one collective was expected. Detected only with
    /// [`verify_collectives`](crate::mpi::Options::verify_collectives); no data was sent, and the buffers were dropped.
    #[error("{}: nothing was sent", describe_variants(variants))]
    Mismatch {
        /// This rank's call.
        call: Box<Call>,
        /// The different calls and who made them, fewest ranks first.
        variants: Vec<CallVariant>,
    },
    /// MPI, NCCL or CUDA reported a failure.
    #[error("{call} failed: {message}; its buffers are lost")]
    Transport {
        /// The call at fault.
        call: Box<Call>,
        /// The library's message.
        message: String,
    },
    /// An earlier call of the group failed.
    #[error("{call} was not started: an earlier call of the group failed: {cause}")]
    Broken {
        /// The call that was not started.
        call: Box<Call>,
        /// The first failure in the group.
        cause: String,
    },
    /// The communication thread has ended.
    #[error("the communication thread has stopped; see its message above")]
    Stopped,
    /// Initializing communication or creating a group failed.
    #[error("{0}")]
    Setup(String),
    /// A mesh that does not fit the group.
    #[error(transparent)]
    Mesh(#[from] MeshError),
}

/// One of the different calls in an [`Error::Mismatch`], with the ranks that made it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallVariant {
    /// The global ranks, in ascending order.
    pub ranks: Vec<usize>,
    /// The call, formatted for the message.
    pub call: String,
}

/// The most variants that a message lists in addition to the last one.
const VARIANTS_MAX: usize = 3;

/// Lists the calls that the ranks made, with the most common one last. If more than half of the ranks made that one, the text
/// contrasts the others with it: `rank 3 called … while ranks 0-2 called …`.
fn describe_variants(variants: &[CallVariant]) -> String {
    let Some((most, others)) = variants.split_last() else {
        return "ranks made different calls".to_string();
    };
    let (named, rest) = others.split_at(others.len().min(VARIANTS_MAX));
    let named = named.iter().map(|CallVariant { ranks, call }| format!("{} called {call}", describe_ranks(ranks)));
    let unnamed: usize = rest.iter().map(|variant| variant.ranks.len()).sum();
    let unnamed = (unnamed > 0).then(|| format!("{unnamed} more made other calls"));
    let others_ranks: usize = others.iter().map(|variant| variant.ranks.len()).sum();
    let joint = if most.ranks.len() > others_ranks { " while" } else { "," };
    format!(
        "{}{joint} {} called {}",
        named.chain(unnamed).collect::<Vec<_>>().join(", "),
        describe_ranks(&most.ranks),
        most.call
    )
}

/// The most runs of consecutive ranks that a message lists.
const RUNS_MAX: usize = 8;

/// Formats ascending ranks, as in `rank 3` or `ranks 0-2, 5`.
pub(crate) fn describe_ranks(ranks: &[usize]) -> String {
    let runs: Vec<String> = ranks
        .chunk_by(|a, b| a + 1 == *b)
        .map(|run| match (run[0], run[run.len() - 1]) {
            (first, last) if first == last => first.to_string(),
            (first, last) => format!("{first}-{last}"),
        })
        .collect();
    match (ranks.len(), runs.len()) {
        (1, _) => format!("rank {}", runs[0]),
        (_, 0..=RUNS_MAX) => format!("ranks {}", runs.join(", ")),
        (many, _) => format!("{many} ranks ({}, …)", runs[..RUNS_MAX].join(", ")),
    }
}
