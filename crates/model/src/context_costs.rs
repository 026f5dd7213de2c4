//! The collectives of attention between ranks that divide sequences.
//!
//! The number of elements that a rank sends in a layer, for a sequence of N positions that C ranks divide. A query has h elements (all of the
//! rank's heads together), and a key h_kv:
//!
//! ```text
//! Ulysses   forward    (C − 1)/C · (2h + 2h_kv) · N/C    query, key and value to where their heads are, and the output back
//!           backward   the same, for gradients
//! ring      forward    2(C − 1)/C · h_kv · N             keys and values to all other ranks, but only what they see
//!           backward   the same again, and as many gradients of keys and values back, in f32 at least
//! ```
//!
//! Each rank of a ring has an early and a late part of the sequence. It sends both parts to lower ranks, but only the early one to higher
//! ranks, whose queries see nothing else, so a ring sends three quarters of the above on average. A sliding window reduces this further.
//! Ulysses sends more if there are fewer key heads than ranks, because several ranks then need the same one. The counts below are exact if
//! each sequence is one document.

use shardwise_plan::program::{CollectiveKind, GroupKind, InnerCollective, InnerCollectives, UnevenBytes};
use shardwise_plan::{ContextSplit, divide_heads};

use crate::PassShape;
use crate::pass::AttentionShape;

impl PassShape {
    /// The collectives of attention, which has this share of the pass's computation.
    pub(crate) fn collectives_of_attention(&self, attention: &AttentionShape, share: f64) -> InnerCollectives {
        if self.context.size() == 1 {
            return InnerCollectives::default();
        }
        let to_heads = |tensors| self.exchange_heads(attention, tensors, Exchange::ToHeads);
        let to_positions = |tensors| self.exchange_heads(attention, tensors, Exchange::ToPositions);
        let ring = RingCosts::new(self, attention, share);
        // Three tensors are query, key and value, or their gradients; one is the output, or its gradient.
        let forward: Vec<InnerCollective> =
            to_heads(3).into_iter().chain(ring.forward()).chain(to_positions(1)).collect();
        let backward = to_heads(1).into_iter().chain(ring.backward()).chain(to_positions(3)).collect();
        InnerCollectives { recompute: forward.clone(), forward, backward }
    }

    /// The number of sequences of a micro-batch.
    fn sequences(&self) -> usize {
        self.tokens / self.context.own_positions(self.positions).max(1)
    }

    /// The exchange of positions for heads, or back, of this many tensors. The first has query heads, and the others have key heads.
    fn exchange_heads(
        &self,
        attention: &AttentionShape,
        tensors: usize,
        direction: Exchange,
    ) -> Option<InnerCollective> {
        let ranks = self.context.ulysses.size;
        let heads = divide_heads(attention.query_heads, attention.key_heads, ranks);
        let rows = |rank: usize| self.context.rows_of(rank, self.positions).len();
        let heads_of = |rank: usize| heads[rank][0].len() + (tensors - 1) * heads[rank][1].len();
        let sent = |rank: usize| {
            let to = |other: usize| match direction {
                Exchange::ToHeads => rows(rank) * heads_of(other),
                Exchange::ToPositions => rows(other) * heads_of(rank),
            };
            let moved: usize = (0..ranks).filter(|&other| other != rank).map(to).sum();
            moved * self.sequences() * attention.head_dim * self.element_bytes
        };
        let own = sent(self.context.ulysses.index);
        let most = (0..ranks).map(sent).max()?;
        (ranks > 1).then(|| all_to_all(GroupKind::Ulysses, UnevenBytes { own, most }, 0.))
    }
}

/// The memory of attention between ranks that divide sequences, in bytes.
#[derive(Clone, Copy, Default)]
pub(crate) struct ContextMemory {
    /// Kept for the backward pass, besides query, key, value and output.
    pub(crate) kept: usize,
    /// The most that the forward pass holds besides what is kept.
    pub(crate) forward: usize,
    /// The most that the backward pass holds besides what was kept.
    pub(crate) backward: usize,
}

impl PassShape {
    /// The memory of attention, if ranks divide sequences.
    pub(crate) fn context_memory(&self, attention: &AttentionShape) -> ContextMemory {
        if self.context.size() == 1 {
            return ContextMemory::default();
        }
        let AttentionShape { query_heads, key_heads, head_dim, .. } = *attention;
        let ulysses = self.context.ulysses;
        let [queries, keys] =
            divide_heads(query_heads, key_heads, ulysses.size)[ulysses.index].clone().map(|it| it.len());
        let positions = self.sequences() * self.context.ring_positions(self.positions);
        let bytes = |heads: usize, element: usize| positions * heads * head_dim * element;
        let (element, wide) = (self.element_bytes, self.element_bytes.max(4));
        let is_exchanged = ulysses.size > 1;
        // What Ulysses keeps instead of this rank's own keys, and besides the output.
        let more_keys = (2 * bytes(keys, element)).saturating_sub(2 * self.tokens * key_heads * head_dim * element);
        let exchanged = if is_exchanged { bytes(queries, element) + more_keys } else { 0 };
        let logsumexp = positions * queries * wide;
        // Keys that are used, keys that arrive, and keys that are sent.
        let travelling = if self.context.ring.size > 1 { 3 * 2 * bytes(keys, element) } else { 0 };
        let expanded = if queries > keys { 2 * bytes(queries, element) } else { 0 };
        ContextMemory {
            kept: logsumexp + exchanged,
            forward: bytes(queries, wide) + logsumexp + travelling + expanded,
            // Gradients of the query and of this rank's keys, of the keys of a turn, and of expanded ones.
            backward: bytes(queries + 4 * keys, wide) + travelling + 2 * expanded + bytes(queries, element),
        }
    }
}

#[derive(Clone, Copy)]
enum Exchange {
    ToHeads,
    ToPositions,
}

/// What the turns of ring attention send, and compute meanwhile.
struct RingCosts {
    rank: usize,
    split: ContextSplit,
    window: Option<usize>,
    /// The elements of keys and values at one position, of all sequences.
    elements: usize,
    element_bytes: usize,
    share: f64,
}

impl RingCosts {
    fn new(shape: &PassShape, attention: &AttentionShape, share: f64) -> Self {
        let ulysses = shape.context.ulysses;
        let heads = divide_heads(attention.query_heads, attention.key_heads, ulysses.size);
        RingCosts {
            rank: shape.context.ring.index,
            split: ContextSplit::new(&[shape.positions], shape.context.ring.size),
            window: attention.window,
            elements: 2 * shape.sequences() * heads[ulysses.index][1].len() * attention.head_dim,
            element_bytes: shape.element_bytes,
            share,
        }
    }

    fn forward(&self) -> Vec<InnerCollective> {
        let keys = |turn: usize| Some(all_to_all(GroupKind::Ring, self.keys(turn)?, self.computed_in(turn - 1)));
        self.turns().filter_map(keys).collect()
    }

    /// While the keys of a turn are used, those of the next arrive, and the gradients of the turn before go back. The rank's own keys are used
    /// in two halves, first and last.
    fn backward(&self) -> Vec<InnerCollective> {
        let keys = |turn: usize, overlap| self.keys(turn).map(|sent| all_to_all(GroupKind::Ring, sent, overlap));
        let mut calls: Vec<InnerCollective> = keys(1, self.computed_in(0) / 2.).into_iter().collect();
        let mut returning: Option<UnevenBytes> = None;
        for turn in self.turns() {
            let computed = self.computed_in(turn);
            let of_next = self.keys(turn + 1);
            let in_flight = [returning, of_next].iter().flatten().map(|sent| sent.most).sum::<usize>();
            let part = |sent: UnevenBytes| computed * sent.most as f64 / in_flight.max(1) as f64;
            if self.keys(turn).is_some() {
                calls.extend(returning.take().map(|sent| all_to_all(GroupKind::Ring, sent, part(sent))));
                returning = Some(self.gradients(turn));
            }
            calls.extend(of_next.map(|sent| all_to_all(GroupKind::Ring, sent, part(sent))));
        }
        calls.extend(returning.map(|sent| all_to_all(GroupKind::Ring, sent, self.computed_in(0) / 2.)));
        calls
    }

    fn turns(&self) -> std::ops::Range<usize> {
        1..self.split.ranks()
    }

    /// The keys and values that ranks send in a turn; `None` if none does.
    fn keys(&self, turn: usize) -> Option<UnevenBytes> {
        let sent = self.turns().contains(&turn).then(|| self.sent(turn, self.element_bytes, false))?;
        (sent.most > 0).then_some(sent)
    }

    /// The gradients of keys and values that ranks send back in a turn.
    fn gradients(&self, turn: usize) -> UnevenBytes {
        self.sent(turn, self.element_bytes.max(4), true)
    }

    fn sent(&self, turn: usize, element_bytes: usize, is_back: bool) -> UnevenBytes {
        let ranks = self.split.ranks();
        let of_rank = |rank: usize| {
            let (from, to) = match is_back {
                // What has come from the rank before goes back to it.
                true => ((rank + ranks - turn) % ranks, rank),
                false => (rank, (rank + turn) % ranks),
            };
            self.split.sent_positions(from, to, self.window) * self.elements * element_bytes
        };
        UnevenBytes { own: of_rank(self.rank), most: (0..ranks).map(of_rank).max().unwrap_or(0) }
    }

    /// The share of the pass's computation that uses the keys of a turn. In turn 0 they are the rank's own.
    fn computed_in(&self, turn: usize) -> f64 {
        let ranks = self.split.ranks();
        let work = self.split.work_with((self.rank + ranks - turn % ranks) % ranks, self.rank, self.window);
        self.share * work as f64 / self.split.work(self.rank, self.window).max(1) as f64
    }
}

pub(crate) fn all_to_all(group: GroupKind, sent: UnevenBytes, overlap: f64) -> InnerCollective {
    let (kind, bytes) = (CollectiveKind::AllToAll, sent.most);
    InnerCollective { group, kind, bytes, row_bytes: 1, overlap, uneven: Some(sent) }
}
