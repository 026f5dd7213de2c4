//! The id of a save, which is part of its files' names.

use std::fmt;

/// Distinguishes the files of different saves of the same step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SaveId(u32);

impl SaveId {
    /// Creates an id from the clock. All ranks of a save must use the same id.
    pub fn new() -> Self {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        SaveId(
            blake3::hash(&since.as_nanos().to_le_bytes()).as_bytes()[..4]
                .iter()
                .fold(0, |id, &byte| id << 8 | u32::from(byte)),
        )
    }

    /// The id as a number, to send between ranks.
    pub fn number(self) -> u32 {
        self.0
    }
}

impl Default for SaveId {
    fn default() -> Self {
        SaveId::new()
    }
}

impl From<u32> for SaveId {
    fn from(number: u32) -> Self {
        SaveId(number)
    }
}

impl fmt::Display for SaveId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0)
    }
}
