//! BLAKE3 hashes, written in hexadecimal.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A BLAKE3 hash.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Hash([u8; 32]);

impl Hash {
    /// Hashes bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Hash(*blake3::hash(bytes).as_bytes())
    }

    pub(crate) fn from_hasher(hasher: &blake3::Hasher) -> Self {
        Hash(*hasher.finalize().as_bytes())
    }

    /// Converts to four words, to send between ranks.
    pub fn to_words(self) -> [i64; 4] {
        let word = |index: usize| {
            let mut eight = [0; 8];
            eight.copy_from_slice(&self.0[8 * index..8 * index + 8]);
            i64::from_le_bytes(eight)
        };
        [word(0), word(1), word(2), word(3)]
    }

    /// Converts from four words.
    pub fn from_words(words: [i64; 4]) -> Self {
        let mut hash = [0; 32];
        for (eight, word) in hash.chunks_exact_mut(8).zip(words) {
            eight.copy_from_slice(&word.to_le_bytes());
        }
        Hash(hash)
    }
}

impl fmt::Display for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Hash {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Ok(byte - b'0'),
            b'a'..=b'f' => Ok(byte - b'a' + 10),
            _ => Err("a hash has lower-case hexadecimal digits only"),
        };
        let bytes = text.as_bytes();
        if bytes.len() != 64 {
            return Err("a hash has 64 digits");
        }
        let mut hash = [0; 32];
        for (byte, pair) in hash.iter_mut().zip(bytes.chunks_exact(2)) {
            *byte = digit(pair[0])? << 4 | digit(pair[1])?;
        }
        Ok(Hash(hash))
    }
}

impl Serialize for Hash {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Hash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use super::*;

    #[test]
    fn hashes_round_trip_through_text_and_words() {
        let hash = Hash::of(b"shardwise");
        assert_eq!(hash.to_string().parse::<Hash>().unwrap(), hash);
        assert_eq!(Hash::from_words(hash.to_words()), hash);
        for wrong in ["", "00", &"A".repeat(64), &"é".repeat(32)] {
            assert!(wrong.parse::<Hash>().is_err(), "{wrong:?}");
        }
    }
}
