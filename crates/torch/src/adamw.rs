//! AdamW on the CPU, in one pass over memory.
//!
//! # Note: the same bits as libtorch
//! The vector code of libtorch's fused kernel does these operations in this order, with fused multiply-adds in the same two places, so
//! parameters have the same bits, except that libtorch does not use vectors for the last few elements of a tensor. This kernel also
//! widens and scales gradients and rounds the result, which would take three more passes; it fetches what it needs next into the
//! cache; and its bits depend neither on the processor nor on where an element is in a tensor.

use half::bf16;

use crate::{round_to_bf16, widen_bf16};

/// The number of elements that are fetched into the cache at once.
const BLOCK: usize = 64;
/// How many elements ahead: those of the next few hundred nanoseconds.
const AHEAD: usize = 512;
/// The least number of elements that are worth a thread.
const ELEMENTS_PER_THREAD: usize = 1 << 17;

/// What an element is multiplied by, added to and divided by, in f32.
#[derive(Clone, Copy)]
pub(crate) struct Coefficients {
    pub(crate) grad_factor: f32,
    pub(crate) decay: f32,
    /// Of the gradient's distance from the first moment. It is added to the first moment or, if it is large, subtracted from the gradient, so
    /// that no digit is lost.
    pub(crate) first_rate: f32,
    pub(crate) starts_from_grad: bool,
    pub(crate) second_decay: f32,
    pub(crate) second_rate: f32,
    pub(crate) step_size: f32,
    pub(crate) root_correction: f32,
    pub(crate) eps: f32,
}

/// A gradient's element.
pub(crate) trait Gradient: Copy + Send + Sync {
    fn widen(self) -> f32;
}

impl Gradient for f32 {
    fn widen(self) -> f32 {
        self
    }
}

impl Gradient for bf16 {
    fn widen(self) -> f32 {
        widen_bf16(self)
    }
}

/// What an updated parameter is rounded to, for the next passes: nothing, or 16 bits.
pub(crate) trait Rounded: Copy + Send + Sync {
    fn round(parameter: f32) -> Self;
}

impl Rounded for () {
    fn round(_: f32) -> Self {}
}

impl Rounded for bf16 {
    /// To the nearest, ties to even.
    fn round(parameter: f32) -> Self {
        round_to_bf16(parameter)
    }
}

/// Elements of one parameter, all slices of the same length.
pub(crate) struct Elements<'a, G, R> {
    pub(crate) parameters: &'a mut [f32],
    pub(crate) grads: &'a [G],
    pub(crate) first_moments: &'a mut [f32],
    pub(crate) second_moments: &'a mut [f32],
    pub(crate) rounded: &'a mut [R],
}

impl<G: Gradient, R: Rounded> Elements<'_, G, R> {
    /// Updates all elements, on this many threads if there are enough elements.
    pub(crate) fn update(self, coefficients: &Coefficients, threads: usize) {
        let len = self.parameters.len();
        let part_len = len.div_ceil(threads.max(1)).max(ELEMENTS_PER_THREAD).next_multiple_of(BLOCK);
        if len <= part_len {
            return self.update_here(coefficients);
        }
        std::thread::scope(|scope| {
            let mut rest = self;
            while rest.parameters.len() > part_len {
                let part;
                (part, rest) = rest.split_at(part_len);
                scope.spawn(|| part.update_here(coefficients));
            }
            // The last part is this thread's.
            rest.update_here(coefficients);
        });
    }

    fn split_at(self, at: usize) -> (Self, Self) {
        let (parameters, more_parameters) = self.parameters.split_at_mut(at);
        let (grads, more_grads) = self.grads.split_at(at);
        let (first_moments, more_first_moments) = self.first_moments.split_at_mut(at);
        let (second_moments, more_second_moments) = self.second_moments.split_at_mut(at);
        let (rounded, more_rounded) = self.rounded.split_at_mut(at);
        (
            Elements { parameters, grads, first_moments, second_moments, rounded },
            Elements {
                parameters: more_parameters,
                grads: more_grads,
                first_moments: more_first_moments,
                second_moments: more_second_moments,
                rounded: more_rounded,
            },
        )
    }

    /// Updates all elements on this thread, with the widest instructions of the processor.
    fn update_here(self, coefficients: &Coefficients) {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("fma") {
                // SAFETY: the processor has these instructions.
                return unsafe { update_with_avx512(self, coefficients) };
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                // SAFETY: as above.
                return unsafe { update_with_avx2(self, coefficients) };
            }
        }
        update_blocks(self, coefficients);
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,fma")]
fn update_with_avx512<G: Gradient, R: Rounded>(elements: Elements<'_, G, R>, coefficients: &Coefficients) {
    update_blocks(elements, coefficients);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn update_with_avx2<G: Gradient, R: Rounded>(elements: Elements<'_, G, R>, coefficients: &Coefficients) {
    update_blocks(elements, coefficients);
}

#[inline(always)]
pub(crate) fn update_blocks<G: Gradient, R: Rounded>(elements: Elements<'_, G, R>, coefficients: &Coefficients) {
    let Elements { parameters, grads, first_moments, second_moments, rounded } = elements;
    let len = parameters.len();
    for start in (0..len).step_by(BLOCK) {
        let block = start..len.min(start + BLOCK);
        fetch_into_cache(parameters, start + AHEAD);
        fetch_into_cache(grads, start + AHEAD);
        fetch_into_cache(first_moments, start + AHEAD);
        fetch_into_cache(second_moments, start + AHEAD);
        update_block(
            Elements {
                parameters: &mut parameters[block.clone()],
                grads: &grads[block.clone()],
                first_moments: &mut first_moments[block.clone()],
                second_moments: &mut second_moments[block.clone()],
                rounded: &mut rounded[block],
            },
            coefficients,
        );
    }
}

/// Asks the processor for the block of a slice that starts at an element, if it has a whole one there.
#[inline(always)]
fn fetch_into_cache<T>(slice: &[T], start: usize) {
    const LINE_BYTES: usize = 64;
    #[cfg(target_arch = "x86_64")]
    if let Some(block) = slice.get(start..start + BLOCK) {
        for offset in (0..size_of_val(block)).step_by(LINE_BYTES) {
            // SAFETY: the address is within the block, and a prefetch changes nothing.
            unsafe {
                use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
                _mm_prefetch::<_MM_HINT_T0>(block.as_ptr().cast::<i8>().add(offset));
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (slice, start, LINE_BYTES);
}

#[inline(always)]
fn update_block<G: Gradient, R: Rounded>(elements: Elements<'_, G, R>, c: &Coefficients) {
    let Elements { parameters, grads, first_moments, second_moments, rounded } = elements;
    let moments = first_moments.iter_mut().zip(second_moments);
    let parameters = parameters.iter_mut().zip(rounded);
    for ((&grad, (first, second)), (parameter, rounded)) in grads.iter().zip(moments).zip(parameters) {
        let grad = grad.widen() * c.grad_factor;
        *first = c.first_rate.mul_add(grad - *first, if c.starts_from_grad { grad } else { *first });
        *second = (c.second_rate * grad).mul_add(grad, *second * c.second_decay);
        let root = second.sqrt() / c.root_correction + c.eps;
        *parameter = *parameter * c.decay - c.step_size * *first / root;
        *rounded = R::round(*parameter);
    }
}
