//! Memory that units use in turn.

use std::sync::{Mutex, MutexGuard, PoisonError};

use shardwise_plan::Dtype;
use shardwise_torch::tch::Device;
use shardwise_torch::{Block, Result};

/// Blocks that are lent and given back: the parameters of units while they are whole, and their gradients until they are
/// reduced. A step lends the same sizes in the same order every time, so after the first step nothing more is asked of the
/// system, and memory is flat.
pub struct Pool {
    device: Device,
    blocks: Mutex<Blocks>,
}

#[derive(Default)]
struct Blocks {
    free: Vec<Block>,
    bytes: usize,
}

/// How many times larger than asked for a lent block may be. The embedding's memory can be the head's, but a small unit does
/// not take the memory that a large one will want next.
const LARGER: usize = 2;

impl Pool {
    /// An empty pool of a device's memory.
    pub fn new(device: Device) -> Self {
        Pool { device, blocks: Mutex::default() }
    }

    /// The device.
    pub fn device(&self) -> Device {
        self.device
    }

    /// All that it has, lent or not.
    pub fn bytes(&self) -> usize {
        self.lock().bytes
    }

    /// A block with arbitrary contents.
    pub(crate) fn lend(&self, dtype: Dtype, len: usize) -> Result<Block> {
        let bytes = len.saturating_mul(dtype.bytes());
        let mut blocks = self.lock();
        let fits = |block: &Block| (bytes..=bytes.saturating_mul(LARGER)).contains(&block.capacity_bytes());
        let best = (0..blocks.free.len())
            .filter(|&index| fits(&blocks.free[index]))
            .min_by_key(|&index| blocks.free[index].capacity_bytes());
        match best {
            Some(index) => Ok(blocks.free.swap_remove(index).reused(dtype, len)),
            None => {
                let block = Block::new(dtype, len, self.device)?;
                blocks.bytes += block.capacity_bytes();
                Ok(block)
            }
        }
    }

    /// Takes a block back.
    pub(crate) fn give_back(&self, block: Block) {
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
    fn blocks_come_back_and_are_lent_again() {
        let pool = Pool::new(Device::Cpu);
        let large = pool.lend(Dtype::F32, 1000).expect("memory");
        let address = large.as_ptr();
        pool.give_back(large);
        // A tenth of it would waste the rest.
        let small = pool.lend(Dtype::F32, 100).expect("memory");
        assert_ne!(small.as_ptr(), address);
        let other = pool.lend(Dtype::Bf16, 1500).expect("memory");
        assert_eq!((other.as_ptr(), other.len(), other.dtype()), (address, 1500, Dtype::Bf16));
        pool.give_back(other);
        pool.give_back(small);
        assert_eq!(pool.bytes(), 4400);
    }
}
