//! A tensor's elements as a Rust slice, copies between devices, and the caching allocator's controls.

use tch::{Device, Tensor};

use crate::block::device_code;
use crate::error::check;
use crate::{Element, Error, Result, dtype_of, ffi};

/// Returns the elements of a contiguous CPU tensor, if this is the only handle to them.
///
/// `tch` tensors are handles: an earlier clone or view could change the elements under a Rust slice. So the call fails if the
/// tensor or its storage has another owner, and the mutable borrow prevents new ones while the slice lives.
///
/// ```
/// # use shardwise_torch::{exclusive, tch::Tensor};
/// let mut tensor = Tensor::from_slice(&[1f32, 2., 3.]);
/// exclusive::<f32>(&mut tensor)?[1] = 7.;
/// assert_eq!(Vec::<f32>::try_from(&tensor)?, [1., 7., 3.]);
///
/// let view = tensor.narrow(0, 0, 2);
/// assert!(exclusive::<f32>(&mut tensor).is_err());
/// # drop(view);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn exclusive<T: Element>(tensor: &mut Tensor) -> Result<&mut [T]> {
    let found = dtype_of(tensor.f_kind()?)?;
    if found != T::DTYPE {
        return Err(Error::WrongDtype { expected: T::DTYPE, found });
    }
    let mut access =
        ffi::Access { data: std::ptr::null_mut(), tensor_owners: 0, storage_owners: 0, contiguous: false, cpu: false };
    // SAFETY: a live tensor; `access` is written if the call succeeds.
    check(unsafe { ffi::sw_tensor_access(tensor.as_mut_ptr(), &mut access) })?;
    if !access.cpu {
        return Err(Error::NotOnCpu(tensor.device()));
    }
    if !access.contiguous {
        return Err(Error::NotContiguous);
    }
    if access.tensor_owners > 1 || access.storage_owners > 1 {
        return Err(Error::Shared { tensors: access.tensor_owners, storages: access.storage_owners });
    }
    assert_eq!(tensor.device(), Device::Cpu);
    let data = std::ptr::NonNull::new(access.data.cast::<T>()).unwrap_or(std::ptr::NonNull::dangling());
    // SAFETY: contiguous CPU memory of `numel` elements of type T, with one tensor on the storage and one handle to the
    // tensor, which is mutably borrowed for as long as the slice lives.
    Ok(unsafe { std::slice::from_raw_parts_mut(data.as_ptr(), tensor.numel()) })
}

/// Copies `bytes` bytes between two addresses, each on the device that it comes with. Runs behind the work that libtorch has queued on
/// these devices; from or to the CPU, it has ended when this function returns.
///
/// # Safety
/// Both addresses have that many bytes on their device, which do not overlap, and nobody else writes to them until the copy ends.
pub unsafe fn copy_bytes(from: (Device, *const u8), to: (Device, *mut u8), bytes: usize) -> Result<()> {
    let (from_type, from_index) = device_code(from.0)?;
    let (to_type, to_index) = device_code(to.0)?;
    // SAFETY: the caller's promise.
    check(unsafe { ffi::sw_copy_bytes(from_type, from_index, from.1.cast(), to_type, to_index, to.1.cast(), bytes) })
}

/// Returns the bytes that this process has allocated from the C library, plus the caching allocator's blocks in use. That
/// includes the memory of all CPU tensors.
pub fn allocated_bytes() -> usize {
    // SAFETY: reads statistics of the C library and the allocator.
    unsafe { ffi::sw_malloc_bytes() }
}

/// Returns the peak size of the caching allocator's blocks in use since the last call, and resets it. Counts only blocks of 256
/// KiB and larger; zero without [`enable_caching_allocator`].
pub fn take_peak_bytes() -> usize {
    // SAFETY: reads and resets the allocator's statistics, under its lock.
    unsafe { ffi::sw_memory_take_peak() }
}

/// Installs a caching allocator for CPU tensors, like PyTorch's for CUDA: the large blocks of freed tensors are kept for new
/// tensors of about the same size, instead of being returned to the system. Every training step allocates the same sizes again,
/// and the system would zero every page that it hands out. See `shim/memory.cpp` for the bound on the cache.
pub fn enable_caching_allocator() {
    // SAFETY: installs an allocator that lives forever; memory of the previous one is still freed by the previous one.
    unsafe { ffi::sw_memory_keep() }
}
