//! Tensors of a unit that are elsewhere while they are not needed: parameters, masters and optimizer state, gradients, activations.
//!
//! Each tensor has a range of a file or of the host's memory. While it is there, the tensor has no memory, and reading it is an error
//! that says so.

use shardwise_plan::Dtype;
use shardwise_torch::storage;
use shardwise_torch::tch::Tensor;

use crate::offload_target::{Arrival, Move, OffloadTarget, Room, text};

/// Tensors that can be offloaded, such as the master and the optimizer state of a shard. Its functions fail with a sentence.
pub struct Offloaded {
    target: OffloadTarget,
    /// One for each tensor.
    slots: Vec<Slot>,
    /// What reading a tensor that is not in memory says.
    reason: String,
}

struct Slot {
    room: Room,
    dtype: Dtype,
    len: usize,
    place: Place,
}

/// Where a tensor's elements are. The variants say what memory they hold.
enum Place {
    /// In memory. The target has the same elements if they arrived there.
    Memory(Option<Arrival>),
    /// In memory, and being stored.
    Storing(Move),
    /// At the target; nothing was stored if nothing arrived, and all elements are zero.
    Stored(Option<Arrival>),
    /// In memory that is being filled from the target, where the elements arrived.
    Fetching(Move, Arrival),
    /// Between two of the other places. A failure leaves the tensor here for good.
    Moving,
}

/// What was read is not what was written.
const CHANGED: &str = "what was read is not what was stored there: another program, the disk or memory has changed it. Parameters can \
                       no longer be updated; resume from the last checkpoint";

impl Offloaded {
    /// Makes room for each tensor, given by its dtype and length. They stay in memory until they are stored.
    pub fn new(
        target: &OffloadTarget,
        tensors: impl Iterator<Item = (Dtype, usize)>,
        what: String,
    ) -> Result<Self, String> {
        let slot = |(dtype, len): (Dtype, usize)| {
            let room = target.reserve(len * dtype.bytes())?;
            Ok(Slot { room, dtype, len, place: Place::Memory(None) })
        };
        let place = match target {
            OffloadTarget::Disk(_) => "a disk",
            OffloadTarget::Host(_) => "the host",
        };
        let reason = format!("{what}: offloaded to {place}, and not fetched");
        Ok(Offloaded { target: target.clone(), slots: tensors.map(slot).collect::<Result<_, String>>()?, reason })
    }

    /// Whether these are the dtypes and lengths of its tensors.
    pub fn holds(&self, tensors: &[(Dtype, usize)]) -> bool {
        self.slots.iter().map(|slot| (slot.dtype, slot.len)).eq(tensors.iter().copied())
    }

    /// Where the tensors are when they are not in memory.
    pub fn target(&self) -> &OffloadTarget {
        &self.target
    }

    /// Whether all tensors are in memory, and not being moved.
    pub(crate) fn is_in_memory(&self) -> bool {
        self.slots.iter().all(|slot| matches!(slot.place, Place::Memory(_)))
    }

    /// The bytes that are in memory.
    pub fn bytes_in_memory(&self) -> usize {
        let in_memory = self.slots.iter().filter(|slot| !matches!(slot.place, Place::Stored(_)));
        in_memory.map(|slot| slot.len * slot.dtype.bytes()).sum()
    }

    /// Frees the memory of tensors that are all zero, without writing it: those from `first` on.
    pub fn forget_zeros(&mut self, tensors: &[&Tensor], first: usize) -> Result<(), String> {
        for (slot, tensor) in self.slots.iter_mut().zip(tensors).skip(first) {
            drop(storage::take(tensor, &self.reason).map_err(text)?);
            slot.place = Place::Stored(None);
        }
        Ok(())
    }

    /// Forgets what is at the target: the next tensors start in memory.
    pub fn reset(&mut self) {
        for slot in &mut self.slots {
            if let Place::Storing(moving) | Place::Fetching(moving, _) = slot.take_place() {
                // Nobody needs it any more.
                drop(moving.finish());
            }
            slot.place = Place::Memory(None);
        }
    }

    /// Notes that the tensors in memory will differ from those at the target.
    pub(crate) fn mark_changed(&mut self) {
        for slot in &mut self.slots {
            if let Place::Memory(arrival) = &mut slot.place {
                *arrival = None;
            }
        }
    }

    /// Gives tensors that are not in memory some with unspecified contents, which will be overwritten.
    pub(crate) fn allocate(&mut self, tensors: &[&Tensor]) -> Result<(), String> {
        for (slot, tensor) in self.slots.iter_mut().zip(tensors) {
            slot.place = match slot.take_place() {
                Place::Stored(_) => {
                    let block = self.target.allocate(slot.dtype, slot.len)?;
                    storage::put(tensor, block).map_err(text)?;
                    Place::Memory(None)
                }
                other => other,
            };
        }
        Ok(())
    }

    /// Frees tensors that have not changed since they were fetched.
    pub(crate) fn evict(&mut self, tensors: &[&Tensor]) -> Result<(), String> {
        for (slot, tensor) in self.slots.iter_mut().zip(tensors) {
            slot.place = match slot.take_place() {
                Place::Memory(Some(arrival)) => {
                    drop(storage::take(tensor, &self.reason).map_err(text)?);
                    Place::Stored(Some(arrival))
                }
                Place::Memory(None) => return Err("it has changed, and must be stored".to_string()),
                other => other,
            };
        }
        Ok(())
    }

    /// Starts to store the tensors that are in memory, if that was never done. Otherwise frees them: they never change.
    pub(crate) fn start_store_once(&mut self, tensors: &[&Tensor]) -> Result<(), String> {
        match self.slots.iter().all(|slot| matches!(slot.place, Place::Memory(None))) {
            true => self.start_store(tensors),
            false => self.evict(tensors),
        }
    }

    /// Starts to store the tensors that are in memory.
    pub fn start_store(&mut self, tensors: &[&Tensor]) -> Result<(), String> {
        for (slot, tensor) in self.slots.iter_mut().zip(tensors) {
            slot.place = match slot.take_place() {
                Place::Memory(_) => {
                    let block = storage::take(tensor, &self.reason).map_err(text)?;
                    Place::Storing(slot.room.start_store(block)?)
                }
                other => other,
            };
        }
        Ok(())
    }

    /// Waits until the tensors are stored, and frees their memory.
    pub fn finish_store(&mut self, _: &[&Tensor]) -> Result<(), String> {
        for slot in &mut self.slots {
            slot.place = match slot.take_place() {
                Place::Storing(moving) => {
                    let (block, arrival) = moving.finish()?;
                    drop(block);
                    Place::Stored(Some(arrival))
                }
                other => other,
            };
        }
        Ok(())
    }

    /// Starts to fetch the tensors that are not in memory.
    pub fn start_fetch(&mut self, tensors: &[&Tensor]) -> Result<(), String> {
        for (slot, tensor) in self.slots.iter_mut().zip(tensors) {
            slot.place = match slot.take_place() {
                Place::Stored(None) => {
                    let zeros = self.target.allocate_zeros(slot.dtype, slot.len)?;
                    storage::put(tensor, zeros).map_err(text)?;
                    Place::Memory(None)
                }
                Place::Stored(Some(arrival)) => {
                    let block = self.target.allocate(slot.dtype, slot.len)?;
                    Place::Fetching(slot.room.start_fetch(block)?, arrival)
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
                Place::Fetching(moving, stored) => {
                    let (block, fetched) = moving.finish()?;
                    if !fetched.is_same(&stored) {
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

    /// A tensor's elements to read, by its index: from the target if they are there, where the next store changes them.
    pub fn read(&self, index: usize, tensor: &Tensor) -> shardwise_torch::Result<Tensor> {
        let slot = &self.slots[index];
        match &slot.place {
            Place::Stored(arrival) if slot.len > 0 => slot.room.read(arrival.as_ref(), slot.dtype, slot.len),
            _ => Ok(tensor.shallow_clone()),
        }
    }
}

impl Slot {
    fn take_place(&mut self) -> Place {
        std::mem::replace(&mut self.place, Place::Moving)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use std::os::unix::fs::FileExt;
    use std::sync::Arc;

    use shardwise_pretend_device::device;
    use shardwise_torch::tch::{Device, Kind};

    use super::*;
    use crate::{HostMemory, ScratchFile};

    fn offloaded(target: &OffloadTarget, tensors: &[&Tensor]) -> Offloaded {
        let tensors = tensors.iter().map(|tensor| (shardwise_torch::dtype_of(tensor.kind()).unwrap(), tensor.numel()));
        Offloaded::new(target, tensors, "a tensor".to_string()).unwrap()
    }

    fn move_away(offloaded: &mut Offloaded, tensors: &[&Tensor]) {
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
            let mut offloaded = offloaded(&OffloadTarget::Disk(file.clone()), &tensors);
            move_away(&mut offloaded, &tensors);
            let starts: Vec<u64> = offloaded.slots.iter().map(|slot| slot.room.start()).collect();
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
        let disk = OffloadTarget::Disk(file.clone());
        let written_bytes = || file.moved().written_bytes;
        move_a_tensor(&disk, "a tensor: offloaded to a disk", &written_bytes);
        // What is overwritten is not read.
        let tensor = Tensor::arange(5000, (Kind::Float, Device::Cpu));
        let mut offloaded = self::offloaded(&disk, &[&tensor]);
        move_away(&mut offloaded, &[&tensor]);
        let read_bytes = file.moved().read_bytes;
        offloaded.allocate(&[&tensor]).unwrap();
        fill(&tensor, &tensor.ones_like());
        assert_eq!(file.moved().read_bytes, read_bytes);
        // What is forgotten while it is being stored is not waited for by the next.
        offloaded.start_store(&[&tensor]).unwrap();
        offloaded.reset();
        assert_eq!(offloaded.bytes_in_memory(), 4 * 5000);
        let host = OffloadTarget::Host(Arc::new(HostMemory::new(device(), 0).unwrap()));
        move_a_tensor(&host, "a tensor: offloaded to the host", &|| 0);
    }

    /// Moves a tensor back and forth, and reads it everywhere.
    fn move_a_tensor(target: &OffloadTarget, reason: &str, written_bytes: &dyn Fn() -> u64) {
        let is_equal = |found: &Tensor, expected: &Tensor| found.to_device(Device::Cpu).equal(expected);
        let expected = Tensor::arange(5000, (Kind::Float, Device::Cpu));
        let [tensor, other] = [(); 2].map(|()| expected.to_device(target.device()).copy());
        let tensors = [&tensor];
        let mut offloaded = offloaded(target, &tensors);
        for _ in 0..2 {
            assert!(is_equal(&offloaded.read(0, &tensor).unwrap(), &expected));
            move_away(&mut offloaded, &tensors);
            assert!(is_equal(&offloaded.read(0, &tensor).unwrap(), &expected));
            assert!(tensor.f_sum(Kind::Float).unwrap_err().to_string().contains(reason));
            move_to_memory(&mut offloaded, &tensors).unwrap();
            assert!(is_equal(&tensor, &expected));
        }
        // Zeros are not stored, and come back.
        offloaded.forget_zeros(&tensors, 0).unwrap();
        assert_eq!(offloaded.bytes_in_memory(), 0);
        move_to_memory(&mut offloaded, &tensors).unwrap();
        assert!(is_equal(&tensor, &expected.zeros_like()));
        // What has not changed is freed without being stored.
        fill(&tensor, &other);
        move_away(&mut offloaded, &tensors);
        move_to_memory(&mut offloaded, &tensors).unwrap();
        let written = written_bytes();
        offloaded.evict(&tensors).unwrap();
        assert_eq!((offloaded.bytes_in_memory(), written_bytes()), (0, written));
        assert!(is_equal(&offloaded.read(0, &tensor).unwrap(), &expected));
        move_to_memory(&mut offloaded, &tensors).unwrap();
        assert!(is_equal(&tensor, &expected));
        offloaded.mark_changed();
        assert!(offloaded.evict(&tensors).unwrap_err().contains("must be stored"));
    }
}
