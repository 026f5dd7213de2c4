//! The messages of the channel, and their form on the wire: a four-byte length, then JSON.
//!
//! JSON is not the most compact form, but a heartbeat is only half a kilobyte, and people can read the traffic. Received data is
//! not trusted: no memory is reserved before the bytes have arrived, and every list and text has a limit.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use shardwise_journal::Entry;

use crate::entry::{check_entry, is_written_by_rank, shorten_entry};
use crate::secret::{Nonce, Proof, Secret};
use crate::status::{check_name, check_text};
use crate::{Error, FailureKind, RankStatus, Result, Snapshot};

/// The longest frame, not counting its length field.
pub(crate) const FRAME_BYTES_MAX: usize = 64 << 10;
/// The longest frame on a connection that is not authenticated yet.
pub(crate) const UNAUTHENTICATED_BYTES_MAX: usize = 4 << 10;

const HEADER_BYTES: usize = 4;

/// An order from the supervisor to its ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Order {
    /// Exit at once.
    End {
        /// The reason, for people.
        reason: String,
    },
    /// Save at the end of the step, then stop.
    Save,
    /// Save at the end of the step, and continue.
    Checkpoint,
    /// Trace the next steps.
    Trace {
        /// The number of steps.
        steps: u64,
    },
}

/// A request from a viewer. The supervisor decides whether to grant it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Save a checkpoint now.
    Save,
    /// Trace the next steps.
    Trace {
        /// The number of steps.
        steps: u64,
    },
}

/// A message from the supervisor.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum FromSupervisor {
    /// The first message on every connection.
    Challenge { nonce: Nonce },
    /// The peer's proof was right. This carries the supervisor's own.
    Welcome { proof: Proof, heartbeat_ms: u64 },
    /// The peer's proof was wrong. The supervisor does not prove itself to such a peer.
    WrongSecret {},
    /// The peer's proof was right, but the rank or viewer is not admitted.
    Refused { reason: String, proof: Proof },
    /// An order.
    Order(Order),
    /// To a viewer: the state of the ranks.
    Snapshot(Snapshot),
    /// To a viewer: a journal entry.
    Entry(Entry),
    /// To a viewer: the answer to a request.
    Answer { text: String },
}

/// The first message of a peer: it joins as a rank or as a viewer.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum FirstMessage {
    /// A rank's answer to the challenge.
    Hello(Hello),
    /// A viewer's answer to the challenge.
    View {
        /// The viewer's own challenge.
        nonce: Nonce,
        proof: Proof,
    },
}

/// A message from a viewer.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum FromViewer {
    Request(Request),
}

/// A message from a rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum FromRank {
    /// The rank is alive and has this status.
    Heartbeat(RankStatus),
    /// The rank failed and will exit.
    Failed { kind: FailureKind, text: String, status: RankStatus },
    /// A message for people.
    Note { text: String },
    /// A journal entry; only rank 0 sends these.
    Entry(Entry),
    /// The rank exits as planned, with this exit code.
    Bye { code: i32 },
}

/// The identity of a rank, with the proof that it knows the secret.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Hello {
    pub(crate) rank: u32,
    pub(crate) ranks: u32,
    pub(crate) host: String,
    pub(crate) pid: u32,
    pub(crate) attempt: u64,
    /// The rank's own challenge.
    pub(crate) nonce: Nonce,
    pub(crate) proof: Proof,
}

impl Hello {
    /// Computes the proof for this hello, in answer to `challenge`.
    pub(crate) fn prove(&self, secret: &Secret, challenge: &Nonce) -> Proof {
        let Hello { rank, ranks, host, pid, attempt, nonce, proof: _ } = self;
        secret.proof(
            challenge,
            &[
                b"shardwise watch 1: hello",
                &rank.to_le_bytes(),
                &ranks.to_le_bytes(),
                host.as_bytes(),
                &pid.to_le_bytes(),
                &attempt.to_le_bytes(),
                nonce.as_bytes(),
            ],
        )
    }
}

/// Computes the proof of a welcome, in answer to the peer's challenge.
pub(crate) fn welcome_proof(secret: &Secret, nonce: &Nonce, heartbeat_ms: u64) -> Proof {
    secret.proof(nonce, &[b"shardwise watch 1: welcome", &heartbeat_ms.to_le_bytes()])
}

/// Computes the proof of a viewer, in answer to `challenge`.
pub(crate) fn view_proof(secret: &Secret, challenge: &Nonce, nonce: &Nonce) -> Proof {
    secret.proof(challenge, &[b"shardwise watch 1: view", nonce.as_bytes()])
}

/// Computes the proof of a refusal, in answer to the peer's challenge.
pub(crate) fn refusal_proof(secret: &Secret, nonce: &Nonce, reason: &str) -> Proof {
    secret.proof(nonce, &[b"shardwise watch 1: refused", reason.as_bytes()])
}

impl FromSupervisor {
    /// Parses a message and checks its limits.
    pub(crate) fn read(frame: &[u8]) -> Result<Self> {
        let mut message = parse(frame)?;
        match &mut message {
            FromSupervisor::Refused { reason: text, .. }
            | FromSupervisor::Order(Order::End { reason: text })
            | FromSupervisor::Answer { text } => check_text(text)?,
            FromSupervisor::Snapshot(snapshot) => snapshot.check()?,
            FromSupervisor::Entry(entry) => check_entry(entry)?,
            _ => {}
        }
        Ok(message)
    }

    /// Appends it to `out` as a frame.
    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        let fits = write(self, out);
        assert!(fits, "messages of a supervisor are short: reasons, summaries and entries are shortened before");
    }

    /// Returns a journal entry as a frame, or `None` if the receiver could not read it, for example because of a non-finite number.
    pub(crate) fn entry(entry: Entry) -> Option<Vec<u8>> {
        let mut frame = Vec::new();
        let fits = write(&FromSupervisor::Entry(shorten_entry(entry)), &mut frame);
        (fits && FromSupervisor::read(&frame[HEADER_BYTES..]).is_ok()).then_some(frame)
    }
}

impl FirstMessage {
    /// Parses a message and checks its limits.
    pub(crate) fn read(frame: &[u8]) -> Result<Self> {
        let message = parse(frame)?;
        if let FirstMessage::Hello(hello) = &message {
            check_name(&hello.host)?;
        }
        Ok(message)
    }

    /// Returns it as a frame.
    pub(crate) fn frame(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let fits = write(self, &mut out);
        assert!(fits, "a hello is short: the host's name is shortened before");
        out
    }
}

impl FromViewer {
    pub(crate) fn read(frame: &[u8]) -> Result<Self> {
        parse(frame)
    }

    /// Returns it as a frame.
    pub(crate) fn frame(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let fits = write(self, &mut out);
        assert!(fits, "a request is one word and one number");
        out
    }
}

impl FromRank {
    /// Parses a message and checks its limits.
    pub(crate) fn read(frame: &[u8]) -> Result<Self> {
        let mut message = parse(frame)?;
        match &mut message {
            FromRank::Heartbeat(status) => status.check()?,
            FromRank::Failed { text, status, .. } => {
                check_text(text)?;
                status.check()?;
            }
            FromRank::Note { text } => check_text(text)?,
            FromRank::Entry(entry) if is_written_by_rank(&entry.kind) => check_entry(entry)?,
            FromRank::Entry(_) => return Err(Error::Malformed("an entry that only the supervisor writes".to_string())),
            FromRank::Bye { .. } => {}
        }
        Ok(message)
    }

    /// Returns a journal entry as a frame, or `None` if the supervisor would reject it and close the connection.
    pub(crate) fn entry(entry: Entry) -> Option<Vec<u8>> {
        let mut frame = Vec::new();
        let fits = write(&FromRank::Entry(shorten_entry(entry)), &mut frame);
        (fits && FromRank::read(&frame[HEADER_BYTES..]).is_ok()).then_some(frame)
    }

    /// Appends it to `out` as a frame. If the status is too long for a frame, its last calls are dropped.
    pub(crate) fn write(&mut self, out: &mut Vec<u8>) {
        while !write(self, out) {
            match self {
                FromRank::Heartbeat(RankStatus { calls, .. })
                | FromRank::Failed { status: RankStatus { calls, .. }, .. }
                    if !calls.is_empty() =>
                {
                    calls.truncate(calls.len() / 2);
                }
                _ => unreachable!("names and texts are shortened before, so only calls can be too long"),
            }
        }
    }
}

/// Received bytes that are not a whole frame yet.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    kept: Vec<u8>,
}

impl Inbox {
    /// Adds received bytes, and calls `each` with every whole frame of at most `bytes_max`. Usually the bytes are whole frames, and
    /// nothing is copied.
    pub(crate) fn take(
        &mut self,
        bytes: &[u8],
        bytes_max: usize,
        mut each: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        if self.kept.is_empty() {
            let used = frames(bytes, bytes_max, &mut each)?;
            self.kept.extend_from_slice(&bytes[used..]);
            return Ok(());
        }
        self.kept.extend_from_slice(bytes);
        let used = frames(&self.kept, bytes_max, &mut each)?;
        self.kept.drain(..used);
        if self.kept.is_empty() {
            // Frees the memory: ten thousand ranks may each have sent a long frame once.
            self.kept = Vec::new();
        }
        Ok(())
    }

    /// Whether a frame has arrived only in part.
    pub(crate) fn has_partial_frame(&self) -> bool {
        !self.kept.is_empty()
    }
}

/// Reads the length from a frame's header, and checks it.
pub(crate) fn frame_bytes(header: [u8; HEADER_BYTES], bytes_max: usize) -> Result<usize> {
    let length = u32::from_le_bytes(header) as usize;
    if length == 0 || length > bytes_max {
        return Err(Error::Malformed(format!("a frame of {length} bytes, but only 1 to {bytes_max} are allowed")));
    }
    Ok(length)
}

/// Calls `each` with the whole frames at the start of `bytes`, and returns their length.
fn frames(bytes: &[u8], bytes_max: usize, each: &mut impl FnMut(&[u8]) -> Result<()>) -> Result<usize> {
    let mut used = 0;
    while let Some((header, rest)) = bytes[used..].split_first_chunk() {
        let length = frame_bytes(*header, bytes_max)?;
        let Some(frame) = rest.get(..length) else { break };
        each(frame)?;
        used += HEADER_BYTES + length;
    }
    Ok(used)
}

fn parse<T: DeserializeOwned>(frame: &[u8]) -> Result<T> {
    serde_json::from_slice(frame).map_err(|error| {
        // serde's messages quote the input, which may be long and contain anything.
        let shown: String = error.to_string().chars().filter(|letter| !letter.is_control()).take(200).collect();
        Error::Malformed(shown)
    })
}

/// Appends a message as a frame. Returns false, and leaves `out` unchanged, if it does not fit.
fn write(message: &impl Serialize, out: &mut Vec<u8>) -> bool {
    let start = out.len();
    out.extend_from_slice(&[0; HEADER_BYTES]);
    serde_json::to_writer(&mut *out, message)
        .expect("texts, numbers and lists are valid JSON, and writing to memory does not fail");
    let length = out.len() - start - HEADER_BYTES;
    if length > FRAME_BYTES_MAX {
        out.truncate(start);
        return false;
    }
    out[start..start + HEADER_BYTES].copy_from_slice(&(length as u32).to_le_bytes());
    true
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use proptest::prelude::*;

    use super::*;
    use crate::Ranks;
    use crate::status::tests::call;

    #[test]
    fn frames_arrive_whole_however_they_are_split() {
        let mut bytes = Vec::new();
        for step in 0..20 {
            FromRank::Heartbeat(RankStatus { step, calls: vec![call(step)], ..RankStatus::default() })
                .write(&mut bytes);
        }
        for cut in [1, 3, 7, 100, 1000, bytes.len()] {
            let (mut inbox, mut steps) = (Inbox::default(), Vec::new());
            for piece in bytes.chunks(cut) {
                let each = |frame: &[u8]| {
                    let FromRank::Heartbeat(status) = FromRank::read(frame)? else { panic!("a heartbeat was sent") };
                    steps.push(status.step);
                    Ok(())
                };
                inbox.take(piece, FRAME_BYTES_MAX, each).unwrap();
            }
            assert_eq!(steps, (0..20).collect::<Vec<_>>());
            assert!(!inbox.has_partial_frame());
        }
    }

    #[test]
    fn the_longest_message_fits_and_longer_ones_do_not() {
        let odd = Ranks::from_ranks((0..10_000).filter(|rank| rank % 2 == 1));
        let mut worst = call(u64::MAX);
        (worst.ranks, worst.waiting_for, worst.label) = (odd.clone(), odd, "\"".repeat(10_000));
        let status = RankStatus { calls: vec![worst; 100], ..RankStatus::default() }.shorten();
        let text = crate::status::shorten_text("\u{1}\"".repeat(100_000));
        let mut message = FromRank::Failed { kind: FailureKind::Error, text, status };
        let mut bytes = Vec::new();
        message.write(&mut bytes);
        let mut read = 0;
        Inbox::default().take(&bytes, FRAME_BYTES_MAX, |frame| FromRank::read(frame).map(|_| read += 1)).unwrap();
        assert_eq!(read, 1);
        for length in [0, FRAME_BYTES_MAX as u32 + 1, u32::MAX] {
            assert!(Inbox::default().take(&length.to_le_bytes(), FRAME_BYTES_MAX, |_| Ok(())).is_err());
        }
    }

    #[test]
    fn a_proof_covers_every_field_of_a_hello() {
        let (secret, challenge) = (Secret::new().unwrap(), Nonce::new().unwrap());
        let nonce = Nonce::new().unwrap();
        let proof = secret.proof(&nonce, &[]);
        let hello = Hello { rank: 3, ranks: 4, host: "b".to_string(), pid: 5, attempt: 6, nonce, proof };
        let right = hello.prove(&secret, &challenge);
        assert_eq!(right, hello.prove(&secret, &challenge));
        let others = [
            Hello { rank: 2, ..hello.clone() },
            Hello { ranks: 5, ..hello.clone() },
            Hello { host: "c".to_string(), ..hello.clone() },
            Hello { pid: 4, ..hello.clone() },
            Hello { attempt: 7, ..hello.clone() },
            Hello { nonce: Nonce::new().unwrap(), ..hello.clone() },
        ];
        assert!(others.iter().all(|other| other.prove(&secret, &challenge) != right));
        assert_ne!(hello.prove(&secret, &Nonce::new().unwrap()), right);
    }

    #[test]
    fn an_entry_that_would_not_be_accepted_is_not_sent() {
        use shardwise_journal::{EntryKind, Step};
        let entry = |kind| Entry { time_s: 1., kind };
        let with_lr = |lr| entry(EntryKind::Step(Step { lr, loss: f64::NAN, ..Step::default() }));
        assert!(FromRank::entry(with_lr(1e-3)).is_some());
        assert!(FromRank::entry(with_lr(f64::NAN)).is_none(), "JSON has no literal for it");
        let ended = || entry(EntryKind::Ended { code: 0, restarts: 0, lost_s: 0. });
        assert!(FromRank::entry(ended()).is_none(), "only the supervisor writes it");
        assert!(FromSupervisor::entry(ended()).is_some());
    }

    proptest! {
        #[test]
        fn no_bytes_break_the_reader(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            drop(FromRank::read(&bytes));
            drop(FromSupervisor::read(&bytes));
            drop(FirstMessage::read(&bytes));
            drop(FromViewer::read(&bytes));
            drop(Inbox::default().take(&bytes, FRAME_BYTES_MAX, |_| Ok(())));
        }

        #[test]
        fn no_change_to_a_message_breaks_the_reader(index in 0usize..10_000, byte in any::<u8>()) {
            let mut bytes = Vec::new();
            let status = RankStatus { calls: vec![call(412)], ..RankStatus::default() };
            FromRank::Failed { kind: FailureKind::Timeout, text: "…".into(), status }.write(&mut bytes);
            let index = index % bytes.len();
            bytes[index] = byte;
            drop(Inbox::default().take(&bytes, FRAME_BYTES_MAX, |frame| FromRank::read(frame).map(drop)));
        }
    }
}
