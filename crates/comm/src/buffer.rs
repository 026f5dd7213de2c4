//! Buffers that a call can send from and receive into.

use std::ops::Range;
use std::sync::Arc;

use shardwise_plan::Dtype;
use shardwise_torch::tch::Device;
use shardwise_torch::{Block, Element};

/// Memory that a call reads.
///
/// # Safety
/// `as_ptr` points to `len` elements of type `dtype` on `device`. They do not move when the value moves, and nobody writes
/// to them while a call owns the value.
#[allow(clippy::len_without_is_empty, reason = "an empty payload needs no special treatment")]
pub unsafe trait Payload: Send + 'static {
    /// The element type.
    fn dtype(&self) -> Dtype;
    /// The number of elements.
    fn len(&self) -> usize;
    /// The address of the first element.
    fn as_ptr(&self) -> *const u8;
    /// The device that the memory is on.
    fn device(&self) -> Device {
        Device::Cpu
    }
}

/// Memory that a call writes.
///
/// # Safety
/// As for [`Payload`], and no other value gives access to this memory.
pub unsafe trait PayloadMut: Payload {
    /// The address of the first element, for writing.
    fn as_mut_ptr(&mut self) -> *mut u8;
}

// SAFETY: a vector's elements are on the heap, and moving the vector does not move them; it owns them.
unsafe impl<T: Element> Payload for Vec<T> {
    fn dtype(&self) -> Dtype {
        T::DTYPE
    }
    fn len(&self) -> usize {
        self.len()
    }
    fn as_ptr(&self) -> *const u8 {
        self.as_slice().as_ptr().cast()
    }
}
// SAFETY: as above.
unsafe impl<T: Element> PayloadMut for Vec<T> {
    fn as_mut_ptr(&mut self) -> *mut u8 {
        self.as_mut_slice().as_mut_ptr().cast()
    }
}

// SAFETY: shared elements on the heap that nobody can write to.
unsafe impl<T: Element> Payload for Arc<[T]> {
    fn dtype(&self) -> Dtype {
        T::DTYPE
    }
    fn len(&self) -> usize {
        self.as_ref().len()
    }
    fn as_ptr(&self) -> *const u8 {
        self.as_ref().as_ptr().cast()
    }
}

// SAFETY: a block is the only owner of its memory, and does not move it.
unsafe impl Payload for Block {
    fn dtype(&self) -> Dtype {
        self.dtype()
    }
    fn len(&self) -> usize {
        self.len()
    }
    fn as_ptr(&self) -> *const u8 {
        self.as_ptr()
    }
    fn device(&self) -> Device {
        self.device()
    }
}
// SAFETY: as above.
unsafe impl PayloadMut for Block {
    fn as_mut_ptr(&mut self) -> *mut u8 {
        Block::as_ptr(self)
    }
}

/// A contiguous range of a payload.
#[derive(Debug)]
pub struct Part<P> {
    whole: P,
    range: Range<usize>,
}

impl<P: Payload> Part<P> {
    /// Creates a part from the elements `range` of `whole`.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn new(whole: P, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= whole.len(), "{range:?} of {} elements", whole.len());
        Part { whole, range }
    }

    /// Returns the whole payload.
    pub fn into_whole(self) -> P {
        self.whole
    }
}

// SAFETY: a range inside a payload.
unsafe impl<P: Payload> Payload for Part<P> {
    fn dtype(&self) -> Dtype {
        self.whole.dtype()
    }
    fn len(&self) -> usize {
        self.range.len()
    }
    fn as_ptr(&self) -> *const u8 {
        self.whole.as_ptr().wrapping_add(self.range.start * self.dtype().bytes())
    }
    fn device(&self) -> Device {
        self.whole.device()
    }
}
// SAFETY: as above.
unsafe impl<P: PayloadMut> PayloadMut for Part<P> {
    fn as_mut_ptr(&mut self) -> *mut u8 {
        let offset = self.range.start * self.dtype().bytes();
        self.whole.as_mut_ptr().wrapping_add(offset)
    }
}
