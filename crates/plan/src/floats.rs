//! Memory for parameters or optimizer state that somebody else fills: with random numbers, or with those of a checkpoint.

use std::ops::Range;

/// Elements to write, in one of the dtypes that optimizers update: f32, or f64 for parameters in f64.
#[derive(Debug)]
pub enum FloatsMut<'a> {
    /// Single precision.
    F32(&'a mut [f32]),
    /// Double precision.
    F64(&'a mut [f64]),
}

impl<'a> FloatsMut<'a> {
    /// The number of elements.
    pub fn len(&self) -> usize {
        match self {
            FloatsMut::F32(elements) => elements.len(),
            FloatsMut::F64(elements) => elements.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes the same value to all elements.
    pub fn fill(self, value: f64) {
        match self {
            FloatsMut::F32(elements) => elements.fill(value as f32),
            FloatsMut::F64(elements) => elements.fill(value),
        }
    }

    /// Writes one value to each element, rounded to its dtype.
    pub fn write(self, values: impl Iterator<Item = f64>) {
        match self {
            FloatsMut::F32(elements) => elements.iter_mut().zip(values).for_each(|(to, from)| *to = from as f32),
            FloatsMut::F64(elements) => elements.iter_mut().zip(values).for_each(|(to, from)| *to = from),
        }
    }

    /// The elements of a range.
    pub fn slice(self, range: Range<usize>) -> Self {
        match self {
            FloatsMut::F32(elements) => FloatsMut::F32(&mut elements[range]),
            FloatsMut::F64(elements) => FloatsMut::F64(&mut elements[range]),
        }
    }

    /// The first `len` elements, and the rest.
    pub fn split_at(self, len: usize) -> (Self, Self) {
        match self {
            FloatsMut::F32(elements) => {
                let (first, rest) = elements.split_at_mut(len);
                (FloatsMut::F32(first), FloatsMut::F32(rest))
            }
            FloatsMut::F64(elements) => {
                let (first, rest) = elements.split_at_mut(len);
                (FloatsMut::F64(first), FloatsMut::F64(rest))
            }
        }
    }

    /// Consecutive chunks of `len` elements; the last one may be shorter.
    pub fn chunks(self, len: usize) -> impl Iterator<Item = FloatsMut<'a>> {
        let (f32s, f64s) = match self {
            FloatsMut::F32(elements) => (Some(elements.chunks_mut(len)), None),
            FloatsMut::F64(elements) => (None, Some(elements.chunks_mut(len))),
        };
        let f64s = f64s.into_iter().flatten().map(FloatsMut::F64);
        f32s.into_iter().flatten().map(FloatsMut::F32).chain(f64s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_rounded_to_the_dtype_only() {
        let (mut narrow, mut wide) = ([0f32; 5], [0f64; 5]);
        for elements in [FloatsMut::F32(&mut narrow), FloatsMut::F64(&mut wide)] {
            let chunks = elements.slice(1..5).chunks(3);
            let lens: Vec<usize> =
                chunks.map(|chunk| (chunk.len(), chunk.write([0.1, 0.2, 0.3].into_iter())).0).collect();
            assert_eq!(lens, [3, 1]);
        }
        assert_eq!(narrow, [0., 0.1, 0.2, 0.3, 0.1]);
        assert_eq!(wide, [0., 0.1, 0.2, 0.3, 0.1]);
    }
}
