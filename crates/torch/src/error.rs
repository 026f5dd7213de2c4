//! What can go wrong at the border to libtorch.

use shardwise_plan::Dtype;
use tch::{Device, Kind};

use crate::ffi;

/// The result of an operation on libtorch.
pub type Result<T> = std::result::Result<T, Error>;

/// What went wrong, with what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A C++ exception, or a failure of a closure that C++ called.
    #[error("libtorch: {0}")]
    Libtorch(String),
    /// A `tch` call failed.
    #[error("libtorch: {0}")]
    Tch(#[from] tch::TchError),
    /// Someone else can see the tensor's memory.
    #[error(
        "the tensor's memory is shared ({tensors} handles to the tensor, {storages} tensors on its storage); \
         drop the other handles and views, or work on a copy"
    )]
    Shared {
        /// Handles to the same tensor.
        tensors: usize,
        /// Tensors that live in the same storage.
        storages: usize,
    },
    /// The tensor's elements are not one after the other.
    #[error("the tensor is not contiguous; call contiguous() first")]
    NotContiguous,
    /// The memory is not reachable by the CPU.
    #[error("the memory is on {0:?}, where the CPU cannot read it; copy it to the CPU first")]
    NotOnCpu(Device),
    /// Memory of two devices where one was meant.
    #[error("the memory is on {found:?}, and {expected:?} was meant")]
    WrongDevice {
        /// Where it should be.
        expected: Device,
        /// Where it is.
        found: Device,
    },
    /// More bytes than can be counted.
    #[error("{len} elements of {dtype} are more bytes than can be counted")]
    TooLarge {
        /// How many.
        len: usize,
        /// Of what.
        dtype: Dtype,
    },
    /// A device that Shardwise does not use.
    #[error("memory of {0:?} is not supported; use the CPU or a CUDA device")]
    UnsupportedDevice(Device),
    /// The elements are of another type.
    #[error("the elements are {found}, and {expected} was asked for")]
    WrongDtype {
        /// What was asked for.
        expected: Dtype,
        /// What there is.
        found: Dtype,
    },
    /// A tensor kind that Shardwise does not store or send.
    #[error("tensors of kind {0:?} are not supported; use Float, BFloat16, Half, Int64 or Uint8")]
    UnsupportedKind(Kind),
    /// Lists that must go together do not.
    #[error("{what}: {found} given, and {expected} expected")]
    Count {
        /// What was counted.
        what: &'static str,
        /// How many there should be.
        expected: usize,
        /// How many there are.
        found: usize,
    },
}

/// Turns what a shim function returned into a `Result`, freeing the message.
pub(crate) fn check(message: ffi::Message) -> Result<()> {
    if message.is_null() {
        return Ok(());
    }
    // SAFETY: the shim returns null or a message of its own making, which is ours to free, once.
    let text = unsafe {
        let text = std::ffi::CStr::from_ptr(message).to_string_lossy().into_owned();
        ffi::sw_message_free(message);
        text
    };
    Err(Error::Libtorch(text.trim_end().to_string()))
}
