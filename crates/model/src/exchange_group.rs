//! Ranks that exchange parts of tensors: keys, values or heads (context parallelism), or tokens (expert parallelism).

use std::ops::Range;

use shardwise_torch::autograd::ClosureError;
use shardwise_torch::tch::{Kind, TchError, Tensor};

use crate::PendingTensor;

/// Ranks that exchange parts of tensors.
pub trait ExchangeGroup: Send + Sync {
    /// This rank's index.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn size(&self) -> usize;

    /// Starts to send the next `send_counts[r]` elements of `send` to rank r, and to receive `receive_counts[r]` from it. The result has
    /// what was received, in the order of ranks.
    fn start_all_to_all(
        &self,
        label: &str,
        send: &Tensor,
        send_counts: &[usize],
        receive_counts: &[usize],
    ) -> Result<PendingTensor, ClosureError>;
}

/// Takes tensors out of a buffer, one after the other.
pub(crate) struct Unpack {
    pub(crate) from: Tensor,
    pub(crate) at: i64,
}

impl Unpack {
    pub(crate) fn next(&mut self, shape: &[i64]) -> Result<Tensor, TchError> {
        let len: i64 = shape.iter().product();
        self.at += len;
        self.from.f_narrow(0, self.at - len, len)?.f_view(shape)
    }
}

/// A range of a dimension.
pub(crate) fn narrow(tensor: &Tensor, dimension: i64, range: &Range<usize>) -> Result<Tensor, TchError> {
    tensor.f_narrow(dimension, range.start as i64, range.len() as i64)
}

/// The type in which sums of parts are kept.
pub(crate) fn wide_kind(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}
