//! What can go wrong at the border to libtorch.

use shardwise_plan::Dtype;
use tch::{Device, Kind};

use crate::ffi;

/// The result of an operation on libtorch.
pub type Result<T> = std::result::Result<T, Error>;

/// What went wrong, with what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
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

/// What an error says of memory that there was not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfMemory {
    /// How much was asked for, where it is said.
    pub asked_bytes: Option<usize>,
    /// How much the process had in use at that moment, where it is said.
    pub in_use_bytes: Option<usize>,
}

impl OutOfMemory {
    /// What a text says of it, if that is what it is about. libtorch has no other sign of it than its messages: those of its
    /// allocators, of ours (`shim/memory.cpp`), and C++'s own.
    pub fn in_text(text: &str) -> Option<Self> {
        let number = |before: &str| {
            let (_, after) = text.split_once(before)?;
            after.chars().take_while(char::is_ascii_digit).collect::<String>().parse::<usize>().ok()
        };
        let asked_bytes = number("you tried to allocate ").or_else(|| number("no memory left for "));
        let is_said = ["can't allocate memory", "no memory left for ", "out of memory", "bad_alloc"];
        is_said
            .iter()
            .any(|sign| text.contains(sign))
            .then(|| OutOfMemory { asked_bytes, in_use_bytes: number(" bytes; ") })
    }
}

impl Error {
    /// What it says of memory that there was not, if that is what it is about.
    pub fn out_of_memory(&self) -> Option<OutOfMemory> {
        match self {
            Error::Libtorch(_) | Error::Tch(_) => OutOfMemory::in_text(&self.to_string()),
            _ => None,
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_there_is_not_is_known_by_its_messages() {
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
