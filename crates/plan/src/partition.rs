//! How a buffer is split into one part per rank.

use std::ops::Range;

/// `len` elements split into `parts` contiguous parts whose lengths differ by at most one, longer parts first.
///
/// There is no padding: any length splits among any number of ranks, and with fewer elements than ranks, the last ranks have
/// empty parts. All splits are computed here, so all-gathers, reductions and checkpoints agree on which rank owns an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partition {
    len: usize,
    parts: usize,
}

impl Partition {
    /// Splits `len` elements into `parts` parts.
    ///
    /// # Panics
    /// If `parts` is zero.
    pub fn new(len: usize, parts: usize) -> Self {
        assert!(parts > 0, "a partition needs at least one part");
        Partition { len, parts }
    }

    /// The total number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The number of parts.
    pub fn parts(&self) -> usize {
        self.parts
    }

    /// The range of part `index`.
    ///
    /// # Panics
    /// If `index` is out of bounds.
    pub fn range(&self, index: usize) -> Range<usize> {
        assert!(index < self.parts, "part {index} of a partition into {}", self.parts);
        let (quotient, longer) = (self.len / self.parts, self.len % self.parts);
        let start = index * quotient + index.min(longer);
        start..start + quotient + usize::from(index < longer)
    }

    /// The length of part `index`.
    pub fn part_len(&self, index: usize) -> usize {
        self.range(index).len()
    }

    /// Whether all parts have the same length.
    pub fn is_even(&self) -> bool {
        self.len.is_multiple_of(self.parts)
    }
}
