//! Ulysses: ranks exchange positions for heads, attend, and exchange them back.

use std::ops::Range;
use std::sync::Arc;

use shardwise_plan::Partition;
use shardwise_torch::autograd::ClosureError;
use shardwise_torch::tch::{TchError, Tensor};

use crate::context_batch::ContextBatch;
use crate::context_group::{ContextGroup, Unpack, wide_kind};
use crate::{Error, Result};

/// The exchange of positions for heads (DeepSpeed: Ulysses). With one rank it does nothing.
#[derive(Clone)]
pub(crate) struct HeadExchange {
    group: Option<Arc<dyn ContextGroup>>,
    label: Arc<str>,
    /// The positions of each rank.
    rows: Vec<Range<usize>>,
    /// The query heads of each rank, and the key heads that they need, which several ranks may.
    heads: Vec<[Range<usize>; 2]>,
    /// The number of query heads, and of key heads.
    counts: [usize; 2],
    sequences: usize,
    head_dim: usize,
    rank: usize,
}

impl HeadExchange {
    pub(crate) fn new(
        group: Option<Arc<dyn ContextGroup>>,
        label: Arc<str>,
        query: &Tensor,
        key: &Tensor,
        batch: &ContextBatch,
    ) -> Result<Self> {
        let (sequences, queries, _, head_dim) = query.size4()?;
        let (queries, keys) = (queries as usize, key.size()[1] as usize);
        let size = batch.heads.size;
        if queries < size {
            let problem = format!("{queries} heads cannot be exchanged by {size} ranks; use fewer for Ulysses");
            return Err(Error::Config { key: "context", problem });
        }
        let shared_by = queries / keys;
        let of_rank = |rank: usize| {
            let own = Partition::new(queries, size).range(rank);
            let needed = own.start / shared_by..own.end.div_ceil(shared_by);
            [own, needed]
        };
        Ok(HeadExchange {
            group,
            label,
            rows: (0..size).map(|rank| batch.rows_of(rank)).collect(),
            heads: (0..size).map(of_rank).collect(),
            counts: [queries, keys],
            sequences: sequences as usize,
            head_dim: head_dim as usize,
            rank: batch.heads.index,
        })
    }

    /// The key head of each of this rank's query heads, among the key heads that it gets; `None` if each has the same number of
    /// consecutive query heads.
    pub(crate) fn key_of_query(&self) -> Option<Vec<i64>> {
        let [own, needed] = &self.heads[self.rank];
        let shared_by = self.counts[0] / self.counts[1];
        let index: Vec<i64> = own.clone().map(|head| (head / shared_by - needed.start) as i64).collect();
        let times = index.len() / needed.len().max(1);
        let is_regular = index.len() == times * needed.len()
            && index.iter().enumerate().all(|(at, &key)| at / times == key as usize);
        (!is_regular).then_some(index)
    }

    /// From this rank's positions of all heads to all positions of this rank's heads: query, key and value.
    pub(crate) fn scatter_heads(
        &self,
        [query, key, value]: [Tensor; 3],
    ) -> std::result::Result<[Tensor; 3], ClosureError> {
        let Some(group) = &self.group else { return Ok([query, key, value]) };
        let own = self.rows[self.rank].len();
        let mut pieces = Vec::new();
        for [queries, keys] in &self.heads {
            for (tensor, heads) in [(&query, queries), (&key, keys), (&value, keys)] {
                pieces.push(narrow_heads(tensor, heads)?.f_reshape(-1)?);
            }
        }
        let [queries, keys] = self.heads[self.rank].clone();
        let send_counts: Vec<usize> =
            self.heads.iter().map(|[queries, keys]| self.elements(own, queries.len() + 2 * keys.len())).collect();
        let receive_counts: Vec<usize> =
            self.rows.iter().map(|rows| self.elements(rows.len(), queries.len() + 2 * keys.len())).collect();
        let received =
            group.start_all_to_all(&self.label, &Tensor::f_cat(&pieces, 0)?, &send_counts, &receive_counts)?()?;
        let mut unpack = Unpack { from: received, at: 0 };
        let mut parts = [Vec::new(), Vec::new(), Vec::new()];
        for rows in &self.rows {
            for (part, heads) in parts.iter_mut().zip([&queries, &keys, &keys]) {
                part.push(unpack.next(&self.shape(heads.len(), rows.len()))?);
            }
        }
        let join = |parts: &Vec<Tensor>| Tensor::f_cat(parts, 2);
        Ok([join(&parts[0])?, join(&parts[1])?, join(&parts[2])?])
    }

    /// From all positions of this rank's query heads to this rank's positions of all heads.
    pub(crate) fn gather_heads(&self, attended: &Tensor) -> std::result::Result<Tensor, ClosureError> {
        let Some(group) = &self.group else { return Ok(attended.f_alias()?) };
        let (own, heads) = (self.rows[self.rank].len(), &self.heads[self.rank][0]);
        let pieces = self
            .rows
            .iter()
            .map(|rows| narrow_rows(attended, rows)?.f_reshape(-1))
            .collect::<std::result::Result<Vec<_>, _>>()?;
        let send_counts: Vec<usize> = self.rows.iter().map(|rows| self.elements(rows.len(), heads.len())).collect();
        let receive_counts: Vec<usize> = self.heads.iter().map(|[heads, _]| self.elements(own, heads.len())).collect();
        let received =
            group.start_all_to_all(&self.label, &Tensor::f_cat(&pieces, 0)?, &send_counts, &receive_counts)?()?;
        let mut unpack = Unpack { from: received, at: 0 };
        let parts = self.heads.iter().map(|[heads, _]| unpack.next(&self.shape(heads.len(), own)));
        Ok(Tensor::f_cat(&parts.collect::<std::result::Result<Vec<_>, _>>()?, 1)?)
    }

    /// The backward pass of [`HeadExchange::gather_heads`].
    pub(crate) fn scatter_output_grad(&self, grad: &Tensor) -> std::result::Result<Tensor, ClosureError> {
        let Some(group) = &self.group else { return Ok(grad.shallow_clone()) };
        let (own, heads) = (self.rows[self.rank].len(), &self.heads[self.rank][0]);
        let pieces = self
            .heads
            .iter()
            .map(|[heads, _]| narrow_heads(grad, heads)?.f_reshape(-1))
            .collect::<std::result::Result<Vec<_>, _>>()?;
        let send_counts: Vec<usize> = self.heads.iter().map(|[heads, _]| self.elements(own, heads.len())).collect();
        let receive_counts: Vec<usize> = self.rows.iter().map(|rows| self.elements(rows.len(), heads.len())).collect();
        let received =
            group.start_all_to_all(&self.label, &Tensor::f_cat(&pieces, 0)?, &send_counts, &receive_counts)?()?;
        let mut unpack = Unpack { from: received, at: 0 };
        let parts = self.rows.iter().map(|rows| unpack.next(&self.shape(heads.len(), rows.len())));
        Ok(Tensor::f_cat(&parts.collect::<std::result::Result<Vec<_>, _>>()?, 2)?)
    }

    /// The backward pass of [`HeadExchange::scatter_heads`]. Key heads that several ranks have used get the sum of their gradients.
    pub(crate) fn gather_grads(&self, grads: [Tensor; 3]) -> std::result::Result<[Tensor; 3], ClosureError> {
        let Some(group) = &self.group else { return Ok(grads) };
        let own = self.rows[self.rank].len();
        let mut pieces = Vec::new();
        for rows in &self.rows {
            for grad in &grads {
                pieces.push(narrow_rows(grad, rows)?.f_reshape(-1)?);
            }
        }
        let [queries, keys] = self.heads[self.rank].clone();
        let send_counts: Vec<usize> =
            self.rows.iter().map(|rows| self.elements(rows.len(), queries.len() + 2 * keys.len())).collect();
        let receive_counts: Vec<usize> =
            self.heads.iter().map(|[queries, keys]| self.elements(own, queries.len() + 2 * keys.len())).collect();
        let received =
            group.start_all_to_all(&self.label, &Tensor::f_cat(&pieces, 0)?, &send_counts, &receive_counts)?()?;
        let kind = received.kind();
        let options = (wide_kind(kind), received.device());
        let mut unpack = Unpack { from: received, at: 0 };
        let [query_heads, key_heads] = self.counts;
        let mut whole = [query_heads, key_heads, key_heads]
            .map(|heads| Tensor::f_zeros(self.shape(heads, own), options))
            .into_iter()
            .collect::<std::result::Result<Vec<_>, _>>()?;
        for [queries, keys] in &self.heads {
            for (whole, heads) in whole.iter_mut().zip([queries, keys, keys]) {
                let part = unpack.next(&self.shape(heads.len(), own))?;
                let _ = narrow_heads(whole, heads)?.f_add_(&part)?;
            }
        }
        let mut whole = whole
            .into_iter()
            .map(|whole| whole.f_to_kind(kind))
            .collect::<std::result::Result<Vec<_>, _>>()?
            .into_iter();
        Ok(std::array::from_fn(|_| whole.next().expect("there are three gradients")))
    }

    fn elements(&self, rows: usize, heads: usize) -> usize {
        self.sequences * rows * heads * self.head_dim
    }

    fn shape(&self, heads: usize, rows: usize) -> [i64; 4] {
        [self.sequences as i64, heads as i64, rows as i64, self.head_dim as i64]
    }
}

fn narrow_heads(tensor: &Tensor, heads: &Range<usize>) -> std::result::Result<Tensor, TchError> {
    tensor.f_narrow(1, heads.start as i64, heads.len() as i64)
}

fn narrow_rows(tensor: &Tensor, rows: &Range<usize>) -> std::result::Result<Tensor, TchError> {
    tensor.f_narrow(2, rows.start as i64, rows.len() as i64)
}
