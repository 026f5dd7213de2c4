//! Host memory for what does not fit on a device.
//!
//! The memory is pinned, so the device copies to and from it while it computes and while the host goes on. Copies to the host and copies
//! from it have a queue each: buses move data in both directions at once.
//!
//! # Note: who waits for what
//! A copy starts when what was queued for the computation before it has run, and the computation waits for it where
//! [`HostCopy::finish`] is called. So copies in different directions are ordered by the computation between them.
//!
//! # Note: arenas
//! CUDA's allocator rounds each piece of pinned memory up to a power of two, which could take twice the memory. Tensors get ranges of
//! larger pieces instead, the size of which is a power of two. A tensor of more than 1 GiB has a piece of its own.

use std::sync::{Arc, Mutex, PoisonError};

use shardwise_torch::tch::{Device, Kind, Tensor};
use shardwise_torch::{Block, Event, Result, Stream, copy_async, pinned_bytes, storage};

/// The smallest and the largest piece of pinned memory that ranges are taken from.
const ARENA_BYTES: [usize; 2] = [1 << 24, 1 << 30];
/// Ranges start at multiples of a cache line.
const ALIGNMENT: usize = 64;

/// Pinned memory of the host that blocks of a device are copied to and from while training continues.
pub struct HostMemory {
    device: Device,
    fetches: Arc<Stream>,
    stores: Arc<Stream>,
    arenas: Mutex<Arenas>,
}

struct Arenas {
    /// The bytes that are expected to be reserved, and for which there is no arena yet.
    expected: usize,
    /// Each with the number of its bytes that are reserved.
    all: Vec<(Tensor, usize)>,
}

/// A copy between the host and a device. Keeps the device's memory until it has run.
pub(crate) struct HostCopy {
    copied: Option<Tensor>,
    stream: Arc<Stream>,
    device: Device,
    event: Arc<Event>,
}

impl HostMemory {
    /// Memory for what is on this device, of which about `bytes` bytes will be reserved.
    pub fn new(device: Device, bytes: usize) -> Result<Self> {
        let arenas = Mutex::new(Arenas { expected: bytes, all: Vec::new() });
        let (fetches, stores) = (Arc::new(Stream::new(device)?), Arc::new(Stream::new(device)?));
        Ok(HostMemory { device, fetches, stores, arenas })
    }

    /// The device.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Reserves a range, as a tensor of bytes.
    pub(crate) fn reserve(&self, bytes: usize) -> Result<Tensor> {
        let Arenas { expected, all } = &mut *self.arenas.lock().unwrap_or_else(PoisonError::into_inner);
        let len = bytes.next_multiple_of(ALIGNMENT);
        let fits = |(arena, reserved): &(Tensor, usize)| reserved + len <= arena.numel();
        let index = match all.iter().position(fits) {
            Some(index) => index,
            None => {
                let [smallest, largest] = ARENA_BYTES;
                // Not the next larger one: several smaller ones leave less unused.
                let usual = 1 << expected.checked_ilog2().unwrap_or(0);
                let arena_bytes = usual.clamp(smallest, largest).max(len.next_power_of_two());
                *expected = expected.saturating_sub(arena_bytes);
                all.push((pinned_bytes(arena_bytes)?, 0));
                all.len() - 1
            }
        };
        let (arena, reserved) = &mut all[index];
        *reserved += len;
        Ok(arena.f_narrow(0, (*reserved - len) as i64, bytes as i64)?)
    }

    /// Starts to copy a block of the device to a range.
    pub(crate) fn start_store(&self, range: &Tensor, block: Block) -> Result<HostCopy> {
        let from = block.into_tensor()?;
        self.start(&self.stores, &bytes_of(&from)?, range)?;
        self.copy_of(from, &self.stores)
    }

    /// Starts to copy a range to a block of the device.
    pub(crate) fn start_fetch(&self, range: &Tensor, block: Block) -> Result<HostCopy> {
        let to = block.into_tensor()?;
        self.start(&self.fetches, range, &bytes_of(&to)?)?;
        self.copy_of(to, &self.fetches)
    }

    fn start(&self, stream: &Stream, from: &Tensor, to: &Tensor) -> Result<()> {
        stream.wait_for(&Stream::current(self.device)?)?;
        stream.run(|| copy_async(from, to))?
    }

    fn copy_of(&self, copied: Tensor, stream: &Arc<Stream>) -> Result<HostCopy> {
        let event = Arc::new(Event::record(stream)?);
        Ok(HostCopy { copied: Some(copied), stream: stream.clone(), device: self.device, event })
    }
}

impl HostCopy {
    /// Makes the computation wait for the copy, but not the host. Returns the device's memory, and the event that the copy has run.
    pub(crate) fn finish(mut self) -> Result<(Block, Arc<Event>)> {
        Stream::current(self.device)?.wait_for_event(&self.event)?;
        let copied = self.copied.take().expect("only this takes it");
        Ok((storage::take(&copied, "it has been copied")?, self.event.clone()))
    }
}

impl Drop for HostCopy {
    /// If the copy is abandoned, its memory is used again only after it has run. Otherwise the computation waits for it before it frees
    /// the memory. Then this would keep libtorch from using the memory again until the host knows that the copy has run.
    fn drop(&mut self) {
        if let Some(copied) = self.copied.take() {
            // Nothing is left that could fail.
            drop(self.stream.record(&copied));
        }
    }
}

fn bytes_of(tensor: &Tensor) -> Result<Tensor> {
    Ok(tensor.f_view_dtype(Kind::Uint8)?)
}
