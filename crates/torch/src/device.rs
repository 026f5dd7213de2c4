//! Devices other than the CPU: which there are, and their memory.

use tch::Device;

use crate::block::{MPS, device_code};
use crate::error::check;
use crate::{Error, Result, ffi};

pub use crate::ffi::DeviceMemory;

/// The devices that libtorch can use, other than the CPU: the GPUs that are visible to this process. Empty if there are none.
///
/// CUDA's part of libtorch is loaded by the first call, so programs that train on the CPU never load it. Fails if libtorch has none.
pub fn accelerators() -> Result<Vec<Device>> {
    // SAFETY: looks into a table of libtorch.
    if unsafe { ffi::sw_has_device(MPS) } {
        return Ok(vec![Device::Mps]);
    }
    // SAFETY: loads a library, and asks it.
    let count = unsafe {
        check(ffi::sw_device_load_cuda())?;
        ffi::sw_device_count(CUDA)
    };
    Ok((0..count).map(Device::Cuda).collect())
}

/// libtorch's number of the device type.
const CUDA: i8 = 1;

/// Asks for the memory of a device.
pub fn memory(device: Device) -> Result<DeviceMemory> {
    let (device_type, device_index) = accelerator_code(device)?;
    let mut memory = DeviceMemory::default();
    // SAFETY: `memory` has the layout that the shim fills.
    check(unsafe { ffi::sw_device_memory(device_type, device_index, &mut memory) })?;
    Ok(memory)
}

/// Sets [`DeviceMemory::peak_bytes`] to what is in use now.
pub fn reset_peak(device: Device) -> Result<()> {
    let (device_type, device_index) = accelerator_code(device)?;
    // SAFETY: changes a statistic of the allocator, under its lock.
    check(unsafe { ffi::sw_device_reset_peak(device_type, device_index) })
}

/// Makes libtorch use kernels that give the same bits every time (PyTorch: `use_deterministic_algorithms`). On a GPU, the backward pass of
/// flash attention is not such a kernel otherwise. Where there is none, the pass fails, or libtorch only warns.
pub fn use_deterministic_algorithms(warn_only: bool) -> Result<()> {
    // SAFETY: sets a flag of libtorch.
    check(unsafe { ffi::sw_use_deterministic_algorithms(warn_only) })
}

pub(crate) fn accelerator_code(device: Device) -> Result<(i8, i8)> {
    match device {
        Device::Cpu => Err(Error::UnsupportedDevice(device)),
        device => device_code(device),
    }
}
