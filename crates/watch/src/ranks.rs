//! Sets of ranks, as short text for the wire and as text for people.
//!
//! A group of ten thousand ranks is sent as `0-9999`, and one with every eighth of them as `0-9992/8`. The type is the counterpart of
//! `RankSet` in `shardwise-plan` for data from the network. That data is not trusted, so a set is a list of runs with a length limit,
//! and iterating over it requires the world size as a bound.

use std::fmt::{self, Write};
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use shardwise_journal::format::join_list;

use crate::Error;

/// The maximum number of runs in a set.
const RUNS_MAX: usize = 256;

/// The maximum number of runs in a text for people.
const SHOWN_MAX: usize = 6;

/// A set of ranks, stored as runs of evenly spaced ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranks(Vec<Run>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    first: u32,
    last: u32,
    stride: u32,
}

impl Ranks {
    /// Creates a set of runs `(first, last, stride)`, as `RankSet::progressions` of `shardwise-plan` returns them. Runs beyond the
    /// limit are dropped.
    pub fn from_runs(runs: impl IntoIterator<Item = (usize, usize, usize)>) -> Self {
        let small = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        let run = |(first, last, stride): (usize, usize, usize)| {
            let (first, stride) = (small(first), small(stride).max(1));
            let last = small(last).max(first);
            Run { first, last: last - (last - first) % stride, stride }
        };
        Ranks(runs.into_iter().take(RUNS_MAX).map(run).collect())
    }

    /// Creates a set of ranks, which must be in ascending order.
    pub fn from_ranks(ranks: impl IntoIterator<Item = usize>) -> Self {
        Ranks::from_runs(runs(ranks).into_iter().map(|(first, last)| (first, last, 1)))
    }

    /// Returns whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns whether a rank is in it.
    pub fn contains(&self, rank: usize) -> bool {
        self.0.iter().any(|run| {
            let rank = u32::try_from(rank).ok().filter(|rank| (run.first..=run.last).contains(rank));
            rank.is_some_and(|rank| (rank - run.first).is_multiple_of(run.stride))
        })
    }

    /// Iterates over its ranks below the world size, run by run.
    pub fn iter(&self, world: usize) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().flat_map(move |run| {
            let end = world.min((run.last as usize).saturating_add(1));
            (run.first as usize..end).step_by(run.stride as usize)
        })
    }
}

impl fmt::Display for Ranks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, Run { first, last, stride }) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_char(',')?;
            }
            match (last == first, stride) {
                (true, _) => write!(f, "{first}")?,
                (false, 1) => write!(f, "{first}-{last}")?,
                (false, _) => write!(f, "{first}-{last}/{stride}")?,
            }
        }
        Ok(())
    }
}

impl FromStr for Ranks {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong = || Error::Ranks { text: text.chars().take(32).collect(), ranges_max: RUNS_MAX };
        // Allow only digits: `parse` accepts a sign, and then one set would have several texts.
        let number = |text: &str| {
            text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse::<u32>().ok()).flatten().ok_or_else(wrong)
        };
        let run = |text: &str| {
            let (ends, stride) = text.split_once('/').unwrap_or((text, "1"));
            let (first, last) = ends.split_once('-').unwrap_or((ends, ends));
            let run = Run { first: number(first)?, last: number(last)?, stride: number(stride)? };
            let whole = run.stride > 0 && run.first <= run.last && (run.last - run.first).is_multiple_of(run.stride);
            if whole { Ok(run) } else { Err(wrong()) }
        };
        if text.is_empty() {
            return Ok(Ranks::default());
        }
        let runs: Vec<Run> = text.split(',').take(RUNS_MAX + 1).map(run).collect::<Result<_, _>>()?;
        if runs.len() > RUNS_MAX { Err(wrong()) } else { Ok(Ranks(runs)) }
    }
}

impl Serialize for Ranks {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Ranks {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Formats ascending ranks for people: `rank 3`, `ranks 2-3`, `ranks 0, 1 and 3`, `ranks 0-2 and 4-9999`. Of many runs, only the
/// first few are listed, with a count of the rest.
pub(crate) fn name_ranks(ranks: &[usize]) -> String {
    let runs = runs(ranks.iter().copied());
    let mut pieces: Vec<(String, usize)> = Vec::new();
    for &(first, last) in runs.iter().take(SHOWN_MAX + 1) {
        match last - first {
            0 => pieces.push((first.to_string(), 1)),
            // A pair among other runs is easier to read as two ranks.
            1 if runs.len() > 1 => pieces.extend([(first.to_string(), 1), (last.to_string(), 1)]),
            more => pieces.push((format!("{first}-{last}"), more + 1)),
        }
    }
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    if runs.len() > SHOWN_MAX || pieces.len() > SHOWN_MAX {
        pieces.truncate(SHOWN_MAX - 1);
        let left = ranks.len() - pieces.iter().map(|(_, count)| count).sum::<usize>();
        pieces.push((format!("{left} more"), left));
    }
    let words: Vec<String> = pieces.into_iter().map(|(word, _)| word).collect();
    format!("{noun} {}", join_list(&words))
}

/// Splits ascending ranks into runs without gaps, as `(first, last)`.
fn runs(ranks: impl IntoIterator<Item = usize>) -> Vec<(usize, usize)> {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for rank in ranks {
        match runs.last_mut() {
            Some((_, last)) if rank <= last.saturating_add(1) => *last = rank.max(*last),
            _ => runs.push((rank, rank)),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sets_have_short_texts() {
        let group = Ranks::from_runs([(0, 9992, 8)]);
        assert_eq!(group.to_string(), "0-9992/8");
        assert!(group.contains(4712) && !group.contains(4711) && !group.contains(10_000));
        assert_eq!(group.iter(17).collect::<Vec<_>>(), [0, 8, 16]);
        assert_eq!(Ranks::from_ranks([0, 1, 2, 5]).to_string(), "0-2,5");
        assert_eq!("0-4294967295".parse::<Ranks>().unwrap().iter(3).count(), 3, "the caller gives the world size");
        assert!("".parse::<Ranks>().unwrap().is_empty());
        let many = (0..=RUNS_MAX).map(|rank| (2 * rank).to_string()).collect::<Vec<_>>().join(",");
        for wrong in ["3-1", "1-4/2", "0-4/0", "-1", "+1", "1,", "4294967296", "0-", "a", &many] {
            assert!(wrong.parse::<Ranks>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn ranks_are_formatted_for_people() {
        let cases: [(&[usize], &str); 6] = [
            (&[3], "rank 3"),
            (&[2, 3], "ranks 2-3"),
            (&[0, 1, 3], "ranks 0, 1 and 3"),
            (&[0, 1, 2, 4, 5, 6], "ranks 0-2 and 4-6"),
            (&[1, 3, 5, 7, 9, 11], "ranks 1, 3, 5, 7, 9 and 11"),
            (&[1, 3, 5, 7, 9, 11, 13], "ranks 1, 3, 5, 7, 9 and 2 more"),
        ];
        for (ranks, expected) in cases {
            assert_eq!(name_ranks(ranks), expected);
        }
        let odd: Vec<usize> = (0..10_000).filter(|rank| rank % 2 == 1).collect();
        assert_eq!(name_ranks(&odd), "ranks 1, 3, 5, 7, 9 and 4995 more");
    }

    proptest! {
        #[test]
        fn a_set_survives_text(ranks in prop::collection::btree_set(0usize..600, 0..200)) {
            let set = Ranks::from_ranks(ranks.iter().copied());
            let read: Ranks = set.to_string().parse().unwrap();
            prop_assert_eq!(&read, &set);
            prop_assert_eq!(read.iter(600).collect::<Vec<_>>(), ranks.into_iter().collect::<Vec<_>>());
        }

        #[test]
        fn no_text_breaks_the_reader(text in "[-0-9,/]{0,40}") {
            if let Ok(ranks) = text.parse::<Ranks>() {
                prop_assert!(ranks.iter(1000).all(|rank| ranks.contains(rank)));
            }
        }
    }
}
