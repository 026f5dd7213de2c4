//! A group of one rank. A call copies at most one buffer, and has completed when it returns.

use std::sync::Arc;

use shardwise_plan::RankSet;
use shardwise_torch::tch::Device;

use crate::instruments::Instruments;
use crate::pending::Completion;
use crate::transport::{Job, Operation, Transport};
use crate::{Group, Result};

/// Creates a group of this process alone. Needs neither MPI nor a launcher.
pub fn group() -> Group {
    Group::new("world", RankSet::world(1), 0, Arc::new(Single), Instruments::new(None))
}

struct Single;

impl Transport for Single {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn start(&self, job: Job) -> Completion {
        job.handle.mark_started();
        let copy = |from: *const u8, to: *mut u8, elements: usize| {
            // SAFETY: `Group` has checked both lengths. For an in-place call, the two addresses are the same.
            unsafe { std::ptr::copy(from, to, elements * job.call.dtype.bytes()) };
            Ok(())
        };
        let result: Result<()> = match &job.operation {
            Operation::AllGather { part, whole, partition } => copy(*part, *whole, partition.len()),
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

    fn split(&self, _: RankSet, _: &Arc<str>) -> Result<Arc<dyn Transport>> {
        Ok(Arc::new(Single))
    }
}
