//! A tensor's elements as a Rust slice, and how much memory there is in use.

use tch::{Device, Tensor};

use crate::error::check;
use crate::{Element, Error, Result, dtype_of, ffi};

/// The elements of a contiguous CPU tensor, where this handle is the only one to them.
///
/// `tch` tensors are handles: a clone or a view made earlier could change the elements under a Rust slice. So the call
/// fails where the tensor or its storage has another owner, and the mutable borrow keeps anyone from making one while
/// the slice lives.
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
    // SAFETY: a live tensor; `access` is written where the call succeeds.
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

/// What this process holds of the C library's memory, and of large blocks where [`keep_freed_memory`] has been called: what
/// libtorch keeps the tensors of the CPU in.
pub fn allocated_bytes() -> usize {
    // SAFETY: reads the C library's own books.
    unsafe { ffi::sw_malloc_bytes() }
}

/// The most that large blocks of CPU memory (256 KiB and more) have had in use at the same time since this was last asked; nothing
/// where [`keep_freed_memory`] has not been called.
pub fn take_peak_bytes() -> usize {
    // SAFETY: reads and resets the allocator's own books, under its lock.
    unsafe { ffi::sw_memory_take_peak() }
}

/// From here on, keeps large blocks of CPU memory that tensors free for the next tensors of about their size, instead of giving
/// them back to the system. For programs that train: a step asks for the same blocks over and over, and the system clears each
/// page that it hands out. `shim/memory.cpp` says how what is kept stays small.
pub fn keep_freed_memory() {
    // SAFETY: installs an allocator that lives forever; memory of the one before it is freed by the one before it.
    unsafe { ffi::sw_memory_keep() }
}
