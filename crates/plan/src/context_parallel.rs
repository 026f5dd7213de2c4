//! Context parallelism as arithmetic: which positions of a sequence each rank has, and which keys travel between ranks.
//!
//! Causal attention is uneven: the last positions attend to all others. So a document is cut into two pieces per rank, and the
//! rank with an early piece has a late one, too (Megatron-LM: load-balanced chunks; "zigzag"):
//!
//! ```text
//! position    0 ─────────────────────────────────────────▶
//! rank           0     1     2     3     3     2     1     0
//! ```
//!
//! Documents that are packed into one sequence do not attend to each other. Short ones stay on one rank, so that their keys do not
//! travel at all, and long ones are divided among all ranks. All ranks have the same number of positions, give or take one.

use std::ops::Range;

use crate::Partition;
use crate::mesh::Place;

/// A rank's place among those that divide a sequence. Ranks that exchange heads divide the part of one rank of the ring. The default is
/// [`ContextPlace::ALONE`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContextPlace {
    /// Among the ranks that send each other keys and values (ring attention).
    pub ring: Place,
    /// Among the ranks that exchange positions for heads (Ulysses).
    pub ulysses: Place,
}

impl ContextPlace {
    /// The place of a rank that has whole sequences.
    pub const ALONE: ContextPlace = ContextPlace { ring: Place::ALONE, ulysses: Place::ALONE };

    /// The number of ranks that divide a sequence.
    pub fn size(&self) -> usize {
        self.ring.size * self.ulysses.size
    }

    /// The number of positions that the ranks which exchange heads with this one have together, of a sequence with `positions`.
    pub fn ring_positions(&self, positions: usize) -> usize {
        ContextSplit::part_len(positions, self.ring.size, self.ring.index)
    }

    /// The positions of one of the ranks that exchange heads with this one, among those that they have together.
    pub fn rows_of(&self, ulysses_index: usize, positions: usize) -> Range<usize> {
        Partition::new(self.ring_positions(positions), self.ulysses.size).range(ulysses_index)
    }

    /// The number of positions that this rank has of a sequence with `positions`.
    pub fn own_positions(&self, positions: usize) -> usize {
        self.rows_of(self.ulysses.index, positions).len()
    }
}

/// The heads that each of `ranks` ranks attends with: its query heads, and the key heads that they need, which several ranks may.
///
/// # Panics
/// If key heads do not divide query heads.
pub fn divide_heads(queries: usize, keys: usize, ranks: usize) -> Vec<[Range<usize>; 2]> {
    assert!(queries.is_multiple_of(keys), "{queries} query heads and {keys} key heads");
    let shared_by = queries / keys;
    let of_rank = |rank| {
        let own = Partition::new(queries, ranks).range(rank);
        let needed = own.start / shared_by..own.end.div_ceil(shared_by);
        [own, needed]
    };
    (0..ranks).map(of_rank).collect()
}

/// What decides between Ulysses and ring attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextAttention {
    /// The number of query heads.
    pub query_heads: usize,
    /// The number of key heads, a divisor of that of query heads.
    pub key_heads: usize,
    /// The number of positions that a position attends to, if it is limited.
    pub window: Option<usize>,
    /// The length of a sequence.
    pub positions: usize,
    /// The size of an element of the computation.
    pub element_bytes: usize,
    /// Whether the backward pass repeats the forward pass.
    pub is_recomputed: bool,
}

/// The size of the Ulysses groups among `ranks` ranks that divide a sequence: the divisor with which ranks send the fewest bytes in a
/// training step.
///
/// With u of C ranks, an exchange moves (u − 1)/u of N/C positions: of query, key, value and output in the forward pass, and of their
/// gradients in the backward pass. A ring of C/u ranks sends the keys and values of 1/u of the heads in both passes, and their gradients
/// back, in f32 at least.
///
/// # Panics
/// If key heads do not divide query heads.
pub fn choose_ulysses(attention: &ContextAttention, ranks: usize) -> usize {
    let ContextAttention { query_heads: queries, key_heads: keys, window, positions, .. } = *attention;
    let (element, repeated) = (attention.element_bytes, usize::from(attention.is_recomputed));
    let (exchange_bytes, ring_bytes) = ((2 + repeated) * element, (2 + repeated) * element + element.max(4));
    let sent = |ulysses: usize| {
        let heads = divide_heads(queries, keys, ulysses);
        let of_key: usize = heads.iter().map(|[_, keys]| keys.len()).sum();
        let exchanged = (exchange_bytes * (2 * queries + 2 * of_key)) as f64 * positions as f64 / ranks as f64;
        let ring = ranks / ulysses;
        let split = ContextSplit::new(&[positions], ring);
        let pairs = (0..ring).flat_map(|from| (0..ring).filter(move |&to| to != from).map(move |to| (from, to)));
        let seen: usize = pairs.map(|(from, to)| split.sent_positions(from, to, window)).sum();
        let most_keys = heads.iter().map(|[_, keys]| keys.len()).max().unwrap_or(0);
        let around = (ring_bytes * 2 * most_keys) as f64 * seen as f64 / ring as f64;
        exchanged * (ulysses - 1) as f64 / ulysses as f64 + around
    };
    let divisors = (1..=ranks.min(queries)).filter(|&ulysses| ranks.is_multiple_of(ulysses));
    divisors.min_by(|&a, &b| sent(a).total_cmp(&sent(b))).unwrap_or(1)
}

/// The work of a rank may be this much more than the mean before another document is divided.
const IMBALANCE: f64 = 1.05;

/// Consecutive positions of one document, on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Segment {
    /// The first position in the sequence.
    pub start: usize,
    /// The number of positions.
    pub len: usize,
    /// The number of the document in the sequence.
    pub document: usize,
    /// The position of its first token in the document.
    pub offset: usize,
}

impl Segment {
    /// Its positions in the sequence.
    pub fn positions(&self) -> Range<usize> {
        self.start..self.start + self.len
    }

    /// Its positions in the document.
    pub fn in_document(&self) -> Range<usize> {
        self.offset..self.offset + self.len
    }

    /// The positions of `keys`, counted from its first one, to which this segment attends.
    pub fn sees(&self, keys: &Segment, window: Option<usize>) -> Range<usize> {
        if self.document != keys.document || self.len == 0 {
            return 0..0;
        }
        let (queries, keys) = (self.in_document(), keys.in_document());
        let oldest = window.map_or(0, |window| (queries.start + 1).saturating_sub(window));
        let (start, end) = (keys.start.max(oldest), keys.end.min(queries.end));
        match start < end {
            true => start - keys.start..end - keys.start,
            false => 0..0,
        }
    }

    /// The number of pairs of a query of this segment and a key of another one.
    fn pairs(&self, keys: &Segment, window: Option<usize>) -> u64 {
        if self.document != keys.document {
            return 0;
        }
        let keys = keys.in_document();
        let seen = |query: usize| {
            let oldest = window.map_or(0, |window| (query + 1).saturating_sub(window));
            keys.end.min(query + 1).saturating_sub(keys.start.max(oldest)) as u64
        };
        self.in_document().map(seen).sum()
    }

    /// The number of pairs of a query of this segment and a key of its document.
    fn work(&self, window: Option<usize>) -> u64 {
        let up_to = |positions: usize| {
            let window = window.map_or(positions, |window| window.min(positions)) as u64;
            let positions = positions as u64;
            window * (window + 1) / 2 + (positions - window) * window
        };
        up_to(self.offset + self.len) - up_to(self.offset)
    }
}

/// A sequence, divided among ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContextSplit {
    parts: Vec<Vec<Segment>>,
}

impl ContextSplit {
    /// Divides a sequence of documents with these lengths among ranks. As few documents as possible are divided, the longest first, until
    /// the work is balanced.
    ///
    /// # Panics
    /// If there are no ranks.
    pub fn new(documents: &[usize], ranks: usize) -> Self {
        let counts = std::iter::successors(Some(0), |divided: &usize| Some((2 * divided).max(1)));
        let counts = counts.take_while(|&divided| divided < documents.len()).chain([documents.len()]);
        let mut best: Option<(f64, ContextSplit)> = None;
        for split in counts.map(|divided| ContextSplit::with_divided(documents, ranks, divided)) {
            let imbalance = split.imbalance();
            if best.as_ref().is_none_or(|(least, _)| imbalance < *least) {
                best = Some((imbalance, split));
            }
            if imbalance <= IMBALANCE {
                break;
            }
        }
        best.expect("there is a last split").1
    }

    /// Divides the longest `divided` documents among all ranks, and keeps as many of the others whole as possible.
    fn with_divided(documents: &[usize], ranks: usize, divided: usize) -> Self {
        let mut starts = Vec::with_capacity(documents.len());
        let mut positions = 0;
        for len in documents {
            starts.push(positions);
            positions += len;
        }
        let mut free: Vec<usize> = (0..ranks).map(|rank| ContextSplit::part_len(positions, ranks, rank)).collect();
        let (mut work, mut parts) = (vec![0; ranks], vec![Vec::new(); ranks]);
        // The longest first, so that what is left to fill the gaps is short.
        let mut order: Vec<usize> = (0..documents.len()).filter(|&document| documents[document] > 0).collect();
        order.sort_by_key(|&document| std::cmp::Reverse(documents[document]));
        for (index, document) in order.into_iter().enumerate() {
            let len = documents[document];
            let roomy = (0..ranks).filter(|&rank| index >= divided && free[rank] >= len).min_by_key(|&rank| work[rank]);
            let pieces = match roomy {
                Some(rank) => vec![(rank, 0..len)],
                None => divide_among_all(len, &free),
            };
            for (rank, range) in pieces {
                let start = starts[document] + range.start;
                let segment = Segment { start, len: range.len(), document, offset: range.start };
                free[rank] -= segment.len;
                work[rank] += segment.work(None);
                parts[rank].push(segment);
            }
        }
        parts.iter_mut().for_each(|part| *part = joined(std::mem::take(part)));
        ContextSplit { parts }
    }

    /// The most work of a rank, divided by the mean.
    fn imbalance(&self) -> f64 {
        let work: Vec<f64> = (0..self.ranks()).map(|rank| self.work(rank, None) as f64).collect();
        let mean = work.iter().sum::<f64>() / work.len() as f64;
        work.iter().fold(1., |most, work| if mean > 0. { f64::max(most, work / mean) } else { most })
    }

    /// The number of positions that a rank has, of a sequence with `positions`.
    pub fn part_len(positions: usize, ranks: usize, rank: usize) -> usize {
        Partition::new(positions, ranks).part_len(rank)
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.parts.len()
    }

    /// The segments of a rank, in order.
    pub fn part(&self, rank: usize) -> &[Segment] {
        &self.parts[rank]
    }

    /// The work of a rank: the number of pairs of its queries and their keys.
    pub fn work(&self, rank: usize, window: Option<usize>) -> u64 {
        self.parts[rank].iter().map(|segment| segment.work(window)).sum()
    }

    /// The work of rank `to` with the keys of rank `from`.
    pub fn work_with(&self, from: usize, to: usize, window: Option<usize>) -> u64 {
        let with = |queries: &Segment| -> u64 { self.parts[from].iter().map(|keys| queries.pairs(keys, window)).sum() };
        self.parts[to].iter().map(with).sum()
    }

    /// The number of positions whose keys rank `from` sends to rank `to`.
    pub fn sent_positions(&self, from: usize, to: usize, window: Option<usize>) -> usize {
        self.visible_keys(from, to, window).iter().map(Range::len).sum()
    }

    /// The keys of rank `from` that queries of rank `to` attend to: for each segment of `from` one range, which may be empty, of the
    /// positions counted from the segment's first one. It covers everything that is visible, and with a window perhaps a gap.
    pub fn visible_keys(&self, from: usize, to: usize, window: Option<usize>) -> Vec<Range<usize>> {
        let cover = |keys: &Segment| {
            let seen = self.parts[to].iter().map(|queries| queries.sees(keys, window)).filter(|seen| !seen.is_empty());
            seen.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0)
        };
        self.parts[from].iter().map(cover).collect()
    }
}

/// Divides a document of `len` positions among the ranks with free positions, equally if they have room. Each rank has an early and a
/// late piece.
fn divide_among_all(len: usize, free: &[usize]) -> Vec<(usize, Range<usize>)> {
    let counts = fill_equally(len, free);
    let early = |rank: usize| (rank, counts[rank].div_ceil(2));
    let late = |rank: usize| (rank, counts[rank] / 2);
    let ranks = 0..free.len();
    let mut at = 0;
    let pieces = ranks.clone().map(early).chain(ranks.rev().map(late)).map(|(rank, len)| {
        at += len;
        (rank, at - len..at)
    });
    pieces.filter(|(_, range)| !range.is_empty()).collect()
}

/// Divides `len` positions among ranks as equally as the free positions of each allow.
fn fill_equally(len: usize, free: &[usize]) -> Vec<usize> {
    let mut counts = vec![0; free.len()];
    let mut left = len;
    while left > 0 {
        let open: Vec<usize> = (0..free.len()).filter(|&rank| counts[rank] < free[rank]).collect();
        assert!(!open.is_empty(), "{len} positions do not fit into {free:?}");
        for (index, &rank) in open.iter().enumerate() {
            let more = Partition::new(left, open.len()).part_len(index).min(free[rank] - counts[rank]);
            counts[rank] += more;
        }
        left = len - counts.iter().sum::<usize>();
    }
    counts
}

/// Sorts segments, and joins those that continue each other.
fn joined(mut segments: Vec<Segment>) -> Vec<Segment> {
    segments.sort();
    let mut joined: Vec<Segment> = Vec::with_capacity(segments.len());
    for segment in segments {
        match joined
            .last_mut()
            .filter(|last| last.document == segment.document && last.positions().end == segment.start)
        {
            Some(last) => last.len += segment.len,
            None => joined.push(segment),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pairs of a query and a key position of the sequence that attention computes, found one by one.
    fn pairs(documents: &[usize], window: Option<usize>) -> Vec<(usize, usize)> {
        let mut start = 0;
        let mut pairs = Vec::new();
        for len in documents {
            for query in 0..*len {
                let oldest = window.map_or(0, |window| (query + 1).saturating_sub(window));
                pairs.extend((oldest..=query).map(|key| (start + query, start + key)));
            }
            start += len;
        }
        pairs
    }

    fn settings() -> impl Iterator<Item = (Vec<usize>, usize, Option<usize>)> {
        let documents: [&[usize]; 8] =
            [&[1], &[7], &[64], &[0, 5, 0], &[30, 3, 4, 5, 1, 1], &[1; 9], &[40, 39, 2, 1, 1], &[3, 50, 3, 11, 9]];
        let windows = [None, Some(1), Some(4), Some(100)];
        documents.into_iter().flat_map(move |documents| {
            (1..=5).flat_map(move |ranks| windows.map(|window| (documents.to_vec(), ranks, window)))
        })
    }

    #[test]
    fn every_position_is_on_one_rank_and_ranks_have_equally_many() {
        for (documents, ranks, _) in settings() {
            let split = ContextSplit::new(&documents, ranks);
            let positions: usize = documents.iter().sum();
            let mut all: Vec<usize> =
                (0..ranks).flat_map(|rank| split.part(rank).iter().flat_map(Segment::positions)).collect();
            all.sort_unstable();
            assert_eq!(all, (0..positions).collect::<Vec<_>>(), "{documents:?} {ranks}");
            for rank in 0..ranks {
                let own: usize = split.part(rank).iter().map(|segment| segment.len).sum();
                assert_eq!(own, ContextSplit::part_len(positions, ranks, rank), "{documents:?} {ranks}");
                assert!(split.part(rank).is_sorted() && split.part(rank).iter().all(|segment| segment.len > 0));
            }
        }
    }

    #[test]
    fn what_is_visible_is_what_attention_reads() {
        for (documents, ranks, window) in settings() {
            let split = ContextSplit::new(&documents, ranks);
            let rank_of = |position: usize| {
                (0..ranks).find(|&rank| split.part(rank).iter().any(|it| it.positions().contains(&position)))
            };
            let pairs = pairs(&documents, window);
            for to in 0..ranks {
                let own = pairs.iter().filter(|(query, _)| rank_of(*query) == Some(to));
                assert_eq!(split.work(to, window), own.clone().count() as u64, "{documents:?} {ranks} {window:?}");
                let with: u64 = (0..ranks).map(|from| split.work_with(from, to, window)).sum();
                assert_eq!(with, split.work(to, window), "{documents:?} {ranks} {window:?}");
                for from in 0..ranks {
                    let mut needed: Vec<usize> =
                        own.clone().map(|(_, key)| *key).filter(|key| rank_of(*key) == Some(from)).collect();
                    needed.sort_unstable();
                    needed.dedup();
                    let sent: Vec<usize> = split
                        .part(from)
                        .iter()
                        .zip(split.visible_keys(from, to, window))
                        .flat_map(|(segment, range)| range.map(|at| segment.start + at))
                        .collect();
                    assert!(needed.iter().all(|key| sent.contains(key)), "{documents:?} {ranks} {window:?}: {sent:?}");
                    if window.is_none() {
                        assert_eq!(sent, needed, "{documents:?} {ranks}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_work_is_balanced() {
        let spread = |documents: &[usize], ranks: usize, window: Option<usize>| {
            let split = ContextSplit::new(documents, ranks);
            let work: Vec<u64> = (0..ranks).map(|rank| split.work(rank, window)).collect();
            let (least, most) = (work.iter().min().copied().unwrap_or(0), work.iter().max().copied().unwrap_or(0));
            most as f64 / least as f64 - 1.
        };
        for ranks in 1..=8 {
            assert!(spread(&[4099], ranks, None) < 0.01, "{ranks}");
            assert!(spread(&[40_999], ranks, Some(100)) < 0.05, "{ranks}");
            // From one long document to many short ones.
            for documents in
                [&[2000, 900, 500, 300, 200, 100, 50, 30, 10, 6][..], &[64; 64], &[1024; 4], &[3000, 8, 1000, 88]]
            {
                let found = spread(documents, ranks, None);
                assert!(found < 0.1, "{documents:?} on {ranks} ranks: {found}");
            }
        }
    }

    #[test]
    fn what_sends_the_fewest_bytes_is_chosen() {
        let choose = |query_heads, key_heads, window, element_bytes, ranks| {
            let attention = ContextAttention {
                query_heads,
                key_heads,
                window,
                positions: 8192,
                element_bytes,
                is_recomputed: false,
            };
            choose_ulysses(&attention, ranks)
        };
        // Ulysses sends every query, and a ring only keys: the fewer they are, the better.
        assert_eq!(choose(32, 32, None, 4, 4), 4);
        assert_eq!(choose(32, 8, None, 4, 4), 1);
        assert_eq!(choose(32, 1, None, 2, 4), 1);
        // In 16 bits, the ring's gradients still have 32.
        assert_eq!(choose(32, 8, None, 2, 4), 4);
        // A ring sends hardly more than a window, and there cannot be more ranks than heads.
        assert_eq!(choose(32, 32, Some(64), 4, 4), 1);
        assert_eq!(choose(2, 2, None, 4, 8), 2);
    }

    #[test]
    fn ranks_that_share_no_document_exchange_nothing() {
        let split = ContextSplit::new(&[8; 8], 4);
        for from in 0..4 {
            assert_eq!(split.part(from).len(), 2, "two whole documents");
            for to in (0..4).filter(|&to| to != from) {
                assert!(split.visible_keys(from, to, None).iter().all(Range::is_empty));
            }
        }
    }
}
