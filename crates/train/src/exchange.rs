//! All-to-alls of tensors: where context and expert parallelism meet the collectives.

use std::sync::Arc;

use shardwise_comm::Group;
use shardwise_model::{ExchangeGroup, PendingTensor};
use shardwise_torch::autograd::ClosureError;
use shardwise_torch::tch::Tensor;
use shardwise_torch::{Block, dtype_of};

use crate::tensor_group::Sent;

/// The ranks of a group, which send each other parts of tensors.
pub(crate) struct Exchange(pub(crate) Arc<Group>);

impl ExchangeGroup for Exchange {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn size(&self) -> usize {
        self.0.size()
    }

    fn start_all_to_all(
        &self,
        label: &str,
        send: &Tensor,
        send_counts: &[usize],
        receive_counts: &[usize],
    ) -> std::result::Result<PendingTensor, ClosureError> {
        let received = Block::new(dtype_of(send.f_kind()?)?, receive_counts.iter().sum(), send.device())?;
        let sent = Sent::new(send)?;
        let pending = self.0.all_to_all_counts(label, sent.take()?, send_counts, received, receive_counts);
        Ok(Box::new(move || {
            let (memory, received) = pending.wait()?;
            sent.put_back(memory)?;
            Ok(received.into_tensor()?)
        }))
    }
}
