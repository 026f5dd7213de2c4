//! A pool of memory that units share.

use std::sync::{Mutex, MutexGuard, PoisonError};

use shardwise_plan::Dtype;
use shardwise_torch::tch::Device;
use shardwise_torch::{Block, Result};

/// A pool of blocks for unsharded parameters, and for gradients until they are reduced. Every step allocates the same sizes
/// in the same order, so after the first step the pool needs no more memory from the system.
pub struct Pool {
    device: Device,
    blocks: Mutex<Blocks>,
}

#[derive(Default)]
struct Blocks {
    free: Vec<Block>,
    bytes: usize,
}

/// How many times larger than requested a block may be. The head can use the embedding's block, but a small unit does not
/// take a block that a large one will need next.
const OVERSIZE_MAX: usize = 2;

impl Pool {
    /// Creates an empty pool for a device.
    pub fn new(device: Device) -> Self {
        Pool { device, blocks: Mutex::default() }
    }

    /// The device that the memory is on.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The total size of all blocks, in use or free.
    pub fn bytes(&self) -> usize {
        self.lock().bytes
    }

    /// Returns a free block that fits, or a new one. Its contents are unspecified.
    pub(crate) fn allocate(&self, dtype: Dtype, len: usize) -> Result<Block> {
        let bytes = len.saturating_mul(dtype.bytes());
        let mut blocks = self.lock();
        let fits = |block: &Block| (bytes..=bytes.saturating_mul(OVERSIZE_MAX)).contains(&block.capacity_bytes());
        let best = (0..blocks.free.len())
            .filter(|&index| fits(&blocks.free[index]))
            .min_by_key(|&index| blocks.free[index].capacity_bytes());
        match best {
            Some(index) => Ok(blocks.free.swap_remove(index).reuse(dtype, len)),
            None => {
                let block = Block::new(dtype, len, self.device)?;
                blocks.bytes += block.capacity_bytes();
                Ok(block)
            }
        }
    }

    /// Returns a block to the pool.
    pub(crate) fn free(&self, block: Block) {
        self.lock().free.push(block);
    }

    fn lock(&self) -> MutexGuard<'_, Blocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_blocks_are_reused() {
        let pool = Pool::new(Device::Cpu);
        let large = pool.allocate(Dtype::F32, 1000).expect("memory");
        let address = large.as_ptr();
        pool.free(large);
        // The freed block is ten times too large, so it is not reused.
        let small = pool.allocate(Dtype::F32, 100).expect("memory");
        assert_ne!(small.as_ptr(), address);
        let other = pool.allocate(Dtype::Bf16, 1500).expect("memory");
        assert_eq!((other.as_ptr(), other.len(), other.dtype()), (address, 1500, Dtype::Bf16));
        pool.free(other);
        pool.free(small);
        assert_eq!(pool.bytes(), 4400);
    }
}
