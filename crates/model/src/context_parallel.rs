//! Context parallelism: ranks that divide the positions of sequences.
//!
//! Everything but attention works on each position by itself, so a rank computes it for its own positions. Attention needs the keys of
//! other ranks. There are two ways to get them, which can be combined:
//!
//! ```text
//! ring attention:  keys and values of one rank after the other arrive while those of the rank before are used
//! Ulysses:         all-to-all, after which a rank has all positions, but only some heads; and back
//! combined:        Ulysses among the ranks of a host, then a ring between hosts, of ranks with the same heads
//! ```
//!
//! [`ContextParallel`] belongs to a pass, and [`ContextBatch`] to a micro-batch.

use std::sync::Arc;

use shardwise_plan::ContextPlace;
use shardwise_plan::program::Place;
use shardwise_torch::autograd::{self, ClosureError, Forward};
use shardwise_torch::tch::{Tensor, no_grad};

use crate::context_batch::ContextBatch;
use crate::exchange_group::ExchangeGroup;
use crate::head_exchange::HeadExchange;
use crate::ring_attention::Ring;
use crate::{Error, Result};

/// The ranks that divide sequences.
#[derive(Clone)]
pub struct ContextParallel {
    /// Those that exchange positions for heads (Ulysses).
    ulysses: Option<Arc<dyn ExchangeGroup>>,
    /// Those that send each other keys and values (ring attention).
    ring: Option<Arc<dyn ExchangeGroup>>,
    label: Arc<str>,
}

impl ContextParallel {
    /// Every rank has whole sequences.
    pub fn none() -> Self {
        ContextParallel { ulysses: None, ring: None, label: "".into() }
    }

    /// Ranks that exchange heads, and ranks that send each other keys. A group may have one rank.
    pub fn new(ulysses: Arc<dyn ExchangeGroup>, ring: Arc<dyn ExchangeGroup>) -> Self {
        let several = |group: Arc<dyn ExchangeGroup>| Some(group).filter(|group| group.size() > 1);
        ContextParallel { ulysses: several(ulysses), ring: several(ring), label: "".into() }
    }

    /// The same with another label for its collectives.
    #[must_use]
    pub fn with_label(&self, label: &str) -> Self {
        ContextParallel { label: label.into(), ..self.clone() }
    }

    /// Fails if a micro-batch is divided among other ranks than these.
    fn check(&self, batch: &ContextBatch) -> Result<()> {
        let place = |group: &Option<Arc<dyn ExchangeGroup>>| match group {
            Some(group) => Place { size: group.size(), index: group.rank() },
            None => Place::ALONE,
        };
        let own = ContextPlace { ring: place(&self.ring), ulysses: place(&self.ulysses) };
        if own != batch.place {
            let problem = format!("the micro-batch is divided for {:?}, but this rank is {own:?}", batch.place);
            return Err(Error::Config { key: "context", problem });
        }
        Ok(())
    }

    /// Attention of `query` (sequences, heads, positions, head dim), this rank's part of a batch, to the keys of all ranks. `key` and
    /// `value` may have fewer heads. Returns the concatenated heads (sequences, positions, heads × head dim).
    pub(crate) fn attend(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        window: Option<usize>,
        batch: &ContextBatch,
    ) -> Result<Tensor> {
        self.check(batch)?;
        let ring = Ring::new(self.ring.clone(), batch, window, self.label.clone());
        let exchange = HeadExchange::new(self.ulysses.clone(), self.label.clone(), query, key, batch)?;
        let computed = no_grad(|| -> std::result::Result<_, ClosureError> {
            let [query, key, value] = exchange.to_heads([query, key, value].map(Tensor::detach))?;
            let (attended, logsumexp) = ring.forward([&query, &key, &value], exchange.key_of_query())?;
            let [output] = exchange.to_positions([attended.f_alias()?])?;
            Ok((output, vec![query, key, value, attended, logsumexp]))
        });
        let (output, saved) = computed.map_err(Error::Communication)?;
        let mut outputs = autograd::function(
            "context-parallel attention",
            &[query, key, value],
            |_| Ok(Forward { outputs: vec![output], saved }),
            move |mut back| {
                let Some(grad) = back.grads.remove(0) else { return Ok(vec![None, None, None]) };
                let [grad] = exchange.to_heads([grad])?;
                let grads = exchange.to_positions(ring.backward(&grad, &back.saved, exchange.key_of_query())?)?;
                Ok(grads.map(Some).into())
            },
        )?;
        Ok(outputs.remove(0).f_transpose(1, 2)?.f_flatten(2, 3)?)
    }
}
