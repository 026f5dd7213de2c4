//! Ring attention: a rank's queries attend to the keys of all ranks, which arrive one rank at a time.
//!
//! Attention to a part of the keys gives an output and the logarithm of the sum of its exponentials. Two such results combine
//! exactly: each output counts with its share of the sum. The backward pass needs only the final output and sum, so every part
//! has its own backward pass, too.
//!
//! In turn `t`, a rank has the keys and values of the rank `t` before it in the ring, and sends its own to the rank `t` after it.
//! Only what queries there can see is sent. In the backward pass they travel again, and their gradients travel back. The first keys travel
//! while a rank computes with half of the heads of its own keys, and the last gradients while it computes with the other half.

use std::ops::Range;
use std::sync::Arc;

use shardwise_plan::program::Place;
use shardwise_plan::{ContextSplit, Segment};
use shardwise_torch::autograd::ClosureError;
use shardwise_torch::tch::{Kind, TchError, Tensor};

use crate::PendingTensor;
use crate::context_batch::ContextBatch;
use crate::exchange_group::{ExchangeGroup, Unpack, narrow, wide_kind};

type ClosureResult<T> = Result<T, ClosureError>;

/// The ranks of a ring, and how they divide a batch.
#[derive(Clone)]
pub(crate) struct Ring {
    group: Option<Arc<dyn ExchangeGroup>>,
    place: Place,
    rows: Arc<[AlikeSequences]>,
    window: Option<usize>,
    label: Arc<str>,
}

/// Sequences that are divided alike.
struct AlikeSequences {
    sequences: Range<usize>,
    split: ContextSplit,
}

/// Keys and values of sequences that are divided alike (sequences, heads, positions, head dim).
type Keys = [Tensor; 2];

/// A part of a rank's queries, with positions of one document.
#[derive(Clone, Copy)]
struct Piece {
    /// The index of its sequences in [`Ring::rows`].
    rows: usize,
    /// Its first row in the rank's part.
    row: usize,
    segment: Segment,
}

/// When a rank computes with keys.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Visit {
    /// Before all others: its own keys, while those of the next turn arrive.
    OwnFirst,
    /// With another rank's keys.
    Other,
    /// After all others: its own keys again, while the gradients of the last turn travel.
    OwnLast,
}

/// Some of the query heads, and the key head of each, if they are not evenly grouped.
struct Heads {
    queries: Range<usize>,
    key_of_query: Option<Vec<i64>>,
}

/// What a piece of queries sees of a segment of keys.
struct Block {
    piece: usize,
    /// The rows of the piece that see a key: kernels give no meaningful result for the others.
    queries: Range<usize>,
    /// The rows of the keys.
    keys: Range<usize>,
    mask: Mask,
}

/// What kernels take of a block.
struct Operands {
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Option<Tensor>,
    is_causal: bool,
}

enum Mask {
    /// Every query sees every key.
    None,
    /// Queries and keys are the same positions.
    Causal,
    /// A query sees the keys that are at most `window` − 1 positions before it. The first query is `ahead` of the first key.
    Band { ahead: i64, window: i64 },
}

impl Ring {
    pub(crate) fn new(
        group: Option<Arc<dyn ExchangeGroup>>,
        batch: &ContextBatch,
        window: Option<usize>,
        label: Arc<str>,
    ) -> Self {
        let alike = if batch.is_alike() { batch.splits.len() } else { 1 };
        let firsts = (0..batch.splits.len()).step_by(alike.max(1));
        let rows = firsts.map(|at| AlikeSequences { sequences: at..at + alike, split: batch.splits[at].clone() });
        Ring { group, place: batch.place.ring, rows: rows.collect(), window, label }
    }

    /// Attention of this rank's queries to all keys: the output, and the logarithm of the sum of exponentials of each query.
    pub(crate) fn forward(
        &self,
        [query, key, value]: [&Tensor; 3],
        key_of_query: Option<Vec<i64>>,
    ) -> ClosureResult<(Tensor, Tensor)> {
        let pieces = self.pieces();
        let mut parts: Vec<Option<(Tensor, Tensor)>> = pieces.iter().map(|_| None).collect();
        let compute = |visit: Visit, from: usize, keys: &[Keys]| {
            if visit == Visit::OwnLast {
                return Ok(None);
            }
            let times = query.size()[1] / key.size()[1];
            let keys = keys.iter().map(|keys| expand(keys, times, &key_of_query)).collect::<ClosureResult<Vec<_>>>()?;
            for block in self.blocks(&pieces, from) {
                let piece = &pieces[block.piece];
                let Operands { query, key, value, mask, is_causal } = self.operands(query, &keys, piece, &block)?;
                let (output, logsumexp) = Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu(
                    &query, &key, &value, 0., is_causal, mask, None,
                )?;
                match &mut parts[block.piece] {
                    Some(part) => combine(part, &block.queries, (output, logsumexp))?,
                    part => *part = Some((output, logsumexp)),
                }
            }
            Ok(None)
        };
        self.visit(key, value, compute, |_, _| Ok(()))?;
        let size = query.size();
        let wide = wide_kind(query.kind());
        // In the order in which the heads are concatenated.
        let output = Tensor::f_empty([size[0], size[2], size[1], size[3]], (query.kind(), query.device()))?;
        let output = output.f_transpose(1, 2)?;
        let logsumexp = Tensor::f_empty(&size[..3], (wide, query.device()))?;
        for (piece, part) in pieces.iter().zip(parts) {
            let (part, part_logsumexp) = part.expect("a query sees its own key");
            self.cut_whole(&output, piece)?.f_copy_(&part)?;
            self.cut_whole(&logsumexp, piece)?.f_copy_(&part_logsumexp)?;
        }
        Ok((output, logsumexp))
    }

    /// The gradients of query, key and value, from that of the output and what the forward pass has saved: query, key, value, output and
    /// the logarithms.
    pub(crate) fn backward(
        &self,
        grad: &Tensor,
        saved: &[Tensor],
        key_of_query: Option<Vec<i64>>,
    ) -> ClosureResult<[Tensor; 3]> {
        let [query, key, value, output, logsumexp] = saved else { unreachable!("the forward pass saves five tensors") };
        let (kind, wide, device) = (query.kind(), wide_kind(query.kind()), query.device());
        let pieces = self.pieces();
        let zeros = |size: Vec<i64>| Tensor::f_zeros(size, (wide, device));
        let query_grad = zeros(query.size())?;
        let own_grads = [zeros(key.size())?, zeros(value.size())?];
        let times = query.size()[1] / key.size()[1];
        let compute = |visit: Visit, from: usize, keys: &[Keys]| {
            let counts = [query.size()[1], key.size()[1]];
            let heads = match (visit, self.place.size) {
                // There is nothing to wait for.
                (Visit::OwnLast, 1) => return Ok(None),
                (Visit::OwnFirst, 1) => Heads::new(Visit::Other, counts, key_of_query.as_ref()),
                _ => Heads::new(visit, counts, key_of_query.as_ref()),
            };
            if heads.queries.is_empty() {
                return Ok(None);
            }
            let [query, grad, output] = [heads.of(query)?, heads.of(grad)?, heads.of(output)?];
            let [logsumexp, query_grad] = [heads.of(logsumexp)?, heads.of(&query_grad)?];
            let grads: Vec<Keys> = match visit != Visit::Other {
                true => self.rows.iter().map(|rows| rows.of(&own_grads)).collect::<ClosureResult<_>>()?,
                false => keys
                    .iter()
                    .map(|keys| Ok([zeros(keys[0].size())?, zeros(keys[1].size())?]))
                    .collect::<ClosureResult<_>>()?,
            };
            let expand = |keys: &Keys| expand(keys, times, &heads.key_of_query);
            let keys = keys.iter().map(expand).collect::<ClosureResult<Vec<_>>>()?;
            for block in self.blocks(&pieces, from) {
                let piece = &pieces[block.piece];
                let Operands { query, key, value, mask, is_causal } = self.operands(&query, &keys, piece, &block)?;
                let (of_query, of_key, of_value) =
                    Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu_backward(
                        &self.cut(&grad, piece, &block)?,
                        &query,
                        &key,
                        &value,
                        &self.cut(&output, piece, &block)?,
                        &self.cut(&logsumexp, piece, &block)?,
                        0.,
                        is_causal,
                        mask,
                        None,
                    )?;
                let _ = self.cut(&query_grad, piece, &block)?.f_add_(&of_query)?;
                for (whole, part) in grads[piece.rows].iter().zip([of_key, of_value]) {
                    add_shared(&narrow(whole, 2, &block.keys)?, &part, &heads.key_of_query)?;
                }
            }
            Ok((visit == Visit::Other).then_some(grads))
        };
        let add_returned = |to: usize, received: Tensor| {
            let mut unpack = Unpack { from: received, at: 0 };
            for rows in self.rows.iter() {
                let visible = rows.visible(self.place.index, to, self.window);
                for whole in &rows.of(&own_grads)? {
                    let mut size = whole.size();
                    size[2] = visible.iter().map(|range| range.len() as i64).sum();
                    let part = unpack.next(&size)?;
                    let mut at = 0;
                    for range in &visible {
                        let part = part.f_narrow(2, at, range.len() as i64)?;
                        let _ = narrow(whole, 2, range)?.f_add_(&part)?;
                        at += range.len() as i64;
                    }
                }
            }
            Ok(())
        };
        self.visit(key, value, compute, add_returned)?;
        let [key_grad, value_grad] = own_grads;
        Ok([query_grad.f_to_kind(kind)?, key_grad.f_to_kind(kind)?, value_grad.f_to_kind(kind)?])
    }

    /// Calls `compute` with the keys and values of each rank, while those of the next arrive; with this rank's own both first and last. What
    /// it returns for another rank's keys, their gradients, is sent back. Calls `returned` with what others have sent back.
    fn visit(
        &self,
        key: &Tensor,
        value: &Tensor,
        mut compute: impl FnMut(Visit, usize, &[Keys]) -> ClosureResult<Option<Vec<Keys>>>,
        returned: impl Fn(usize, Tensor) -> ClosureResult<()>,
    ) -> ClosureResult<()> {
        let Place { index, size } = self.place;
        let mut arriving = self.start_turn(1, key, value)?;
        let own = self.rows.iter().map(|rows| rows.of(&[key, value])).collect::<ClosureResult<Vec<_>>>()?;
        compute(Visit::OwnFirst, index, &own)?;
        let mut returning: Option<(usize, PendingTensor)> = None;
        for turn in 1..size {
            let arrived = arriving.take().map(|pending| pending()).transpose()?;
            arriving = self.start_turn(turn + 1, key, value)?;
            let Some(arrived) = arrived else { continue };
            let (from, to) = ((index + size - turn) % size, (index + turn) % size);
            let keys = self.unpack(arrived, from, key)?;
            if let Some(grads) = compute(Visit::Other, from, &keys)? {
                // One at a time: each needs memory for as many keys as a rank has.
                if let Some((to, pending)) = returning.take() {
                    returned(to, pending()?)?;
                }
                returning = Some((to, self.start_return(turn, &grads)?));
            }
        }
        compute(Visit::OwnLast, index, &own)?;
        match returning {
            Some((to, pending)) => returned(to, pending()?),
            None => Ok(()),
        }
    }

    /// Starts to send keys and values to the rank that is `turn` after this one, and to receive those of the rank that is `turn` before
    /// it. `None` if no rank sends anything in this turn, or there is no such turn.
    fn start_turn(&self, turn: usize, key: &Tensor, value: &Tensor) -> ClosureResult<Option<PendingTensor>> {
        let Place { index, size } = self.place;
        let Some(group) = self.group.as_ref().filter(|_| turn < size && !self.is_silent(turn)) else { return Ok(None) };
        let (from, to) = ((index + size - turn) % size, (index + turn) % size);
        let mut pieces = Vec::new();
        for rows in self.rows.iter() {
            let visible = rows.visible(index, to, self.window);
            for keys in rows.of(&[key, value])? {
                let seen = visible.iter().map(|range| narrow(&keys, 2, range)).collect::<Result<Vec<_>, _>>()?;
                if !seen.is_empty() {
                    pieces.push(Tensor::f_cat(&seen, 2)?.f_reshape(-1)?);
                }
            }
        }
        let send = flat(&pieces, key)?;
        let [mut send_counts, mut receive_counts] = [vec![0; size], vec![0; size]];
        send_counts[to] = send.numel();
        receive_counts[from] = self.elements(from, index, key);
        Ok(Some(group.start_all_to_all(&self.label, &send, &send_counts, &receive_counts)?))
    }

    /// Starts to send gradients back to the rank that is `turn` before this one.
    fn start_return(&self, turn: usize, grads: &[Keys]) -> ClosureResult<PendingTensor> {
        let Place { index, size } = self.place;
        let group = self.group.as_ref().expect("there are other ranks");
        let (from, to) = ((index + size - turn) % size, (index + turn) % size);
        let first = &grads[0][0];
        let pieces = grads.iter().flatten().map(|grad| grad.f_reshape(-1)).collect::<Result<Vec<_>, _>>()?;
        let send = flat(&pieces, first)?;
        let [mut send_counts, mut receive_counts] = [vec![0; size], vec![0; size]];
        send_counts[from] = send.numel();
        receive_counts[to] = self.elements(index, to, first);
        group.start_all_to_all(&self.label, &send, &send_counts, &receive_counts)
    }

    /// The number of elements of keys and values that a rank sends to another. `like` has their heads and head dim.
    fn elements(&self, from: usize, to: usize, like: &Tensor) -> usize {
        let size = like.size();
        let tokens: usize =
            self.rows.iter().map(|rows| rows.sequences.len() * rows.split.sent_positions(from, to, self.window)).sum();
        2 * tokens * (size[1] * size[3]) as usize
    }

    /// Whether no rank sends anything in a turn.
    fn is_silent(&self, turn: usize) -> bool {
        let size = self.place.size;
        let is_empty = |rows: &AlikeSequences, from: usize| {
            rows.split.sent_positions(from, (from + turn) % size, self.window) == 0
        };
        (0..size).all(|from| self.rows.iter().all(|rows| is_empty(rows, from)))
    }

    /// Keys and values that have arrived from a rank.
    fn unpack(&self, arrived: Tensor, from: usize, like: &Tensor) -> ClosureResult<Vec<Keys>> {
        let (heads, head_dim) = (like.size()[1], like.size()[3]);
        let mut unpack = Unpack { from: arrived, at: 0 };
        let of_rows = |rows: &AlikeSequences| {
            let seen = rows.split.sent_positions(from, self.place.index, self.window) as i64;
            let shape = [rows.sequences.len() as i64, heads, seen, head_dim];
            Ok([unpack.next(&shape)?, unpack.next(&shape)?])
        };
        self.rows.iter().map(of_rows).collect()
    }

    /// This rank's queries in pieces, each of which sees a contiguous range of any segment of keys.
    fn pieces(&self) -> Vec<Piece> {
        let mut pieces = Vec::new();
        for (rows, of_rows) in self.rows.iter().enumerate() {
            let mut row = 0;
            for segment in of_rows.split.part(self.place.index) {
                // A long segment sees far more keys than one window, and would need a mask for all of them.
                let step = match self.window {
                    Some(window) if window < segment.in_document().end => window.clamp(SHORTEST_PIECE, LONGEST_PIECE),
                    _ => segment.len,
                };
                for at in (0..segment.len).step_by(step.max(1)) {
                    let len = step.min(segment.len - at);
                    let cut = Segment { start: segment.start + at, len, offset: segment.offset + at, ..*segment };
                    pieces.push(Piece { rows, row: row + at, segment: cut });
                }
                row += segment.len;
            }
        }
        pieces
    }

    /// What each piece of queries sees of the keys of a rank. Those of another rank are only what it has sent. Of this rank's own blocks,
    /// those that all queries of a piece have come first.
    fn blocks(&self, pieces: &[Piece], from: usize) -> Vec<Block> {
        let sent_of = |rows: &AlikeSequences| -> Vec<Range<usize>> {
            match from == self.place.index {
                true => rows.split.part(from).iter().map(|segment| 0..segment.len).collect(),
                false => rows.split.visible_keys(from, self.place.index, self.window),
            }
        };
        let sent: Vec<Vec<Range<usize>>> = self.rows.iter().map(sent_of).collect();
        let mut blocks = Vec::new();
        for (index, piece) in pieces.iter().enumerate() {
            let segments = self.rows[piece.rows].split.part(from);
            let mut row = 0;
            for (segment, sent) in segments.iter().zip(&sent[piece.rows]) {
                let seen = piece.segment.sees(segment, self.window);
                if !seen.is_empty() {
                    let keys = row + seen.start - sent.start..row + seen.end - sent.start;
                    let seen = segment.offset + seen.start..segment.offset + seen.end;
                    let last = self.window.map_or(usize::MAX, |window| seen.end + window - 1 - piece.segment.offset);
                    let queries = 0..piece.segment.len.min(last);
                    let mask =
                        self.mask(piece.segment.offset + queries.start..piece.segment.offset + queries.end, seen);
                    blocks.push(Block { piece: index, queries, keys, mask });
                }
                row += sent.len();
            }
        }
        blocks.sort_by_key(|block| block.queries.len() < pieces[block.piece].segment.len);
        blocks
    }

    /// The mask between queries and keys at these positions of one document.
    fn mask(&self, queries: Range<usize>, keys: Range<usize>) -> Mask {
        let is_within_window = self.window.is_none_or(|window| queries.end - 1 - keys.start < window);
        if is_within_window && keys.end <= queries.start + 1 {
            return Mask::None;
        }
        if is_within_window && keys == queries {
            return Mask::Causal;
        }
        let ahead = queries.start as i64 - keys.start as i64;
        let window = self.window.map_or(queries.end.max(keys.end), |window| window) as i64;
        Mask::Band { ahead, window }
    }

    /// The queries, keys and values of a block, and its mask.
    fn operands(&self, query: &Tensor, keys: &[Keys], piece: &Piece, block: &Block) -> Result<Operands, TchError> {
        let [key, value] = &keys[piece.rows];
        let (key, value) = (narrow(key, 2, &block.keys)?, narrow(value, 2, &block.keys)?);
        let query = self.cut(query, piece, block)?;
        let (mask, is_causal) = block.mask.tensor(&query, &key)?;
        Ok(Operands { query, key, value, mask, is_causal })
    }

    /// The queries of a piece that are in a block.
    fn cut(&self, tensor: &Tensor, piece: &Piece, block: &Block) -> Result<Tensor, TchError> {
        narrow(&self.cut_whole(tensor, piece)?, 2, &block.queries)
    }

    /// The queries of a piece.
    fn cut_whole(&self, tensor: &Tensor, piece: &Piece) -> Result<Tensor, TchError> {
        let rows = narrow(tensor, 0, &self.rows[piece.rows].sequences)?;
        narrow(&rows, 2, &(piece.row..piece.row + piece.segment.len))
    }
}

/// The lengths of pieces of queries that see a window: short ones are slow, and long ones need large masks.
const SHORTEST_PIECE: usize = 128;
const LONGEST_PIECE: usize = 512;

impl Heads {
    /// The heads with which a backward pass computes in a visit, of these numbers of query and key heads.
    fn new(visit: Visit, [queries, keys]: [i64; 2], key_of_query: Option<&Vec<i64>>) -> Self {
        let half = (queries + 1) / 2;
        let range = match visit {
            Visit::OwnFirst => 0..half,
            Visit::Other => return Heads { queries: 0..queries as usize, key_of_query: key_of_query.cloned() },
            Visit::OwnLast => half..queries,
        };
        let key_head = |query: i64| key_of_query.map_or(query / (queries / keys), |heads| heads[query as usize]);
        Heads { queries: range.start as usize..range.end as usize, key_of_query: Some(range.map(key_head).collect()) }
    }

    /// These heads of a tensor that has all of them.
    fn of(&self, tensor: &Tensor) -> Result<Tensor, TchError> {
        narrow(tensor, 1, &self.queries)
    }
}

impl AlikeSequences {
    /// The part of tensors that belongs to these sequences.
    fn of(&self, tensors: &[impl std::borrow::Borrow<Tensor>; 2]) -> ClosureResult<Keys> {
        let [key, value] = tensors;
        Ok([narrow(key.borrow(), 0, &self.sequences)?, narrow(value.borrow(), 0, &self.sequences)?])
    }

    /// The rows of one rank that another one sees.
    fn visible(&self, from: usize, to: usize, window: Option<usize>) -> Vec<Range<usize>> {
        let mut row = 0;
        let segments = self.split.part(from).iter().zip(self.split.visible_keys(from, to, window));
        segments
            .map(|(segment, seen)| {
                row += segment.len;
                row - segment.len + seen.start..row - segment.len + seen.end
            })
            .collect()
    }
}

impl Mask {
    /// The mask as a tensor, and whether the kernel has a flag for it.
    fn tensor(&self, query: &Tensor, key: &Tensor) -> Result<(Option<Tensor>, bool), TchError> {
        let Mask::Band { ahead, window } = *self else { return Ok((None, matches!(self, Mask::Causal))) };
        let size = [query.size()[2], key.size()[2]];
        let all = Tensor::f_ones(size, (Kind::Bool, query.device()))?;
        let hidden = all.f_tril(ahead)?.f_logical_and(&all.f_triu(ahead + 1 - window)?)?.f_logical_not()?;
        let mask = Tensor::f_zeros(size, (query.kind(), query.device()))?.f_masked_fill(&hidden, f64::NEG_INFINITY)?;
        Ok((Some(mask), false))
    }
}

/// Combines attention to two sets of keys: outputs, and the logarithms of the sums of exponentials. The second set is seen by `queries`
/// only. Of the sums only the ratio matters: they may be too large for any float.
fn combine(
    (output, logsumexp): &mut (Tensor, Tensor),
    queries: &Range<usize>,
    (more, more_logsumexp): (Tensor, Tensor),
) -> Result<(), TchError> {
    let wide = wide_kind(output.kind());
    *output = output.f_to_kind(wide)?;
    let (mut output, mut logsumexp) = (narrow(output, 2, queries)?, narrow(logsumexp, 2, queries)?);
    let share = more_logsumexp.f_sub(&logsumexp)?.f_sigmoid()?.f_unsqueeze(-1)?;
    let _ = output.f_lerp_tensor_(&more.f_to_kind(wide)?, &share)?;
    let sum = logsumexp.f_logaddexp(&more_logsumexp)?;
    logsumexp.f_copy_(&sum)
}

/// Keys and values with as many heads as the queries.
fn expand(keys: &Keys, times: i64, key_of_query: &Option<Vec<i64>>) -> ClosureResult<Keys> {
    let expand = |keys: &Tensor| match key_of_query {
        Some(index) => keys.f_index_select(1, &Tensor::f_from_slice(index)?.f_to_device(keys.device())?),
        None if times == 1 => Ok(keys.shallow_clone()),
        None => keys.f_repeat_interleave_self_int(times, 1, None),
    };
    Ok([expand(&keys[0])?, expand(&keys[1])?])
}

/// Adds the gradient of expanded keys to that of the keys.
fn add_shared(whole: &Tensor, part: &Tensor, key_of_query: &Option<Vec<i64>>) -> Result<(), TchError> {
    let (mut whole, part) = (whole.shallow_clone(), part.f_to_kind(whole.kind())?);
    let size = whole.size();
    let _ = match key_of_query {
        Some(index) => whole.f_index_add_(1, &Tensor::f_from_slice(index)?.f_to_device(part.device())?, &part)?,
        None => {
            let shared = part.f_view([size[0], size[1], -1, size[2], size[3]])?;
            whole.f_add_(&shared.f_sum_dim_intlist(2i64, false, None)?)?
        }
    };
    Ok(())
}

/// Tensors one after the other, in memory of their own.
fn flat(pieces: &[Tensor], like: &Tensor) -> Result<Tensor, TchError> {
    match pieces.is_empty() {
        true => Tensor::f_empty([0], (like.kind(), like.device())),
        false => Tensor::f_cat(pieces, 0),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use super::*;

    /// Sums of exponentials that are too large for any float combine nevertheless: only their ratio matters.
    #[test]
    fn large_logits_do_not_overflow() {
        let of = |value: f64| Tensor::full([1, 1, 2, 3], value, (Kind::Double, shardwise_torch::tch::Device::Cpu));
        let sums = |value: f64| Tensor::full([1, 1, 2], value, (Kind::Double, shardwise_torch::tch::Device::Cpu));
        let mut part = (of(1.), sums(5000.));
        combine(&mut part, &(1..2), (of(3.).narrow(2, 0, 1), sums(5000.).narrow(2, 0, 1))).unwrap();
        // The first query does not see the second set of keys; for the other, both weigh the same.
        assert_eq!(Vec::<f64>::try_from(part.0.view(-1)).unwrap(), [1., 1., 1., 2., 2., 2.]);
        let found = Vec::<f64>::try_from(part.1.view(-1)).unwrap();
        assert!(found[0] == 5000. && (found[1] - 5000. - 2f64.ln()).abs() < 1e-9, "{found:?}");
    }
}
