//! The errors of the supervisor.

use std::path::PathBuf;

use crate::rank_count::RankCount;

/// The result of an operation of the supervisor.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of the supervisor.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A launcher started this process, with another number of ranks than `-n`.
    #[error("-n {asked} contradicts the launcher, which started {started} ranks; leave -n out")]
    WorldSize {
        /// The value of `-n`.
        asked: usize,
        /// The number of ranks that the launcher started.
        started: usize,
    },
    /// A library that ranks need is missing, or is not the one that they need.
    #[error("{0}")]
    Installation(String),
    /// Only Open MPI's launcher can be told the hosts.
    #[error(
        "--hosts needs Open MPI's mpirun; with another MPI, write a host file and run shardwise under its launcher"
    )]
    NotOpenMpi,
    /// The hosts that answer have too little room.
    #[error("there is room for {room} ranks{}, but -n {asked} needs {needed}", list_missing(missing))]
    NoRoom {
        /// The number of ranks that there is room for.
        room: usize,
        /// The names of the hosts that do not answer.
        missing: Vec<String>,
        /// The value of `-n`.
        asked: RankCount,
        /// The smallest world size that the recipe can run on.
        needed: usize,
    },
    /// Another supervisor is using the run's folder.
    #[error(
        "{}: another `shardwise train` is running in this folder; watch it with `shardwise watch {}`. To stop it, press Ctrl-C \
         where it was started",
        folder.display(),
        folder.display()
    )]
    FolderInUse {
        /// The run's folder.
        folder: PathBuf,
    },
    /// The run belongs to another user.
    #[error("{}: only the user who started the run may watch it", path.display())]
    NotOwner {
        /// The file that cannot be read.
        path: PathBuf,
    },
    /// The address of `--metrics` needs a token.
    #[error("{0}")]
    MetricsToken(String),
    /// A `--fault` is invalid.
    #[error("{0}")]
    Fault(String),
    /// The launcher process lacks something that every process has.
    #[error("the launcher has no {0}")]
    Launcher(&'static str),
    /// An operation failed.
    #[error("{what}")]
    Failed {
        /// The file, program or operation that failed.
        what: String,
        /// Why it failed.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A system call failed.
    #[error(transparent)]
    System(#[from] std::io::Error),
    /// The channel to the ranks failed.
    #[error(transparent)]
    Channel(#[from] shardwise_watch::Error),
}

impl Error {
    /// Names what failed. `source` says why.
    pub(crate) fn failed(what: impl ToString, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Error::Failed { what: what.to_string(), source: source.into() }
    }
}

fn list_missing(names: &[String]) -> String {
    match names.is_empty() {
        true => String::new(),
        false => format!(" (no answer from {})", names.join(", ")),
    }
}
