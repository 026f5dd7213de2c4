//! Call signatures, which the ranks of a group compare before each collective to detect mismatches (PyTorch:
//! `CollectiveFingerPrint`), and the report of a mismatch.
//!
//! A signature holds everything that all ranks must agree on, in a fixed number of bytes; two signatures match if their bytes
//! do. It omits the rest: long labels are truncated, and an all-to-all with counts, whose lengths differ between ranks,
//! has no length.

use std::collections::BTreeMap;

use shardwise_plan::{Dtype, RankSet};

use crate::error::CallVariant;
use crate::transport::{Operation, Splits};
use crate::{Call, ReduceOp, Verb};

pub(super) const SIGNATURE_BYTES: usize = 64;
const LABEL_BYTES_MAX: usize = 40;

/// Markers for a call without a length or without a root.
const NO_LENGTH: u64 = u64::MAX;
const NO_ROOT: u32 = u32::MAX;

const REDUCTIONS: [ReduceOp; 3] = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max];

/// The bytes of a signature: operation, dtype, reduction (from 1; 0 is none), length of the full label (at most 255), root
/// (4 bytes), number (8), elements (8), and the start of the label, padded with zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(transparent)]
pub(super) struct CallSignature([u8; SIGNATURE_BYTES]);

impl CallSignature {
    pub(super) const EMPTY: CallSignature = CallSignature([0; SIGNATURE_BYTES]);

    pub(super) fn new(call: &Call, operation: &Operation) -> Self {
        let reduce = match operation {
            Operation::ReduceScatter { reduce, .. } | Operation::AllReduce { reduce, .. } => Some(*reduce),
            _ => None,
        };
        let root = match operation {
            Operation::Broadcast { root, .. } => u32::try_from(*root).expect("MPI ranks have 31 bits"),
            _ => NO_ROOT,
        };
        let elements = match operation {
            Operation::AllToAll { sends: Splits::Ends(_), .. } => NO_LENGTH,
            _ => call.elements as u64,
        };
        let code = |index: Option<usize>| index.map_or(0, |index| index as u8);
        let label = &call.label[..call.label.floor_char_boundary(LABEL_BYTES_MAX)];
        let mut bytes = [0; SIGNATURE_BYTES];
        bytes[0] = code(Verb::ALL.iter().position(|&verb| verb == call.verb));
        bytes[1] = code(Dtype::ALL.iter().position(|&dtype| dtype == call.dtype));
        bytes[2] = code(REDUCTIONS.iter().position(|&op| Some(op) == reduce).map(|index| index + 1));
        bytes[3] = u8::try_from(call.label.len()).unwrap_or(u8::MAX);
        bytes[4..8].copy_from_slice(&root.to_le_bytes());
        bytes[8..16].copy_from_slice(&call.number.to_le_bytes());
        bytes[16..24].copy_from_slice(&elements.to_le_bytes());
        bytes[24..24 + label.len()].copy_from_slice(label.as_bytes());
        CallSignature(bytes)
    }

    fn word(&self, at: usize) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|index| self.0[at + index]))
    }

    /// The operation and the size, as in `reduce-scatter #412 of 'block.7'` and `3145728 × f32`.
    fn describe(&self) -> (String, String) {
        let verb = Verb::ALL.get(usize::from(self.0[0])).map_or("unknown operation".to_string(), Verb::to_string);
        let dtype = Dtype::ALL.get(usize::from(self.0[1])).map_or("unknown dtype".to_string(), Dtype::to_string);
        let label = &self.0[24..];
        let label = &label[..label.iter().position(|&byte| byte == 0).unwrap_or(label.len())];
        let cut = if usize::from(self.0[3]) > label.len() { "…" } else { "" };
        let what = format!("{verb} #{} of '{}{cut}'", self.word(8), String::from_utf8_lossy(label));
        match self.word(16) {
            NO_LENGTH => (what, dtype),
            elements => (what, format!("{elements} × {dtype}")),
        }
    }

    /// Details that are rarely worth reporting: the reduction operator, and the root of a broadcast.
    fn details(&self, ranks: RankSet) -> Option<String> {
        let root = u32::from_le_bytes(std::array::from_fn(|index| self.0[4 + index]));
        let reduce = usize::from(self.0[2]).checked_sub(1).and_then(|index| REDUCTIONS.get(index));
        match (reduce, root) {
            (Some(ReduceOp::Sum), _) => Some("sum".to_string()),
            (Some(ReduceOp::Mean), _) => Some("mean".to_string()),
            (Some(ReduceOp::Max), _) => Some("max".to_string()),
            (None, NO_ROOT) => None,
            (None, root) if (root as usize) < ranks.len() => {
                Some(format!("from rank {}", ranks.rank_at(root as usize)))
            }
            (None, root) => Some(format!("from index {root}")),
        }
    }
}

/// Groups the ranks by their signatures, fewest ranks first. There is one signature per rank of the group, in order.
pub(super) fn group_variants(signatures: &[CallSignature], ranks: RankSet, group: &str) -> Vec<CallVariant> {
    let mut variants: BTreeMap<CallSignature, Vec<usize>> = BTreeMap::new();
    for (signature, rank) in signatures.iter().zip(ranks.iter()) {
        variants.entry(*signature).or_default().push(rank);
    }
    let mut variants: Vec<(CallSignature, Vec<usize>)> = variants.into_iter().collect();
    variants.sort_by_key(|(_, ranks)| (ranks.len(), ranks[0]));
    // Report details only if two variants would otherwise read the same.
    let alike = variants.iter().enumerate().any(|(index, (signature, _))| {
        let description = signature.describe();
        variants[..index].iter().any(|(other, _)| other.describe() == description)
    });
    let count = variants.len();
    let described = variants.into_iter().enumerate().map(|(index, (signature, callers))| {
        let (what, size) = signature.describe();
        let details = signature.details(ranks).filter(|_| alike);
        // Report the group's name once, at the end.
        let group = (index + 1 == count).then(|| group.to_string());
        let inside = [Some(size), details, group].into_iter().flatten().collect::<Vec<_>>().join(", ");
        CallVariant { ranks: callers, call: format!("{what} ({inside})") }
    });
    described.collect()
}

#[cfg(test)]
mod tests {
    use shardwise_plan::Partition;

    use super::*;
    use crate::Error;

    fn call(verb: Verb, label: &str, number: u64, elements: usize) -> Call {
        Call {
            verb,
            label: label.into(),
            group: "shard 0-6/2".into(),
            number,
            elements,
            dtype: Dtype::F32,
            elements_sent: 0,
        }
    }

    fn reduction(elements: usize, reduce: ReduceOp) -> Operation {
        Operation::AllReduce { buffer: std::ptr::null_mut(), partition: Partition::new(elements, 4), reduce }
    }

    fn broadcast(root: usize) -> Operation {
        Operation::Broadcast { buffer: std::ptr::null_mut(), len: 8, root }
    }

    /// The error message for a group of ranks 0, 2, 4 and 6.
    fn message(signatures: [CallSignature; 4]) -> String {
        let ranks = shardwise_plan::Mesh::new(&[(shardwise_plan::Axis::Shard, 4), (shardwise_plan::Axis::Tensor, 2)])
            .expect("a valid mesh")
            .group(0, &[shardwise_plan::Axis::Shard]);
        let variants = group_variants(&signatures, ranks, "shard 0-6/2");
        Error::Mismatch { call: Box::new(call(Verb::Barrier, "", 1, 0)), variants }.to_string()
    }

    #[test]
    fn a_minority_is_contrasted_with_the_majority() {
        let most = CallSignature::new(&call(Verb::AllReduce, "norm", 7, 8), &reduction(8, ReduceOp::Sum));
        let other = CallSignature::new(&call(Verb::Barrier, "end", 7, 0), &Operation::Barrier);
        assert_eq!(
            message([most, most, other, most]),
            "rank 4 called barrier #7 of 'end' (0 × f32) while ranks 0, 2, 6 called all-reduce #7 of 'norm' \
             (8 × f32, shard 0-6/2): nothing was sent"
        );
    }

    #[test]
    fn without_a_majority_all_calls_are_listed() {
        let one = CallSignature::new(&call(Verb::AllReduce, "norm", 7, 8), &reduction(8, ReduceOp::Sum));
        let two = CallSignature::new(&call(Verb::AllReduce, "norm", 7, 8), &reduction(8, ReduceOp::Max));
        assert_eq!(
            message([one, one, two, two]),
            "ranks 0, 2 called all-reduce #7 of 'norm' (8 × f32, sum), ranks 4, 6 called all-reduce #7 of 'norm' \
             (8 × f32, max, shard 0-6/2): nothing was sent"
        );
        let [a, b, c, d] =
            [0, 1, 2, 3].map(|root| CallSignature::new(&call(Verb::Broadcast, "unit", 7, 8), &broadcast(root)));
        let text = message([a, b, c, d]);
        assert!(
            text.starts_with("rank 0 called broadcast #7 of 'unit' (8 × f32, from rank 0), rank 2 called"),
            "{text}"
        );
        assert!(
            text.ends_with(
                "rank 6 called broadcast #7 of 'unit' (8 × f32, from rank 6, shard 0-6/2): nothing was sent"
            )
        );
    }

    #[test]
    fn a_long_label_is_truncated_between_characters_and_its_length_still_counts() {
        let label = "ä".repeat(30);
        let signature = |label: &str| CallSignature::new(&call(Verb::Barrier, label, 1, 0), &Operation::Barrier);
        let text = message([signature(&label), signature(&label), signature(&label), signature(&format!("{label}!"))]);
        assert!(text.contains(&format!("'{}…'", "ä".repeat(20))), "{text}");
    }

    #[test]
    fn an_all_to_all_with_counts_is_compared_without_its_length() {
        let signature = |elements| {
            let (send, receive) = (std::ptr::null(), std::ptr::null_mut());
            let (sends, receives) = (Splits::from_counts(&[elements]), Splits::from_counts(&[elements]));
            CallSignature::new(
                &call(Verb::AllToAll, "experts", 1, elements),
                &Operation::AllToAll { send, sends, receive, receives },
            )
        };
        assert!(signature(3) == signature(5));
    }
}
