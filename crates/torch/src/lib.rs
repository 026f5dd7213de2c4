//! The parts of libtorch that Shardwise needs and `tch` does not expose.
//!
//! - [`autograd`]: custom autograd functions written as Rust closures, and gradients for given output gradients.
//! - [`storage`] and [`Block`]: taking the memory out of a storage in place, and putting memory back. This is how parameters
//!   are unsharded only while they are needed, while the autograd graph keeps its views of them.
//! - [`optim`]: fused AdamW.
//! - [`CompiledFunction`]: functions that PyTorch has compiled ahead of time, without Python.
//! - [`enable_caching_allocator`], [`allocated_bytes`] and [`take_peak_bytes`]: a caching allocator for CPU tensors, and its
//!   statistics.
//! - [`exclusive`]: a tensor's elements as a Rust slice, if no other handle can access them.
//! - [`device`], [`Stream`], [`Event`] and [`attention`]: the devices other than the CPU, their memory, queues and attention kernels.
//! - [`count_operators`]: how often the host calls, waits for and copies to a device.
//! - [`encode_int8`] and [`decode_int8`]: blockwise quantization.
//! - [`copy_bytes`]: copies between addresses on any two devices.
//!
//! This is not a second tensor library: it works on `tch`'s tensors, and knows nothing about ranks or models. The C++ side is a
//! small shim in `shim/`: C++ exceptions arrive here as [`Error`], and no Rust panic unwinds into C++. The code does not depend
//! on the device, because it takes and replaces a storage's memory through the storage's own allocator.

mod adamw;
pub mod attention;
pub mod autograd;
mod block;
mod counts;
pub mod device;
mod element;
mod error;
mod ffi;
mod int8;
mod memory;
pub mod optim;
mod package;
pub mod storage;
mod stream;

pub use block::Block;
pub use counts::{OperatorCounts, count_operators};
use element::round_to_bf16;
pub use element::{Element, dtype_of, kind_of, widen_bf16};
pub use error::{Error, OutOfMemory, Result};
pub use int8::{decode_int8, encode_int8};
pub use memory::{allocated_bytes, copy_bytes, enable_caching_allocator, exclusive, take_peak_bytes};
pub use package::{CompiledFunction, Signature, TensorType};
pub use stream::{Event, Stream, copy_async, pin, pinned_bytes, read};
pub use tch;

/// The version of libtorch that this program was compiled against.
pub fn libtorch_version() -> &'static str {
    // SAFETY: the shim returns a string literal.
    unsafe { std::ffi::CStr::from_ptr(ffi::sw_torch_version()) }.to_str().unwrap_or("unreadable")
}
