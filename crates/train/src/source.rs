//! Training on your own data: the [`Source`] of samples, and which rank reads which.
//!
//! A sample is a function of its index, and a step's indices are a function of the step. So a step has the same samples on any
//! number of ranks, and a resumed run needs only the step. The data of recipes (corpora, conversations) is in `data`; the training
//! loop of recipes, with checkpoints and supervision, is in `run`.

use shardwise_model::Batch;

use crate::error::{Error, Result, SourceError};
use crate::report::Report;
use crate::step::Trainer;

/// A map-style dataset: returns samples by index. Closures implement it.
pub trait Source {
    /// Returns the samples with these indices as one micro-batch. The result must depend on the indices alone.
    fn batch(&self, indices: &[u64]) -> std::result::Result<Batch, SourceError>;
}

impl<F: Fn(&[u64]) -> std::result::Result<Batch, SourceError>> Source for F {
    fn batch(&self, indices: &[u64]) -> std::result::Result<Batch, SourceError> {
        self(indices)
    }
}

/// The batch size of each rank.
///
/// ```
/// # use shardwise_train::BatchSize;
/// let batch_size = BatchSize { micro_batch_size: 2, gradient_accumulation_steps: 2 };
/// // In step 2, on ranks 0 and 1 of two ranks:
/// assert_eq!(batch_size.sample_indices(2, 0, 2), [[8, 9], [12, 13]]);
/// assert_eq!(batch_size.sample_indices(2, 1, 2), [[10, 11], [14, 15]]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchSize {
    /// The number of samples in a micro-batch.
    pub micro_batch_size: usize,
    /// The number of micro-batches per step.
    pub gradient_accumulation_steps: usize,
}

impl BatchSize {
    /// The indices of a rank's samples in a step (counted from 1), by micro-batch. `ranks` is the number of ranks that read different
    /// samples.
    pub fn sample_indices(&self, step: u64, rank: usize, ranks: usize) -> Vec<Vec<u64>> {
        let together = (ranks * self.micro_batch_size) as u64;
        let micro_batch = |index: u64| {
            // Indices may wrap around after 2⁶⁴.
            let micro_batch =
                step.wrapping_sub(1).wrapping_mul(self.gradient_accumulation_steps as u64).wrapping_add(index);
            let first = micro_batch.wrapping_mul(together).wrapping_add((rank * self.micro_batch_size) as u64);
            (0..self.micro_batch_size as u64).map(|index| first.wrapping_add(index)).collect()
        };
        (0..self.gradient_accumulation_steps as u64).map(micro_batch).collect()
    }
}

impl Trainer {
    /// Trains on a source up to step `steps`, including steps before this call, and calls `each` after every step. All ranks call
    /// it together.
    pub fn train(
        &mut self,
        source: &dyn Source,
        batch_size: BatchSize,
        steps: u64,
        each: &mut dyn FnMut(&Report),
    ) -> Result<()> {
        let (rank, ranks) = (self.ranks.data_rank(), self.ranks.data_size());
        while self.steps < steps {
            if self.skip_batch().is_some() {
                continue;
            }
            let step = self.steps + 1;
            let context = self.ranks.context.clone();
            let read = |indices: &Vec<u64>| {
                let batch = source.batch(indices).and_then(|batch| Ok(context.split(batch)?));
                batch.map_err(|error| Error::Source { step, error })
            };
            let micro_batches =
                batch_size.sample_indices(step, rank, ranks).iter().map(read).collect::<Result<Vec<_>>>()?;
            each(&self.step(&micro_batches)?);
        }
        Ok(())
    }
}
