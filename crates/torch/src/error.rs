//! The error type of this crate, and the recognition of out-of-memory errors.

use shardwise_plan::Dtype;
use tch::{Device, Kind};

use crate::ffi;

/// The result of a libtorch operation.
pub type Result<T> = std::result::Result<T, Error>;

/// A failed libtorch operation, with a remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A C++ exception, or an error from a closure that C++ called.
    #[error("libtorch: {0}")]
    Libtorch(String),
    /// A `tch` call failed.
    #[error("libtorch: {0}")]
    Tch(#[from] tch::TchError),
    /// The tensor's memory has other owners.
    #[error(
        "the tensor's memory is shared ({tensors} handles to the tensor, {storages} tensors on its storage); \
         drop the other handles and views, or work on a copy"
    )]
    Shared {
        /// The number of handles to the tensor.
        tensors: usize,
        /// The number of tensors on its storage.
        storages: usize,
    },
    /// The tensor is not contiguous.
    #[error("the tensor is not contiguous; call contiguous() first")]
    NotContiguous,
    /// Tensors that are written share memory with others.
    #[error("tensors that are written share memory with others; work on copies")]
    Overlap,
    /// The memory is not on the CPU.
    #[error("the memory is on {0:?}, which the CPU cannot read; copy it to the CPU first")]
    NotOnCpu(Device),
    /// The memory is on a different device than expected.
    #[error("the memory is on {found:?}, but {expected:?} was expected")]
    WrongDevice {
        /// The expected device.
        expected: Device,
        /// The actual device.
        found: Device,
    },
    /// The size in bytes overflows.
    #[error("{len} elements of {dtype} are too many: their size in bytes overflows")]
    TooLarge {
        /// The number of elements.
        len: usize,
        /// The dtype of the elements.
        dtype: Dtype,
    },
    /// A file cannot be mapped.
    #[error("a file cannot be mapped: {0}")]
    File(String),
    /// A device that Shardwise does not support.
    #[error("memory of {0:?} is not supported; use the CPU or a CUDA device")]
    UnsupportedDevice(Device),
    /// The elements have a different dtype than expected.
    #[error("the elements are {found}, but {expected} was expected")]
    WrongDtype {
        /// The expected dtype.
        expected: Dtype,
        /// The actual dtype.
        found: Dtype,
    },
    /// A tensor kind that Shardwise does not store or communicate.
    #[error("tensors of kind {0:?} are not supported; use Float, BFloat16, Half, Int64 or Uint8")]
    UnsupportedKind(Kind),
    /// A compiled function cannot be loaded, or was called with other tensors than it was compiled for.
    #[error("{name}: {problem}")]
    Package {
        /// The package's file.
        name: String,
        /// The problem.
        problem: String,
    },
    /// A list or a tensor has the wrong number of elements.
    #[error("{what}: expected {expected}, got {found}")]
    Count {
        /// What was counted.
        what: &'static str,
        /// The expected count.
        expected: usize,
        /// The actual count.
        found: usize,
    },
}

/// A failed allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfMemory {
    /// The requested size, if known.
    pub asked_bytes: Option<usize>,
    /// The memory in use by the process at that moment, if known.
    pub in_use_bytes: Option<usize>,
}

impl OutOfMemory {
    /// Parses an error message, or returns `None` if it is not about a failed allocation. libtorch has no error type for these,
    /// so they are recognized by the messages of libtorch's allocators, of ours (`shim/memory.cpp`), and of C++'s `bad_alloc`.
    pub fn from_message(text: &str) -> Option<Self> {
        let number = |before: &str| {
            let (_, after) = text.split_once(before)?;
            after.chars().take_while(char::is_ascii_digit).collect::<String>().parse::<usize>().ok()
        };
        let asked_bytes = number("you tried to allocate ").or_else(|| number("no memory left for "));
        let signs = ["can't allocate memory", "no memory left for ", "out of memory", "bad_alloc"];
        signs
            .iter()
            .any(|sign| text.contains(sign))
            .then(|| OutOfMemory { asked_bytes, in_use_bytes: number(" bytes; ") })
    }
}

impl Error {
    /// Returns the failed allocation, if this is an out-of-memory error.
    pub fn out_of_memory(&self) -> Option<OutOfMemory> {
        match self {
            Error::Libtorch(_) | Error::Tch(_) | Error::Package { .. } => OutOfMemory::from_message(&self.to_string()),
            _ => None,
        }
    }
}

/// Turns the return value of a shim function into a `Result`, and frees the message.
pub(crate) fn check(message: ffi::Message) -> Result<()> {
    if message.is_null() {
        return Ok(());
    }
    // SAFETY: the shim returns null or a message that we own and free once.
    let text = unsafe {
        let text = std::ffi::CStr::from_ptr(message).to_string_lossy().into_owned();
        ffi::sw_message_free(message);
        text
    };
    Err(Error::Libtorch(text.trim_end().to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn out_of_memory_errors_are_recognized_by_their_messages() {
        let of = |text: &str| Error::Libtorch(text.to_string()).out_of_memory();
        let both = OutOfMemory { asked_bytes: Some(4096), in_use_bytes: Some(123) };
        assert_eq!(of("the system has no memory left for 4096 bytes; 123 are in use"), Some(both));
        let libtorch = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to \
                        allocate 4096 bytes. Error code 12 (Cannot allocate memory)";
        assert_eq!(of(libtorch), Some(OutOfMemory { in_use_bytes: None, ..both }));
        let unknown = OutOfMemory { asked_bytes: None, in_use_bytes: None };
        assert_eq!(of("CUDA out of memory. Tried to allocate 2.00 GiB."), Some(unknown));
        assert_eq!(of("std::bad_alloc"), Some(unknown));
        assert_eq!(of("mat1 and mat2 shapes cannot be multiplied"), None);
    }
}
