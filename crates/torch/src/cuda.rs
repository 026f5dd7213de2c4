//! libtorch's CUDA streams (cargo feature `cuda`; needs a GPU to run).

use std::ffi::c_void;

use crate::error::check;
use crate::{Result, ffi};

/// The `cudaStream_t` on which libtorch queues this thread's work for a device.
pub fn current_stream(device_index: usize) -> Result<*mut c_void> {
    let mut stream = std::ptr::null_mut();
    // SAFETY: `stream` is written if the call succeeds.
    check(unsafe { ffi::sw_cuda_current_stream(i8::try_from(device_index).unwrap_or(i8::MAX), &mut stream) })?;
    Ok(stream)
}
