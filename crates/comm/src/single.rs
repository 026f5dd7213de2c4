//! A group of one rank. A call copies at most one buffer, and has completed when it returns.

use std::sync::Arc;
use std::time::Duration;

use shardwise_plan::RankSet;
use shardwise_torch::copy_bytes;
use shardwise_torch::tch::Device;

use crate::instruments::Instruments;
use crate::pending::Completion;
use crate::reduce::reduce_into;
use crate::transport::{Job, Operation, Transport};
use crate::{Error, Group, Result};

/// Creates a group of this process alone. Needs neither MPI nor a launcher.
pub fn group() -> Group {
    group_on(Device::Cpu)
}

/// Like [`group`], for buffers on `device`.
pub fn group_on(device: Device) -> Group {
    Group::new("world", RankSet::world(1), 0, Arc::new(Single(device)), Instruments::new(None))
}

/// With the device of its buffers.
struct Single(Device);

impl Transport for Single {
    fn device(&self) -> Device {
        self.0
    }

    fn start(&self, job: Job) -> Completion {
        job.handle.mark_started();
        let copy = |from: *const u8, to: *mut u8, elements: usize| {
            let bytes = elements * job.call.dtype.bytes();
            let copied = match self.0 {
                Device::Cpu => {
                    // SAFETY: `Group` has checked both lengths. For an in-place call, the two addresses are the same.
                    unsafe { std::ptr::copy(from, to, bytes) };
                    Ok(())
                }
                _ if from == to.cast_const() => Ok(()),
                // SAFETY: `Group` has checked both lengths, and the call owns both buffers.
                device => unsafe { copy_bytes((device, from), (device, to), bytes) },
            };
            copied.map_err(|error| Error::Transport { call: Box::new(job.call.clone()), message: error.to_string() })
        };
        let result: Result<()> = match &job.operation {
            Operation::AllGather { part, whole, partition } => copy(*part, *whole, partition.len()),
            Operation::ReduceScatter { whole, part, part_dtype, partition, reduce }
                if *part_dtype != job.call.dtype =>
            {
                // SAFETY: `Group` has checked both lengths, and allows two dtypes on the CPU only.
                unsafe { reduce_into(job.call.dtype, *part_dtype, *reduce, &[*whole], *part, partition.len()) };
                Ok(())
            }
            Operation::ReduceScatter { whole, part, partition, .. } => copy(*whole, *part, partition.len()),
            Operation::AllToAll { send, receive, sends, .. } => copy(*send, *receive, sends.len()),
            Operation::AllReduce { .. } | Operation::Broadcast { .. } | Operation::Barrier => Ok(()),
            Operation::Send { .. } | Operation::Receive { .. } => {
                unreachable!("Group refuses messages from a rank to itself, and there is no other rank")
            }
        };
        job.handle.mark_ended(&result);
        let buffers = job.buffers;
        Box::new(move || result.map(|()| buffers))
    }

    fn timeout(&self) -> Duration {
        Duration::MAX
    }

    fn split(&self, _: RankSet, _: &Arc<str>) -> Result<Arc<dyn Transport>> {
        Ok(Arc::new(Single(self.0)))
    }
}
