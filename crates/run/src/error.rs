//! The errors of a run.

use crate::out_of_memory_report::OutOfMemoryReport;
use crate::phase::Phase;
use crate::spike::Spike;
use crate::spot_check_failure::SpotCheckFailure;

/// The result type of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// An error in a run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A step failed, or the trainer could not be created.
    #[error(transparent)]
    Train(#[from] shardwise_train::Error),
    /// The recipe is invalid.
    #[error(transparent)]
    Recipe(#[from] shardwise_recipe::Error),
    /// The options are invalid or contradict each other.
    #[error("{0}")]
    Options(String),
    /// The data cannot be read.
    #[error("{}: {problem}", path.display())]
    Data {
        /// The file that cannot be read.
        path: std::path::PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// Text, tokens or conversations are invalid.
    #[error(transparent)]
    Text(#[from] shardwise_data::Error),
    /// A checkpoint cannot be resumed from, or the checkpoint folder cannot be used.
    #[error("{0}")]
    Checkpoint(String),
    /// Memory ran out.
    #[error("{0}")]
    OutOfMemory(Box<OutOfMemoryReport>),
    /// The loss or the gradient norm spikes. The parameters are unchanged.
    #[error("step {step}: {spike}; nothing was updated")]
    Spike {
        /// The step that spiked.
        step: u64,
        /// The metrics that spiked, with hints at the cause.
        spike: Box<Spike>,
    },
    /// There were too many spikes for another rollback to help.
    #[error(
        "step {step}: {spike}; nothing was updated, and the run stops: it already skipped {} after a spike. This many are \
         rarely the data's fault: lower the learning rate, or look for a rank that computes wrongly \
         (supervision.spot_check_every)",
        steps(before)
    )]
    RepeatedSpikes {
        /// The step that spiked.
        step: u64,
        /// The metrics that spiked, with hints at the cause.
        spike: Box<Spike>,
        /// The steps whose batches were skipped shortly before.
        before: Vec<u64>,
    },
    /// Ranks compute different gradients from the same samples. The parameters are unchanged.
    #[error("spot check at step {step}: {failure}; nothing was updated")]
    SpotCheck {
        /// The step that was checked.
        step: u64,
        /// The ranks and the unit that differ.
        failure: Box<SpotCheckFailure>,
    },
}

impl From<shardwise_comm::Error> for Error {
    fn from(error: shardwise_comm::Error) -> Self {
        Error::Train(error.into())
    }
}

impl From<shardwise_torch::Error> for Error {
    fn from(error: shardwise_torch::Error) -> Self {
        Error::Train(error.into())
    }
}

impl From<shardwise_zero::Error> for Error {
    fn from(error: shardwise_zero::Error) -> Self {
        Error::Train(error.into())
    }
}

impl Error {
    /// Whether every rank returns this same error.
    pub fn is_same_on_all_ranks(&self) -> bool {
        match self {
            Error::Train(error) => error.is_same_on_all_ranks(),
            Error::Recipe(_) | Error::Options(_) | Error::Checkpoint(_) => true,
            Error::Spike { .. } | Error::RepeatedSpikes { .. } | Error::SpotCheck { .. } => true,
            Error::Data { .. } | Error::Text(_) | Error::OutOfMemory(_) => false,
        }
    }

    /// The communication error, if this is one.
    pub fn comm_error(&self) -> Option<&shardwise_comm::Error> {
        match self {
            Error::Train(error) => error.comm_error(),
            _ => None,
        }
    }

    /// Whether memory ran out.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Error::OutOfMemory(_)) || self.out_of_memory().is_some()
    }

    /// libtorch's out-of-memory error, if this is one.
    pub(crate) fn out_of_memory(&self) -> Option<shardwise_torch::OutOfMemory> {
        match self {
            Error::Train(error) => error.out_of_memory(),
            _ => None,
        }
    }

    /// Describes the phase and the unit in which the error occurred. `phase` is the rank's current phase.
    pub(crate) fn location(&self, phase: Phase) -> String {
        use shardwise_train::Error as Train;
        match self {
            Error::Train(Train::Model { unit, .. }) => format!("the forward pass of unit {unit}"),
            Error::Train(Train::Backward { unit, .. }) => format!("the backward pass of unit {unit}"),
            Error::Train(Train::Zero(shardwise_zero::Error::Torch { unit, .. })) => {
                format!("the {phase} of unit {unit}")
            }
            _ => "a step".to_string(),
        }
    }
}

fn steps(steps: &[u64]) -> String {
    let steps: Vec<String> = steps.iter().map(u64::to_string).collect();
    format!("step{} {}", if steps.len() == 1 { "" } else { "s" }, steps.join(", "))
}
