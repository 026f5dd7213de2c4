//! Ulysses: ranks exchange positions for heads, attend, and exchange them back.

use std::ops::Range;
use std::sync::Arc;

use shardwise_plan::divide_heads;
use shardwise_torch::autograd::ClosureError;
use shardwise_torch::tch::{TchError, Tensor};

use crate::Error;
use crate::context_batch::ContextBatch;
use crate::exchange_group::{ExchangeGroup, Unpack, narrow, wide_kind};

type ClosureResult<T> = Result<T, ClosureError>;

/// The exchange of positions for heads (DeepSpeed: Ulysses). With one rank it does nothing.
#[derive(Clone)]
pub(crate) struct HeadExchange {
    group: Option<Arc<dyn ExchangeGroup>>,
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
        group: Option<Arc<dyn ExchangeGroup>>,
        label: Arc<str>,
        query: &Tensor,
        key: &Tensor,
        batch: &ContextBatch,
    ) -> crate::Result<Self> {
        let (sequences, queries, _, head_dim) = query.size4()?;
        let (queries, keys) = (queries as usize, key.size()[1] as usize);
        let size = batch.place.ulysses.size;
        if queries < size {
            let problem = format!("{queries} heads cannot be exchanged by {size} ranks; use fewer for Ulysses");
            return Err(Error::Config { key: "context", problem });
        }
        Ok(HeadExchange {
            group,
            label,
            rows: (0..size).map(|rank| batch.rows_of(rank)).collect(),
            heads: divide_heads(queries, keys, size),
            counts: [queries, keys],
            sequences: sequences as usize,
            head_dim: head_dim as usize,
            rank: batch.place.ulysses.index,
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

    /// From this rank's positions of all heads to all positions of this rank's heads. The first tensor has query heads, the others key
    /// heads.
    pub(crate) fn to_heads<const N: usize>(&self, tensors: [Tensor; N]) -> ClosureResult<[Tensor; N]> {
        let Some(group) = &self.group else { return Ok(tensors) };
        let received = self.exchange(
            group,
            &tensors,
            |tensor, kind, rank| narrow(tensor, 1, &self.heads[rank][kind]),
            |kind, rank| self.shape(self.heads[self.rank][kind].len(), self.rows[rank].len()),
        )?;
        collect(received.each_ref().map(|parts| Tensor::f_cat(parts, 2)))
    }

    /// The way back, from all positions of this rank's heads to this rank's positions of all heads. Key heads that several ranks have
    /// get the sum.
    pub(crate) fn to_positions<const N: usize>(&self, tensors: [Tensor; N]) -> ClosureResult<[Tensor; N]> {
        let Some(group) = &self.group else { return Ok(tensors) };
        let own = self.rows[self.rank].len();
        let received = self.exchange(
            group,
            &tensors,
            |tensor, _, rank| narrow(tensor, 2, &self.rows[rank]),
            |kind, rank| self.shape(self.heads[rank][kind].len(), own),
        )?;
        let mut at = 0;
        collect(received.each_ref().map(|parts| {
            at += 1;
            self.join_heads(parts, kind_of(at - 1), own)
        }))
    }

    /// Joins the heads of all ranks.
    fn join_heads(&self, parts: &[Tensor], kind: usize, rows: usize) -> Result<Tensor, TchError> {
        let is_shared = self.heads.iter().map(|heads| heads[kind].len()).sum::<usize>() > self.counts[kind];
        if !is_shared {
            return Tensor::f_cat(parts, 1);
        }
        let dtype = parts[0].kind();
        let whole = Tensor::f_zeros(self.shape(self.counts[kind], rows), (wide_kind(dtype), parts[0].device()))?;
        for (heads, part) in self.heads.iter().zip(parts) {
            let _ = narrow(&whole, 1, &heads[kind])?.f_add_(part)?;
        }
        whole.f_to_kind(dtype)
    }

    /// Sends each rank its `piece` of every tensor. Returns the pieces that ranks have sent, of these shapes, for every tensor. Both
    /// functions get the kind of heads, and a rank.
    fn exchange<const N: usize>(
        &self,
        group: &Arc<dyn ExchangeGroup>,
        tensors: &[Tensor; N],
        piece: impl Fn(&Tensor, usize, usize) -> Result<Tensor, TchError>,
        shape: impl Fn(usize, usize) -> [i64; 4],
    ) -> ClosureResult<[Vec<Tensor>; N]> {
        let (mut pieces, mut send_counts, mut receive_counts) = (Vec::new(), Vec::new(), Vec::new());
        for rank in 0..group.size() {
            let (mut send, mut receive) = (0, 0);
            for (at, tensor) in tensors.iter().enumerate() {
                let piece = piece(tensor, kind_of(at), rank)?.f_reshape(-1)?;
                send += piece.numel();
                receive += shape(kind_of(at), rank).iter().product::<i64>() as usize;
                pieces.push(piece);
            }
            send_counts.push(send);
            receive_counts.push(receive);
        }
        let send = Tensor::f_cat(&pieces, 0)?;
        let received = group.start_all_to_all(&self.label, &send, &send_counts, &receive_counts)?()?;
        let mut unpack = Unpack { from: received, at: 0 };
        let mut received = [const { Vec::new() }; N];
        for rank in 0..group.size() {
            for (at, parts) in received.iter_mut().enumerate() {
                parts.push(unpack.next(&shape(kind_of(at), rank))?);
            }
        }
        Ok(received)
    }

    fn shape(&self, heads: usize, rows: usize) -> [i64; 4] {
        [self.sequences as i64, heads as i64, rows as i64, self.head_dim as i64]
    }
}

/// The kind of heads that a tensor has: the first one those of queries, the others those of keys.
fn kind_of(tensor: usize) -> usize {
    usize::from(tensor > 0)
}

fn collect<const N: usize>(tensors: [Result<Tensor, TchError>; N]) -> ClosureResult<[Tensor; N]> {
    let tensors = tensors.into_iter().collect::<Result<Vec<_>, _>>()?;
    Ok(tensors.try_into().unwrap_or_else(|_| unreachable!("there are as many as before")))
}
