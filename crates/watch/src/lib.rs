//! The channel between a run's supervisor, which people start, and its ranks.
//!
//! Every rank holds one connection to the [`Server`] of the supervisor, and says twice a second where it stands: its step, its
//! phase, and the newest call in each of its groups. When a rank dies, falls silent or reports a failure, [`explain`] makes one
//! paragraph of what all of them said last. The other way go orders: to end, or to save and end. The first rank also hands on the
//! lines that it writes into the run's journal, and a [`Viewer`], who knows the secret too, is shown those and where the ranks are.
//!
//! It is no part of training: nothing of a step waits for it, it carries no tensor, and it knows neither libtorch nor MPI, so
//! that it still works when those do not. It decides nothing either; what is done about a silent rank is the supervisor's choice.
//!
//! Both sides prove that they know the run's [`Secret`], so that neither a stranger who finds the port nor a rank left over from
//! another run takes part, and a rank does not take orders from whoever took the port. What follows the proof is not sealed:
//! the channel is for a cluster's own network, and is no defence against one who can change packets on it.
//!
//! ```
//! use std::thread;
//! use std::time::Duration;
//!
//! use shardwise_watch::{Client, Place, Secret, Server};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let secret = Secret::new()?;
//! let mut server = Server::bind("127.0.0.1:0".parse()?, secret.clone(), 1, 1)?; // for one rank, at the first attempt
//!
//! // On the rank, which has been told address and secret.
//! let address = server.address();
//! let rank = thread::spawn(move || {
//!     let place = Place { rank: 0, ranks: 1, host: "a".to_string(), pid: 4711, attempt: 1 };
//!     Client::join(&[address], &secret, &place, Duration::from_secs(60))
//! });
//!
//! while !server.awaited().is_empty() {
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
mod entry;
mod error;
mod explain;
mod failure;
mod history;
mod message;
mod ranks;
mod secret;
mod server;
mod standing;
mod view;
mod viewer;
mod wording;

pub use client::{Client, Place, Watch};
pub use error::{Error, Result};
pub use explain::{Cause, explain};
pub use failure::FailureKind;
pub use history::History;
pub use message::{Order, Request};
pub use ranks::Ranks;
pub use secret::Secret;
pub use server::{Event, Presence, Seen, Server};
pub use standing::{CallStanding, CallState, Standing};
pub use view::{Glimpse, SHOWN_MAX, Snapshot, Wait};
pub use viewer::{News, Viewer};
