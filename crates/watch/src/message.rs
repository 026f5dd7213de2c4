//! What supervisor and rank say to each other, and its form on the wire: a length of four bytes, then JSON.
//!
//! JSON is not the shortest form, but a beat is half a kilobyte, and what is on the wire can be read. What came is never
//! believed: no length is reserved before the bytes are there, and every list and text has a limit.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use shardwise_journal::Entry;

use crate::entry::{check_entry, cut_entry, is_of_a_rank};
use crate::secret::{Nonce, Proof, Secret};
use crate::standing::{check_name, check_text};
use crate::{Error, FailureKind, Result, Snapshot, Standing};

/// The longest frame, without its length.
pub(crate) const FRAME_BYTES_MAX: usize = 64 << 10;
/// The longest frame of one who has proved nothing yet.
pub(crate) const UNPROVEN_BYTES_MAX: usize = 4 << 10;

const HEADER_BYTES: usize = 4;

/// What the supervisor wants of its ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Order {
    /// Exit at once.
    End {
        /// Why, for people.
        reason: String,
    },
    /// Save at the end of the step, then end.
    Save,
    /// Save at the end of the step, and go on.
    Checkpoint,
    /// Write down where the time of the next steps goes.
    Trace {
        /// How many.
        steps: u64,
    },
}

/// What one who looks on may ask for. The supervisor decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// A checkpoint, now.
    Save,
    /// A trace of the next steps.
    Trace {
        /// How many.
        steps: u64,
    },
}

/// From the supervisor.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum FromSupervisor {
    /// The first word on every connection.
    Challenge { nonce: Nonce },
    /// The proof was right, and here is ours.
    Welcome { proof: Proof, beat_ms: u64 },
    /// The proof was wrong. Without a proof of ours: to one who has none, we prove nothing.
    Stranger {},
    /// The proof was right, and the rank is not wanted all the same.
    Refused { reason: String, proof: Proof },
    /// What to do.
    Order(Order),
    /// To one who looks on: where the ranks are.
    Snapshot(Snapshot),
    /// To one who looks on: a line of the journal.
    Entry(Entry),
    /// To one who looks on: what became of a request.
    Answer { text: String },
}

/// The first word of those who come: as a rank, or to look on.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum FromStranger {
    /// The answer to a challenge, of one who is a rank.
    Hello(Hello),
    /// The same, of one who wants to look on.
    View {
        /// The viewer's own challenge.
        nonce: Nonce,
        proof: Proof,
    },
}

/// From one who looks on.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum FromViewer {
    Ask(Request),
}

/// From a rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum FromRank {
    /// Alive, and here.
    Beat(Standing),
    /// Something went wrong; the rank will end.
    Failed { kind: FailureKind, text: String, standing: Standing },
    /// Something that people should read.
    Note { text: String },
    /// A line of the journal; from the first rank alone.
    Entry(Entry),
    /// The rank ends, and means to, with this exit code.
    Bye { code: i32 },
}

/// Who a rank is.
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
    /// The proof of a hello that says this, in answer to `challenge`.
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

/// The proof of a welcome, in answer to a rank's challenge.
pub(crate) fn welcome_proof(secret: &Secret, nonce: &Nonce, beat_ms: u64) -> Proof {
    secret.proof(nonce, &[b"shardwise watch 1: welcome", &beat_ms.to_le_bytes()])
}

/// The proof of one who wants to look on, in answer to `challenge`.
pub(crate) fn view_proof(secret: &Secret, challenge: &Nonce, nonce: &Nonce) -> Proof {
    secret.proof(challenge, &[b"shardwise watch 1: view", nonce.as_bytes()])
}

/// The proof of a refusal, in answer to a rank's challenge.
pub(crate) fn refusal_proof(secret: &Secret, nonce: &Nonce, reason: &str) -> Proof {
    secret.proof(nonce, &[b"shardwise watch 1: refused", reason.as_bytes()])
}

impl FromSupervisor {
    /// Read, and within its limits.
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

    /// As a frame, at the end of `out`.
    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        let fits = write(self, out);
        assert!(fits, "what a supervisor says is short: reasons, summaries and lines are cut before");
    }

    /// A line of the journal as a frame; none if it cannot be read again, as one with a number that JSON has no word for.
    pub(crate) fn entry(entry: Entry) -> Option<Vec<u8>> {
        let mut frame = Vec::new();
        let fits = write(&FromSupervisor::Entry(cut_entry(entry)), &mut frame);
        (fits && FromSupervisor::read(&frame[HEADER_BYTES..]).is_ok()).then_some(frame)
    }
}

impl FromStranger {
    /// Read, and within its limits.
    pub(crate) fn read(frame: &[u8]) -> Result<Self> {
        let message = parse(frame)?;
        if let FromStranger::Hello(hello) = &message {
            check_name(&hello.host)?;
        }
        Ok(message)
    }

    /// As a frame.
    pub(crate) fn frame(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let fits = write(self, &mut out);
        assert!(fits, "a hello is short: the host's name is cut before");
        out
    }
}

impl FromViewer {
    pub(crate) fn read(frame: &[u8]) -> Result<Self> {
        parse(frame)
    }

    /// As a frame.
    pub(crate) fn frame(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let fits = write(self, &mut out);
        assert!(fits, "a request is a word and a number");
        out
    }
}

impl FromRank {
    /// Read, and within its limits.
    pub(crate) fn read(frame: &[u8]) -> Result<Self> {
        let mut message = parse(frame)?;
        match &mut message {
            FromRank::Beat(standing) => standing.check()?,
            FromRank::Failed { text, standing, .. } => {
                check_text(text)?;
                standing.check()?;
            }
            FromRank::Note { text } => check_text(text)?,
            FromRank::Entry(entry) if is_of_a_rank(&entry.what) => check_entry(entry)?,
            FromRank::Entry(_) => return Err(Error::Malformed("a line that is the supervisor's to write".to_string())),
            FromRank::Bye { .. } => {}
        }
        Ok(message)
    }

    /// A line of the journal as a frame; none if it would not be taken, because the connection would end for it.
    pub(crate) fn entry(entry: Entry) -> Option<Vec<u8>> {
        let mut frame = Vec::new();
        let fits = write(&FromRank::Entry(cut_entry(entry)), &mut frame);
        (fits && FromRank::read(&frame[HEADER_BYTES..]).is_ok()).then_some(frame)
    }

    /// As a frame, at the end of `out`. Of a standing that is too long for one, its last calls are left out.
    pub(crate) fn write(&mut self, out: &mut Vec<u8>) {
        while !write(self, out) {
            match self {
                FromRank::Beat(Standing { calls, .. }) | FromRank::Failed { standing: Standing { calls, .. }, .. }
                    if !calls.is_empty() =>
                {
                    calls.truncate(calls.len() / 2);
                }
                _ => unreachable!("names and texts are cut before, so that only calls can be too long"),
            }
        }
    }
}

/// Bytes that have come and are no whole frame yet.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    kept: Vec<u8>,
}

impl Inbox {
    /// Takes what has come, and hands on every whole frame of at most `bytes_max`. In the usual case that is all of it, and
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
            // Ten thousand ranks may each have sent a long frame once.
            self.kept = Vec::new();
        }
        Ok(())
    }

    /// Whether a frame has begun that has not ended.
    pub(crate) fn has_rest(&self) -> bool {
        !self.kept.is_empty()
    }
}

/// The length in a frame's header, if it is allowed.
pub(crate) fn frame_bytes(header: [u8; HEADER_BYTES], bytes_max: usize) -> Result<usize> {
    let length = u32::from_le_bytes(header) as usize;
    if length == 0 || length > bytes_max {
        return Err(Error::Malformed(format!("a frame of {length} bytes, where 1 to {bytes_max} are allowed")));
    }
    Ok(length)
}

/// Hands on the whole frames at the beginning of `bytes`, and says how many bytes they were.
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
        // serde's texts repeat what they do not know, which may be as long as the frame and anything at all.
        let shown: String = error.to_string().chars().filter(|letter| !letter.is_control()).take(200).collect();
        Error::Malformed(shown)
    })
}

/// Whether it fitted a frame; otherwise `out` is as it was.
fn write(message: &impl Serialize, out: &mut Vec<u8>) -> bool {
    let start = out.len();
    out.extend_from_slice(&[0; HEADER_BYTES]);
    serde_json::to_writer(&mut *out, message).expect("texts, numbers and lists are JSON, and memory takes them");
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
    use crate::standing::tests::call;

    #[test]
    fn frames_arrive_whole_however_they_are_cut() {
        let mut bytes = Vec::new();
        for step in 0..20 {
            FromRank::Beat(Standing { step, calls: vec![call(step)], ..Standing::default() }).write(&mut bytes);
        }
        for cut in [1, 3, 7, 100, 1000, bytes.len()] {
            let (mut inbox, mut steps) = (Inbox::default(), Vec::new());
            for piece in bytes.chunks(cut) {
                let each = |frame: &[u8]| {
                    let FromRank::Beat(standing) = FromRank::read(frame)? else { panic!("a beat was sent") };
                    steps.push(standing.step);
                    Ok(())
                };
                inbox.take(piece, FRAME_BYTES_MAX, each).unwrap();
            }
            assert_eq!(steps, (0..20).collect::<Vec<_>>());
            assert!(!inbox.has_rest());
        }
    }

    #[test]
    fn the_longest_message_fits_and_longer_ones_do_not() {
        let odd = Ranks::of((0..10_000).filter(|rank| rank % 2 == 1));
        let mut worst = call(u64::MAX);
        (worst.ranks, worst.waits_for, worst.label) = (odd.clone(), odd, "\"".repeat(10_000));
        let standing = Standing { calls: vec![worst; 100], ..Standing::default() }.cut();
        let text = crate::standing::text("\u{1}\"".repeat(100_000));
        let mut message = FromRank::Failed { kind: FailureKind::Error, text, standing };
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
    fn a_line_that_would_not_be_taken_is_not_sent() {
        use shardwise_journal::{Step, What};
        let line = |what| Entry { time_s: 1., what };
        let rate = |rate| line(What::Step(Step { rate, loss: f64::NAN, ..Step::default() }));
        assert!(FromRank::entry(rate(1e-3)).is_some());
        assert!(FromRank::entry(rate(f64::NAN)).is_none(), "JSON has no word for it");
        let ended = || line(What::Ended { code: 0, restarts: 0, lost_s: 0. });
        assert!(FromRank::entry(ended()).is_none(), "that is the supervisor's to say");
        assert!(FromSupervisor::entry(ended()).is_some());
    }

    proptest! {
        #[test]
        fn no_bytes_break_the_reader(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            drop(FromRank::read(&bytes));
            drop(FromSupervisor::read(&bytes));
            drop(FromStranger::read(&bytes));
            drop(FromViewer::read(&bytes));
            drop(Inbox::default().take(&bytes, FRAME_BYTES_MAX, |_| Ok(())));
        }

        #[test]
        fn no_change_to_a_message_breaks_the_reader(place in 0usize..10_000, byte in any::<u8>()) {
            let mut bytes = Vec::new();
            let standing = Standing { calls: vec![call(412)], ..Standing::default() };
            FromRank::Failed { kind: FailureKind::Timeout, text: "…".into(), standing }.write(&mut bytes);
            let place = place % bytes.len();
            bytes[place] = byte;
            drop(Inbox::default().take(&bytes, FRAME_BYTES_MAX, |frame| FromRank::read(frame).map(drop)));
        }
    }
}
