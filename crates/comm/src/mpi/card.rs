//! What a rank says of a collective before it takes part, in checked mode, and who is told what when the cards differ.
//!
//! A card has what all ranks of a group must agree about, in as many bytes on every rank. It is not the call: a long label is
//! cut, and of an all-to-all with counts, whose lengths differ from rank to rank, it has no length. Two cards are the same
//! where their bytes are.

use std::collections::BTreeMap;

use shardwise_plan::{Dtype, RankSet};

use crate::error::Side;
use crate::transport::{Cuts, Work};
use crate::{Call, Reduce, Verb};

pub(super) const CARD_BYTES: usize = 64;
const LABEL_BYTES_MAX: usize = 40;

/// Where there is no length or no root.
const NO_LENGTH: u64 = u64::MAX;
const NO_ROOT: u32 = u32::MAX;

const REDUCTIONS: [Reduce; 3] = [Reduce::Sum, Reduce::Mean, Reduce::Max];

/// The bytes of a card: verb, type, reduction (from 1; 0 is none), length of the whole label (255 and more are 255), root
/// (4 bytes), number (8), elements (8), and the label's beginning, filled up with zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(transparent)]
pub(super) struct Card([u8; CARD_BYTES]);

impl Card {
    pub(super) const EMPTY: Card = Card([0; CARD_BYTES]);

    pub(super) fn new(call: &Call, work: &Work) -> Self {
        let reduce = match work {
            Work::ReduceScatter { reduce, .. } | Work::AllReduce { reduce, .. } => Some(*reduce),
            _ => None,
        };
        let root = match work {
            Work::Broadcast { root, .. } => u32::try_from(*root).expect("MPI's ranks have 31 bits"),
            _ => NO_ROOT,
        };
        let elements = match work {
            Work::AllToAll { sends: Cuts::Listed(_), .. } => NO_LENGTH,
            _ => call.elements as u64,
        };
        let place_of = |found: Option<usize>| found.map_or(0, |index| index as u8);
        let label = &call.label[..call.label.floor_char_boundary(LABEL_BYTES_MAX)];
        let mut bytes = [0; CARD_BYTES];
        bytes[0] = place_of(Verb::ALL.iter().position(|&verb| verb == call.verb));
        bytes[1] = place_of(Dtype::ALL.iter().position(|&dtype| dtype == call.dtype));
        bytes[2] = place_of(REDUCTIONS.iter().position(|&how| Some(how) == reduce).map(|index| index + 1));
        bytes[3] = u8::try_from(call.label.len()).unwrap_or(u8::MAX);
        bytes[4..8].copy_from_slice(&root.to_le_bytes());
        bytes[8..16].copy_from_slice(&call.number.to_le_bytes());
        bytes[16..24].copy_from_slice(&elements.to_le_bytes());
        bytes[24..24 + label.len()].copy_from_slice(label.as_bytes());
        Card(bytes)
    }

    fn word(&self, at: usize) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|index| self.0[at + index]))
    }

    /// The call in words, as in `reduce-scatter #412 of 'block.7' (3145728 × f32)`.
    fn call(&self) -> (String, String) {
        let verb = Verb::ALL.get(usize::from(self.0[0])).map_or("unknown verb".to_string(), Verb::to_string);
        let dtype = Dtype::ALL.get(usize::from(self.0[1])).map_or("unknown type".to_string(), Dtype::to_string);
        let label = &self.0[24..];
        let label = &label[..label.iter().position(|&byte| byte == 0).unwrap_or(label.len())];
        let cut = if usize::from(self.0[3]) > label.len() { "…" } else { "" };
        let what = format!("{verb} #{} of '{}{cut}'", self.word(8), String::from_utf8_lossy(label));
        match self.word(16) {
            NO_LENGTH => (what, dtype),
            elements => (what, format!("{elements} × {dtype}")),
        }
    }

    /// What is seldom worth saying: how a reduction reduces, and who broadcasts.
    fn manner(&self, ranks: RankSet) -> Option<String> {
        let root = u32::from_le_bytes(std::array::from_fn(|index| self.0[4 + index]));
        let reduce = usize::from(self.0[2]).checked_sub(1).and_then(|index| REDUCTIONS.get(index));
        match (reduce, root) {
            (Some(Reduce::Sum), _) => Some("sum".to_string()),
            (Some(Reduce::Mean), _) => Some("mean".to_string()),
            (Some(Reduce::Max), _) => Some("max".to_string()),
            (None, NO_ROOT) => None,
            (None, root) if (root as usize) < ranks.len() => {
                Some(format!("from rank {}", ranks.rank_at(root as usize)))
            }
            (None, root) => Some(format!("from place {root}")),
        }
    }
}

/// Who came with what, the fewest first. There is one card per rank of the group, in order.
pub(super) fn sides(cards: &[Card], ranks: RankSet, group: &str) -> Vec<Side> {
    let mut sides: BTreeMap<Card, Vec<usize>> = BTreeMap::new();
    for (card, rank) in cards.iter().zip(ranks.iter()) {
        sides.entry(*card).or_default().push(rank);
    }
    let mut sides: Vec<(Card, Vec<usize>)> = sides.into_iter().collect();
    sides.sort_by_key(|(_, ranks)| (ranks.len(), ranks[0]));
    // How a reduction reduces is said where sides would read alike without.
    let alike = sides.iter().enumerate().any(|(index, (card, _))| {
        let words = card.call();
        sides[..index].iter().any(|(other, _)| other.call() == words)
    });
    let count = sides.len();
    let told = sides.into_iter().enumerate().map(|(index, (card, came))| {
        let (what, size) = card.call();
        let manner = card.manner(ranks).filter(|_| alike);
        // The group is said once, at the end.
        let group = (index + 1 == count).then(|| group.to_string());
        let inside = [Some(size), manner, group].into_iter().flatten().collect::<Vec<_>>().join(", ");
        Side { ranks: came, came_with: format!("{what} ({inside})") }
    });
    told.collect()
}

#[cfg(test)]
mod tests {
    use shardwise_plan::Partition;

    use super::*;
    use crate::Error;

    fn call(verb: Verb, label: &str, number: u64, elements: usize) -> Call {
        Call { verb, label: label.into(), group: "shard 0-6/2".into(), number, elements, dtype: Dtype::F32 }
    }

    fn reduction(elements: usize, reduce: Reduce) -> Work {
        Work::AllReduce { buffer: std::ptr::null_mut(), partition: Partition::new(elements, 4), reduce }
    }

    fn broadcast(root: usize) -> Work {
        Work::Broadcast { buffer: std::ptr::null_mut(), len: 8, root }
    }

    /// What ranks 0, 2, 4 and 6 are told.
    fn told(cards: [Card; 4]) -> String {
        let ranks = shardwise_plan::Mesh::new(&[(shardwise_plan::Axis::Shard, 4), (shardwise_plan::Axis::Tensor, 2)])
            .expect("a good mesh")
            .group(0, &[shardwise_plan::Axis::Shard]);
        let sides = sides(&cards, ranks, "shard 0-6/2");
        Error::Mismatch { call: Box::new(call(Verb::Barrier, "", 1, 0)), sides }.to_string()
    }

    #[test]
    fn a_minority_stands_against_the_majority() {
        let most = Card::new(&call(Verb::AllReduce, "norm", 7, 8), &reduction(8, Reduce::Sum));
        let other = Card::new(&call(Verb::Barrier, "end", 7, 0), &Work::Barrier);
        assert_eq!(
            told([most, most, other, most]),
            "rank 4 came with barrier #7 of 'end' (0 × f32) where ranks 0, 2, 6 came with all-reduce #7 of 'norm' \
             (8 × f32, shard 0-6/2): nothing was sent"
        );
    }

    #[test]
    fn without_a_majority_all_sides_are_named() {
        let one = Card::new(&call(Verb::AllReduce, "norm", 7, 8), &reduction(8, Reduce::Sum));
        let two = Card::new(&call(Verb::AllReduce, "norm", 7, 8), &reduction(8, Reduce::Max));
        assert_eq!(
            told([one, one, two, two]),
            "ranks 0, 2 came with all-reduce #7 of 'norm' (8 × f32, sum), ranks 4, 6 with all-reduce #7 of 'norm' \
             (8 × f32, max, shard 0-6/2): nothing was sent"
        );
        let [a, b, c, d] = [0, 1, 2, 3].map(|root| Card::new(&call(Verb::Broadcast, "unit", 7, 8), &broadcast(root)));
        let text = told([a, b, c, d]);
        assert!(
            text.starts_with("rank 0 came with broadcast #7 of 'unit' (8 × f32, from rank 0), rank 2 with"),
            "{text}"
        );
        assert!(
            text.ends_with("rank 6 with broadcast #7 of 'unit' (8 × f32, from rank 6, shard 0-6/2): nothing was sent")
        );
    }

    #[test]
    fn a_long_label_is_cut_between_characters_and_its_length_still_counts() {
        let label = "ä".repeat(30);
        let card = |label: &str| Card::new(&call(Verb::Barrier, label, 1, 0), &Work::Barrier);
        let text = told([card(&label), card(&label), card(&label), card(&format!("{label}!"))]);
        assert!(text.contains(&format!("'{}…'", "ä".repeat(20))), "{text}");
    }

    #[test]
    fn an_all_to_all_with_counts_is_compared_without_its_length() {
        let card = |elements| {
            let (send, receive) = (std::ptr::null(), std::ptr::null_mut());
            let (sends, receives) = (Cuts::listed(&[elements]), Cuts::listed(&[elements]));
            Card::new(&call(Verb::AllToAll, "experts", 1, elements), &Work::AllToAll { send, sends, receive, receives })
        };
        assert!(card(3) == card(5));
    }
}
