//! Regions of tensors, and the overlap of two regions.
//!
//! A region is a box (ranges along every dimension) and a range of that box's elements in row-major order. So it can be a
//! flat range of the whole tensor (ZeRO), ranges along one dimension (tensor parallelism), a range of experts (expert parallelism), or a flat range
//! of such a box (both).

use std::ops::Range;

use serde::{Deserialize, Serialize};
use shardwise_plan::Slice;

/// The region of a tensor that a shard holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Region {
    /// The ranges along every dimension, ascending; empty for the whole tensor.
    #[serde(rename = "box", default, skip_serializing_if = "Vec::is_empty")]
    ranges: Vec<Vec<[u64; 2]>>,
    /// The range of the box's elements, in row-major order.
    flat: [u64; 2],
}

/// Elements that are contiguous both in the tensor and in a region of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The offset in the tensor.
    pub global: u64,
    /// The offset in the region.
    pub local: u64,
    /// The number of elements.
    pub len: u64,
}

/// Contiguous elements that two regions have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overlap {
    /// The offset in the first region.
    pub from: u64,
    /// The offset in the second region.
    pub to: u64,
    /// The number of elements.
    pub len: u64,
}

/// The number of elements of a shape, or `None` on overflow.
pub fn elements(shape: &[u64]) -> Option<u64> {
    shape.iter().try_fold(1u64, |product, &size| product.checked_mul(size))
}

impl Region {
    /// A range of the whole tensor's elements, in row-major order.
    pub fn flat(range: Range<u64>) -> Self {
        Region { ranges: Vec::new(), flat: [range.start, range.end] }
    }

    /// A slice of a tensor.
    pub fn of_slice(shape: &[u64], slice: &Slice) -> Self {
        let mut ranges: Vec<Vec<[u64; 2]>> = shape.iter().map(|&size| vec![[0, size]]).collect();
        let of_slice = slice.ranges.iter().map(|range| [range.start as u64, range.end as u64]);
        ranges[slice.dimension] = of_slice.collect();
        if let Some(experts) = &slice.experts {
            ranges[0] = vec![[experts.start as u64, experts.end as u64]];
        }
        let len = ranges.iter().map(|ranges| total(ranges)).product();
        Region { ranges, flat: [0, len] }
    }

    /// A range of this region's elements, in row-major order.
    pub fn part(mut self, range: Range<u64>) -> Self {
        self.flat = [self.flat[0] + range.start, self.flat[0] + range.end];
        self
    }

    /// The number of elements.
    pub fn len(&self) -> u64 {
        self.flat[1] - self.flat[0]
    }

    /// Whether the region has no elements.
    pub fn is_empty(&self) -> bool {
        self.flat[0] == self.flat[1]
    }

    /// Whether the region lies within a tensor of this shape. All other methods require that it does.
    pub fn fits(&self, shape: &[u64]) -> bool {
        let boxed = match self.ranges.is_empty() {
            true => elements(shape),
            false => {
                let within = self.ranges.len() == shape.len()
                    && self.ranges.iter().zip(shape).all(|(ranges, &size)| are_ascending(ranges, size));
                let sizes = || self.ranges.iter().map(|ranges| total(ranges)).collect::<Vec<_>>();
                if within && elements(shape).is_some() { elements(&sizes()) } else { None }
            }
        };
        boxed.is_some_and(|boxed| self.flat[0] <= self.flat[1] && self.flat[1] <= boxed)
    }

    /// The region's contiguous runs, in order.
    pub fn runs(&self, shape: &[u64]) -> impl Iterator<Item = Run> + use<> {
        self.runs_from(shape, 0)
    }

    /// The number of elements of the box that come before an offset in the tensor.
    fn elements_before(&self, shape: &[u64], offset: u64) -> u64 {
        if self.ranges.is_empty() {
            return offset;
        }
        let mut before = 0;
        for (dimension, ranges) in self.ranges.iter().enumerate() {
            let inner: u64 = shape[dimension + 1..].iter().product();
            let coordinate = offset / inner.max(1) % shape[dimension].max(1);
            let boxed_inner: u64 = self.ranges[dimension + 1..].iter().map(|ranges| total(ranges)).product();
            let lower = ranges.iter().map(|&[start, end]| end.min(coordinate).saturating_sub(start)).sum::<u64>();
            before += lower * boxed_inner;
            if !ranges.iter().any(|&[start, end]| (start..end).contains(&coordinate)) {
                break;
            }
        }
        before
    }

    /// The runs with elements from an offset in the tensor on. The first one may start earlier.
    fn runs_from(&self, shape: &[u64], offset: u64) -> impl Iterator<Item = Run> + use<> {
        let skipped = match offset {
            0 => 0,
            _ => self.elements_before(shape, offset).clamp(self.flat[0], self.flat[1]) - self.flat[0],
        };
        let ranges: Vec<Vec<[u64; 2]>> = match self.ranges.is_empty() {
            true => shape.iter().map(|&size| vec![[0, size]]).collect(),
            false => self.ranges.clone(),
        };
        let sizes: Vec<u64> = ranges.iter().map(|ranges| total(ranges)).collect();
        let shape = shape.to_vec();
        // From this dimension on, the box is as wide as the tensor, so its elements are contiguous.
        let whole = (0..shape.len()).rev().take_while(|&d| sizes[d] == shape[d]).last().unwrap_or(shape.len());
        // An empty region has no runs, but the product of its sizes may overflow.
        let row = sizes[whole..].iter().fold(1u64, |row, &size| row.saturating_mul(size));
        let [start, end] = self.flat;
        let mut at = start + skipped;
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            // Convert the element's coordinates in the box to an offset in the tensor.
            let (mut rest, mut global, mut stride, mut left) = (at, 0, 1, 1);
            for dimension in (0..shape.len()).rev() {
                let (coordinate, left_in_range) = locate(&ranges[dimension], rest % sizes[dimension]);
                if dimension + 1 == whole {
                    left = left_in_range;
                }
                global += coordinate * stride;
                rest /= sizes[dimension];
                stride *= shape[dimension];
            }
            let len = (row.saturating_mul(left) - at % row).min(end - at);
            let run = Run { global, local: at - start, len };
            at += len;
            Some(run)
        })
    }

    /// The overlaps with another region of the same tensor.
    pub fn overlaps(&self, other: &Region, shape: &[u64]) -> Vec<Overlap> {
        // A part of a row is looked up in shards that may have many rows.
        let first = |region: &Region| region.runs(shape).next().map(|run| run.global);
        let (Some(one), Some(two)) = (first(self), first(other)) else { return Vec::new() };
        let from = one.max(two);
        let (mut ours, mut theirs) = (self.runs_from(shape, from).peekable(), other.runs_from(shape, from).peekable());
        let mut overlaps = Vec::new();
        while let (Some(a), Some(b)) = (ours.peek(), theirs.peek()) {
            let (start, end) = (a.global.max(b.global), (a.global + a.len).min(b.global + b.len));
            if start < end {
                overlaps.push(Overlap {
                    from: start - a.global + a.local,
                    to: start - b.global + b.local,
                    len: end - start,
                });
            }
            match a.global + a.len <= b.global + b.len {
                true => drop(ours.next()),
                false => drop(theirs.next()),
            }
        }
        overlaps
    }
}

/// The number of indices in these ranges.
fn total(ranges: &[[u64; 2]]) -> u64 {
    ranges.iter().fold(0u64, |sum, [start, end]| sum.saturating_add(end.saturating_sub(*start)))
}

/// Whether ranges are ascending, do not overlap, and end within `size`.
fn are_ascending(ranges: &[[u64; 2]], size: u64) -> bool {
    let mut at = 0;
    ranges.iter().all(|&[start, end]| {
        let fits = at <= start && start <= end && end <= size;
        at = end;
        fits
    })
}

/// The index of the element at `offset` in these ranges, and the number of elements from it to the end of its range.
fn locate(ranges: &[[u64; 2]], offset: u64) -> (u64, u64) {
    let mut rest = offset;
    for &[start, end] in ranges {
        if rest < end - start {
            return (start + rest, end - start - rest);
        }
        rest -= end - start;
    }
    unreachable!("the offset is within the ranges")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Lists the elements of a region, in order, the slow way.
    fn listed(region: &Region, shape: &[u64]) -> Vec<u64> {
        let ranges: Vec<Vec<[u64; 2]>> = match region.ranges.is_empty() {
            true => shape.iter().map(|&size| vec![[0, size]]).collect(),
            false => region.ranges.clone(),
        };
        let mut all = vec![0];
        for (dimension, ranges) in ranges.into_iter().enumerate() {
            let indices: Vec<u64> = ranges.iter().flat_map(|&[start, end]| start..end).collect();
            all = all.iter().flat_map(|before| indices.iter().map(move |i| before * shape[dimension] + i)).collect();
        }
        all[region.flat[0] as usize..region.flat[1] as usize].to_vec()
    }

    fn region(shape: Vec<u64>) -> impl Strategy<Value = Region> {
        let dimensions = shape.len();
        (0..=dimensions, any::<[prop::sample::Index; 6]>()).prop_map(move |(dimension, cuts)| {
            let cut = |index: &prop::sample::Index, len: u64| index.index(len as usize + 1);
            let whole = elements(&shape).unwrap();
            let base = match dimension < dimensions {
                true => {
                    let mut ends: Vec<usize> = cuts[..4].iter().map(|index| cut(index, shape[dimension])).collect();
                    ends.sort_unstable();
                    let ranges = vec![ends[0]..ends[1], ends[2]..ends[3]];
                    Region::of_slice(&shape, &Slice { dimension, ranges, experts: None })
                }
                false => Region::flat(0..whole),
            };
            let (a, b) = (cut(&cuts[4], base.len()) as u64, cut(&cuts[5], base.len()) as u64);
            base.part(a.min(b)..a.max(b))
        })
    }

    fn case() -> impl Strategy<Value = (Vec<u64>, Region, Region)> {
        prop::collection::vec(0u64..6, 1..4)
            .prop_flat_map(|shape| (Just(shape.clone()), region(shape.clone()), region(shape)))
    }

    proptest! {
        #[test]
        fn runs_are_the_elements((shape, region, _) in case()) {
            prop_assert!(region.fits(&shape));
            let mut found = Vec::new();
            for run in region.runs(&shape) {
                prop_assert_eq!(run.local as usize, found.len());
                found.extend(run.global..run.global + run.len);
            }
            prop_assert_eq!(found, listed(&region, &shape));
        }

        #[test]
        fn overlaps_are_the_common_elements((shape, one, other) in case()) {
            let (ones, others) = (listed(&one, &shape), listed(&other, &shape));
            let mut pairs = Vec::new();
            for Overlap { from, to, len } in one.overlaps(&other, &shape) {
                for step in 0..len {
                    prop_assert_eq!(ones[(from + step) as usize], others[(to + step) as usize]);
                    pairs.push(ones[(from + step) as usize]);
                }
            }
            let expected: Vec<u64> = ones.iter().copied().filter(|element| others.contains(element)).collect();
            prop_assert_eq!(pairs, expected);
        }

        #[test]
        fn invalid_regions_are_refused(
            ranges in prop::collection::vec(prop::collection::vec([number(), number()], 0..3), 0..4),
            flat in [number(), number()],
            shape in prop::collection::vec(number(), 0..4),
        ) {
            let region = Region { ranges, flat };
            if region.fits(&shape) {
                prop_assert!(region.len() <= elements(&shape).unwrap());
                region.overlaps(&Region::flat(0..0), &shape);
            }
        }
    }

    /// Small numbers, which often fit, and very large ones.
    fn number() -> impl Strategy<Value = u64> {
        prop_oneof![0u64..4, Just(1 << 63), Just(u64::MAX)]
    }
}
