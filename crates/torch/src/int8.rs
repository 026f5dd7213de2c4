//! Blockwise quantization to 8 bits, for elements that are sent.
//!
//! Each block of [`INT8_BLOCK`] elements has a scale, the largest absolute value divided by 127, and each element becomes the nearest
//! multiple of it. A block takes its scale as an f32, then a byte for each element, so a block follows the one before without a gap.
//!
//! # Note: the same bytes everywhere
//! An element is multiplied by `127 / largest` and rounded to the nearest integer, ties to even, all in f32, so the bytes depend neither
//! on the processor nor on the number of threads. `reference/int8.py` has the same bytes. Blocks whose elements are all smaller than
//! [`SMALLEST`] become zeros. A block with an element that is not finite has a scale that is not finite, and so are all its elements once
//! they are decoded: what is wrong is found, not hidden.

use half::bf16;
use shardwise_plan::{Dtype, INT8_BLOCK, int8_bytes};

use crate::{Block, Element, Error, Result, round_to_bf16, widen_bf16};

/// The bytes of a scale.
const SCALE_BYTES: usize = size_of::<f32>();
/// The bytes of a whole block.
const BLOCK_BYTES: usize = SCALE_BYTES + INT8_BLOCK;
/// Below this, the factor of a block would overflow.
const SMALLEST: f32 = 1e-30;
/// Added to a number of at most 2²², it leaves the nearest integer in the lowest bits.
const ROUNDS: f32 = 12_582_912.;
/// The least number of elements that are worth a thread.
const ELEMENTS_PER_THREAD: usize = 1 << 20;

/// An element that can be quantized.
trait Quantized: Element {
    fn widen(self) -> f32;
    fn narrow(wide: f32) -> Self;
}

impl Quantized for f32 {
    fn widen(self) -> f32 {
        self
    }

    fn narrow(wide: f32) -> Self {
        wide
    }
}

impl Quantized for bf16 {
    fn widen(self) -> f32 {
        widen_bf16(self)
    }

    /// To the nearest, ties to even.
    fn narrow(wide: f32) -> Self {
        round_to_bf16(wide)
    }
}

/// Quantizes the elements of a block of memory, f32 or bf16, into the first bytes of another, on this many threads if there are enough
/// elements.
///
/// # Panics
/// If `to` has fewer bytes than the elements take ([`int8_bytes`]).
pub fn encode_int8(from: &Block, to: &mut Block, threads: usize) -> Result<()> {
    let to = &mut to.as_mut_slice::<u8>()?[..int8_bytes(from.len())];
    match from.dtype() {
        Dtype::F32 => encode_in_parallel(from.as_slice::<f32>()?, to, threads),
        Dtype::Bf16 => encode_in_parallel(from.as_slice::<bf16>()?, to, threads),
        found => return Err(Error::WrongDtype { expected: Dtype::F32, found }),
    }
    Ok(())
}

/// Fills a range of a block of memory, f32 or bf16, with elements that were quantized into bytes.
///
/// # Panics
/// If the range is not in the block, or the bytes are not those of as many elements.
pub fn decode_int8(from: &[u8], to: &mut Block, range: std::ops::Range<usize>, threads: usize) -> Result<()> {
    match to.dtype() {
        Dtype::F32 => decode_in_parallel(from, &mut to.as_mut_slice::<f32>()?[range], threads),
        Dtype::Bf16 => decode_in_parallel(from, &mut to.as_mut_slice::<bf16>()?[range], threads),
        found => return Err(Error::WrongDtype { expected: Dtype::F32, found }),
    }
    Ok(())
}

/// The number of elements of each thread's part: whole blocks.
fn part_len(len: usize, threads: usize) -> usize {
    len.div_ceil(threads.max(1)).max(ELEMENTS_PER_THREAD).next_multiple_of(INT8_BLOCK)
}

fn encode_in_parallel<T: Quantized>(from: &[T], to: &mut [u8], threads: usize) {
    let part_len = part_len(from.len(), threads);
    in_parallel(from.chunks(part_len).zip(to.chunks_mut(int8_bytes(part_len))), encode);
}

fn decode_in_parallel<T: Quantized>(from: &[u8], to: &mut [T], threads: usize) {
    assert_eq!(from.len(), int8_bytes(to.len()), "the bytes of {} elements", to.len());
    let part_len = part_len(to.len(), threads);
    in_parallel(from.chunks(int8_bytes(part_len)).zip(to.chunks_mut(part_len)), decode);
}

/// Works on each part on a thread of its own. The first part is this thread's.
fn in_parallel<'a, A: Sync + 'a, B: Send + 'a>(
    mut parts: impl Iterator<Item = (&'a [A], &'a mut [B])>,
    work: fn(&[A], &mut [B]),
) {
    let first = parts.next();
    std::thread::scope(|scope| {
        for (from, to) in parts {
            scope.spawn(move || work(from, to));
        }
        if let Some((from, to)) = first {
            work(from, to);
        }
    });
}

/// Encodes on this thread, with the widest instructions of the processor.
fn encode<T: Quantized>(from: &[T], to: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw") {
            // SAFETY: the processor has these instructions.
            return unsafe { encode_with_avx512(from, to) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: as above.
            return unsafe { encode_with_avx2(from, to) };
        }
    }
    encode_blocks(from, to);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw")]
fn encode_with_avx512<T: Quantized>(from: &[T], to: &mut [u8]) {
    encode_blocks(from, to);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn encode_with_avx2<T: Quantized>(from: &[T], to: &mut [u8]) {
    encode_blocks(from, to);
}

#[inline(always)]
fn encode_blocks<T: Quantized>(from: &[T], to: &mut [u8]) {
    let (blocks, rest) = from.as_chunks::<INT8_BLOCK>();
    let (encoded, encoded_rest) = to.split_at_mut(BLOCK_BYTES * blocks.len());
    for (block, encoded) in blocks.iter().zip(encoded.as_chunks_mut::<BLOCK_BYTES>().0) {
        encode_block(block, encoded);
    }
    if !rest.is_empty() {
        encode_block(rest, encoded_rest);
    }
}

/// If the length is known, this becomes vector instructions.
#[inline(always)]
fn encode_block<T: Quantized>(block: &[T], encoded: &mut [u8]) {
    let largest = f32::from_bits(largest_magnitude(block));
    let (scale, factor) = if largest < SMALLEST { (0., 0.) } else { (largest / 127., 127. / largest) };
    let (scale_bytes, bytes) = encoded.split_at_mut(SCALE_BYTES);
    scale_bytes.copy_from_slice(&scale.to_le_bytes());
    for (byte, x) in bytes.iter_mut().zip(block) {
        *byte = (x.widen() * factor + ROUNDS).to_bits() as u8;
    }
}

/// The bits of the largest absolute value. As integers, numbers that are not finite are larger than all others. Halves are compared
/// with each other, so that no comparison waits for the one before.
#[inline(always)]
fn largest_magnitude<T: Quantized>(block: &[T]) -> u32 {
    let mut magnitudes = [0; INT8_BLOCK];
    for (magnitude, x) in magnitudes.iter_mut().zip(block) {
        *magnitude = x.widen().to_bits() & 0x7FFF_FFFF;
    }
    let mut half = INT8_BLOCK / 2;
    while half > 0 {
        let (low, high) = magnitudes.split_at_mut(half);
        for (low, high) in low.iter_mut().zip(high) {
            *low = u32::max(*low, *high);
        }
        half /= 2;
    }
    magnitudes[0]
}

/// Decodes on this thread, with the widest instructions of the processor.
fn decode<T: Quantized>(from: &[u8], to: &mut [T]) {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw") {
            // SAFETY: the processor has these instructions.
            return unsafe { decode_with_avx512(from, to) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: as above.
            return unsafe { decode_with_avx2(from, to) };
        }
    }
    decode_blocks(from, to);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw")]
fn decode_with_avx512<T: Quantized>(from: &[u8], to: &mut [T]) {
    decode_blocks(from, to);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn decode_with_avx2<T: Quantized>(from: &[u8], to: &mut [T]) {
    decode_blocks(from, to);
}

#[inline(always)]
fn decode_blocks<T: Quantized>(from: &[u8], to: &mut [T]) {
    for (encoded, block) in from.chunks(BLOCK_BYTES).zip(to.chunks_mut(INT8_BLOCK)) {
        let (scale, bytes) = encoded.split_first_chunk().expect("a block has a scale");
        let scale = f32::from_le_bytes(*scale);
        for (x, &byte) in block.iter_mut().zip(bytes) {
            *x = T::narrow(f32::from(byte.cast_signed()) * scale);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use tch::Device;

    use super::*;

    /// Numbers of many magnitudes, as a recurrence with a period of 2³² gives them.
    fn numbers(len: usize) -> Vec<f32> {
        let mut state = 1u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f32::from((state >> 16) as u16) / 32768. - 1.
        };
        (0..len).map(|index| next() * f32::powi(10., (index / 100 % 9) as i32 - 4)).collect()
    }

    fn there_and_back<T: Quantized>(elements: &[T], threads: usize) -> (Vec<u8>, Vec<T>) {
        let from = Block::from_slice(elements).unwrap();
        let mut encoded = Block::new(Dtype::U8, int8_bytes(elements.len()), Device::Cpu).unwrap();
        encode_int8(&from, &mut encoded, threads).unwrap();
        let mut to = Block::new(T::DTYPE, elements.len(), Device::Cpu).unwrap();
        decode_int8(encoded.as_slice().unwrap(), &mut to, 0..elements.len(), threads).unwrap();
        (encoded.as_slice().unwrap().to_vec(), to.as_slice().unwrap().to_vec())
    }

    #[test]
    fn elements_are_the_nearest_multiples_of_their_blocks_scale() {
        for len in [0, 1, 255, 256, 257, 1000, 4 * 256] {
            let elements = numbers(len);
            let (encoded, decoded) = there_and_back(&elements, 1);
            assert_eq!(encoded.len(), len + 4 * len.div_ceil(256));
            for (block, decoded) in elements.chunks(256).zip(decoded.chunks(256)) {
                let largest = block.iter().fold(0f32, |largest, x| largest.max(x.abs()));
                for (x, y) in block.iter().zip(decoded) {
                    assert!((x - y).abs() <= 0.5001 * largest / 127., "{x} became {y} next to {largest}");
                }
                assert!(block.iter().zip(decoded).any(|(x, y)| x.abs() == largest && (x - y).abs() <= 1e-6 * largest));
            }
        }
        let halves: Vec<bf16> = numbers(700).into_iter().map(bf16::from_f32).collect();
        let (_, decoded) = there_and_back(&halves, 1);
        for (block, decoded) in halves.chunks(256).zip(decoded.chunks(256)) {
            let largest = block.iter().fold(0f32, |largest, x| largest.max(x.to_f32().abs()));
            let is_near =
                |(x, y): (&bf16, &bf16)| (x.to_f32() - y.to_f32()).abs() <= largest * (0.5001 / 127. + 1. / 256.);
            assert!(block.iter().zip(decoded).all(is_near));
        }
    }

    #[test]
    fn neither_threads_nor_instructions_change_a_byte() {
        let elements = numbers(3 * ELEMENTS_PER_THREAD + 333);
        let (alone, decoded) = there_and_back(&elements, 1);
        for threads in [2, 3, 16] {
            assert!(there_and_back(&elements, threads) == (alone.clone(), decoded.clone()), "{threads} threads");
        }
        let (mut plain, mut plain_decoded) = (vec![0; alone.len()], vec![0f32; elements.len()]);
        encode_blocks(&elements, &mut plain);
        decode_blocks(&plain, &mut plain_decoded);
        assert!(plain == alone && plain_decoded == decoded);
    }

    #[test]
    fn zeros_stay_zeros_and_what_is_not_finite_stays_so() {
        let (_, decoded) = there_and_back(&[0., -0., 1e-31, -3e-40], 1);
        assert!(decoded.iter().all(|x| *x == 0.));
        for wrong in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut elements = numbers(512);
            elements[300] = wrong;
            let (_, decoded) = there_and_back(&elements, 1);
            assert!(decoded[..256].iter().all(|x| x.is_finite()));
            assert!(decoded[256..].iter().all(|x| !x.is_finite()), "{wrong}");
        }
    }

    #[test]
    fn bf16_is_rounded_as_by_the_half_crate() {
        for bits in (0..=u32::MAX).step_by(65_537).chain([0x3F80_8000, 0x3F81_8000, 0x7F7F_FFFF, 0x7F80_0001]) {
            let wide = f32::from_bits(bits);
            let (expected, found) = (bf16::from_f32(wide), round_to_bf16(wide));
            assert!(expected == found || wide.is_nan() && found.is_nan(), "{wide}");
        }
    }
}
