//! What a run's supervisor and its ranks know and nobody else does, and proofs of knowing it.
//!
//! The secret never travels on the channel. Each side sends a number that was never used before, and the other answers with a
//! hash of it, keyed by the secret. How the secret comes to the ranks is the launcher's concern.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{Error, Result};

/// The secret of one run: 32 random bytes.
#[derive(Clone)]
pub struct Secret([u8; 32]);

impl Secret {
    /// A new one.
    ///
    /// # Errors
    /// If the system has no random numbers.
    pub fn new() -> Result<Self> {
        random().map(Secret)
    }

    /// As text, to be handed to the ranks where nobody else can read it.
    pub fn to_hex(&self) -> String {
        hex(&self.0)
    }

    /// From that text.
    ///
    /// # Errors
    /// If it is not 64 lower-case hexadecimal digits. The error does not repeat the text.
    pub fn from_hex(text: &str) -> Result<Self> {
        from_hex(text).map(Secret).ok_or(Error::Secret)
    }

    /// A proof of knowing the secret, for this occasion and these words only.
    pub(crate) fn proof(&self, nonce: &Nonce, words: &[&[u8]]) -> Proof {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(&nonce.0);
        for word in words {
            // With its length, so that no two lists of words are the same bytes.
            hasher.update(&(word.len() as u64).to_le_bytes()).update(word);
        }
        Proof(hasher.finalize())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// A number that was never used before.
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

/// A proof of knowing the secret. Comparing two takes the same time wherever they differ, as blake3 promises for its hashes.
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
        digits(deserializer).map(Nonce)
    }
}

impl Serialize for Proof {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.serialize_str(&hex(self.0.as_bytes()))
    }
}

impl<'de> Deserialize<'de> for Proof {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        digits(deserializer).map(|bytes| Proof(bytes.into()))
    }
}

fn digits<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<[u8; 32], D::Error> {
    let text = String::deserialize(deserializer)?;
    from_hex(&text).ok_or_else(|| serde::de::Error::custom("64 lower-case hexadecimal digits are expected"))
}

fn random() -> Result<[u8; 32]> {
    let mut bytes = [0; 32];
    let mut filled = 0;
    while filled < bytes.len() {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Error::io("random numbers")(error.into())),
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
    fn a_secret_survives_text_and_is_not_shown() {
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
    fn a_proof_is_for_one_secret_one_occasion_and_these_words() {
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
