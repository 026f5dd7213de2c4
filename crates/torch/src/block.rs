//! Uniquely owned device memory.

use std::fmt;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use shardwise_plan::Dtype;
use tch::Device;

use crate::error::check;
use crate::{Element, Error, Result, ffi};

/// A uniquely owned buffer in device memory: a tensor's memory, without a tensor that could share it.
///
/// Tensors share their memory freely, so a tensor cannot guarantee exclusive access while a collective writes into it. A
/// block can: it is not a tensor, and it cannot be cloned. A block comes from a storage ([`crate::storage::take`]) or from
/// the device's allocator, and becomes a tensor again when it is put back into a storage, or by [`Block::into_tensor`].
pub struct Block {
    raw: NonNull<ffi::Block>,
    dtype: Dtype,
    len: usize,
}

// SAFETY: a block is the only owner of its memory, and libtorch's allocators may free from any thread.
unsafe impl Send for Block {}
// SAFETY: through a shared reference the memory can only be read.
unsafe impl Sync for Block {}

impl Block {
    /// Allocates `len` uninitialized elements on `device`.
    pub fn new(dtype: Dtype, len: usize, device: Device) -> Result<Self> {
        let (device_type, device_index) = device_code(device)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is written if the call succeeds.
        check(unsafe { ffi::sw_block_new(device_type, device_index, bytes_of(dtype, len)?, &mut raw) })?;
        Ok(Block { raw: NonNull::new(raw).expect("the shim created a block"), dtype, len })
    }

    /// Allocates `len` zeros on the CPU. With [`crate::enable_caching_allocator`], a large block comes fresh from the system,
    /// already zeroed, so its pages become resident only when they are first used.
    pub fn zeros(dtype: Dtype, len: usize) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is written if the call succeeds.
        check(unsafe { ffi::sw_block_zeros(bytes_of(dtype, len)?, &mut raw) })?;
        Ok(Block::from_raw(raw, dtype, len))
    }

    /// Maps `len` elements of a file from the byte `start` on, which must be the start of a page. Reading them reads the file, whose pages
    /// the system may drop from memory at any time. Writing to them does not change the file.
    ///
    /// Fails if the file ends before. Whoever shortens it afterwards makes reading the elements a fatal error.
    pub fn map_file(file: &File, start: u64, dtype: Dtype, len: usize) -> Result<Self> {
        let bytes = bytes_of(dtype, len)?;
        let size = file.metadata().map_err(|error| Error::File(error.to_string()))?.len();
        if start.checked_add(bytes as u64).is_none_or(|end| end > size) {
            return Err(Error::File(format!(
                "it has {size} bytes, but {bytes} bytes from {start} on are to be mapped"
            )));
        }
        let mut raw = std::ptr::null_mut();
        // SAFETY: an open file; `raw` is written if the call succeeds.
        check(unsafe { ffi::sw_block_map(file.as_raw_fd(), start, bytes, &mut raw) })?;
        Ok(Block::from_raw(raw, dtype, len))
    }

    /// Copies `elements` into a new block on the CPU.
    pub fn from_slice<T: Element>(elements: &[T]) -> Result<Self> {
        let mut block = Block::new(T::DTYPE, elements.len(), Device::Cpu)?;
        block.as_mut_slice()?.copy_from_slice(elements);
        Ok(block)
    }

    /// Takes ownership of a block from the shim.
    pub(crate) fn from_raw(raw: *mut ffi::Block, dtype: Dtype, len: usize) -> Self {
        let block = Block { raw: NonNull::new(raw).expect("the shim created a block"), dtype, len };
        assert!(len * dtype.bytes() <= block.capacity_bytes(), "{block:?} has enough memory for its elements");
        block
    }

    /// The size of the block's memory, which may be larger than its elements need.
    pub fn capacity_bytes(&self) -> usize {
        // SAFETY: a live block of the shim.
        unsafe { ffi::sw_block_bytes(self.raw()) }
    }

    /// Reuses the memory for `len` elements of `dtype`, whose contents are unspecified.
    ///
    /// # Panics
    /// If they do not fit.
    pub fn reuse(self, dtype: Dtype, len: usize) -> Self {
        let bytes = len.checked_mul(dtype.bytes());
        assert!(bytes.is_some_and(|bytes| bytes <= self.capacity_bytes()), "{len} × {dtype} do not fit in {self:?}");
        let raw = self.raw;
        self.forget();
        Block { raw, dtype, len }
    }

    pub(crate) fn raw(&self) -> *mut ffi::Block {
        self.raw.as_ptr()
    }

    /// Gives up the memory without freeing it: it now belongs to whoever holds `self.raw()`.
    pub(crate) fn forget(self) {
        std::mem::forget(self);
    }

    /// The element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device that the memory is on.
    pub fn device(&self) -> Device {
        // SAFETY: a live block of the shim.
        let (kind, index) = unsafe { (ffi::sw_block_device_type(self.raw()), ffi::sw_block_device_index(self.raw())) };
        match kind {
            0 => Device::Cpu,
            1 => Device::Cuda(usize::try_from(index).unwrap_or(0)),
            // As `tch` reports the device of a tensor.
            _ => Device::Mps,
        }
    }

    /// The address of the first element; null or dangling if there are none.
    pub fn as_ptr(&self) -> *mut u8 {
        // SAFETY: a live block of the shim.
        unsafe { ffi::sw_block_data(self.raw()).cast() }
    }

    /// The elements as a slice. Fails if the block is not on the CPU, or if `T` is not its element type.
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        let data = self.cpu_pointer::<T>()?;
        // SAFETY: `cpu_pointer` checked that the memory is on the CPU and has `len` elements of type T; the allocator aligns
        // it. It comes from C++, so its bits are initialized as far as Rust is concerned, and any bits are a valid T.
        Ok(unsafe { std::slice::from_raw_parts(data.as_ptr(), self.len) })
    }

    /// Like [`Block::as_slice`], for writing.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        let data = self.cpu_pointer::<T>()?;
        // SAFETY: as in `as_slice`, and `&mut self` is the only access to this memory.
        Ok(unsafe { std::slice::from_raw_parts_mut(data.as_ptr(), self.len) })
    }

    /// The elements as bytes. Fails if the block is not on the CPU.
    pub fn bytes(&self) -> Result<&[u8]> {
        match self.device() {
            // SAFETY: as in `as_slice`; bytes need no alignment.
            Device::Cpu if !self.is_empty() => unsafe {
                Ok(std::slice::from_raw_parts(self.as_ptr(), self.len * self.dtype.bytes()))
            },
            Device::Cpu => Ok(&[]),
            device => Err(Error::NotOnCpu(device)),
        }
    }

    /// Like [`Block::bytes`], for writing.
    pub fn bytes_mut(&mut self) -> Result<&mut [u8]> {
        match self.device() {
            // SAFETY: as in `as_mut_slice`; bytes need no alignment.
            Device::Cpu if !self.is_empty() => unsafe {
                Ok(std::slice::from_raw_parts_mut(self.as_ptr(), self.len * self.dtype.bytes()))
            },
            Device::Cpu => Ok(&mut []),
            device => Err(Error::NotOnCpu(device)),
        }
    }

    fn cpu_pointer<T: Element>(&self) -> Result<NonNull<T>> {
        if T::DTYPE != self.dtype {
            return Err(Error::WrongDtype { expected: T::DTYPE, found: self.dtype });
        }
        if self.device() != Device::Cpu {
            return Err(Error::NotOnCpu(self.device()));
        }
        Ok(NonNull::new(self.as_ptr().cast()).unwrap_or(NonNull::dangling()))
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: a live block of the shim, which nobody else owns.
        unsafe { ffi::sw_block_free(self.raw.as_ptr()) }
    }
}

/// libtorch's number of the device type.
pub(crate) const MPS: i8 = 13;

/// libtorch's type and index of a device. Fails if no tensor of a trainer can be there.
pub(crate) fn device_code(device: Device) -> Result<(i8, i8)> {
    match device {
        Device::Cpu => Ok((0, -1)),
        Device::Cuda(index) => Ok((1, i8::try_from(index).map_err(|_| Error::UnsupportedDevice(device))?)),
        // The name under which a device of another kind registers itself, because `tch` has one for no other.
        // SAFETY: looks into a table of libtorch.
        Device::Mps if unsafe { ffi::sw_has_device(MPS) } => Ok((MPS, 0)),
        Device::Mps | Device::Vulkan => Err(Error::UnsupportedDevice(device)),
    }
}

/// The size of `len` elements in bytes, or an error if it exceeds `isize::MAX`.
fn bytes_of(dtype: Dtype, len: usize) -> Result<usize> {
    let bytes = len.checked_mul(dtype.bytes()).filter(|&bytes| isize::try_from(bytes).is_ok());
    bytes.ok_or(Error::TooLarge { len, dtype })
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Block({} × {} on {:?})", self.len, self.dtype, self.device())
    }
}
