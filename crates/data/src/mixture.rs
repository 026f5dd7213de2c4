//! Which window of which corpus a sample is.
//!
//! Samples have numbers, and what a number stands for depends on the seed and on nothing else: not on the number of ranks, nor
//! on what was read before. So a run can be continued anywhere, by any number of ranks, and sees the same data in the same
//! order.
//!
//! Sources get their shares exactly. The first has `floor(n · p)` of the first `n` samples, as in Bresenham's line; what it does
//! not take is divided between the others in the same way. Within a source, every window comes once before any comes twice, in
//! an order that is another one in each epoch.

use crate::order::{Permutation, key_of};
use crate::{Error, Result};

/// Several sources, in proportion to their weights.
#[derive(Clone, Debug)]
pub struct Mixture {
    sources: Vec<Source>,
    seed: u64,
}

#[derive(Clone, Debug)]
struct Source {
    windows: u64,
    /// Its part of what the sources before it leave, in parts of 2^64.
    share: u128,
}

/// What a sample is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sample {
    /// The source, in the order in which they were given.
    pub source: usize,
    /// How often all of the source came before.
    pub epoch: u64,
    /// The window of the source.
    pub index: u64,
}

impl Mixture {
    /// Mixes sources of so many windows and such a weight.
    pub fn new(sources: Vec<(u64, f64)>, seed: u64) -> Result<Self> {
        if sources.is_empty() {
            return Err(Error::settings("a mixture of nothing; name at least one corpus"));
        }
        for (source, &(windows, weight)) in sources.iter().enumerate() {
            if windows == 0 || !(weight.is_finite() && weight > 0.0) {
                let problem =
                    format!("source {source} has {windows} windows and weight {weight}; both must be above 0");
                return Err(Error::settings(problem));
            }
        }
        let left = |from: usize| sources[from..].iter().map(|(_, weight)| weight).sum::<f64>();
        // Rounded up a little, so that a third of 9,000 is 3,000.
        let part = |source: usize, weight: f64| (weight / left(source) * WHOLE as f64) as u128 + ROUNDING;
        let share = |source: usize, weight: f64| part(source, weight).min(WHOLE - 1);
        let sources = sources.iter().enumerate();
        let sources = sources.map(|(source, &(windows, weight))| Source { windows, share: share(source, weight) });
        Ok(Mixture { sources: sources.collect(), seed })
    }

    /// What the sample with that number is.
    pub fn at(&self, number: u64) -> Sample {
        let (source, number) = self.source_of(number);
        let windows = self.sources[source].windows;
        let (epoch, place) = (number / windows, number % windows);
        let order = Permutation::new(windows, key_of(&[self.seed, source as u64, epoch]));
        Sample { source, epoch, index: order.at(place) }
    }

    /// How many of the first `number` samples are of each source.
    pub fn taken(&self, number: u64) -> Vec<u64> {
        let mut left = number;
        let last = self.sources.len() - 1;
        let mut taken = Vec::with_capacity(self.sources.len());
        for source in &self.sources[..last] {
            taken.push(floor(left, source.share));
            left -= floor(left, source.share);
        }
        taken.push(left);
        taken
    }

    /// The source of a sample, and how many of that source came before it.
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
/// More than a quotient of two weights is off by.
const ROUNDING: u128 = 1 << 12;

/// A share of a number.
fn floor(number: u64, share: u128) -> u64 {
    (u128::from(number) * share / WHOLE) as u64
}
