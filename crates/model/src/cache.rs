//! What a unit remembers of the positions that it has seen, so that the next one costs one position's work.

use shardwise_torch::tch::Tensor;

use crate::Result;

/// The fewest positions that memory is made for.
const ROOM_MIN: i64 = 16;

/// What one unit remembers of a generation: of a block keys and values, of the others how far it has come.
///
/// Memory grows by doubling. With a window, positions that have left it are dropped when it would grow, so that it never
/// has more than twice the window and what was added at once.
#[derive(Default)]
pub struct Cache {
    seen: i64,
    /// How many positions are in memory: the last of those seen.
    held: i64,
    /// Keys and values, each sequences by heads by room by head width.
    memory: Option<[Tensor; 2]>,
}

impl Cache {
    /// Nothing seen yet.
    pub fn new() -> Self {
        Cache::default()
    }

    /// How many positions the unit has seen.
    pub fn positions(&self) -> usize {
        self.seen as usize
    }

    /// The memory that it holds.
    pub fn bytes(&self) -> usize {
        let bytes = |tensor: &Tensor| tensor.numel() * tensor.kind().elt_size_in_bytes();
        self.memory.iter().flatten().map(bytes).sum()
    }

    /// Notes new positions of a unit that remembers nothing else. Returns the first one's place.
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
                // What the first of the new positions sees besides itself.
                let kept = window.map_or(self.held, |window| self.held.min(window as i64 - 1));
                let room = ROOM_MIN.max(2 * (kept + new));
                let old = full.map(|[keys, values]| [Some(keys), Some(values)]).unwrap_or_default();
                let [old_keys, old_values] = old.map(|old| old.map(|old| old.narrow(2, self.held - kept, kept)));
                self.held = kept;
                [moved(old_keys, key, room)?, moved(old_values, value, room)?]
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

/// Memory with room for so many positions, which begins with the old ones; otherwise like `new`.
fn moved(old: Option<Tensor>, new: &Tensor, room: i64) -> Result<Tensor> {
    let size = new.size();
    let memory = Tensor::f_empty([size[0], size[1], room, size[3]], (new.kind(), new.device()))?;
    if let Some(old) = old {
        memory.f_narrow(2, 0, old.size()[2])?.f_copy_(&old)?;
    }
    Ok(memory)
}
