//! The queues of a device, and the memory from which it can copy while the host goes on.

use std::ffi::c_void;

use tch::{Device, Tensor};

use crate::device::accelerator_code;
use crate::error::check;
use crate::{Result, ffi};

/// A queue of work on a device. The work of different streams may run at the same time, and in any order, unless one waits for the other.
#[derive(Debug)]
pub struct Stream {
    raw: *mut ffi::Stream,
    device: Device,
}
// SAFETY: a number, which any thread may use.
unsafe impl Send for Stream {}
// SAFETY: as above; it never changes.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream beside the one that libtorch uses.
    pub fn new(device: Device) -> Result<Stream> {
        Stream::make(device, ffi::sw_stream_new)
    }

    /// The stream on which libtorch queues this thread's work.
    pub fn current(device: Device) -> Result<Stream> {
        Stream::make(device, ffi::sw_stream_current)
    }

    fn make(
        device: Device,
        make: unsafe extern "C" fn(i8, i8, *mut *mut ffi::Stream) -> ffi::Message,
    ) -> Result<Stream> {
        let (device_type, device_index) = accelerator_code(device)?;
        let mut stream = std::ptr::null_mut();
        // SAFETY: `stream` is written if the call succeeds.
        check(unsafe { make(device_type, device_index, &mut stream) })?;
        Ok(Stream { raw: stream, device })
    }

    /// The handle of the device's own library (`cudaStream_t`).
    pub fn handle(&self) -> Result<*mut c_void> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: a live stream; `handle` is written if the call succeeds.
        check(unsafe { ffi::sw_stream_handle(self.raw, &mut handle) })?;
        Ok(handle)
    }

    /// Makes what is queued from now on wait for what is queued on `other` already.
    pub fn wait_for(&self, other: &Stream) -> Result<()> {
        // SAFETY: live streams.
        check(unsafe { ffi::sw_stream_wait_for(self.raw, other.raw) })
    }

    /// Makes what is queued from now on wait for an event.
    pub fn wait_for_event(&self, event: &Event) -> Result<()> {
        // SAFETY: a live stream and a live event.
        check(unsafe { ffi::sw_stream_wait_for_event(self.raw, event.raw) })
    }

    /// Waits, on this thread, until everything that is queued has run.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: a live stream.
        check(unsafe { ffi::sw_stream_synchronize(self.raw) })
    }

    /// Queues what libtorch is asked for in `work` on this stream. Tensors that are made there belong to it: see [`Stream::record`].
    pub fn run<T>(&self, work: impl FnOnce() -> T) -> Result<T> {
        let before = Restore(Stream::current(self.device)?);
        // SAFETY: a live stream.
        check(unsafe { ffi::sw_stream_make_current(self.raw) })?;
        let done = work();
        drop(before);
        Ok(done)
    }

    /// Says that this stream uses a tensor that was made on another: when the tensor is freed, its memory is not used again before
    /// this stream has run what is queued.
    pub fn record(&self, tensor: &Tensor) -> Result<()> {
        // SAFETY: a live stream and a live tensor.
        check(unsafe { ffi::sw_stream_record(self.raw, tensor.as_ptr()) })
    }
}

/// What was queued on a stream at some point.
#[derive(Debug)]
pub struct Event {
    raw: *mut ffi::Event,
}
// SAFETY: libtorch's events may be waited for and freed by any thread.
unsafe impl Send for Event {}
// SAFETY: as above; it never changes.
unsafe impl Sync for Event {}

impl Event {
    /// Everything that is queued on `stream` so far.
    pub fn record(stream: &Stream) -> Result<Event> {
        let mut event = std::ptr::null_mut();
        // SAFETY: a live stream; `event` is written if the call succeeds.
        check(unsafe { ffi::sw_event_new(stream.raw, &mut event) })?;
        Ok(Event { raw: event })
    }

    /// Waits for it on this thread.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: a live event.
        check(unsafe { ffi::sw_event_synchronize(self.raw) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: nobody else has the pointer.
        unsafe { ffi::sw_event_free(self.raw) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: nobody else has the pointer.
        unsafe { ffi::sw_stream_free(self.raw) }
    }
}

/// Makes a stream current again when it is dropped.
struct Restore(Stream);

impl Drop for Restore {
    fn drop(&mut self) {
        // SAFETY: a live stream. It was current before, so this does not fail.
        let _ = check(unsafe { ffi::sw_stream_make_current(self.0.raw) });
    }
}

/// Moves a tensor of the CPU to pinned memory, from which a device copies without making the host wait.
pub fn pin(tensor: &mut Tensor) -> Result<()> {
    // SAFETY: a live tensor, which is replaced.
    check(unsafe { ffi::sw_tensor_pin(tensor.as_mut_ptr()) })
}

/// Allocates pinned memory of the host for so many bytes, with unspecified contents.
pub fn pinned_bytes(bytes: usize) -> Result<Tensor> {
    let mut tensor = std::ptr::null_mut();
    // SAFETY: `tensor` is written if the call succeeds, and then owned here.
    unsafe {
        check(ffi::sw_pinned_bytes(bytes, &mut tensor))?;
        Ok(Tensor::from_ptr(tensor))
    }
}

/// Queues a copy between a device and pinned memory on the current stream, and returns before it runs.
pub fn copy_async(from: &Tensor, to: &Tensor) -> Result<()> {
    // SAFETY: live tensors.
    check(unsafe { ffi::sw_tensor_copy_async(to.as_ptr().cast_mut(), from.as_ptr()) })
}

/// Copies a tensor's bytes from a device to the host, through pinned memory, on the current stream. Waits for them, and for nothing
/// that is queued on other streams.
pub fn read(tensor: &Tensor, to: &mut [u8]) -> Result<()> {
    // SAFETY: a live tensor; the shim compares the size.
    check(unsafe { ffi::sw_tensor_read(tensor.as_ptr(), to.as_mut_ptr().cast(), to.len()) })
}
