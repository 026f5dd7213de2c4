//! Samples of a user's own: where they come from, and which rank takes which.
//!
//! A sample is a function of its number, and a step's numbers are a function of the step. So any number of ranks sees the same
//! samples in the same step, and a run that goes on needs to remember the step and nothing else. What a recipe names (corpora,
//! conversations) is `data`'s; the loop of a recipe, with its checkpoints and its supervisor, is `run`'s.

use shardwise_model::Batch;

use crate::position::Phase;
use crate::{Error, Report, Result, Trainer};

/// Why a source has no samples of these numbers.
pub type SourceError = Box<dyn std::error::Error + Send + Sync>;

/// Where samples come from. A closure is one; so is whatever reads a user's files.
pub trait Source {
    /// The samples of these numbers, as one micro-batch. They depend on the numbers alone, whoever asks, and however often.
    fn batch(&self, numbers: &[u64]) -> std::result::Result<Batch, SourceError>;
}

impl<F: Fn(&[u64]) -> std::result::Result<Batch, SourceError>> Source for F {
    fn batch(&self, numbers: &[u64]) -> std::result::Result<Batch, SourceError> {
        self(numbers)
    }
}

/// How much every rank takes in a step.
///
/// ```
/// # use shardwise_train::Portion;
/// let portion = Portion { samples: 2, micro_batches: 2 };
/// // In the second step, of the first and of the second of two ranks.
/// assert_eq!(portion.numbers(2, 0, 2), [[8, 9], [12, 13]]);
/// assert_eq!(portion.numbers(2, 1, 2), [[10, 11], [14, 15]]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Portion {
    /// Samples that a rank computes with at once.
    pub samples: usize,
    /// How many times it does so before parameters are updated.
    pub micro_batches: usize,
}

impl Portion {
    /// The numbers of the samples that a rank takes in a step, which are counted from one: those of each micro-batch.
    pub fn numbers(&self, step: u64, rank: usize, ranks: usize) -> Vec<Vec<u64>> {
        let together = (ranks * self.samples) as u64;
        let micro_batch = |index: u64| {
            // A number is only a number of a sample: that it wraps around after 2⁶⁴ harms nobody.
            let micro_batch = step.wrapping_sub(1).wrapping_mul(self.micro_batches as u64).wrapping_add(index);
            let first = micro_batch.wrapping_mul(together).wrapping_add((rank * self.samples) as u64);
            (0..self.samples as u64).map(|index| first.wrapping_add(index)).collect()
        };
        (0..self.micro_batches as u64).map(micro_batch).collect()
    }
}

impl Trainer {
    /// Trains on a source until so many steps have been made, those before this call included, and tells `each` of every one. All
    /// ranks call it together.
    pub fn train(
        &mut self,
        source: &dyn Source,
        portion: Portion,
        steps: u64,
        each: &mut dyn FnMut(&Report),
    ) -> Result<()> {
        let (rank, ranks) = (self.ranks.world.rank(), self.ranks.world.size());
        while self.steps < steps {
            if self.pass_over().is_some() {
                continue;
            }
            self.position.enter(Phase::Data);
            let step = self.steps + 1;
            let read = |numbers: &Vec<u64>| source.batch(numbers).map_err(|error| Error::Source { step, error });
            let micro_batches = portion.numbers(step, rank, ranks).iter().map(read).collect::<Result<Vec<_>>>()?;
            each(&self.step(&micro_batches)?);
        }
        Ok(())
    }
}
