//! How a buffer is split into one part per rank.

use std::ops::Range;

/// `len` elements split into `parts` contiguous parts whose lengths differ by at most one, longer parts first.
///
/// There is no padding: any length splits among any number of ranks, and with fewer elements than ranks, the last ranks have
/// empty parts. All splits are computed here, so all-gathers, reductions and checkpoints agree on which rank owns an element.
///
/// A partition may keep rows together: then parts differ by at most one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partition {
    rows: usize,
    row_len: usize,
    parts: usize,
}

impl Partition {
    /// Splits `len` elements into `parts` parts.
    ///
    /// # Panics
    /// If `parts` is zero.
    pub fn new(len: usize, parts: usize) -> Self {
        Partition::of_rows(len, 1, parts)
    }

    /// Splits `rows` rows of `row_len` elements into `parts` parts of whole rows.
    ///
    /// # Panics
    /// If `parts` is zero.
    pub fn of_rows(rows: usize, row_len: usize, parts: usize) -> Self {
        assert!(parts > 0, "a partition needs at least one part");
        Partition { rows, row_len, parts }
    }

    /// The same partition without the last row.
    #[must_use]
    pub fn without_last_row(self) -> Self {
        Partition { rows: self.rows.saturating_sub(1), ..self }
    }

    /// The total number of elements.
    pub fn len(&self) -> usize {
        self.rows * self.row_len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
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
        let (quotient, longer) = (self.rows / self.parts, self.rows % self.parts);
        let start = index * quotient + index.min(longer);
        let end = start + quotient + usize::from(index < longer);
        start * self.row_len..end * self.row_len
    }

    /// The length of part `index`.
    pub fn part_len(&self, index: usize) -> usize {
        self.range(index).len()
    }

    /// Whether all parts have the same length.
    pub fn is_even(&self) -> bool {
        self.rows.is_multiple_of(self.parts)
    }
}

/// The largest number of equal parts, at most `most`, into which `count` things can be divided.
pub fn most_equal_parts(count: usize, most: usize) -> usize {
    (1..=most).rev().find(|parts| count.is_multiple_of(*parts)).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_stay_together() {
        let partition = Partition::of_rows(7, 4, 3);
        assert_eq!([0, 1, 2].map(|part| partition.range(part)), [0..12, 12..20, 20..28]);
        assert!(!partition.is_even() && partition.len() == 28);
        assert!(partition.without_last_row().is_even());
        assert_eq!(Partition::of_rows(28, 1, 3), Partition::new(28, 3));
    }
}
