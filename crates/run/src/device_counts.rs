//! What a step asks of a device. The counts do not depend on how fast the device is.

use serde::Serialize;
use shardwise_torch::device::memory;
use shardwise_torch::tch::Device;
use shardwise_torch::{OperatorCounts, count_operators};

use crate::error::Result;

/// What a step asks of a device other than the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceCounts {
    /// Calls of libtorch's dispatcher, also those that an operator makes itself.
    pub operators: u64,
    /// How often the host waits for the device.
    pub host_waits: u64,
    /// Copies from the host to the device.
    pub to_device: u64,
    /// Copies from the device to the host.
    pub to_host: u64,
    /// How often the device's memory is allocated.
    pub allocations: u64,
}

/// Runs a step, and counts what it asks of a device; nothing, if that is the CPU.
pub(crate) fn count_step(device: Device, step: impl FnOnce() -> Result<()>) -> Result<Option<DeviceCounts>> {
    if device == Device::Cpu {
        step()?;
        return Ok(None);
    }
    let before = memory(device)?.allocations;
    let (done, counts) = count_operators(step)?;
    done?;
    let OperatorCounts { operators, host_waits, to_device, to_host } = counts;
    let allocations = (memory(device)?.allocations - before) as u64;
    Ok(Some(DeviceCounts { operators, host_waits, to_device, to_host, allocations }))
}
