//! Shuffling without a list.
//!
//! A shuffled list of a trillion numbers takes terabytes, and every rank would need it. A Feistel network is a permutation of
//! 2^2k numbers whatever its rounds compute, so a key selects an order, and any element of it can be computed on its own. A
//! result beyond the length goes through the network again until it is below (cycle walking), which keeps it a permutation and
//! takes fewer than four passes on average.

const ROUNDS: usize = 6;

/// A pseudorandom permutation of the numbers below a length.
#[derive(Clone, Copy, Debug)]
pub struct Permutation {
    len: u64,
    half_bits: u32,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// Creates the permutation of `len` numbers that a key selects.
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

    /// The number of elements.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The element at an index.
    ///
    /// # Panics
    ///
    /// If the index is not below the length.
    pub fn at(&self, index: u64) -> u64 {
        assert!(index < self.len, "index {index} is out of range for a permutation of {} numbers", self.len);
        let mut number = self.scramble(index);
        while number >= self.len {
            number = self.scramble(number);
        }
        number
    }

    fn scramble(&self, number: u64) -> u64 {
        let mask = (1_u64 << self.half_bits) - 1;
        let (mut left, mut right) = (number >> self.half_bits, number & mask);
        for key in self.keys {
            (left, right) = (right, left ^ (mix(right ^ key) & mask));
        }
        left << self.half_bits | right
    }
}

/// 2^64 divided by the golden ratio. Multiples of it are spread evenly.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Turns related numbers into unrelated ones (the finalizer of SplitMix64).
pub(crate) fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

/// Combines several numbers into one key that depends on each of them and on their order.
pub(crate) fn combine_keys(numbers: &[u64]) -> u64 {
    numbers.iter().fold(0, |key, &number| mix(key.wrapping_add(GOLDEN) ^ mix(number.wrapping_add(GOLDEN))))
}
