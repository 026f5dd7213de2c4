//! How many ranks: `4`, or `2..8` for as many as there is room for.

use std::fmt;
use std::str::FromStr;

/// From and to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RankCount {
    pub(crate) least: usize,
    pub(crate) most: usize,
}

impl FromStr for RankCount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (least, most) = text.split_once("..").unwrap_or((text, text));
        let number = |text: &str| text.parse().ok().filter(|ranks| (1..=1_000_000).contains(ranks));
        match (number(least), number(most)) {
            (Some(least), Some(most)) if least <= most => Ok(RankCount { least, most }),
            _ => Err("write a number of ranks, as in 4, or the least and the most, as in 2..8".to_string()),
        }
    }
}

impl fmt::Display for RankCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.least == self.most {
            true => write!(f, "{}", self.most),
            false => write!(f, "{}..{}", self.least, self.most),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use super::*;

    #[test]
    fn a_count_is_a_number_or_a_range() {
        for (text, least, most) in [("4", 4, 4), ("2..8", 2, 8), ("3..3", 3, 3)] {
            assert_eq!(text.parse(), Ok(RankCount { least, most }));
        }
        assert_eq!("2..8".parse::<RankCount>().unwrap().to_string(), "2..8");
        for wrong in ["", "0", "-1", "8..2", "2..", "..8", "2...8", "x", "99999999999999999999"] {
            assert!(wrong.parse::<RankCount>().is_err(), "{wrong}");
        }
    }
}
