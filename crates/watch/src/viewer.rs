//! A viewer's side: it proves that it knows the secret, and then receives what the supervisor knows.
//!
//! A viewer has no thread: whoever draws the screen polls it ([`Viewer::receive`]). The supervisor drops a viewer that has not read
//! for too long; the viewer can join again.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use shardwise_journal::Entry;

use crate::client::{connect, receive};
use crate::message::{
    FRAME_BYTES_MAX, FirstMessage, FromSupervisor, FromViewer, Inbox, Request, refusal_proof, view_proof, welcome_proof,
};
use crate::secret::{Nonce, Secret};
use crate::{Error, Result, Snapshot};

/// The maximum number of reads in one [`Viewer::receive`].
const READS_MAX: usize = 64;

/// Something that a viewer receives.
#[derive(Clone, Debug, PartialEq)]
pub enum Update {
    /// The state of the ranks.
    Snapshot(Snapshot),
    /// A journal entry. Entries from before the viewer joined come first; for a long run, most steps are left out.
    Entry(Entry),
    /// The supervisor's answer to a request.
    Answer(String),
}

/// A viewer's end of the channel, after both sides have proved that they know the secret.
#[derive(Debug)]
pub struct Viewer {
    stream: TcpStream,
    inbox: Inbox,
}

impl Viewer {
    /// Joins the supervisor at this address, within `limit`.
    ///
    /// # Errors
    /// If no supervisor listens there, it does not know the secret, or it has too many viewers.
    pub fn join(address: SocketAddr, secret: &Secret, limit: Duration) -> Result<Viewer> {
        let end = Instant::now() + limit.min(Duration::from_secs(86_400));
        let stream = connect(address, end)?;
        let not_supervisor = || Error::NotSupervisor { address };
        // A program that does not speak our protocol is not a supervisor.
        let receive = || match receive(&stream, end) {
            Err(Error::Malformed(_)) => Err(not_supervisor()),
            received => received,
        };
        let FromSupervisor::Challenge { nonce: challenge } = receive()? else { return Err(not_supervisor()) };
        let nonce = Nonce::new()?;
        let view = FirstMessage::View { nonce, proof: view_proof(secret, &challenge, &nonce) };
        (&stream).write_all(&view.frame()).map_err(Error::io("sending the hello"))?;
        match receive()? {
            FromSupervisor::Welcome { proof, heartbeat_ms } if proof == welcome_proof(secret, &nonce, heartbeat_ms) => {
                stream.set_nonblocking(true).map_err(Error::io("preparing the connection"))?;
                Ok(Viewer { stream, inbox: Inbox::default() })
            }
            FromSupervisor::Refused { reason, proof } if proof == refusal_proof(secret, &nonce, &reason) => {
                Err(Error::ViewerRefused { reason })
            }
            FromSupervisor::WrongSecret {} => Err(Error::WrongSecret { address }),
            _ => Err(not_supervisor()),
        }
    }

    /// Returns what has arrived since the last call, without blocking.
    ///
    /// # Errors
    /// If the supervisor is gone, or sent a message that is not for viewers.
    pub fn receive(&mut self) -> Result<Vec<Update>> {
        let (mut updates, mut buffer) = (Vec::new(), vec![0; 64 << 10]);
        for _ in 0..READS_MAX {
            let count = match self.stream.read(&mut buffer) {
                // Return the updates that arrived before the end. The next call reports the end.
                Ok(0) if !updates.is_empty() => break,
                Ok(0) => return Err(Error::io("reading from the supervisor")(ErrorKind::UnexpectedEof.into())),
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(_) if !updates.is_empty() => break,
                Err(error) => return Err(Error::io("reading from the supervisor")(error)),
            };
            self.inbox.take(&buffer[..count], FRAME_BYTES_MAX, |frame| {
                updates.push(match FromSupervisor::read(frame)? {
                    FromSupervisor::Snapshot(snapshot) => Update::Snapshot(snapshot),
                    FromSupervisor::Entry(entry) => Update::Entry(entry),
                    FromSupervisor::Answer { text } => Update::Answer(text),
                    _ => return Err(Error::Malformed("a message that is not for viewers".to_string())),
                });
                Ok(())
            })?;
        }
        Ok(updates)
    }

    /// Sends a request; the answer comes as an [`Update::Answer`].
    ///
    /// # Errors
    /// If the supervisor is gone.
    pub fn request(&mut self, request: Request) -> Result<()> {
        // Requests are few and small. If even they do not fit into the send buffer, the supervisor no longer reads.
        self.stream.write_all(&FromViewer::Request(request).frame()).map_err(Error::io("sending the request"))
    }
}
