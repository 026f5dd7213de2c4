//! Taking the memory out of a storage in place, and putting memory back.
//!
//! # Note: release in place
//! A unit's parameters are views of one flat tensor, and the autograd graph keeps those views from the forward pass to
//! the backward pass. [`take`] removes the memory under all of them at once: resident memory falls, the views keep
//! their shapes, and a view that is read without memory fails with the reason given to `take` instead of reading
//! nothing. [`put`] gives the storage memory again, with the same contents or others, before the backward pass. Neither
//! bumps version counters, so autograd accepts what it finds.
//!
//! The memory in between is a [`Block`]: owned, movable, and out of everybody's sight. It can be freed, filled by a
//! collective on another thread, or put into the next unit's storage, so a handful of blocks serves a model of any depth
//! without going back to the system for memory.

use std::ffi::CString;

use tch::Tensor;

use crate::error::check;
use crate::{Block, Error, Result, dtype_of, ffi};

/// Takes the memory out of `tensor`'s storage. Until [`put`], whoever reads this tensor, or another on the same storage,
/// gets an error with `reason` in it.
pub fn take(tensor: &Tensor, reason: &str) -> Result<Block> {
    let dtype = dtype_of(tensor.f_kind()?)?;
    let len = bytes(tensor)? / dtype.bytes();
    let reason = CString::new(reason.replace('\0', " ")).expect("zero bytes were replaced");
    let mut raw = std::ptr::null_mut();
    // SAFETY: a live tensor; `raw` is written where the call succeeds.
    check(unsafe { ffi::sw_storage_take(tensor.as_ptr().cast_mut(), reason.as_ptr(), &mut raw) })?;
    Ok(Block::from_raw(raw, dtype, len))
}

/// A block that a storage did not accept, given back.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Refused {
    /// Why.
    pub error: Error,
    /// The block.
    pub block: Block,
}

/// Puts memory into a storage whose own has been taken. It must be on the storage's device and have at least its
/// size; a block that is longer is whole again when it is taken out.
pub fn put(tensor: &Tensor, block: Block) -> std::result::Result<(), Refused> {
    // SAFETY: a live tensor and a live block; where the call succeeds, the block is the storage's.
    match check(unsafe { ffi::sw_storage_put(tensor.as_ptr().cast_mut(), block.raw()) }) {
        Ok(()) => {
            block.forget();
            Ok(())
        }
        Err(error) => Err(Refused { error, block }),
    }
}

/// Whether the memory of `tensor`'s storage has been taken.
pub fn is_taken(tensor: &Tensor) -> Result<bool> {
    let mut taken = false;
    // SAFETY: a live tensor; `taken` is written where the call succeeds.
    check(unsafe { ffi::sw_storage_is_taken(tensor.as_ptr(), &mut taken) })?;
    Ok(taken)
}

/// The size of `tensor`'s storage, with its memory or without.
pub fn bytes(tensor: &Tensor) -> Result<usize> {
    let mut bytes = 0;
    // SAFETY: a live tensor; `bytes` is written where the call succeeds.
    check(unsafe { ffi::sw_storage_bytes(tensor.as_ptr(), &mut bytes) })?;
    Ok(bytes)
}
