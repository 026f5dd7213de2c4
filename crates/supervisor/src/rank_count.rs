//! The argument of `-n`: `4` ranks, or `2..8` for as many as there is room for in that range.

use std::fmt;
use std::str::FromStr;

/// A range of rank counts, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankCount {
    /// The smallest number of ranks.
    pub min: usize,
    /// The largest number of ranks.
    pub max: usize,
}

impl FromStr for RankCount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (min, max) = text.split_once("..").unwrap_or((text, text));
        let number = |text: &str| text.parse().ok().filter(|ranks| (1..=1_000_000).contains(ranks));
        match (number(min), number(max)) {
            (Some(min), Some(max)) if min <= max => Ok(RankCount { min, max }),
            _ => Err("write a number of ranks, such as 4, or a range, such as 2..8".to_string()),
        }
    }
}

impl fmt::Display for RankCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.min == self.max {
            true => write!(f, "{}", self.max),
            false => write!(f, "{}..{}", self.min, self.max),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use super::*;

    #[test]
    fn a_count_is_a_number_or_a_range() {
        for (text, min, max) in [("4", 4, 4), ("2..8", 2, 8), ("3..3", 3, 3)] {
            assert_eq!(text.parse(), Ok(RankCount { min, max }));
        }
        assert_eq!("2..8".parse::<RankCount>().unwrap().to_string(), "2..8");
        for wrong in ["", "0", "-1", "8..2", "2..", "..8", "2...8", "x", "99999999999999999999"] {
            assert!(wrong.parse::<RankCount>().is_err(), "{wrong}");
        }
    }
}
