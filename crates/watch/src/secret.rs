//! The secret that a run's supervisor and its ranks share, and proofs of knowledge of it.
//!
//! The secret is never sent over the channel. Each side sends a nonce, and the other answers with a hash of it, keyed by the secret.
//! Getting the secret to the ranks is the launcher's job.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{Error, Result};

/// The secret of one run: 32 random bytes.
#[derive(Clone)]
pub struct Secret([u8; 32]);

impl Secret {
    /// Generates a new secret.
    ///
    /// # Errors
    /// If the system provides no random numbers.
    pub fn new() -> Result<Self> {
        random().map(Secret)
    }

    /// Returns it as text. Pass it to the ranks in a way that nobody else can read.
    pub fn to_hex(&self) -> String {
        hex(&self.0)
    }

    /// Parses the text of [`Secret::to_hex`].
    ///
    /// # Errors
    /// If it is not 64 lower-case hexadecimal digits. The error does not repeat the text.
    pub fn from_hex(text: &str) -> Result<Self> {
        from_hex(text).map(Secret).ok_or(Error::Secret)
    }

    /// Computes a proof of knowing the secret, which is valid only for this nonce and these parts of a message.
    pub(crate) fn proof(&self, nonce: &Nonce, parts: &[&[u8]]) -> Proof {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(&nonce.0);
        for part in parts {
            // Hash each part with its length, so that no two lists of parts hash the same bytes.
            hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
        }
        Proof(hasher.finalize())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// A random number that is used once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Nonce([u8; 32]);

impl Nonce {
    pub(crate) fn new() -> Result<Self> {
        random().map(Nonce)
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// A proof of knowing the secret. Comparisons take constant time, which blake3 guarantees for its hashes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Proof(blake3::Hash);

impl fmt::Debug for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Proof(…)")
    }
}

impl Serialize for Nonce {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.serialize_str(&hex(&self.0))
    }
}

impl<'de> Deserialize<'de> for Nonce {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        bytes_from_hex(deserializer).map(Nonce)
    }
}

impl Serialize for Proof {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.serialize_str(&hex(self.0.as_bytes()))
    }
}

impl<'de> Deserialize<'de> for Proof {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        bytes_from_hex(deserializer).map(|bytes| Proof(bytes.into()))
    }
}

fn bytes_from_hex<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<[u8; 32], D::Error> {
    let text = String::deserialize(deserializer)?;
    from_hex(&text).ok_or_else(|| serde::de::Error::custom("expected 64 lower-case hexadecimal digits"))
}

fn random() -> Result<[u8; 32]> {
    let mut bytes = [0; 32];
    let mut filled = 0;
    while filled < bytes.len() {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Error::io("generating random numbers")(error.into())),
        }
    }
    Ok(bytes)
}

fn hex(bytes: &[u8; 32]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]).map(|digit| char::from(DIGITS[usize::from(digit)])).collect()
}

fn from_hex(text: &str) -> Option<[u8; 32]> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let text = text.as_bytes();
    let mut bytes = [0; 32];
    if text.len() != 2 * bytes.len() {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(text.chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use super::*;

    #[test]
    fn a_secret_survives_text_and_is_not_printed() {
        let secret = Secret::new().unwrap();
        let text = secret.to_hex();
        assert_eq!(Secret::from_hex(&text).unwrap().to_hex(), text);
        assert_ne!(Secret::new().unwrap().to_hex(), text);
        assert_eq!(format!("{secret:?} {secret:#?}"), "Secret(…) Secret(…)");
        let shortened = &text[..63];
        for wrong in ["", shortened, &format!("{text}0"), &text.to_uppercase().replace('0', "A"), &"é".repeat(32)] {
            let error = Secret::from_hex(wrong).unwrap_err();
            let shown = format!("{error} {error:?}");
            assert!(shown.contains("secret") && (wrong.is_empty() || !shown.contains(wrong)), "{shown}");
        }
    }

    #[test]
    fn a_proof_is_for_one_secret_one_nonce_and_one_message() {
        let (secret, nonce) = (Secret::new().unwrap(), Nonce::new().unwrap());
        let proof = secret.proof(&nonce, &[b"ab", b"c"]);
        assert_eq!(proof, secret.proof(&nonce, &[b"ab", b"c"]));
        assert_ne!(proof, secret.proof(&nonce, &[b"a", b"bc"]));
        assert_ne!(proof, secret.proof(&nonce, &[b"abc"]));
        assert_ne!(proof, secret.proof(&Nonce::new().unwrap(), &[b"ab", b"c"]));
        assert_ne!(proof, Secret::new().unwrap().proof(&nonce, &[b"ab", b"c"]));
        assert_eq!(format!("{proof:?}"), "Proof(…)");
    }
}
