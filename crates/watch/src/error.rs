//! The errors of the channel.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

/// The result of an operation on the channel.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of the channel. No error message contains a secret or a proof.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The text is not a secret.
    #[error("the run's secret must be 64 lower-case hexadecimal digits; pass it on exactly as the supervisor wrote it")]
    Secret,
    /// The text is not a set of ranks.
    #[error("'{text}' is not a set of ranks; write '0-3,8,16-64/16', with at most {ranges_max} ranges")]
    Ranks {
        /// The start of the text.
        text: String,
        /// The maximum number of ranges.
        ranges_max: usize,
    },
    /// The bytes are not a valid message.
    #[error("malformed message: {0}")]
    Malformed(String),
    /// No supervisor was reached in time.
    #[error("no supervisor was reached at {} within {} s: {last}", list_addresses(addresses), limit.as_secs())]
    Unreachable {
        /// The addresses that were tried.
        addresses: Vec<SocketAddr>,
        /// The time limit.
        limit: Duration,
        /// The error of the last attempt.
        last: String,
    },
    /// The program at that address does not know the secret.
    #[error(
        "the program at {address} could not prove that it knows this run's secret: it is another run's supervisor, or none at all"
    )]
    NotSupervisor {
        /// The address of that program.
        address: SocketAddr,
    },
    /// The supervisor at that address does not accept the secret.
    #[error("the supervisor at {address} does not accept this secret: it supervises another run")]
    WrongSecret {
        /// The supervisor's address.
        address: SocketAddr,
    },
    /// The supervisor refused this rank.
    #[error("the supervisor refused rank {rank}: {reason}")]
    Refused {
        /// The rank that was refused.
        rank: u32,
        /// The supervisor's reason.
        reason: String,
    },
    /// The supervisor refused this viewer.
    #[error("the supervisor refused to show the run: {reason}")]
    ViewerRefused {
        /// The supervisor's reason.
        reason: String,
    },
    /// A system call failed.
    #[error("{action}: {source}")]
    Io {
        /// What was attempted.
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

impl Error {
    pub(crate) fn io(action: &'static str) -> impl FnOnce(io::Error) -> Error {
        move |source| Error::Io { action, source }
    }
}

fn list_addresses(addresses: &[SocketAddr]) -> String {
    match addresses {
        [] => "any address (none was given)".to_string(),
        some => some.iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(", "),
    }
}
