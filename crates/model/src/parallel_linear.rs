//! The linear layers at both ends of a tensor-parallel region, in pieces of rows that overlap with communication.
//!
//! A layer at the beginning (Megatron-LM: `ColumnParallelLinear`) multiplies the rows of all ranks: this rank's own, while those of
//! the others arrive, and then the others'. The products of the layer at the end (`RowParallelLinear`) are summed over the ranks: the
//! sum of a piece is under way while the next piece is multiplied. PyTorch calls this async tensor parallelism
//! (`fused_all_gather_matmul`, `fused_matmul_reduce_scatter`).
//!
//! Without overlap each collective is awaited where it starts. The pieces and their order are the same, and so are the bits, even if
//! a kernel's depend on the number of rows.

use std::ops::Range;

use shardwise_torch::tch::{Tensor, no_grad};

use crate::row_pieces::{multiplies_own_rows_first, row_pieces};
use crate::tensor_parallel::{as_rows, rows_of};
use crate::{Error, Linear, PendingTensor, Result, TensorParallel};

impl TensorParallel {
    /// Leads into a tensor-parallel region with layers whose weights are divided by outputs: returns what
    /// [`TensorParallel::enter`] does, and the output of each layer.
    pub fn column_parallel<const N: usize>(
        &self,
        x: &Tensor,
        rows: usize,
        layers: [Linear<'_>; N],
    ) -> Result<(Tensor, [Tensor; N])> {
        let is_cut = self.splits_sequence() && multiplies_own_rows_first(rows, self.size());
        let (entered, outputs) = match is_cut {
            true => {
                let (entered, outputs) = no_grad(|| self.gather_and_multiply(x, rows, &layers))?;
                let entered = self.attach_enter(x, entered)?;
                let attach = |(layer, output): (&Linear<'_>, Tensor)| layer.attach(&entered, output, Ok);
                let outputs = layers.iter().zip(outputs).map(attach).collect::<Result<Vec<_>>>()?;
                (entered, outputs)
            }
            false => {
                let entered = self.enter(x, rows)?;
                let outputs = layers.iter().map(|layer| layer.apply(&entered)).collect::<Result<Vec<_>>>()?;
                (entered, outputs)
            }
        };
        Ok((entered, outputs.try_into().expect("every layer has an output")))
    }

    /// Leads out of a tensor-parallel region with a layer whose weight is divided by inputs, and which has no bias: the sum of its
    /// products on all ranks, as from [`TensorParallel::leave`].
    pub fn row_parallel(&self, x: &Tensor, layer: &Linear<'_>) -> Result<Tensor> {
        if self.size() == 1 {
            return layer.apply(x);
        }
        let rows = rows_of(x);
        let pieces = row_pieces(rows, if self.splits_sequence() { self.size() } else { 1 });
        if pieces.len() == 1 {
            return self.leave(&layer.apply(x)?);
        }
        let sum = no_grad(|| self.multiply_and_sum(x, layer, &pieces))?;
        layer.attach(x, sum, self.backward_of_leave(rows))
    }

    /// All rows, and the products of each layer.
    fn gather_and_multiply(&self, x: &Tensor, rows: usize, layers: &[Linear<'_>]) -> Result<(Tensor, Vec<Tensor>)> {
        let empty =
            |layer: &Linear<'_>| Tensor::f_empty([rows as i64, layer.output_features()], (x.kind(), x.device()));
        let outputs = layers.iter().map(empty).collect::<std::result::Result<Vec<_>, _>>()?;
        let multiply = |input: &Tensor, rows: &Range<usize>| {
            layers.iter().zip(&outputs).try_for_each(|(layer, output)| layer.write(input, &narrow(output, rows)?))
        };
        // A copy, because a collective owns what it sends, and the product reads it meanwhile.
        let mut sent = x.f_empty_like()?;
        sent.f_copy_(x)?;
        let pending = self.await_unless_async(self.start_gather_rows(&sent, rows)?)?;
        let own = self.own_rows(rows);
        // The collective must end even if this fails: its buffers are lent to the network.
        let multiplied = multiply(x, &own);
        let entered = pending().map_err(Error::Communication)?;
        multiplied?;
        for others in [0..own.start, own.end..rows].iter().filter(|others| !others.is_empty()) {
            multiply(&narrow(&entered, others)?, others)?;
        }
        Ok((entered, outputs))
    }

    /// The sum over all ranks of a layer's products, piece by piece.
    fn multiply_and_sum(&self, x: &Tensor, layer: &Linear<'_>, pieces: &[Vec<Range<usize>>]) -> Result<Tensor> {
        let (input, features) = (as_rows(&x.f_detach()?)?, layer.output_features());
        let start = |piece: &Vec<Range<usize>>| -> Result<PendingTensor> {
            let rows = piece.iter().map(Range::len).sum::<usize>();
            let product = Tensor::f_empty([rows as i64, features], (x.kind(), x.device()))?;
            let mut end = 0;
            for range in piece {
                let written = end..end + range.len();
                layer.write(&narrow(&input, range)?, &narrow(&product, &written)?)?;
                end = written.end;
            }
            self.await_unless_async(self.start_sum(&product)?)
        };
        let started: Vec<Result<PendingTensor>> = pieces.iter().map(start).collect();
        // All that have started must end, even if one has not.
        let sums: Vec<Result<Tensor>> =
            started.into_iter().map(|pending| pending?().map_err(Error::Communication)).collect();
        let sums = sums.into_iter().collect::<Result<Vec<_>>>()?;
        let sum = Tensor::f_cat(&sums, 0)?;
        if self.splits_sequence() {
            return Ok(sum);
        }
        let mut shape = x.size();
        *shape.last_mut().expect("a tensor with features has a dimension") = features;
        Ok(sum.f_view(&shape[..])?)
    }
}

fn narrow(tensor: &Tensor, rows: &Range<usize>) -> Result<Tensor> {
    Ok(tensor.f_narrow(0, rows.start as i64, rows.len() as i64)?)
}
