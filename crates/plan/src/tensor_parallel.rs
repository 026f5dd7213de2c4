//! Tensor parallelism as arithmetic: which elements of a parameter each rank of a tensor-parallel group holds.

use std::ops::Range;

use crate::Partition;
use crate::mesh::Place;

/// How a parameter is placed on the ranks of a tensor-parallel group (DTensor: a `Placement`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorPlacement {
    /// Every rank holds all of it and applies it to whole features of its own rows: norms, and biases that are added after a
    /// row-parallel matrix. Every rank has the gradient of the rows that it computes.
    Replicated,
    /// Every rank holds all of it and applies it to all rows and features, so that all ranks compute the same.
    ReplicatedWhole,
    /// Every rank holds all of it and applies it to its own part of the features, as the norm of each head: every rank has the
    /// gradient of its own part.
    ReplicatedInside,
    /// Every rank holds a part.
    Split(Split),
}

impl TensorPlacement {
    /// Column-parallel, for a matrix of shape (out, in): every rank has some of the outputs.
    pub fn by_outputs(outputs: usize) -> Self {
        TensorPlacement::Split(Split::along(0, outputs))
    }

    /// Row-parallel, for a matrix of shape (out, in): every rank has some of the inputs.
    pub fn by_inputs(inputs: usize) -> Self {
        TensorPlacement::Split(Split::along(1, inputs))
    }

    /// The same placement for `blocks` matrices in one, such as query, key and value: every rank has a part of each.
    #[must_use]
    pub fn fused(self, blocks: usize) -> Self {
        match self {
            TensorPlacement::Split(split) => TensorPlacement::Split(Split { blocks, ..split }),
            replicated => replicated,
        }
    }

    /// Checks that a parameter of this shape can be placed on this many ranks.
    pub fn check(&self, shape: &[usize], ranks: usize) -> Result<(), String> {
        let TensorPlacement::Split(Split { dimension, blocks, items, shared_by }) = *self else { return Ok(()) };
        let Some(size) = shape.get(dimension) else {
            return Err(format!("it is split along dimension {dimension}, but its shape is {shape:?}"));
        };
        let parts = blocks * items.div_ceil(shared_by.max(1));
        if blocks == 0 || shared_by == 0 || parts == 0 || !size.is_multiple_of(parts) {
            return Err(format!(
                "{size}, dimension {dimension} of its shape {shape:?}, is not made of {parts} equal parts"
            ));
        }
        match ranks <= items {
            true => Ok(()),
            false => {
                Err(format!("{ranks} ranks cannot share {items} parts of dimension {dimension} of its shape {shape:?}"))
            }
        }
    }
}

/// How a parameter is split along one dimension.
///
/// The dimension consists of `blocks` equal blocks, such as query, key and value in a fused matrix. Each block consists of
/// `items`, such as heads or rows, which are divided among the ranks in order. If `shared_by` consecutive items use the same
/// elements, as the query heads of a group use one key head, a rank needs those elements of all its items.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// The dimension.
    pub dimension: usize,
    /// The number of blocks.
    pub blocks: usize,
    /// The number of items in a block.
    pub items: usize,
    /// The number of consecutive items that use the same elements.
    pub shared_by: usize,
}

/// The part of a tensor that a rank holds: ranges along one dimension, one after the other, of all experts or of some.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Slice {
    /// The dimension.
    pub dimension: usize,
    /// Ascending ranges along it that do not touch.
    pub ranges: Vec<Range<usize>>,
    /// The range along the first dimension, if ranks divide that, too: the experts of one rank.
    pub experts: Option<Range<usize>>,
}

/// Elements that are contiguous both in a tensor and in a slice of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SliceRun {
    /// The offset in the tensor.
    pub whole: usize,
    /// The offset in the slice.
    pub local: usize,
    /// The number of elements.
    pub len: usize,
}

impl Split {
    /// Along a dimension of `items` rows or columns, each of which is an item.
    pub fn along(dimension: usize, items: usize) -> Self {
        Split { dimension, blocks: 1, items, shared_by: 1 }
    }

    /// The items of a rank.
    pub fn items_of(&self, rank: usize, ranks: usize) -> Range<usize> {
        Partition::new(self.items, ranks).range(rank)
    }

    /// Whether no two ranks need the same elements.
    pub fn is_disjoint(&self, ranks: usize) -> bool {
        let starts = (1..ranks).map(|rank| self.items_of(rank, ranks).start);
        self.shared_by == 1 || starts.into_iter().all(|start| start.is_multiple_of(self.shared_by))
    }

    /// The part of a tensor that a rank needs.
    ///
    /// # Panics
    /// If the dimension does not consist of equal blocks of equal items.
    pub fn slice(&self, shape: &[usize], rank: usize, ranks: usize) -> Slice {
        let groups = self.blocks * self.items.div_ceil(self.shared_by);
        let size = shape[self.dimension];
        assert!(size.is_multiple_of(groups), "{self:?} does not split {shape:?}");
        let (item, block) = (size / groups, size / self.blocks);
        let items = self.items_of(rank, ranks);
        let groups = items.start / self.shared_by..items.end.div_ceil(self.shared_by);
        let within = if items.is_empty() { 0..0 } else { groups.start * item..groups.end * item };
        let ranges = (0..self.blocks).map(|at| at * block + within.start..at * block + within.end);
        let ranges = merge(ranges.filter(|range| !range.is_empty()));
        Slice { dimension: self.dimension, ranges, experts: None }
    }
}

/// Merges ranges that touch.
fn merge(ranges: impl Iterator<Item = Range<usize>>) -> Vec<Range<usize>> {
    let mut merged: Vec<Range<usize>> = Vec::new();
    for range in ranges {
        match merged.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => merged.push(range),
        }
    }
    merged
}

impl Slice {
    /// The experts of a rank, of a tensor whose first dimension is the expert.
    pub fn of_experts(shape: &[usize], expert: Place) -> Self {
        let range = Partition::new(shape[0], expert.size).range(expert.index);
        Slice { dimension: 0, ranges: merge(std::iter::once(range)), experts: None }
    }

    /// The same for some of the experts.
    ///
    /// # Panics
    /// If the slice is along the first dimension, which is the expert.
    #[must_use]
    pub fn with_experts(self, experts: Range<usize>) -> Self {
        assert!(self.dimension > 0, "the first dimension is the expert");
        Slice { experts: Some(experts), ..self }
    }

    /// The shape of the slice of a tensor.
    pub fn shape(&self, whole: &[usize]) -> Vec<usize> {
        let mut shape = whole.to_vec();
        shape[self.dimension] = self.len();
        if let Some(experts) = &self.experts {
            shape[0] = experts.len();
        }
        shape
    }

    /// The size along the dimension.
    pub fn len(&self) -> usize {
        self.ranges.iter().map(Range::len).sum()
    }

    /// Whether the slice has no elements.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// The contiguous runs of some elements of the slice, in order.
    pub fn runs(&self, whole: &[usize], elements: Range<usize>) -> impl Iterator<Item = SliceRun> + use<> {
        let row: usize = whole[self.dimension + 1..].iter().product();
        let first_expert =
            self.experts.as_ref().map_or(0, |experts| experts.start * whole[1..].iter().product::<usize>());
        let (size, len, ranges) = (whole[self.dimension], self.len(), self.ranges.clone());
        let mut at = elements.start;
        std::iter::from_fn(move || {
            if at >= elements.end {
                return None;
            }
            let (outer, index, column) = (at / (len * row), at / row % len, at % row);
            let mut before = 0;
            let range = ranges.iter().find(|range| {
                before += range.len();
                index < before
            })?;
            let place = range.end - (before - index);
            let run_len = ((range.end - place) * row - column).min(elements.end - at);
            let offset = (outer * size + place) * row + column;
            let run = SliceRun { whole: first_expert + offset, local: at, len: run_len };
            at += run_len;
            Some(run)
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    #[allow(clippy::single_range_in_vec_init, reason = "a slice with one range")]
    fn heads_blocks_and_rows_are_divided_in_order() {
        let heads = Split { dimension: 0, blocks: 1, items: 6, shared_by: 1 };
        assert_eq!(heads.slice(&[24, 5], 1, 3).ranges, vec![8..16]);
        let fused = Split { dimension: 1, blocks: 3, items: 6, shared_by: 1 };
        assert_eq!(fused.slice(&[5, 72], 1, 2).ranges, [12..24, 36..48, 60..72]);
        assert_eq!(fused.slice(&[5, 72], 0, 1).ranges, vec![0..72]);
        let rows = Split::along(0, 7);
        assert_eq!([0, 1, 2].map(|rank| rows.slice(&[7], rank, 3).len()), [3, 2, 2]);
        assert!(rows.slice(&[7], 8, 9).is_empty());
    }

    #[test]
    #[allow(clippy::single_range_in_vec_init, reason = "a slice with one range")]
    fn a_rank_has_the_key_heads_of_its_query_heads() {
        // Six query heads and three key heads of size 2.
        let keys = Split { dimension: 0, blocks: 1, items: 6, shared_by: 2 };
        assert_eq!(keys.slice(&[6, 1], 0, 2).ranges, vec![0..4]);
        assert_eq!(keys.slice(&[6, 1], 1, 2).ranges, vec![2..6]);
        assert!(!keys.is_disjoint(2) && keys.is_disjoint(3) && !keys.is_disjoint(6));
    }

    #[test]
    fn some_experts_of_a_split_matrix() {
        let rows = Split::along(1, 4).slice(&[6, 4, 3], 1, 2).with_experts(2..4);
        assert_eq!(rows.shape(&[6, 4, 3]), [2, 2, 3]);
        // The last two rows of the third and of the fourth expert.
        let runs: Vec<_> = rows.runs(&[6, 4, 3], 1..12).map(|run| (run.whole, run.local, run.len)).collect();
        assert_eq!(runs, [(2 * 12 + 7, 1, 5), (3 * 12 + 6, 6, 6)]);
        let whole = Slice::of_experts(&[6, 4, 3], Place { size: 3, index: 1 });
        assert_eq!((whole.shape(&[6, 4, 3]), whole.ranges[0].clone()), (vec![2, 4, 3], 2..4));
    }

    proptest! {
        #[test]
        fn runs_are_the_elements_of_the_slice(
            sizes in prop::collection::vec(1usize..5, 1..4),
            place in any::<prop::sample::Index>(),
            blocks in 1usize..4,
            items in 1usize..7,
            ranks in 1usize..5,
            cuts in any::<[prop::sample::Index; 3]>(),
        ) {
            let mut shape = sizes;
            let dimension = place.index(shape.len());
            shape[dimension] *= blocks * items;
            let split = Split { dimension, blocks, items, shared_by: 1 };
            prop_assert!(split.is_disjoint(ranks));
            let slice = split.slice(&shape, cuts[0].index(ranks), ranks);
            // The offsets of all elements of the slice, the slow way.
            let (row, size) = (shape[dimension + 1..].iter().product::<usize>(), shape[dimension]);
            let all: Vec<usize> = (0..shape.iter().product())
                .filter(|offset| slice.ranges.iter().any(|range| range.contains(&(offset / row % size))))
                .collect();
            prop_assert_eq!(all.len(), slice.shape(&shape).iter().product::<usize>());
            let (a, b) = (cuts[1].index(all.len() + 1), cuts[2].index(all.len() + 1));
            let (from, to) = (a.min(b), a.max(b));
            let mut found = Vec::new();
            for run in slice.runs(&shape, from..to) {
                prop_assert_eq!(run.local, from + found.len());
                found.extend(run.whole..run.whole + run.len);
            }
            prop_assert_eq!(found, &all[from..to]);
        }
    }
}
