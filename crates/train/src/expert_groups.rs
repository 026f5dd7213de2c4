//! The ranks of expert parallelism.

use std::sync::Arc;

use shardwise_comm::Group;
use shardwise_model::ExpertParallel;
use shardwise_zero::Groups;

use crate::exchange::Exchange;

/// The ranks that hold the experts of a layer, and those that shard them.
#[derive(Clone)]
pub struct ExpertGroups {
    /// The ranks that hold different experts, and exchange tokens.
    pub exchange: Arc<Group>,
    /// The ranks that shard and replicate the same experts.
    pub groups: Groups,
    /// The ranks that hold the other parts of the same tensors: other experts, and with tensor parallelism other parts of each.
    pub parts: Arc<Group>,
}

impl ExpertGroups {
    /// Every rank has all experts, sharded like all other parameters.
    pub(crate) fn none(groups: &Groups, tensor: &Arc<Group>) -> Self {
        let exchange = Arc::new(shardwise_comm::single::group());
        ExpertGroups { exchange, groups: groups.clone(), parts: tensor.clone() }
    }

    /// The number of ranks that hold different experts.
    pub fn size(&self) -> usize {
        self.exchange.size()
    }

    /// The verbs of expert parallelism.
    pub(crate) fn verbs(&self) -> ExpertParallel {
        ExpertParallel::new(Arc::new(Exchange(self.exchange.clone())))
    }
}
