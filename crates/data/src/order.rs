//! Shuffled orders without lists.
//!
//! A list of a trillion places would need terabytes, and every rank would need it. A Feistel network is a permutation of 2^2k
//! numbers whatever its rounds compute, so that a key chooses an order, any place of which can be computed on its own. Numbers
//! beyond the length are sent through again until they fall within it, which keeps it a permutation, and takes fewer than four
//! attempts on average.

const ROUNDS: usize = 6;

/// An order of the numbers below a length.
#[derive(Clone, Copy, Debug)]
pub struct Permutation {
    len: u64,
    half_bits: u32,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// The order that a key stands for.
    pub fn new(len: u64, key: u64) -> Self {
        let bits = 64 - len.saturating_sub(1).leading_zeros();
        let mut keys = [0; ROUNDS];
        let mut state = key;
        for round_key in &mut keys {
            state = mix(state.wrapping_add(GOLDEN));
            *round_key = state;
        }
        Permutation { len, half_bits: bits.div_ceil(2).max(1), keys }
    }

    /// How many numbers are ordered.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The number at a place of the order.
    ///
    /// # Panics
    ///
    /// If there is no such place.
    pub fn at(&self, index: u64) -> u64 {
        assert!(index < self.len, "place {index} of an order of {} numbers", self.len);
        let mut number = self.scrambled(index);
        while number >= self.len {
            number = self.scrambled(number);
        }
        number
    }

    fn scrambled(&self, number: u64) -> u64 {
        let mask = (1_u64 << self.half_bits) - 1;
        let (mut left, mut right) = (number >> self.half_bits, number & mask);
        for key in self.keys {
            (left, right) = (right, left ^ (mix(right ^ key) & mask));
        }
        left << self.half_bits | right
    }
}

/// 2^64 divided by the golden ratio: steps that visit all numbers, far apart.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Makes numbers that have nothing to do with each other of numbers that have (the finisher of SplitMix64).
pub(crate) fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

/// One key of several numbers, in which each of them and its place matter.
pub(crate) fn key_of(numbers: &[u64]) -> u64 {
    numbers.iter().fold(0, |key, &number| mix(key.wrapping_add(GOLDEN) ^ mix(number.wrapping_add(GOLDEN))))
}
