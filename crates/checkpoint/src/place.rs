//! Where a slice of a tensor stands in it, and what two slices have in common.
//!
//! A slice is a box (a range along every dimension) and a range of that box's elements in row-major order. So it can be a flat
//! range of the whole tensor (ZeRO), a range along one dimension (tensor parallelism), or a flat range of the latter (both).

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// A slice's place in its tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    /// A range along every dimension; none stands for the whole tensor.
    #[serde(rename = "box", default, skip_serializing_if = "Vec::is_empty")]
    ranges: Vec<[u64; 2]>,
    /// The elements of the box, in row-major order.
    flat: [u64; 2],
}

/// Elements that are next to each other in the tensor and in a slice of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Where they begin in the tensor.
    pub global: u64,
    /// Where they begin in the slice.
    pub local: u64,
    /// How many they are.
    pub len: u64,
}

/// Elements that two slices have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shared {
    /// Where they begin in the one.
    pub from: u64,
    /// Where they begin in the other.
    pub to: u64,
    /// How many they are.
    pub len: u64,
}

/// The number of elements of a shape, unless that is too large to count.
pub fn elements(shape: &[u64]) -> Option<u64> {
    shape.iter().try_fold(1u64, |product, &size| product.checked_mul(size))
}

impl Place {
    /// Elements of the whole tensor in row-major order.
    pub fn flat(range: Range<u64>) -> Self {
        Place { ranges: Vec::new(), flat: [range.start, range.end] }
    }

    /// A range along one dimension.
    pub fn along(shape: &[u64], dimension: usize, range: Range<u64>) -> Self {
        let mut ranges: Vec<[u64; 2]> = shape.iter().map(|&size| [0, size]).collect();
        ranges[dimension] = [range.start, range.end];
        let len = ranges.iter().map(|[start, end]| end - start).product();
        Place { ranges, flat: [0, len] }
    }

    /// Some of its elements, in row-major order.
    pub fn part(mut self, range: Range<u64>) -> Self {
        self.flat = [self.flat[0] + range.start, self.flat[0] + range.end];
        self
    }

    /// How many elements it has.
    pub fn len(&self) -> u64 {
        self.flat[1] - self.flat[0]
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.flat[0] == self.flat[1]
    }

    /// Whether it lies within a tensor of this shape. Everything else is asked only of places that do.
    pub fn fits(&self, shape: &[u64]) -> bool {
        let boxed = match self.ranges.is_empty() {
            true => elements(shape),
            false => {
                let within = self.ranges.len() == shape.len()
                    && self.ranges.iter().zip(shape).all(|([start, end], &size)| start <= end && *end <= size);
                let sizes: Vec<u64> = self.ranges.iter().map(|[start, end]| end.saturating_sub(*start)).collect();
                elements(&sizes).filter(|_| within && elements(shape).is_some())
            }
        };
        boxed.is_some_and(|boxed| self.flat[0] <= self.flat[1] && self.flat[1] <= boxed)
    }

    /// Its runs, in the order of the tensor and of the slice, which is the same.
    pub fn runs(&self, shape: &[u64]) -> impl Iterator<Item = Run> + use<> {
        let (ranges, sizes) = match self.ranges.is_empty() {
            true => (shape.iter().map(|&size| [0, size]).collect(), shape.to_vec()),
            false => (self.ranges.clone(), self.ranges.iter().map(|[start, end]| end - start).collect::<Vec<u64>>()),
        };
        let shape = shape.to_vec();
        // From this dimension on the box is as wide as the tensor: rows begin before it.
        let whole = (0..shape.len()).rev().take_while(|&d| sizes[d] == shape[d]).last().unwrap_or(shape.len());
        // An empty place has no runs, and may have sizes that no product holds.
        let row = sizes[whole.saturating_sub(1)..].iter().fold(1u64, |row, &size| row.saturating_mul(size));
        let [mut at, end] = self.flat;
        let begin = at;
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            // The box's coordinates of this element, turned into the tensor's.
            let (mut rest, mut global, mut stride) = (at, 0, 1);
            for dimension in (0..shape.len()).rev() {
                global += (rest % sizes[dimension] + ranges[dimension][0]) * stride;
                rest /= sizes[dimension];
                stride *= shape[dimension];
            }
            let len = (row - at % row).min(end - at);
            let run = Run { global, local: at - begin, len };
            at += len;
            Some(run)
        })
    }

    /// What it has in common with `other`, of the same tensor.
    pub fn shared(&self, other: &Place, shape: &[u64]) -> Vec<Shared> {
        let (mut ours, mut theirs) = (self.runs(shape).peekable(), other.runs(shape).peekable());
        let mut shared = Vec::new();
        while let (Some(a), Some(b)) = (ours.peek(), theirs.peek()) {
            let (start, end) = (a.global.max(b.global), (a.global + a.len).min(b.global + b.len));
            if start < end {
                shared.push(Shared {
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
        shared
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Which elements of the tensor a place has, in its own order: counted out.
    fn listed(place: &Place, shape: &[u64]) -> Vec<u64> {
        let ranges: Vec<[u64; 2]> = match place.ranges.is_empty() {
            true => shape.iter().map(|&size| [0, size]).collect(),
            false => place.ranges.clone(),
        };
        let mut all = vec![0];
        for (dimension, [start, end]) in ranges.into_iter().enumerate() {
            all = all.iter().flat_map(|before| (start..end).map(move |i| before * shape[dimension] + i)).collect();
        }
        all[place.flat[0] as usize..place.flat[1] as usize].to_vec()
    }

    fn place(shape: Vec<u64>) -> impl Strategy<Value = Place> {
        let dimensions = shape.len();
        (0..=dimensions, any::<[prop::sample::Index; 4]>()).prop_map(move |(dimension, cuts)| {
            let cut = |index: &prop::sample::Index, len: u64| index.index(len as usize + 1) as u64;
            let whole = elements(&shape).unwrap();
            let base = match dimension < dimensions {
                true => {
                    let (a, b) = (cut(&cuts[0], shape[dimension]), cut(&cuts[1], shape[dimension]));
                    Place::along(&shape, dimension, a.min(b)..a.max(b))
                }
                false => Place::flat(0..whole),
            };
            let (a, b) = (cut(&cuts[2], base.len()), cut(&cuts[3], base.len()));
            base.part(a.min(b)..a.max(b))
        })
    }

    fn case() -> impl Strategy<Value = (Vec<u64>, Place, Place)> {
        prop::collection::vec(0u64..6, 1..4)
            .prop_flat_map(|shape| (Just(shape.clone()), place(shape.clone()), place(shape)))
    }

    proptest! {
        #[test]
        fn runs_are_the_elements((shape, place, _) in case()) {
            prop_assert!(place.fits(&shape));
            let mut found = Vec::new();
            for run in place.runs(&shape) {
                prop_assert_eq!(run.local as usize, found.len());
                found.extend(run.global..run.global + run.len);
            }
            prop_assert_eq!(found, listed(&place, &shape));
        }

        #[test]
        fn shared_elements_are_the_same((shape, one, other) in case()) {
            let (ones, others) = (listed(&one, &shape), listed(&other, &shape));
            let mut pairs = Vec::new();
            for Shared { from, to, len } in one.shared(&other, &shape) {
                for step in 0..len {
                    prop_assert_eq!(ones[(from + step) as usize], others[(to + step) as usize]);
                    pairs.push(ones[(from + step) as usize]);
                }
            }
            let expected: Vec<u64> = ones.iter().copied().filter(|element| others.contains(element)).collect();
            prop_assert_eq!(pairs, expected);
        }

        #[test]
        fn places_from_outside_are_refused_not_believed(
            ranges in prop::collection::vec([number(), number()], 0..4),
            flat in [number(), number()],
            shape in prop::collection::vec(number(), 0..4),
        ) {
            let place = Place { ranges, flat };
            if place.fits(&shape) {
                prop_assert!(place.len() <= elements(&shape).unwrap());
                place.shared(&Place::flat(0..0), &shape);
            }
        }
    }

    /// Small ones, among which much fits, and the largest.
    fn number() -> impl Strategy<Value = u64> {
        prop_oneof![0u64..4, Just(1 << 63), Just(u64::MAX)]
    }
}
