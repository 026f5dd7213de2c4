//! The channel between a run's supervisor and its ranks.
//!
//! Every rank holds one connection to the supervisor's [`Server`]. At least twice a second it sends a heartbeat with its [`RankStatus`]:
//! its step, its phase, and the current call in each of its groups. When a rank dies, falls silent or reports a failure, [`explain`] turns
//! the last status of all ranks into one paragraph. Orders, such as to save and stop, go the other way. Rank 0 also forwards the entries
//! of the run's journal. A [`Viewer`] that knows the secret receives those entries and a summary of the ranks.
//!
//! The channel is not part of training. No step waits for it, it carries no tensors, and it depends on neither libtorch nor MPI, so it
//! works when those do not. It decides nothing: what to do about a silent rank is up to the supervisor.
//!
//! Both sides prove that they know the run's [`Secret`]. So neither a program that happens to find the port nor a rank of another
//! run can join, and a rank takes no orders from a program that took over the port. The traffic is not encrypted or signed: use the
//! channel on a trusted network.
//!
//! ```
//! use std::thread;
//! use std::time::Duration;
//!
//! use shardwise_watch::{Client, RankIdentity, Secret, Server};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let secret = Secret::new()?;
//! let mut server = Server::bind("127.0.0.1:0".parse()?, secret.clone(), 1, 1)?; // world size 1, attempt 1
//!
//! // On the rank, which was given the address and the secret.
//! let address = server.address();
//! let rank = thread::spawn(move || {
//!     let identity = RankIdentity { rank: 0, ranks: 1, host: "a".to_string(), pid: 4711, attempt: 1 };
//!     Client::join(&[address], &secret, &identity, Duration::from_secs(60))
//! });
//!
//! while !server.not_joined().is_empty() {
//!     for event in server.poll(Duration::from_millis(20))? {
//!         println!("{event:?}");
//!     }
//! }
//! assert_eq!(server.ranks()[0].pid, 4711);
//! # rank.join().expect("it does not panic")?;
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod client;
mod coordinates;
mod entry;
mod error;
mod explain;
mod failure;
mod history;
mod message;
mod mismatch;
mod rank_info;
mod ranks;
mod secret;
mod server;
mod situation;
mod status;
mod view;
mod viewer;
mod wording;

pub use client::{Client, RankIdentity, Reporter};
pub use coordinates::{Coordinates, ModelAxes};
pub use error::{Error, Result};
pub use explain::{Cause, explain};
pub use failure::FailureKind;
pub use history::History;
pub use message::{Order, Request};
pub use rank_info::{Presence, RankInfo};
pub use ranks::Ranks;
pub use secret::Secret;
pub use server::{Event, Server};
pub use status::{CallState, CallStatus, RankStatus};
pub use view::{RankSnapshot, SHOWN_MAX, Snapshot, Wait};
pub use viewer::{Update, Viewer};
