//! Where tensors are while a rank does not need them: in a file on a disk, or in memory of the host.

use std::sync::Arc;

use shardwise_plan::Dtype;
use shardwise_torch::tch::{Device, Tensor};
use shardwise_torch::{Block, Event, kind_of, storage};

use crate::host_memory::{HostCopy, HostMemory};
use crate::scratch_file::{Region, ScratchFile, Transfer};

/// Where tensors are while a rank does not need them.
#[derive(Clone)]
pub enum OffloadTarget {
    /// A file on a disk, for tensors of the CPU.
    Disk(Arc<ScratchFile>),
    /// Memory of the host, for tensors of another device.
    Host(Arc<HostMemory>),
}

/// Where the elements of one tensor are kept. Its functions fail with a sentence.
pub(crate) enum Room {
    Disk {
        file: Arc<ScratchFile>,
        region: Region,
    },
    Host {
        memory: Arc<HostMemory>,
        /// A tensor of bytes.
        range: Tensor,
    },
}

/// A block on its way. Nobody else can touch its memory.
pub(crate) enum Move {
    Disk(Transfer),
    Host(HostCopy),
}

/// What was moved: its checksum, or when it arrives.
#[derive(Clone)]
pub(crate) enum Arrival {
    Disk(u32),
    Host(Arc<Event>),
}

impl OffloadTarget {
    /// The device of the tensors that it is for.
    pub fn device(&self) -> Device {
        match self {
            OffloadTarget::Disk(_) => Device::Cpu,
            OffloadTarget::Host(memory) => memory.device(),
        }
    }

    /// What it is called in errors: the folder of a file.
    pub fn name(&self) -> String {
        match self {
            OffloadTarget::Disk(file) => file.folder().display().to_string(),
            OffloadTarget::Host(_) => "host memory".to_string(),
        }
    }

    /// Makes room for a tensor of this size.
    pub(crate) fn reserve(&self, bytes: usize) -> Result<Room, String> {
        Ok(match self {
            OffloadTarget::Disk(file) => Room::Disk { file: file.clone(), region: file.reserve(bytes).map_err(text)? },
            OffloadTarget::Host(memory) => {
                Room::Host { memory: memory.clone(), range: memory.reserve(bytes).map_err(text)? }
            }
        })
    }

    /// A block for elements that will be fetched or overwritten.
    pub(crate) fn allocate(&self, dtype: Dtype, len: usize) -> Result<Block, String> {
        Block::new(dtype, len, self.device()).map_err(text)
    }

    /// A block of zeros.
    pub(crate) fn allocate_zeros(&self, dtype: Dtype, len: usize) -> Result<Block, String> {
        match self.device() {
            Device::Cpu => Block::zeros(dtype, len).map_err(text),
            device => {
                let zeros = Tensor::f_zeros([len as i64], (kind_of(dtype), device)).map_err(text)?;
                storage::take(&zeros, "it is being fetched").map_err(text)
            }
        }
    }
}

impl Room {
    /// Starts to move a block there.
    pub(crate) fn start_store(&self, block: Block) -> Result<Move, String> {
        match self {
            Room::Disk { file, region } => Ok(Move::Disk(file.start_write(*region, block))),
            Room::Host { memory, range } => memory.start_store(range, block).map(Move::Host).map_err(text),
        }
    }

    /// Starts to fill a block with what is there.
    pub(crate) fn start_fetch(&self, block: Block) -> Result<Move, String> {
        match self {
            Room::Disk { file, region } => Ok(Move::Disk(file.start_read(*region, block))),
            Room::Host { memory, range } => memory.start_fetch(range, block).map(Move::Host).map_err(text),
        }
    }

    /// The elements that have arrived there, or zeros if none have, as a tensor of the CPU. The next store changes them.
    pub(crate) fn read(&self, arrived: Option<&Arrival>, dtype: Dtype, len: usize) -> shardwise_torch::Result<Tensor> {
        match (self, arrived) {
            // Nothing was ever written to a new file.
            (Room::Disk { file, region }, _) => file.map(*region, dtype, len)?.into_tensor(),
            (Room::Host { range, .. }, Some(Arrival::Host(event))) => {
                event.synchronize()?;
                Ok(range.f_view_dtype(kind_of(dtype))?)
            }
            (Room::Host { .. }, _) => Block::zeros(dtype, len)?.into_tensor(),
        }
    }

    #[cfg(test)]
    pub(crate) fn start(&self) -> u64 {
        match self {
            Room::Disk { region, .. } => region.start(),
            Room::Host { .. } => 0,
        }
    }
}

impl Move {
    /// Waits for the block. What a device queues from now on waits for a copy of the host; the caller does not.
    pub(crate) fn finish(self) -> Result<(Block, Arrival), String> {
        match self {
            Move::Disk(transfer) => {
                let (block, checksum) = transfer.wait().map_err(text)?;
                Ok((block, Arrival::Disk(checksum)))
            }
            Move::Host(copy) => {
                let (block, event) = copy.finish().map_err(text)?;
                Ok((block, Arrival::Host(event)))
            }
        }
    }
}

impl Arrival {
    /// Whether what was fetched is what was stored. Memory of the host is not checked.
    pub(crate) fn is_same(&self, stored: &Arrival) -> bool {
        match (self, stored) {
            (Arrival::Disk(fetched), Arrival::Disk(stored)) => fetched == stored,
            (Arrival::Host(_), Arrival::Host(_)) => true,
            _ => false,
        }
    }
}

/// The first line of an error: those of libtorch go on with a backtrace.
pub(crate) fn text(error: impl std::fmt::Display) -> String {
    error.to_string().lines().next().unwrap_or_default().to_string()
}
