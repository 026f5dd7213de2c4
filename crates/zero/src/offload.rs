//! Tensors of a unit that are on a disk while they are not needed: parameters, masters and optimizer state, gradients, activations.
//!
//! Each tensor has a range of the scratch file. While it is there, the tensor has no memory, and reading it is an error that says so.

use std::sync::Arc;

use shardwise_plan::Dtype;
use shardwise_torch::tch::{Device, Tensor};
use shardwise_torch::{Block, storage};

use crate::scratch_file::{Region, ScratchFile, Transfer};

/// Tensors that can be on a disk, such as the master and the optimizer state of a shard. Its functions fail with a sentence.
pub struct Offloaded {
    file: Arc<ScratchFile>,
    /// One for each tensor.
    slots: Vec<Slot>,
    /// What reading a tensor that is on the disk says.
    reason: String,
}

struct Slot {
    region: Region,
    dtype: Dtype,
    len: usize,
    place: Place,
}

/// Where a tensor's elements are. The variants say what memory they hold.
enum Place {
    /// In memory. The file has the same elements if there is a checksum, which is theirs.
    Memory(Option<u32>),
    /// In memory, and being written.
    Storing(Transfer),
    /// In the file, with this checksum; nothing was written if it is none, and all elements are zero.
    File(Option<u32>),
    /// In memory that is being read from the file, where the elements have this checksum.
    Fetching(Transfer, u32),
    /// Between two of the other places. A failure leaves the tensor here for good.
    Moving,
}

/// What was read is not what was written.
const CHANGED: &str = "what was read is not what was stored there: another program, the disk or memory has changed it. Parameters can \
                       no longer be updated; resume from the last checkpoint";

impl Offloaded {
    /// Reserves a range of the file for each tensor, given by its dtype and length. They stay in memory until they are stored.
    pub fn new(
        file: &Arc<ScratchFile>,
        tensors: impl Iterator<Item = (Dtype, usize)>,
        what: String,
    ) -> Result<Self, String> {
        let slot = |(dtype, len): (Dtype, usize)| {
            let region = file.reserve(len * dtype.bytes()).map_err(text)?;
            Ok(Slot { region, dtype, len, place: Place::Memory(None) })
        };
        let reason = format!("{what} is on a disk; fetch it before it is used");
        Ok(Offloaded { file: file.clone(), slots: tensors.map(slot).collect::<Result<_, String>>()?, reason })
    }

    /// Whether these are the dtypes and lengths of its tensors.
    pub fn holds(&self, tensors: &[(Dtype, usize)]) -> bool {
        self.slots.iter().map(|slot| (slot.dtype, slot.len)).eq(tensors.iter().copied())
    }

    /// The file.
    pub fn file(&self) -> &ScratchFile {
        &self.file
    }

    /// The bytes that are in memory.
    pub fn bytes_in_memory(&self) -> usize {
        let in_memory = self.slots.iter().filter(|slot| !matches!(slot.place, Place::File(_)));
        in_memory.map(|slot| slot.len * slot.dtype.bytes()).sum()
    }

    /// Frees the memory of tensors that are all zero, without writing it: those from `first` on.
    pub fn forget_zeros(&mut self, tensors: &[&Tensor], first: usize) -> Result<(), String> {
        for (slot, tensor) in self.slots.iter_mut().zip(tensors).skip(first) {
            drop(storage::take(tensor, &self.reason).map_err(text)?);
            slot.place = Place::File(None);
        }
        Ok(())
    }

    /// Forgets what the file has: the next tensors start in memory.
    pub fn reset(&mut self) {
        for slot in &mut self.slots {
            if let Place::Storing(transfer) | Place::Fetching(transfer, _) = slot.take_place() {
                // Nobody needs it any more.
                drop(transfer.wait());
            }
            slot.place = Place::Memory(None);
        }
    }

    /// Notes that the tensors in memory will differ from those in the file.
    pub fn mark_changed(&mut self) {
        for slot in &mut self.slots {
            if let Place::Memory(checksum) = &mut slot.place {
                *checksum = None;
            }
        }
    }

    /// Gives tensors that are on the disk memory with unspecified contents, which will be overwritten.
    pub fn allocate(&mut self, tensors: &[&Tensor]) -> Result<(), String> {
        for (slot, tensor) in self.slots.iter_mut().zip(tensors) {
            slot.place = match slot.take_place() {
                Place::File(_) => {
                    let block = Block::new(slot.dtype, slot.len, Device::Cpu).map_err(text)?;
                    storage::put(tensor, block).map_err(text)?;
                    Place::Memory(None)
                }
                other => other,
            };
        }
        Ok(())
    }

    /// Frees tensors that have not changed since they were fetched.
    pub fn evict(&mut self, tensors: &[&Tensor]) -> Result<(), String> {
        for (slot, tensor) in self.slots.iter_mut().zip(tensors) {
            slot.place = match slot.take_place() {
                Place::Memory(Some(checksum)) => {
                    drop(storage::take(tensor, &self.reason).map_err(text)?);
                    Place::File(Some(checksum))
                }
                Place::Memory(None) => return Err("it has changed, and must be stored".to_string()),
                other => other,
            };
        }
        Ok(())
    }

    /// Starts to write the tensors that are in memory, if that was never done. Otherwise frees them: they never change.
    pub fn start_store_once(&mut self, tensors: &[&Tensor]) -> Result<(), String> {
        match self.slots.iter().all(|slot| matches!(slot.place, Place::Memory(None))) {
            true => self.start_store(tensors),
            false => self.evict(tensors),
        }
    }

    /// Starts to write the tensors that are in memory.
    pub fn start_store(&mut self, tensors: &[&Tensor]) -> Result<(), String> {
        for (slot, tensor) in self.slots.iter_mut().zip(tensors) {
            slot.place = match slot.take_place() {
                Place::Memory(_) => {
                    let block = storage::take(tensor, &self.reason).map_err(text)?;
                    Place::Storing(self.file.start_write(slot.region, block))
                }
                other => other,
            };
        }
        Ok(())
    }

    /// Waits until the tensors are written.
    pub fn finish_store(&mut self, _: &[&Tensor]) -> Result<(), String> {
        for slot in &mut self.slots {
            slot.place = match slot.take_place() {
                Place::Storing(transfer) => {
                    let (block, checksum) = transfer.wait().map_err(text)?;
                    drop(block);
                    Place::File(Some(checksum))
                }
                other => other,
            };
        }
        Ok(())
    }

    /// Starts to read the tensors that are on the disk.
    pub fn start_fetch(&mut self, tensors: &[&Tensor]) -> Result<(), String> {
        for (slot, tensor) in self.slots.iter_mut().zip(tensors) {
            slot.place = match slot.take_place() {
                Place::File(None) => {
                    let zeros = Block::zeros(slot.dtype, slot.len).map_err(text)?;
                    storage::put(tensor, zeros).map_err(text)?;
                    Place::Memory(None)
                }
                Place::File(Some(checksum)) => {
                    let block = Block::new(slot.dtype, slot.len, Device::Cpu).map_err(text)?;
                    Place::Fetching(self.file.start_read(slot.region, block), checksum)
                }
                other => other,
            };
        }
        Ok(())
    }

    /// Waits until the tensors are in memory.
    pub fn finish_fetch(&mut self, tensors: &[&Tensor]) -> Result<(), String> {
        for (slot, tensor) in self.slots.iter_mut().zip(tensors) {
            slot.place = match slot.take_place() {
                Place::Fetching(transfer, stored) => {
                    let (block, read) = transfer.wait().map_err(text)?;
                    if read != stored {
                        return Err(CHANGED.to_string());
                    }
                    storage::put(tensor, block).map_err(text)?;
                    Place::Memory(Some(stored))
                }
                other => other,
            };
        }
        Ok(())
    }

    /// A tensor's elements to read, by its index: from the file if they are there, where the next store changes them.
    pub fn read(&self, index: usize, tensor: &Tensor) -> shardwise_torch::Result<Tensor> {
        let slot = &self.slots[index];
        match slot.place {
            Place::File(_) if slot.len > 0 => self.file.map(slot.region, slot.dtype, slot.len)?.into_tensor(),
            _ => Ok(tensor.shallow_clone()),
        }
    }
}

impl Slot {
    fn take_place(&mut self) -> Place {
        std::mem::replace(&mut self.place, Place::Moving)
    }
}

/// The first line of an error: those of libtorch go on with a backtrace.
fn text(error: impl std::fmt::Display) -> String {
    error.to_string().lines().next().unwrap_or_default().to_string()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use std::os::unix::fs::FileExt;

    use shardwise_torch::tch::Kind;

    use super::*;

    fn offloaded(file: &Arc<ScratchFile>, tensors: &[&Tensor]) -> Offloaded {
        let tensors = tensors.iter().map(|tensor| (shardwise_torch::dtype_of(tensor.kind()).unwrap(), tensor.numel()));
        Offloaded::new(file, tensors, "a tensor".to_string()).unwrap()
    }

    fn move_to_disk(offloaded: &mut Offloaded, tensors: &[&Tensor]) {
        offloaded.start_store(tensors).unwrap();
        offloaded.finish_store(tensors).unwrap();
        assert_eq!(offloaded.bytes_in_memory(), 0);
    }

    fn fill(tensor: &Tensor, from: &Tensor) {
        tensor.shallow_clone().copy_(from);
    }

    fn move_to_memory(offloaded: &mut Offloaded, tensors: &[&Tensor]) -> Result<(), String> {
        offloaded.start_fetch(tensors)?;
        offloaded.finish_fetch(tensors)
    }

    #[test]
    fn each_of_1000_flipped_bytes_is_found() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        for round in 0..1000 {
            let file = Arc::new(ScratchFile::create(folder.path(), 0).unwrap());
            let new = |kind, len| Tensor::ones([len], (kind, Device::Cpu));
            // Whole pages and parts of them.
            let [a, b] = [new(Kind::Float, 1024 + round % 7 * 500), new(Kind::BFloat16, 3 + round)];
            let tensors = [&a, &b];
            let mut offloaded = offloaded(&file, &tensors);
            move_to_disk(&mut offloaded, &tensors);
            let starts: Vec<u64> = offloaded.slots.iter().map(|slot| slot.region.start()).collect();
            let at = match round % 2 {
                0 => starts[0] + (round as u64 * 7919) % (4 * a.numel() as u64),
                _ => starts[1] + (round as u64 * 7919) % (2 * b.numel() as u64),
            };
            let (other, mut byte) = (file.open_again().unwrap(), [0]);
            other.read_exact_at(&mut byte, at).unwrap();
            other.write_all_at(&[byte[0] ^ (1 << (round % 8))], at).unwrap();
            let error = move_to_memory(&mut offloaded, &tensors).unwrap_err();
            assert!(error.contains("is not what was stored"), "byte {at}: {error}");
        }
    }

    #[test]
    fn tensors_can_be_read_wherever_they_are() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let file = Arc::new(ScratchFile::create(folder.path(), 0).unwrap());
        let tensor = Tensor::arange(5000, (Kind::Float, Device::Cpu));
        let (expected, tensors) = (tensor.copy(), [&tensor]);
        let mut offloaded = offloaded(&file, &tensors);
        for _ in 0..2 {
            assert!(offloaded.read(0, &tensor).unwrap().equal(&expected));
            move_to_disk(&mut offloaded, &tensors);
            assert!(offloaded.read(0, &tensor).unwrap().equal(&expected));
            assert!(tensor.f_sum(Kind::Float).unwrap_err().to_string().contains("a tensor is on a disk"));
            move_to_memory(&mut offloaded, &tensors).unwrap();
            assert!(tensor.equal(&expected));
        }
        // Zeros are not written, and come back.
        offloaded.forget_zeros(&tensors, 0).unwrap();
        assert_eq!(offloaded.bytes_in_memory(), 0);
        move_to_memory(&mut offloaded, &tensors).unwrap();
        assert!(tensor.equal(&tensor.zeros_like()));
        // What has not changed is freed without being written.
        fill(&tensor, &expected);
        move_to_disk(&mut offloaded, &tensors);
        move_to_memory(&mut offloaded, &tensors).unwrap();
        let written_bytes = file.moved().written_bytes;
        offloaded.evict(&tensors).unwrap();
        assert_eq!((offloaded.bytes_in_memory(), file.moved().written_bytes), (0, written_bytes));
        assert!(offloaded.read(0, &tensor).unwrap().equal(&expected));
        move_to_memory(&mut offloaded, &tensors).unwrap();
        assert!(tensor.equal(&expected));
        offloaded.mark_changed();
        assert!(offloaded.evict(&tensors).unwrap_err().contains("must be stored"));
        // What is overwritten is not read.
        let mut offloaded = self::offloaded(&file, &tensors);
        move_to_disk(&mut offloaded, &tensors);
        let read_bytes = file.moved().read_bytes;
        offloaded.allocate(&tensors).unwrap();
        fill(&tensor, &expected);
        assert_eq!(file.moved().read_bytes, read_bytes);
        // What is forgotten while it is being stored is not waited for by the next.
        offloaded.start_store(&tensors).unwrap();
        offloaded.reset();
        assert_eq!(offloaded.bytes_in_memory(), 4 * 5000);
    }
}
