//! How a buffer is cut into one part per rank.

use std::ops::Range;

/// `len` elements cut into `parts` contiguous parts whose lengths differ by at most one, longer parts first.
///
/// There is no padding: any length can be cut for any number of ranks, a prime for a prime, and fewer elements than
/// ranks leave the last ranks with empty parts. Everyone who cuts a buffer cuts it here, so a gather, a reduction and a
/// checkpoint agree about who owns an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partition {
    len: usize,
    parts: usize,
}

impl Partition {
    /// Cuts `len` elements into `parts` parts.
    ///
    /// # Panics
    /// If `parts` is zero: a group always has a rank in it.
    pub fn new(len: usize, parts: usize) -> Self {
        assert!(parts > 0, "a partition needs at least one part");
        Partition { len, parts }
    }

    /// The number of elements in all parts together.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is nothing to cut.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The number of parts.
    pub fn parts(&self) -> usize {
        self.parts
    }

    /// The elements of part `index`.
    ///
    /// # Panics
    /// If there is no such part.
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
