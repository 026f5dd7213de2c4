//! What can go wrong on the channel.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

/// The result of what can go wrong here.
pub type Result<T> = std::result::Result<T, Error>;

/// What went wrong. No text of it has a secret or a proof in it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A text that is no secret.
    #[error(
        "the run's secret is not 64 lower-case hexadecimal digits; it must be passed on as the supervisor wrote it"
    )]
    Secret,
    /// A text that is no set of ranks.
    #[error("'{text}' is no set of ranks: '0-3,8,16-64/16' is one, of at most {} runs", crate::ranks::RUNS_MAX)]
    Ranks {
        /// The beginning of the text.
        text: String,
    },
    /// Bytes that are no message.
    #[error("a malformed message: {0}")]
    Malformed(String),
    /// No supervisor was reached in time.
    #[error("no supervisor was reached at {} within {} s: {last}", shown(addresses), limit.as_secs())]
    Unreached {
        /// Where it was looked for.
        addresses: Vec<SocketAddr>,
        /// For how long.
        limit: Duration,
        /// How the last attempt ended.
        last: String,
    },
    /// Whoever listens there does not know the secret.
    #[error(
        "who listens at {address} has not proved to know this run's secret: another run's supervisor, or a stranger"
    )]
    Stranger {
        /// Where.
        address: SocketAddr,
    },
    /// The supervisor at that address says that the secret is not its run's.
    #[error("the supervisor at {address} does not accept this secret: it watches another run")]
    WrongSecret {
        /// Where.
        address: SocketAddr,
    },
    /// The supervisor does not want this rank.
    #[error("the supervisor refuses rank {rank}: {reason}")]
    Refused {
        /// The rank.
        rank: u32,
        /// The supervisor's reason.
        reason: String,
    },
    /// The supervisor does not want one more who looks on.
    #[error("the supervisor shows nothing: {reason}")]
    NoViewer {
        /// The supervisor's reason.
        reason: String,
    },
    /// The system did not do what it was asked for.
    #[error("{what}: {source}")]
    Io {
        /// What it was asked for.
        what: &'static str,
        /// What it says.
        source: io::Error,
    },
}

impl Error {
    pub(crate) fn io(what: &'static str) -> impl FnOnce(io::Error) -> Error {
        move |source| Error::Io { what, source }
    }
}

fn shown(addresses: &[SocketAddr]) -> String {
    match addresses {
        [] => "any address (none was given)".to_string(),
        some => some.iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(", "),
    }
}
