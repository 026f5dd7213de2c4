//! Tensor parallelism over a group of ranks: where the layers' verbs meet the collectives.

use std::sync::Arc;

use shardwise_comm::{Group, ReduceOp};
use shardwise_model::{PendingTensor, TensorGroup};
use shardwise_plan::Partition;
use shardwise_torch::autograd::ClosureError;
use shardwise_torch::tch::{Tensor, no_grad};
use shardwise_torch::{Block, dtype_of, storage};

/// The ranks that share a layer.
pub(crate) struct TensorRanks(pub(crate) Arc<Group>);

type Result<T> = std::result::Result<T, ClosureError>;

impl TensorGroup for TensorRanks {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn size(&self) -> usize {
        self.0.size()
    }

    fn start_all_gather(&self, label: &str, part: &Tensor, rows: usize) -> Result<PendingTensor> {
        let row_len = row_len(part);
        let whole = Block::new(dtype_of(part.f_kind()?)?, rows * row_len, part.device())?;
        let sent = Sent::new(part)?;
        let pending = self.0.all_gather_rows(label, row_len, sent.take()?, whole);
        Ok(Box::new(move || {
            let (memory, whole) = pending.wait()?;
            sent.put_back(memory)?;
            Ok(whole.into_tensor()?.f_view([rows as i64, row_len as i64])?)
        }))
    }

    fn start_reduce_scatter(&self, label: &str, whole: &Tensor) -> Result<PendingTensor> {
        let row_len = row_len(whole);
        let partition = Partition::of_rows(whole.numel() / row_len, row_len, self.size());
        let part = Block::new(dtype_of(whole.f_kind()?)?, partition.part_len(self.rank()), whole.device())?;
        let sent = Sent::new(whole)?;
        let pending = self.0.reduce_scatter_rows(label, ReduceOp::Sum, row_len, sent.take()?, part);
        Ok(Box::new(move || {
            let (memory, part) = pending.wait()?;
            sent.put_back(memory)?;
            let rows = (part.len() / row_len) as i64;
            Ok(part.into_tensor()?.f_view([rows, row_len as i64])?)
        }))
    }

    fn start_all_reduce(&self, label: &str, part: &Tensor) -> Result<PendingTensor> {
        let sum = copy_of(part)?;
        let memory = storage::take(&sum, "it is being summed over tensor-parallel ranks")?;
        let pending = self.0.all_reduce(label, ReduceOp::Sum, memory);
        Ok(Box::new(move || {
            storage::put(&sum, pending.wait()?).map_err(|failure| failure.error)?;
            Ok(sum)
        }))
    }
}

/// A tensor whose memory is lent to a collective.
pub(crate) struct Sent(Tensor);

impl Sent {
    /// The tensor itself, if it has its memory to itself, or a copy.
    pub(crate) fn new(tensor: &Tensor) -> Result<Sent> {
        let tensor = tensor.f_detach()?.f_contiguous()?;
        let bytes = tensor.numel() * dtype_of(tensor.f_kind()?)?.bytes();
        match storage::bytes(&tensor)? == bytes {
            true => Ok(Sent(tensor)),
            false => Ok(Sent(copy_of(&tensor)?)),
        }
    }

    pub(crate) fn take(&self) -> Result<Block> {
        Ok(storage::take(&self.0, "it is being sent to other ranks")?)
    }

    pub(crate) fn put_back(&self, memory: Block) -> Result<()> {
        Ok(storage::put(&self.0, memory).map_err(|failure| failure.error)?)
    }
}

/// A copy with its own memory, in order.
fn copy_of(tensor: &Tensor) -> Result<Tensor> {
    let mut copy = Tensor::f_empty(tensor.size(), (tensor.f_kind()?, tensor.device()))?;
    no_grad(|| copy.f_copy_(tensor))?;
    Ok(copy)
}

/// The elements of a row: those of the last dimension.
fn row_len(tensor: &Tensor) -> usize {
    tensor.size().last().map_or(1, |&size| size.max(1) as usize)
}
