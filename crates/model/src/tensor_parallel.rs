//! The verbs of tensor and sequence parallelism, for layers whose parameters are split among several ranks (Megatron-LM).
//!
//! Outside of a tensor-parallel region every rank has whole features: all rows of the activations or, with sequence parallelism,
//! its own rows. A row is a token, and rows are divided without regard to sequences. Inside, every rank has all rows, and computes
//! its own part of the features. [`TensorParallel::enter`] leads into a region, and [`TensorParallel::leave`] out of it:
//!
//! ```text
//!                    norm ─ enter ─ column-parallel matrix ─ heads ─ row-parallel matrix ─ leave ─ add to residual
//! split sequence:           all-gather                                                     reduce-scatter
//! whole sequence:           nothing                                                        all-reduce
//! ```
//!
//! The backward pass of each verb is the other one. On one rank, all verbs are the identity.

use std::ops::Range;
use std::sync::Arc;

use shardwise_plan::{Partition, Slice};
use shardwise_torch::autograd::{self, ClosureError, Forward};
use shardwise_torch::tch::{TchError, Tensor, no_grad};

use crate::{DeferredGradients, Error, Result};

/// A collective that has started. Call it to wait for the result.
pub type PendingTensor = Box<dyn FnOnce() -> std::result::Result<Tensor, ClosureError>>;

/// The ranks that share a layer. Tensors have rows: all dimensions but the last are one.
pub trait TensorGroup: Send + Sync {
    /// This rank's index.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn size(&self) -> usize;

    /// Starts to concatenate the rows of all ranks, `rows` in total, divided as in [`Partition::of_rows`]. Until the call returns,
    /// `part` cannot be read.
    fn start_all_gather(
        &self,
        label: &str,
        part: &Tensor,
        rows: usize,
    ) -> std::result::Result<PendingTensor, ClosureError>;

    /// Starts to sum `whole` over all ranks, for this rank's rows of the sum. Until the call returns, `whole` cannot be read.
    fn start_reduce_scatter(&self, label: &str, whole: &Tensor) -> std::result::Result<PendingTensor, ClosureError>;

    /// Starts to sum a tensor over all ranks.
    fn start_all_reduce(&self, label: &str, part: &Tensor) -> std::result::Result<PendingTensor, ClosureError>;

    /// Concatenates the rows of all ranks; see [`TensorGroup::start_all_gather`].
    fn all_gather(&self, label: &str, part: &Tensor, rows: usize) -> std::result::Result<Tensor, ClosureError> {
        self.start_all_gather(label, part, rows)?()
    }

    /// Sums `whole` over all ranks, and returns this rank's rows of the sum.
    fn reduce_scatter(&self, label: &str, whole: &Tensor) -> std::result::Result<Tensor, ClosureError> {
        self.start_reduce_scatter(label, whole)?()
    }

    /// Sums a tensor over all ranks.
    fn all_reduce(&self, label: &str, part: &Tensor) -> std::result::Result<Tensor, ClosureError> {
        self.start_all_reduce(label, part)?()
    }
}

/// The verbs of tensor parallelism, which a layer receives in its [`Pass`](crate::Pass).
#[derive(Clone)]
pub struct TensorParallel {
    group: Option<Arc<dyn TensorGroup>>,
    splits_sequence: bool,
    /// The label of collectives.
    label: Arc<str>,
    /// Whether the forward pass multiplies while its collectives are under way.
    is_async: bool,
    /// What the backward pass computes while its collectives are under way.
    meanwhile: Option<DeferredGradients>,
}

impl TensorParallel {
    /// A layer that is on one rank.
    pub fn none() -> Self {
        TensorParallel { group: None, splits_sequence: false, label: "".into(), is_async: false, meanwhile: None }
    }

    /// A layer that is split among the ranks of a group, with or without sequence parallelism.
    pub fn new(group: Arc<dyn TensorGroup>, splits_sequence: bool) -> Self {
        match group.size() {
            1 => TensorParallel::none(),
            _ => TensorParallel { group: Some(group), splits_sequence, ..TensorParallel::none() },
        }
    }

    /// The same with another label for its collectives.
    #[must_use]
    pub fn with_label(&self, label: &str) -> Self {
        match &self.group {
            Some(_) => TensorParallel { label: label.into(), ..self.clone() },
            None => TensorParallel::none(),
        }
    }

    /// The same without sequence parallelism, for tensors that are too short to be split.
    #[must_use]
    pub fn with_whole_sequence(&self) -> Self {
        TensorParallel { splits_sequence: false, ..self.clone() }
    }

    /// The same with or without overlap in the forward pass (async tensor parallelism): while collectives are under way,
    /// [`TensorParallel::column_parallel`] and [`TensorParallel::row_parallel`] multiply. Changes no bit.
    #[must_use]
    pub fn with_async(&self, is_async: bool) -> Self {
        TensorParallel { is_async, ..self.clone() }
    }

    /// The same with a backward pass that computes these gradients of weights while its collectives are under way.
    #[must_use]
    pub fn with_overlap(&self, meanwhile: DeferredGradients) -> Self {
        TensorParallel { meanwhile: Some(meanwhile), ..self.clone() }
    }

    /// The number of ranks that share a layer.
    pub fn size(&self) -> usize {
        self.group.as_ref().map_or(1, |group| group.size())
    }

    /// This rank's index among them.
    pub fn rank(&self) -> usize {
        self.group.as_ref().map_or(0, |group| group.rank())
    }

    /// Whether each rank has its own rows outside of a region.
    pub fn splits_sequence(&self) -> bool {
        self.splits_sequence
    }

    /// The rows that this rank has outside of a region, of `rows` in total.
    pub fn own_rows(&self, rows: usize) -> Range<usize> {
        match self.splits_sequence {
            true => Partition::new(rows, self.size()).range(self.rank()),
            false => 0..rows,
        }
    }

    /// The shape of activations outside of a region: `features` for each element of `tokens`.
    pub fn shape_outside(&self, tokens: &Tensor, features: usize) -> Vec<i64> {
        match self.splits_sequence {
            true => vec![self.own_rows(tokens.numel()).len() as i64, features as i64],
            false => tokens.size().into_iter().chain([features as i64]).collect(),
        }
    }

    /// Leads into a tensor-parallel region: returns all rows, `rows` in total. The backward pass sums the gradients of all ranks.
    pub fn enter(&self, x: &Tensor, rows: usize) -> Result<Tensor> {
        match self.group {
            Some(_) => self.attach_enter(x, self.gather_rows(&x.f_detach()?, rows)?),
            None => Ok(x.shallow_clone()),
        }
    }

    /// Leads out of a tensor-parallel region: sums what every rank has computed from its part of the features.
    pub fn leave(&self, x: &Tensor) -> Result<Tensor> {
        let left = no_grad(|| self.sum(x))?;
        match self.group {
            Some(_) => apply("leave", x, left, self.backward_of_leave(rows_of(x))),
            None => Ok(left),
        }
    }

    /// Gives `entered`, the rows of all ranks, the backward pass of [`TensorParallel::enter`].
    pub(crate) fn attach_enter(&self, x: &Tensor, entered: Tensor) -> Result<Tensor> {
        let parallel = self.clone();
        apply("enter", x, entered, move |grad| {
            wait_meanwhile(parallel.start_sum(&grad)?, parallel.meanwhile.as_ref(), 1)
        })
    }

    /// The backward pass of [`TensorParallel::leave`]: from the gradient of a sum to that of this rank's term, which has `rows` rows.
    pub(crate) fn backward_of_leave(
        &self,
        rows: usize,
    ) -> impl Fn(Tensor) -> std::result::Result<Tensor, ClosureError> + Send + 'static {
        let parallel = self.clone();
        move |grad| match parallel.splits_sequence {
            true => wait_meanwhile(parallel.start_gather_rows(&grad, rows)?, parallel.meanwhile.as_ref(), 0),
            false => Ok(grad),
        }
    }

    /// Keeps this rank's rows of a tensor that all ranks have computed, with sequence parallelism. The backward pass gathers the
    /// gradients, so parameters that are applied before it are [`ReplicatedWhole`](shardwise_plan::TensorPlacement::ReplicatedWhole).
    pub fn scatter(&self, x: &Tensor) -> Result<Tensor> {
        let Some(group) = self.group.as_ref().filter(|_| self.splits_sequence) else { return Ok(x.shallow_clone()) };
        let (group, label, shape, rows) = (group.clone(), self.label.clone(), x.size(), rows_of(x));
        let own = self.own_rows(rows);
        let kept = as_rows(x)?.f_narrow(0, own.start as i64, own.len() as i64)?.detach().f_contiguous()?;
        apply("scatter", x, kept, move |grad| Ok(group.all_gather(&label, &grad, rows)?.f_view(&shape[..])?))
    }

    /// Gathers the rows of all ranks, `rows` in total, with sequence parallelism, for a computation that all ranks do alike: the
    /// opposite of [`TensorParallel::scatter`]. Parameters that are applied after it are
    /// [`ReplicatedWhole`](shardwise_plan::TensorPlacement::ReplicatedWhole).
    pub fn gather(&self, x: &Tensor, rows: usize) -> Result<Tensor> {
        let Some(group) = self.group.as_ref().filter(|_| self.splits_sequence) else { return Ok(x.shallow_clone()) };
        let gathered = no_grad(|| group.all_gather(&self.label, x, rows)).map_err(Error::Communication)?;
        let own = self.own_rows(rows);
        apply("gather", x, gathered, move |grad| {
            Ok(as_rows(&grad)?.f_narrow(0, own.start as i64, own.len() as i64)?.f_contiguous()?)
        })
    }

    /// Keeps this rank's rows of a tensor that all ranks have, without autograd, until [`TensorParallel::restore`].
    pub fn partition(&self, x: &Tensor) -> Result<Tensor> {
        let own = Partition::new(rows_of(x), self.size()).range(self.rank());
        let part = as_rows(&x.f_detach()?)?.f_narrow(0, own.start as i64, own.len() as i64)?;
        let mut kept = Tensor::f_empty(part.size(), (part.kind(), part.device()))?;
        no_grad(|| kept.f_copy_(&part))?;
        Ok(kept)
    }

    /// Gathers the rows of a tensor of this shape that [`TensorParallel::partition`] has divided.
    pub fn restore(&self, part: &Tensor, shape: &[i64]) -> Result<Tensor> {
        let Some(group) = &self.group else { return Ok(part.f_view(shape)?) };
        let rows = shape[..shape.len() - 1].iter().product::<i64>() as usize;
        Ok(group.all_gather(&self.label, part, rows).map_err(Error::Communication)?.f_view(shape)?)
    }

    /// Sums a tensor over all ranks, without autograd.
    pub fn all_reduce(&self, x: &Tensor) -> Result<Tensor> {
        let Some(group) = &self.group else { return Ok(x.shallow_clone()) };
        group.all_reduce(&self.label, x).map_err(Error::Communication)
    }

    /// All rows of a tensor, as [`TensorParallel::enter`] returns them, without autograd.
    pub(crate) fn gather_rows(&self, x: &Tensor, rows: usize) -> Result<Tensor> {
        self.start_gather_rows(x, rows)?().map_err(Error::Communication)
    }

    /// The sum over all ranks, without autograd: all of it or, with sequence parallelism, this rank's rows.
    pub(crate) fn sum(&self, x: &Tensor) -> Result<Tensor> {
        self.start_sum(x)?().map_err(Error::Communication)
    }

    /// Starts [`TensorParallel::gather_rows`].
    pub(crate) fn start_gather_rows(&self, x: &Tensor, rows: usize) -> Result<PendingTensor> {
        match self.group.as_ref().filter(|_| self.splits_sequence) {
            Some(group) => group.start_all_gather(&self.label, x, rows).map_err(Error::Communication),
            None => Ok(done(x.shallow_clone())),
        }
    }

    /// Starts [`TensorParallel::sum`].
    pub(crate) fn start_sum(&self, x: &Tensor) -> Result<PendingTensor> {
        let Some(group) = &self.group else { return Ok(done(x.shallow_clone())) };
        let started = match self.splits_sequence {
            true => group.start_reduce_scatter(&self.label, x),
            false => group.start_all_reduce(&self.label, x),
        };
        started.map_err(Error::Communication)
    }

    /// A collective that has started, which ends here unless the forward pass overlaps.
    pub(crate) fn await_unless_async(&self, pending: PendingTensor) -> Result<PendingTensor> {
        match self.is_async {
            true => Ok(pending),
            false => Ok(done(pending().map_err(Error::Communication)?)),
        }
    }

    /// The tensors of all ranks, stacked, without autograd.
    pub(crate) fn stack(&self, x: &Tensor) -> Result<Tensor> {
        let row = x.f_reshape([1, -1])?;
        let Some(group) = &self.group else { return Ok(row) };
        group.all_gather(&self.label, &row, group.size()).map_err(Error::Communication)
    }

    /// Joins the last dimensions of the tensors of all ranks, `features` in total, without autograd.
    pub(crate) fn join_features(&self, x: &Tensor, features: usize) -> Result<Tensor> {
        let Some(group) = &self.group else { return Ok(x.shallow_clone()) };
        let transposed = as_rows(x)?.f_transpose(0, 1)?.f_contiguous()?;
        let joined = group.all_gather(&self.label, &transposed, features).map_err(Error::Communication)?;
        let mut shape = x.size();
        *shape.last_mut().expect("a tensor with features has a dimension") = features as i64;
        Ok(joined.f_transpose(0, 1)?.f_contiguous()?.f_view(&shape[..])?)
    }
}

/// The part of a tensor that a slice describes: a view if the slice is one range, otherwise a copy.
pub fn cut(tensor: &Tensor, slice: &Slice) -> Result<Tensor> {
    let of_experts = match &slice.experts {
        Some(experts) => tensor.f_narrow(0, experts.start as i64, experts.len() as i64)?,
        None => tensor.shallow_clone(),
    };
    let (tensor, dimension) = (&of_experts, slice.dimension as i64);
    let part = |range: &Range<usize>| tensor.f_narrow(dimension, range.start as i64, range.len() as i64);
    match &slice.ranges[..] {
        [range] => Ok(part(range)?),
        ranges => {
            let parts = ranges.iter().map(part).collect::<std::result::Result<Vec<_>, _>>()?;
            Ok(Tensor::f_cat(&parts, dimension)?)
        }
    }
}

/// A collective that has ended.
pub(crate) fn done(result: Tensor) -> PendingTensor {
    Box::new(move || Ok(result))
}

/// Waits for a collective of the backward pass. Meanwhile computes the gradients that were put aside, except for the last `left`,
/// which are for the next collective.
fn wait_meanwhile(
    pending: PendingTensor,
    meanwhile: Option<&DeferredGradients>,
    left: usize,
) -> std::result::Result<Tensor, ClosureError> {
    // The collective must end even if this fails: its buffers are lent to the network.
    let computed = meanwhile.map_or(Ok(()), |meanwhile| meanwhile.compute_all_but(left));
    let result = pending()?;
    computed?;
    Ok(result)
}

/// A result of the forward pass whose gradient is `backward` of the given one.
fn apply(
    name: &'static str,
    input: &Tensor,
    output: Tensor,
    backward: impl Fn(Tensor) -> std::result::Result<Tensor, ClosureError> + Send + 'static,
) -> Result<Tensor> {
    let shape = input.size();
    let mut outputs = autograd::function(
        name,
        &[input],
        |_| Ok(Forward { outputs: vec![output], saved: vec![] }),
        move |mut back| match back.grads.remove(0) {
            Some(grad) => Ok(vec![Some(backward(grad)?.f_view(&shape[..])?)]),
            None => Ok(vec![None]),
        },
    )?;
    Ok(outputs.remove(0))
}

/// The number of rows of a tensor.
pub(crate) fn rows_of(x: &Tensor) -> usize {
    x.numel() / x.size().last().map_or(1, |&features| features.max(1) as usize)
}

/// The tensor as a matrix of rows.
pub(crate) fn as_rows(x: &Tensor) -> std::result::Result<Tensor, TchError> {
    x.f_reshape([rows_of(x) as i64, x.size().last().copied().unwrap_or(1)])
}
