//! Groups of ranks that communicate device memory over a group that communicates host memory.
//!
//! A call copies what it sends to the host, and what it has received to the device. That is slow: NCCL is what GPUs communicate over.
//! This is for devices without a library of their own, above all the one that tests pretend to have.

use std::sync::Arc;

use shardwise_plan::{Dtype, RankSet};
use shardwise_torch::tch::Device;
use shardwise_torch::{Block, copy_bytes};

use crate::pending::Completion;
use crate::transport::{Job, Operation, Transport};
use crate::{Error, Group, Result};

/// Creates a group for buffers on `device`, with the same ranks as `control`, a group of CPU ranks.
pub fn connect(control: Group, device: Device) -> Group {
    let (inner, ranks, rank) = (control.transport().clone(), control.ranks(), control.rank());
    control.over("staged", Arc::new(Staged { inner, device, ranks, rank }))
}

struct Staged {
    inner: Arc<dyn Transport>,
    device: Device,
    ranks: RankSet,
    /// This rank's index in the group.
    rank: usize,
}

impl Transport for Staged {
    fn device(&self) -> Device {
        self.device
    }

    fn start(&self, job: Job) -> Completion {
        let Job { call, operation, buffers, handle, panics } = job;
        let named = Box::new(call.clone());
        let failed =
            move |error: shardwise_torch::Error| Error::Transport { call: named.clone(), message: error.to_string() };
        let mut staging = Staging { device: self.device, dtype: call.dtype, host: Vec::new(), received: Vec::new() };
        let operation = match staging.stage(operation, self.rank) {
            Ok(operation) => operation,
            Err(error) => {
                let result = Err(failed(error));
                handle.mark_started();
                handle.mark_ended(&result);
                return Box::new(move || result.map(|()| buffers));
            }
        };
        let Staging { device, host, received, .. } = staging;
        let completion = self.inner.start(Job { call, operation, buffers: Box::new(host), handle, panics });
        Box::new(move || {
            let host = completion()?;
            for Received { from, to, bytes } in received {
                // SAFETY: both addresses are in buffers that this closure owns, with lengths that `stage` has computed for both.
                unsafe { copy_bytes((Device::Cpu, from), (device, to), bytes) }.map_err(&failed)?;
            }
            drop(host);
            Ok(buffers)
        })
    }

    fn split(&self, ranks: RankSet, name: &Arc<str>) -> Result<Arc<dyn Transport>> {
        let rank = ranks.index_of(self.ranks.rank_at(self.rank)).expect("a rank is in its own group");
        Ok(Arc::new(Staged { inner: self.inner.split(ranks, name)?, device: self.device, ranks, rank }))
    }

    fn abort(&self) {
        self.inner.abort();
    }
}

/// Bytes to copy to the device when a call has ended.
struct Received {
    from: *const u8,
    to: *mut u8,
    bytes: usize,
}
// SAFETY: the addresses point into buffers that travel with them.
unsafe impl Send for Received {}

/// The host memory of a call.
struct Staging {
    device: Device,
    dtype: Dtype,
    host: Vec<Block>,
    received: Vec<Received>,
}

impl Staging {
    /// The operation on host memory, to which everything that it reads has been copied.
    fn stage(&mut self, operation: Operation, rank: usize) -> shardwise_torch::Result<Operation> {
        Ok(match operation {
            Operation::AllGather { part, whole, partition } => {
                let (range, staged) = (partition.range(rank), self.allocate(partition.len())?);
                let own = self.offset(staged, range.start);
                self.fetch(part, own, range.len())?;
                self.receive(staged, whole, partition.len());
                Operation::AllGather { part: own, whole: staged, partition }
            }
            Operation::ReduceScatter { whole, part, partition, reduce } => {
                let (range, staged) = (partition.range(rank), self.read(whole, partition.len())?);
                let own = self.offset(staged, range.start);
                self.receive(own, part, range.len());
                Operation::ReduceScatter { whole: staged, part: own, partition, reduce }
            }
            Operation::AllReduce { buffer, partition, reduce } => {
                Operation::AllReduce { buffer: self.read_and_write(buffer, partition.len())?, partition, reduce }
            }
            Operation::AllToAll { send, sends, receive, receives } => Operation::AllToAll {
                send: self.read(send, sends.len())?,
                receive: self.write(receive, receives.len())?,
                sends,
                receives,
            },
            Operation::Broadcast { buffer, len, root } => {
                Operation::Broadcast { buffer: self.read_and_write(buffer, len)?, len, root }
            }
            Operation::Send { buffer, len, to } => Operation::Send { buffer: self.read(buffer, len)?, len, to },
            Operation::Receive { buffer, len, from } => {
                Operation::Receive { buffer: self.write(buffer, len)?, len, from }
            }
            Operation::Barrier => Operation::Barrier,
        })
    }

    fn read(&mut self, buffer: *const u8, len: usize) -> shardwise_torch::Result<*mut u8> {
        let staged = self.allocate(len)?;
        self.fetch(buffer, staged, len)?;
        Ok(staged)
    }

    fn write(&mut self, buffer: *mut u8, len: usize) -> shardwise_torch::Result<*mut u8> {
        let staged = self.allocate(len)?;
        self.receive(staged, buffer, len);
        Ok(staged)
    }

    fn read_and_write(&mut self, buffer: *mut u8, len: usize) -> shardwise_torch::Result<*mut u8> {
        let staged = self.read(buffer, len)?;
        self.receive(staged, buffer, len);
        Ok(staged)
    }

    fn allocate(&mut self, len: usize) -> shardwise_torch::Result<*mut u8> {
        self.host.push(Block::new(self.dtype, len, Device::Cpu)?);
        Ok(self.host.last().expect("pushed above").as_ptr())
    }

    fn offset(&self, data: *mut u8, element: usize) -> *mut u8 {
        data.wrapping_add(element * self.dtype.bytes())
    }

    /// Copies elements of the device to the host.
    fn fetch(&self, from: *const u8, to: *mut u8, len: usize) -> shardwise_torch::Result<()> {
        // SAFETY: `Group` has checked the length of the call's buffer, and `to` was allocated for as many elements.
        unsafe { copy_bytes((self.device, from), (Device::Cpu, to), len * self.dtype.bytes()) }
    }

    /// Notes elements of the host to copy to the device.
    fn receive(&mut self, from: *const u8, to: *mut u8, len: usize) {
        self.received.push(Received { from, to, bytes: len * self.dtype.bytes() });
    }
}
