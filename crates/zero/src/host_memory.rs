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
//! larger pieces instead, the size of which is a power of two.

use std::sync::{Arc, Mutex, PoisonError};

use shardwise_torch::tch::{Device, Kind, Tensor};
use shardwise_torch::{Block, Event, Result, Stream, copy_async, pin, storage};

/// The smallest and the largest piece of pinned memory that ranges are taken from.
const ARENA_BYTES: [usize; 2] = [1 << 20, 1 << 30];
/// Ranges start at multiples of a cache line.
const ALIGNMENT: usize = 64;

/// Pinned memory of the host that blocks of a device are copied to and from while training continues.
pub struct HostMemory {
    device: Device,
    fetches: Stream,
    stores: Stream,
    arenas: Mutex<Arenas>,
}

struct Arenas {
    /// The size of the next one.
    bytes: usize,
    /// The last one, and the bytes of it that are reserved.
    last: Option<(Tensor, usize)>,
}

/// A copy between the host and a device. Keeps the device's memory until it has run.
pub(crate) struct HostCopy {
    copied: Tensor,
    device: Device,
    event: Arc<Event>,
}

impl HostMemory {
    /// Memory for what is on this device, of which about `bytes` bytes will be reserved.
    pub fn new(device: Device, bytes: usize) -> Result<Self> {
        let [smallest, largest] = ARENA_BYTES;
        let arenas = Arenas { bytes: bytes.next_power_of_two().clamp(smallest, largest), last: None };
        let (fetches, stores) = (Stream::new(device)?, Stream::new(device)?);
        Ok(HostMemory { device, fetches, stores, arenas: Mutex::new(arenas) })
    }

    /// The device.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Reserves a range, as a tensor of bytes.
    pub(crate) fn reserve(&self, bytes: usize) -> Result<Tensor> {
        let mut arenas = self.arenas.lock().unwrap_or_else(PoisonError::into_inner);
        let len = bytes.next_multiple_of(ALIGNMENT);
        if let Some((arena, used)) = &mut arenas.last
            && *used + len <= arena.numel()
        {
            *used += len;
            return Ok(arena.f_narrow(0, (*used - len) as i64, bytes as i64)?);
        }
        let mut arena = Tensor::f_empty([len.max(arenas.bytes) as i64], (Kind::Uint8, Device::Cpu))?;
        pin(&mut arena)?;
        let range = arena.f_narrow(0, 0, bytes as i64)?;
        // A larger range leaves the rest of the arena before it to the next ones.
        if len <= arenas.bytes {
            arenas.last = Some((arena, len));
        }
        Ok(range)
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

    fn copy_of(&self, copied: Tensor, stream: &Stream) -> Result<HostCopy> {
        // If the copy is abandoned, its memory is used again after it has run.
        stream.record(&copied)?;
        Ok(HostCopy { copied, device: self.device, event: Arc::new(Event::record(stream)?) })
    }
}

impl HostCopy {
    /// Makes the computation wait for the copy, but not the host. Returns the device's memory, and the event that the copy has run.
    pub(crate) fn finish(self) -> Result<(Block, Arc<Event>)> {
        Stream::current(self.device)?.wait_for_event(&self.event)?;
        Ok((storage::take(&self.copied, "it has been copied")?, self.event))
    }
}

fn bytes_of(tensor: &Tensor) -> Result<Tensor> {
    Ok(tensor.f_view_dtype(Kind::Uint8)?)
}
