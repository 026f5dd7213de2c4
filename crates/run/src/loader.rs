//! Loading the next step's batches while a step runs.

use std::sync::Arc;
use std::thread::JoinHandle;

use shardwise_model::Batch;
use shardwise_plan::ContextPlace;
use shardwise_train::Ranks;

use crate::data::Data;
use crate::error::{Error, Result};

/// Loads a rank's batches, those of the next step on a thread of its own. A device gets them in pinned memory.
pub(crate) struct Loader {
    place: Place,
    /// The step that is being loaded.
    next: Option<(u64, JoinHandle<Result<Vec<Batch>>>)>,
    /// The last step of the run.
    last: u64,
}

#[derive(Clone)]
struct Place {
    data: Arc<Data>,
    rank: usize,
    ranks: usize,
    context: ContextPlace,
    is_pinned: bool,
}

impl Place {
    fn load(&self, step: u64) -> Result<Vec<Batch>> {
        let mut batches = self.data.step_part(step, self.rank, self.ranks, self.context)?;
        if self.is_pinned {
            batches.iter_mut().try_for_each(Batch::pin).map_err(shardwise_train::Error::Batch)?;
        }
        Ok(batches)
    }
}

impl Loader {
    pub(crate) fn new(data: Arc<Data>, ranks: &Ranks, is_pinned: bool, last: u64) -> Self {
        let (rank, size, context) = (ranks.data_rank(), ranks.data_size(), ranks.context.place());
        let place = Place { data, rank, ranks: size, context, is_pinned };
        Loader { place, next: None, last }
    }

    /// Returns the batches of a step, and starts to load those of the one after it.
    pub(crate) fn load(&mut self, step: u64) -> Result<Vec<Batch>> {
        let batches = match self.next.take() {
            Some((loading, thread)) if loading == step => join(thread)?,
            // After a batch that was skipped, or a rollback.
            Some((_, thread)) => join(thread).and_then(|_| self.place.load(step))?,
            None => self.place.load(step)?,
        };
        if step < self.last {
            let place = self.place.clone();
            let thread = std::thread::Builder::new().name("loader".to_string()).spawn(move || place.load(step + 1));
            self.next =
                Some((step + 1, thread.map_err(|error| Error::Options(format!("no thread can be started: {error}")))?));
        }
        Ok(batches)
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        // A thread that still runs would use libtorch while the process ends.
        if let Some((_, thread)) = self.next.take() {
            let _ = thread.join();
        }
    }
}

fn join(thread: JoinHandle<Result<Vec<Batch>>>) -> Result<Vec<Batch>> {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use shardwise_comm::single;

    use super::*;
    use crate::build::tests::recipe;

    #[test]
    fn a_step_has_its_own_batches_in_any_order() {
        let data = Arc::new(Data::open(&recipe(""), 1).unwrap());
        let mut loader = Loader::new(data.clone(), &Ranks::sharded(Arc::new(single::group())), false, 9);
        // A batch is skipped after a rollback, and a rollback goes back.
        for step in [1, 2, 4, 5, 3, 4, 9] {
            let [found, expected] = [loader.load(step).unwrap(), data.step(step, 0, 1).unwrap()];
            assert!(
                found.iter().zip(&expected).all(|(found, expected)| found.inputs == expected.inputs),
                "step {step}"
            );
        }
        assert!(loader.next.is_none(), "there is no step after the last");
    }
}
