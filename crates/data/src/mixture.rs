//! Mixing several sources: maps a sample number to a window of a source.
//!
//! The mapping depends only on the seed: not on the world size, nor on what was read before. So a run can resume anywhere, on any number
//! of ranks, and sees the same data in the same order.
//!
//! Sources get their shares exactly. The first source gets `floor(n · p)` of the first `n` samples, as in Bresenham's line; the
//! others divide the rest in the same way. Within a source, every window comes once before any comes twice, and each epoch has
//! a different order.

use crate::permutation::{Permutation, combine_keys};
use crate::{Error, Result};

/// Samples from several sources in proportion to their weights.
#[derive(Clone, Debug)]
pub struct Mixture {
    sources: Vec<Source>,
    seed: u64,
}

#[derive(Clone, Debug)]
struct Source {
    windows: u64,
    /// Its share of the samples that the sources before it leave, in units of 2^-64.
    share: u128,
}

/// One window of one source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sample {
    /// The index of the source.
    pub source: usize,
    /// How many times the whole source has been used before.
    pub epoch: u64,
    /// The window in the source.
    pub index: u64,
}

impl Mixture {
    /// Mixes sources, each given by its number of windows and its weight.
    pub fn new(sources: Vec<(u64, f64)>, seed: u64) -> Result<Self> {
        if sources.is_empty() {
            return Err(Error::invalid_argument("a mixture needs at least one source"));
        }
        for (source, &(windows, weight)) in sources.iter().enumerate() {
            if windows == 0 || !(weight.is_finite() && weight > 0.0) {
                let problem =
                    format!("source {source} has {windows} windows and weight {weight}; both must be positive");
                return Err(Error::invalid_argument(problem));
            }
        }
        let left = |from: usize| sources[from..].iter().map(|(_, weight)| weight).sum::<f64>();
        // Rounded up a little, so that a third of 9,000 is 3,000 and not 2,999.
        let part = |source: usize, weight: f64| (weight / left(source) * WHOLE as f64) as u128 + ROUNDING;
        let share = |source: usize, weight: f64| part(source, weight).min(WHOLE - 1);
        let sources = sources.iter().enumerate();
        let sources = sources.map(|(source, &(windows, weight))| Source { windows, share: share(source, weight) });
        Ok(Mixture { sources: sources.collect(), seed })
    }

    /// The sample with this number.
    pub fn at(&self, number: u64) -> Sample {
        let (source, number) = self.source_of(number);
        let windows = self.sources[source].windows;
        let (epoch, index) = (number / windows, number % windows);
        let order = Permutation::new(windows, combine_keys(&[self.seed, source as u64, epoch]));
        Sample { source, epoch, index: order.at(index) }
    }

    /// How many of the first `number` samples come from each source.
    pub fn source_counts(&self, number: u64) -> Vec<u64> {
        let mut left = number;
        let last = self.sources.len() - 1;
        let mut counts = Vec::with_capacity(self.sources.len());
        for source in &self.sources[..last] {
            counts.push(floor(left, source.share));
            left -= floor(left, source.share);
        }
        counts.push(left);
        counts
    }

    /// The source of a sample, and how many samples of that source came before it.
    fn source_of(&self, number: u64) -> (usize, u64) {
        let mut number = number;
        let last = self.sources.len() - 1;
        for (source, Source { share, .. }) in self.sources[..last].iter().enumerate() {
            let before = floor(number, *share);
            if (u128::from(number) + 1) * share / WHOLE > u128::from(before) {
                return (source, before);
            }
            number -= before;
        }
        (last, number)
    }
}

const WHOLE: u128 = 1 << 64;
/// More than the rounding error in a quotient of two weights.
const ROUNDING: u128 = 1 << 12;

/// A share of a number, rounded down.
fn floor(number: u64, share: u128) -> u64 {
    (u128::from(number) * share / WHOLE) as u64
}
