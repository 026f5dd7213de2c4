//! The collectives of context parallelism.

use std::sync::Arc;

use shardwise_comm::Group;
use shardwise_model::{Batch, ContextParallel};
use shardwise_plan::ContextPlace;
use shardwise_plan::program::Place;

use crate::exchange::Exchange;

/// The ranks that divide sequences: neighbors that exchange heads, and rings of ranks that have the same heads.
#[derive(Clone)]
pub struct ContextGroups {
    /// The ranks that exchange heads (Ulysses).
    pub ulysses: Arc<Group>,
    /// The ranks that send each other keys and values (ring attention).
    pub ring: Arc<Group>,
}

impl ContextGroups {
    /// Every rank has whole sequences.
    pub(crate) fn none() -> Self {
        let [ulysses, ring] = [(); 2].map(|()| Arc::new(shardwise_comm::single::group()));
        ContextGroups { ulysses, ring }
    }

    /// The number of ranks that divide a sequence.
    pub fn size(&self) -> usize {
        self.ulysses.size() * self.ring.size()
    }

    /// The verbs of context parallelism.
    pub(crate) fn verbs(&self) -> ContextParallel {
        let exchange = |group: &Arc<Group>| Arc::new(Exchange(group.clone()));
        ContextParallel::new(exchange(&self.ulysses), exchange(&self.ring))
    }

    /// This rank's part of a micro-batch.
    pub fn split(&self, batch: Batch) -> shardwise_model::Result<Batch> {
        match self.size() {
            1 => Ok(batch),
            _ => batch.split_context(self.place()),
        }
    }

    /// This rank's place among those that divide sequences.
    pub fn place(&self) -> ContextPlace {
        let place = |group: &Group| Place { size: group.size(), index: group.rank() };
        ContextPlace { ring: place(&self.ring), ulysses: place(&self.ulysses) }
    }
}
