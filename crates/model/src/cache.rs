//! The KV cache, with which generating a token costs the work of a single position.

use shardwise_torch::tch::Tensor;

use crate::Result;

/// The smallest capacity, in positions.
const CAPACITY_MIN: i64 = 16;

/// The cache of one unit: the keys and values of a block; for other units, only the number of positions so far.
///
/// Memory grows by doubling. With a sliding window, positions outside of it are dropped before the cache would grow, so its
/// capacity stays below twice the sum of the window and the positions that are added at once.
#[derive(Default)]
pub struct Cache {
    seen: i64,
    /// The number of positions in memory: the last ones of those seen.
    held: i64,
    /// Keys and values, each (sequences, heads, capacity, head dim).
    memory: Option<[Tensor; 2]>,
}

impl Cache {
    /// An empty cache.
    pub fn new() -> Self {
        Cache::default()
    }

    /// The number of positions that the unit has seen.
    pub fn positions(&self) -> usize {
        self.seen as usize
    }

    /// The size of keys and values in memory.
    pub fn bytes(&self) -> usize {
        let bytes = |tensor: &Tensor| tensor.numel() * tensor.kind().elt_size_in_bytes();
        self.memory.iter().flatten().map(bytes).sum()
    }

    /// Counts new positions for a unit that has no keys and values. Returns the index of the first one.
    pub(crate) fn advance(&mut self, positions: i64) -> i64 {
        self.seen += positions;
        self.seen - positions
    }

    /// Adds keys and values of new positions. Returns those of all positions in memory, old and new.
    pub(crate) fn extend(&mut self, key: &Tensor, value: &Tensor, window: Option<usize>) -> Result<[Tensor; 2]> {
        let new = key.size()[2];
        let memory = match self.memory.take() {
            Some(memory) if self.held + new <= memory[0].size()[2] => memory,
            full => {
                // Keep the positions that the first new one attends to, besides itself.
                let kept = window.map_or(self.held, |window| self.held.min(window as i64 - 1));
                let capacity = CAPACITY_MIN.max(2 * (kept + new));
                let old = full.map(|[keys, values]| [Some(keys), Some(values)]).unwrap_or_default();
                let [old_keys, old_values] = old.map(|old| old.map(|old| old.narrow(2, self.held - kept, kept)));
                self.held = kept;
                [grow(old_keys, key, capacity)?, grow(old_values, value, capacity)?]
            }
        };
        for (memory, added) in memory.iter().zip([key, value]) {
            memory.f_narrow(2, self.held, new)?.f_copy_(added)?;
        }
        self.held += new;
        self.seen += new;
        let all = [memory[0].f_narrow(2, 0, self.held)?, memory[1].f_narrow(2, 0, self.held)?];
        self.memory = Some(memory);
        Ok(all)
    }
}

/// Allocates memory for `capacity` positions like those of `new`, and copies the old ones to its start.
fn grow(old: Option<Tensor>, new: &Tensor, capacity: i64) -> Result<Tensor> {
    let size = new.size();
    let memory = Tensor::f_empty([size[0], size[1], capacity, size[3]], (new.kind(), new.device()))?;
    if let Some(old) = old {
        memory.f_narrow(2, 0, old.size()[2])?.f_copy_(&old)?;
    }
    Ok(memory)
}
