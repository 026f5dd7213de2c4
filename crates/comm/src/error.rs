//! What can go wrong between ranks.

use std::time::Duration;

use shardwise_plan::{Dtype, MeshError};
use shardwise_torch::tch::Device;

use crate::Call;

/// The result of a verb.
pub type Result<T> = std::result::Result<T, Error>;

/// What went wrong, with the call and the ranks at fault.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
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
    /// Ranks came to a collective with different calls. Only checked mode sees this; no data was sent, and the buffers were
    /// dropped.
    #[error("{}: nothing was sent", sides_in_words(sides))]
    Mismatch {
        /// This rank's call.
        call: Box<Call>,
        /// Who came with what, the fewest ranks first.
        sides: Vec<Side>,
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

/// Ranks that came with the same call, where others came with another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Side {
    /// Their numbers in the world, ascending.
    pub ranks: Vec<usize>,
    /// The call, as it is told.
    pub came_with: String,
}

/// Sides that a message names beside the last.
const SIDES_MAX: usize = 3;

/// The others against the majority, or everyone against everyone.
fn sides_in_words(sides: &[Side]) -> String {
    let Some((most, others)) = sides.split_last() else {
        return "ranks came with different calls".to_string();
    };
    let (named, rest) = others.split_at(others.len().min(SIDES_MAX));
    let named = named.iter().enumerate().map(|(index, Side { ranks, came_with })| {
        let came = if index == 0 { "came with" } else { "with" };
        format!("{} {came} {came_with}", ranks_in_words(ranks))
    });
    let unnamed: usize = rest.iter().map(|side| side.ranks.len()).sum();
    let unnamed = (unnamed > 0).then(|| format!("{unnamed} more with other calls"));
    let others_ranks: usize = others.iter().map(|side| side.ranks.len()).sum();
    let joint = if most.ranks.len() > others_ranks { (" where", "came with") } else { (",", "with") };
    format!(
        "{}{} {} {} {}",
        named.chain(unnamed).collect::<Vec<_>>().join(", "),
        joint.0,
        ranks_in_words(&most.ranks),
        joint.1,
        most.came_with
    )
}

/// Runs of neighbouring ranks that a message names.
const RUNS_MAX: usize = 8;

/// As in `rank 3` or `ranks 0-2, 5`; `ranks` ascends.
pub(crate) fn ranks_in_words(ranks: &[usize]) -> String {
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
