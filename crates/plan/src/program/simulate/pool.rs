//! How the pool of `shardwise-zero` reuses buffers.

/// A buffer of the pool. It may be larger than requested.
#[derive(Clone, Copy)]
pub(super) struct Buffer {
    bytes: usize,
}

/// The pool of `shardwise-zero`.
#[derive(Default)]
pub(super) struct Pool {
    free: Vec<Buffer>,
    /// The size of all buffers, in use or free.
    bytes: usize,
}

/// How many times larger than requested a buffer may be, as in `shardwise-zero`.
const OVERSIZE_MAX: usize = 2;

impl Pool {
    /// Returns the smallest free buffer that fits, or a new one.
    pub(super) fn allocate(&mut self, bytes: usize) -> Buffer {
        let fits = |&index: &usize| (bytes..=bytes * OVERSIZE_MAX).contains(&self.free[index].bytes);
        let best = (0..self.free.len()).filter(fits).min_by_key(|&index| self.free[index].bytes);
        match best {
            Some(index) => self.free.swap_remove(index),
            None => {
                self.bytes += bytes;
                Buffer { bytes }
            }
        }
    }

    pub(super) fn free(&mut self, buffer: Buffer) {
        self.free.push(buffer);
    }

    pub(super) fn used_bytes(&self) -> usize {
        self.bytes - self.free_bytes()
    }

    pub(super) fn free_bytes(&self) -> usize {
        self.free.iter().map(|buffer| buffer.bytes).sum()
    }
}
