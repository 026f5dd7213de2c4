//! Taking the memory out of a storage in place, and putting memory back.
//!
//! # Note: freeing in place
//! A unit's parameters are views of one flat tensor, and the autograd graph keeps those views from the forward pass to the
//! backward pass. [`take`] removes the memory under all of them at once: resident memory falls, the views keep their shapes,
//! and reading a view without memory fails with the reason given to `take`. [`put`] gives the storage memory again, with the
//! same or other contents, before the backward pass. Neither bumps version counters, so autograd does not object (FSDP2
//! resizes the unsharded storage for the same purpose).
//!
//! The memory in between is a [`Block`]: owned, movable, and inaccessible to anyone else. It can be freed, filled by a
//! collective on another thread, or put into the next unit's storage, so a few blocks serve a model of any depth without
//! asking the system for more memory.

use std::ffi::CString;

use tch::Tensor;

use crate::error::check;
use crate::{Block, Error, Result, dtype_of, ffi, kind_of};

/// Takes the memory out of `tensor`'s storage. Until [`put`], reading any tensor on that storage fails with an error that
/// contains `reason`.
pub fn take(tensor: &Tensor, reason: &str) -> Result<Block> {
    let dtype = dtype_of(tensor.f_kind()?)?;
    let len = bytes(tensor)? / dtype.bytes();
    let reason = CString::new(reason.replace('\0', " ")).expect("zero bytes were replaced");
    let mut raw = std::ptr::null_mut();
    // SAFETY: a live tensor; `raw` is written if the call succeeds.
    check(unsafe { ffi::sw_storage_take(tensor.as_ptr().cast_mut(), reason.as_ptr(), &mut raw) })?;
    Ok(Block::from_raw(raw, dtype, len))
}

/// A failed [`put`], with the block that it did not consume.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct PutError {
    /// Why the storage did not accept the block.
    pub error: Error,
    /// The block, unchanged.
    pub block: Block,
}

/// Puts `block` into a storage whose memory has been taken. The block must be on the storage's device and at least as large as
/// the storage; a larger block still has its full capacity when it is taken out again.
pub fn put(tensor: &Tensor, block: Block) -> std::result::Result<(), PutError> {
    // SAFETY: a live tensor and a live block; if the call succeeds, the storage owns the block.
    match check(unsafe { ffi::sw_storage_put(tensor.as_ptr().cast_mut(), block.raw()) }) {
        Ok(()) => {
            block.forget();
            Ok(())
        }
        Err(error) => Err(PutError { error, block }),
    }
}

impl Block {
    /// Converts the block into a one-dimensional tensor that owns the memory.
    pub fn into_tensor(self) -> Result<Tensor> {
        let tensor = Tensor::f_empty([0], (kind_of(self.dtype()), self.device()))?;
        // SAFETY: a live tensor and a live block; if the call succeeds, the tensor owns the block.
        check(unsafe { ffi::sw_block_into_tensor(tensor.as_ptr().cast_mut(), self.raw(), self.len() as i64) })?;
        self.forget();
        Ok(tensor)
    }
}

/// Returns whether the memory of `tensor`'s storage has been taken.
pub fn is_taken(tensor: &Tensor) -> Result<bool> {
    let mut taken = false;
    // SAFETY: a live tensor; `taken` is written if the call succeeds.
    check(unsafe { ffi::sw_storage_is_taken(tensor.as_ptr(), &mut taken) })?;
    Ok(taken)
}

/// The size of `tensor`'s storage in bytes, whether or not its memory has been taken.
pub fn bytes(tensor: &Tensor) -> Result<usize> {
    let mut bytes = 0;
    // SAFETY: a live tensor; `bytes` is written if the call succeeds.
    check(unsafe { ffi::sw_storage_bytes(tensor.as_ptr(), &mut bytes) })?;
    Ok(bytes)
}
