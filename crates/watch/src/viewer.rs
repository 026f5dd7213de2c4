//! One who looks on: proves to know the secret, and from then on is shown what the supervisor knows.
//!
//! It is nobody's thread: whoever draws a screen asks from time to time what has come ([`Viewer::hear`]). A viewer that takes
//! nothing for too long is dropped by the supervisor, and can come again.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use shardwise_journal::Entry;

use crate::client::{call, hear};
use crate::message::{
    FRAME_BYTES_MAX, FromStranger, FromSupervisor, FromViewer, Inbox, Request, refusal_proof, view_proof, welcome_proof,
};
use crate::secret::{Nonce, Secret};
use crate::{Error, Result, Snapshot};

/// How much is read before the caller has its turn.
const READS_MAX: usize = 64;

/// Something that a viewer is shown.
#[derive(Clone, Debug, PartialEq)]
pub enum News {
    /// Where the ranks are.
    Snapshot(Snapshot),
    /// A line of the journal. Those from before it came are first, with most steps of a long run left out.
    Entry(Entry),
    /// What became of a request.
    Answer(String),
}

/// A viewer's end of the channel, after both sides have proved to know the secret.
#[derive(Debug)]
pub struct Viewer {
    stream: TcpStream,
    inbox: Inbox,
}

impl Viewer {
    /// Comes to the supervisor that listens there, and takes at most `limit` for it.
    ///
    /// # Errors
    /// If nobody is there, or does not know the secret, or has as many viewers as it can have.
    pub fn join(address: SocketAddr, secret: &Secret, limit: Duration) -> Result<Viewer> {
        let end = Instant::now() + limit.min(Duration::from_secs(86_400));
        let stream = call(address, end)?;
        let stranger = || Error::Stranger { address };
        let heard = |heard: Result<FromSupervisor>| match heard {
            Err(Error::Malformed(_)) => Err(stranger()),
            heard => heard,
        };
        let FromSupervisor::Challenge { nonce: challenge } = heard(hear(&stream, end))? else { return Err(stranger()) };
        let nonce = Nonce::new()?;
        let view = FromStranger::View { nonce, proof: view_proof(secret, &challenge, &nonce) };
        (&stream).write_all(&view.frame()).map_err(Error::io("introducing the viewer"))?;
        match heard(hear(&stream, end))? {
            FromSupervisor::Welcome { proof, beat_ms } if proof == welcome_proof(secret, &nonce, beat_ms) => {
                stream.set_nonblocking(true).map_err(Error::io("preparing the connection"))?;
                Ok(Viewer { stream, inbox: Inbox::default() })
            }
            FromSupervisor::Refused { reason, proof } if proof == refusal_proof(secret, &nonce, &reason) => {
                Err(Error::NoViewer { reason })
            }
            FromSupervisor::Stranger {} => Err(Error::WrongSecret { address }),
            _ => Err(stranger()),
        }
    }

    /// What has come since; does not wait.
    ///
    /// # Errors
    /// If the supervisor is gone, or has said what a viewer is not told.
    pub fn hear(&mut self) -> Result<Vec<News>> {
        let (mut news, mut buffer) = (Vec::new(), vec![0; 64 << 10]);
        for _ in 0..READS_MAX {
            let count = match self.stream.read(&mut buffer) {
                // What came before the end is news all the same; the end comes again.
                Ok(0) if !news.is_empty() => break,
                Ok(0) => return Err(Error::io("the supervisor's connection")(ErrorKind::UnexpectedEof.into())),
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(_) if !news.is_empty() => break,
                Err(error) => return Err(Error::io("the supervisor's connection")(error)),
            };
            self.inbox.take(&buffer[..count], FRAME_BYTES_MAX, |frame| {
                news.push(match FromSupervisor::read(frame)? {
                    FromSupervisor::Snapshot(snapshot) => News::Snapshot(snapshot),
                    FromSupervisor::Entry(entry) => News::Entry(entry),
                    FromSupervisor::Answer { text } => News::Answer(text),
                    _ => return Err(Error::Malformed("what is not for viewers".to_string())),
                });
                Ok(())
            })?;
        }
        Ok(news)
    }

    /// Asks for something; the answer is among the news.
    ///
    /// # Errors
    /// If the supervisor is gone.
    pub fn ask(&mut self, request: Request) -> Result<()> {
        // A few bytes, seldom: where there is no room even for those, nobody reads them.
        self.stream.write_all(&FromViewer::Ask(request).frame()).map_err(Error::io("asking the supervisor"))
    }
}
