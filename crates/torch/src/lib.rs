//! What Shardwise needs of libtorch and `tch` does not offer.
//!
//! - [`autograd`]: a custom autograd function made of Rust closures, and gradients of given outputs with given output
//!   gradients.
//! - [`storage`] and [`Block`]: taking the memory out of a storage in place, and putting memory back. This is how
//!   parameters are whole only while they are needed, while the autograd graph keeps its views of them.
//! - [`optim`]: fused AdamW on slices.
//! - [`keep_freed_memory`], [`allocated_bytes`] and [`take_peak_bytes`]: the process's own memory, kept between uses, and how much of
//!   it is and was in use.
//! - [`exclusive`]: a tensor's elements as a Rust slice, where nobody else can see them.
//!
//! It is not a second tensor library: tensors are `tch`'s. Neither does it know of ranks or models. The C++ behind it
//! is `shim/`, a few pages; its errors arrive here as [`Error`], and no panic of Rust's leaves through it.
//! Nothing in it asks which device a tensor is on: storages are taken and refilled through their own allocator.

pub mod autograd;
mod block;
#[cfg(feature = "cuda")]
pub mod cuda;
mod element;
mod error;
mod ffi;
mod memory;
pub mod optim;
pub mod storage;

pub use block::Block;
pub(crate) use element::dtype_of;
pub use element::{Element, kind_of};
pub use error::{Error, OutOfMemory, Result};
pub use memory::{allocated_bytes, exclusive, keep_freed_memory, take_peak_bytes};
pub use tch;

/// The version of libtorch that this program was compiled for.
pub fn libtorch_version() -> &'static str {
    // SAFETY: the shim returns a string literal.
    unsafe { std::ffi::CStr::from_ptr(ffi::sw_torch_version()) }.to_str().unwrap_or("unreadable")
}
