//! Reductions in rank order, accumulated in f32 (f64 and i64 in their own type).

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use shardwise_plan::Dtype;
use shardwise_torch::{Element, widen_bf16};

/// A reduction operator (torch.distributed: `ReduceOp`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The sum.
    Sum,
    /// The sum divided by the number of ranks, before the result is rounded to the payload's dtype.
    Mean,
    /// The maximum; NaN if any contribution is NaN.
    Max,
}

impl ReduceOp {
    /// Returns why this operator cannot reduce a dtype, or `None` if it can.
    pub(crate) fn unsupported(self, dtype: Dtype) -> Option<&'static str> {
        match (dtype, self) {
            (Dtype::U8, _) => {
                Some("u8 payloads are raw bytes and cannot be reduced; gather them, decode them, and reduce the values")
            }
            (Dtype::I64, ReduceOp::Mean) => {
                Some("the mean of integers is not an integer; reduce with Sum, then divide")
            }
            _ => None,
        }
    }
}

/// The number of elements that are reduced at a time: few enough that several contributions fit in the L1 cache.
const TILE: usize = 1024;

/// Reduces `inputs`, in order, to `output`. Each address points to `len` elements of type `dtype`; one of the inputs may be the
/// output.
///
/// # Safety
/// The addresses are valid for that, and nobody else writes to them.
pub(crate) unsafe fn reduce(dtype: Dtype, reduce: ReduceOp, inputs: &[*const u8], output: *mut u8, len: usize) {
    // SAFETY: passed on.
    unsafe {
        match dtype {
            Dtype::F64 => reduce_typed::<f64>(reduce, inputs, output, len),
            Dtype::F32 => reduce_typed::<f32>(reduce, inputs, output, len),
            Dtype::Bf16 => reduce_typed::<bf16>(reduce, inputs, output, len),
            Dtype::F16 => reduce_typed::<f16>(reduce, inputs, output, len),
            Dtype::I64 => reduce_typed::<i64>(reduce, inputs, output, len),
            Dtype::U8 => unreachable!("Group refuses reductions of bytes"),
        }
    }
}

/// Like [`reduce`], but writes the result in another dtype: f32 of inputs in 16 bits. Then no input is the output.
///
/// # Safety
/// As for [`reduce`]; the output has `len` elements of type `to`.
pub(crate) unsafe fn reduce_into(
    dtype: Dtype,
    to: Dtype,
    how: ReduceOp,
    inputs: &[*const u8],
    output: *mut u8,
    len: usize,
) {
    // SAFETY: passed on.
    unsafe {
        match (dtype, to) {
            (Dtype::Bf16, Dtype::F32) => reduce_wide::<bf16>(how, inputs, output, len),
            (Dtype::F16, Dtype::F32) => reduce_wide::<f16>(how, inputs, output, len),
            (dtype, to) => {
                assert_eq!(dtype, to, "Group allows no other pair of dtypes");
                reduce(dtype, how, inputs, output, len);
            }
        }
    }
}

/// Reduces to the type in which sums are accumulated, tile by tile, in place.
unsafe fn reduce_wide<T: Reducible>(how: ReduceOp, inputs: &[*const u8], output: *mut u8, len: usize) {
    for start in (0..len).step_by(TILE) {
        let count = TILE.min(len - start);
        // SAFETY: within the output, which does not overlap the inputs.
        let sums = unsafe { std::slice::from_raw_parts_mut(output.cast::<T::Wide>().add(start), count) };
        // SAFETY: inside the inputs.
        unsafe { sum_tile::<T>(how, inputs, start, sums) };
    }
}

/// Reduces the elements from `start` on, as many as there are `sums`.
unsafe fn sum_tile<T: Reducible>(how: ReduceOp, inputs: &[*const u8], start: usize, sums: &mut [T::Wide]) {
    let count = sums.len();
    // SAFETY: inside the input.
    let tile = |input: &*const u8| unsafe { std::slice::from_raw_parts(input.cast::<T>().add(start), count) };
    match (how, inputs) {
        (ReduceOp::Sum | ReduceOp::Mean, [first, second, others @ ..]) => {
            T::combine_pair(tile(first), tile(second), sums, T::Wide::add);
            others.iter().for_each(|input| T::combine(tile(input), sums, T::Wide::add));
        }
        (ReduceOp::Max, [first, second, others @ ..]) => {
            T::combine_pair(tile(first), tile(second), sums, T::Wide::max);
            others.iter().for_each(|input| T::combine(tile(input), sums, T::Wide::max));
        }
        (_, [only]) => T::widen(tile(only), sums),
        (_, []) => unreachable!("a group has ranks"),
    }
    if how == ReduceOp::Mean {
        sums.iter_mut().for_each(|sum| *sum = sum.divided(inputs.len()));
    }
}

unsafe fn reduce_typed<T: Reducible>(reduce: ReduceOp, inputs: &[*const u8], output: *mut u8, len: usize) {
    let mut sums = [T::Wide::default(); TILE];
    let output = output.cast::<T>();
    for start in (0..len).step_by(TILE) {
        let count = TILE.min(len - start);
        let sums = &mut sums[..count];
        // SAFETY: inside the inputs; the output's tile is written after all inputs' tiles were read.
        unsafe { sum_tile::<T>(reduce, inputs, start, sums) };
        // SAFETY: inside the output, and no reference to a tile is alive.
        T::narrow(sums, unsafe { std::slice::from_raw_parts_mut(output.add(start), count) });
    }
}

/// An element type, and the type in which its sums are accumulated.
trait Reducible: Element {
    type Wide: Wide;
    fn wide(self) -> Self::Wide;
    fn narrow(from: &[Self::Wide], to: &mut [Self]);

    fn widen(from: &[Self], to: &mut [Self::Wide]) {
        to.iter_mut().zip(from).for_each(|(to, &x)| *to = x.wide());
    }

    /// Sets each result to that of two elements.
    fn combine_pair(a: &[Self], b: &[Self], to: &mut [Self::Wide], how: impl Fn(Self::Wide, Self::Wide) -> Self::Wide) {
        to.iter_mut().zip(a).zip(b).for_each(|((to, &a), &b)| *to = how(a.wide(), b.wide()));
    }

    /// Combines each result with one more element.
    fn combine(from: &[Self], to: &mut [Self::Wide], how: impl Fn(Self::Wide, Self::Wide) -> Self::Wide) {
        to.iter_mut().zip(from).for_each(|(to, &x)| *to = how(*to, x.wide()));
    }
}

/// An accumulator type.
trait Wide: Copy + Default {
    fn add(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    fn divided(self, count: usize) -> Self;
}

macro_rules! wide_float {
    ($float:ty) => {
        impl Wide for $float {
            fn add(self, other: Self) -> Self {
                self + other
            }
            fn max(self, other: Self) -> Self {
                if self.is_nan() || self > other { self } else { other }
            }
            fn divided(self, count: usize) -> Self {
                self / count as $float
            }
        }
    };
}
wide_float!(f32);
wide_float!(f64);

impl Wide for i64 {
    fn add(self, other: Self) -> Self {
        self.wrapping_add(other)
    }
    fn max(self, other: Self) -> Self {
        Ord::max(self, other)
    }
    fn divided(self, _: usize) -> Self {
        unreachable!("Group refuses means of integers")
    }
}

macro_rules! reducible_as_it_is {
    ($number:ty) => {
        impl Reducible for $number {
            type Wide = $number;
            fn wide(self) -> $number {
                self
            }
            fn narrow(from: &[$number], to: &mut [$number]) {
                to.copy_from_slice(from);
            }
        }
    };
}
reducible_as_it_is!(f64);
reducible_as_it_is!(f32);
reducible_as_it_is!(i64);

impl Reducible for bf16 {
    type Wide = f32;
    fn wide(self) -> f32 {
        widen_bf16(self)
    }
    fn narrow(from: &[f32], to: &mut [bf16]) {
        to.convert_from_f32_slice(from);
    }
}

impl Reducible for f16 {
    type Wide = f32;
    fn wide(self) -> f32 {
        self.to_f32()
    }
    fn narrow(from: &[f32], to: &mut [f16]) {
        to.convert_from_f32_slice(from);
    }

    // Slices are converted by the processor's own instructions, where it has them.
    fn widen(from: &[f16], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }
    fn combine_pair(a: &[f16], b: &[f16], to: &mut [f32], how: impl Fn(f32, f32) -> f32) {
        Self::widen(a, to);
        Self::combine(b, to, how);
    }
    fn combine(from: &[f16], to: &mut [f32], how: impl Fn(f32, f32) -> f32) {
        let mut wide = [0.; TILE];
        let wide = &mut wide[..from.len()];
        Self::widen(from, wide);
        to.iter_mut().zip(wide).for_each(|(to, &mut x)| *to = how(*to, x));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reduced<T: Element>(how: ReduceOp, inputs: &[Vec<T>]) -> Vec<T> {
        let mut output = vec![T::default(); inputs[0].len()];
        let addresses: Vec<*const u8> = inputs.iter().map(|input| input.as_ptr().cast()).collect();
        // SAFETY: vectors of one length.
        unsafe { reduce(T::DTYPE, how, &addresses, output.as_mut_ptr().cast(), output.len()) };
        output
    }

    #[test]
    fn sums_of_bf16_are_exact_to_f32() {
        // Summed in bf16, each small contribution would be lost against the large one.
        let mut inputs = vec![vec![bf16::from_f32(256.); 3000]];
        inputs.extend((0..8).map(|_| vec![bf16::from_f32(0.5); 3000]));
        assert!(reduced(ReduceOp::Sum, &inputs).iter().all(|x| x.to_f32() == 260.));
    }

    #[test]
    fn sums_of_16_bits_can_be_kept_in_f32() {
        let inputs = [vec![f16::from_f32(60000.); 1500], vec![f16::from_f32(0.125); 1500]];
        let addresses: Vec<*const u8> = inputs.iter().map(|input| input.as_ptr().cast()).collect();
        let mut output = vec![0f32; 1500];
        // SAFETY: vectors of one length.
        unsafe {
            reduce_into(Dtype::F16, Dtype::F32, ReduceOp::Sum, &addresses, output.as_mut_ptr().cast(), output.len());
        }
        assert!(output.iter().all(|sum| *sum == 60000.125));
    }

    #[test]
    fn a_mean_is_divided_before_it_is_rounded() {
        let inputs = vec![vec![f16::from_f32(60000.)]; 4];
        assert_eq!(reduced(ReduceOp::Mean, &inputs)[0].to_f32(), f16::from_f32(60000.).to_f32());
        assert!(reduced(ReduceOp::Sum, &inputs)[0].is_infinite());
    }

    #[test]
    fn the_order_of_a_sum_is_the_order_of_the_ranks() {
        let inputs = [1e8f32, -1e8, 1.].map(|x| vec![x]);
        assert_eq!(reduced(ReduceOp::Sum, &inputs), [1.]);
        let inputs = [1f32, 1e8, -1e8].map(|x| vec![x]);
        assert_eq!(reduced(ReduceOp::Sum, &inputs), [0.]);
    }

    #[test]
    fn a_maximum_propagates_nan() {
        for inputs in [[f32::NAN, 1., 2.], [1., f32::NAN, 2.], [1., 2., f32::NAN]] {
            assert!(reduced(ReduceOp::Max, &inputs.map(|x| vec![x]))[0].is_nan());
        }
        assert_eq!(reduced(ReduceOp::Max, &[vec![-3i64], vec![-7]]), [-3]);
    }
}
