//! CUDA's contexts and events.

use cudarc::driver::{result as cuda, sys as cuda_sys};

/// What failed, in CUDA's words.
pub(super) type CudaResult<T> = std::result::Result<T, String>;

pub(super) fn explain(error: cuda::DriverError) -> String {
    format!("CUDA: {error:?}")
}

/// The context of a device, which libtorch uses as well.
#[derive(Clone, Copy)]
pub(super) struct Context(pub(super) cuda_sys::CUcontext);
// SAFETY: a primary context may be made current on any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Makes this context current on this thread.
    pub(super) fn enter(self) -> CudaResult<()> {
        // SAFETY: the context was retained, and is never released.
        unsafe { cuda::ctx::set_current(self.0) }.map_err(explain)
    }
}

/// A point in a stream's work.
pub(super) struct Event(cuda_sys::CUevent);
// SAFETY: a handle that may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// # Safety
    /// `stream` is alive, and its context is current.
    pub(super) unsafe fn record(stream: cuda_sys::CUstream) -> CudaResult<Self> {
        let event = Event(cuda::event::create(cuda_sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).map_err(explain)?);
        // SAFETY: the caller's promise, and the event was just created.
        unsafe { cuda::event::record(event.0, stream) }.map_err(explain)?;
        Ok(event)
    }

    /// Makes `stream` wait for this event.
    ///
    /// # Safety
    /// `stream` is alive, and its context is current.
    pub(super) unsafe fn block_stream(&self, stream: cuda_sys::CUstream) -> CudaResult<()> {
        // SAFETY: the caller's promise.
        unsafe { cuda::stream::wait_event(stream, self.0, cuda_sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT) }
            .map_err(explain)
    }

    /// Whether the stream has got here.
    pub(super) fn has_passed(&self) -> CudaResult<bool> {
        // SAFETY: a live event.
        match unsafe { cuda::event::query(self.0) } {
            Ok(()) => Ok(true),
            Err(cuda::DriverError(cuda_sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(explain(error)),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: nobody else has the handle. A stream that waits for the event keeps what it needs.
        let _ = unsafe { cuda::event::destroy(self.0) };
    }
}
