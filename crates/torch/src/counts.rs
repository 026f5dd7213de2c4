//! Counting what libtorch is asked to do, on any device.

use crate::error::check;
use crate::{Result, ffi};

pub use crate::ffi::OperatorCounts;

/// Counts what libtorch is asked to do in `work`, by all threads. Costs a little time per operator. Only one thread may count at a time.
pub fn count_operators<T>(work: impl FnOnce() -> T) -> Result<(T, OperatorCounts)> {
    let mut handle = 0;
    // SAFETY: writes the handle.
    check(unsafe { ffi::sw_count_start(&mut handle) })?;
    let counting = Counting(handle);
    let done = work();
    Ok((done, counting.stop()))
}

struct Counting(u64);

impl Counting {
    fn stop(self) -> OperatorCounts {
        let mut counts = OperatorCounts::default();
        // SAFETY: counting was started, and is stopped once.
        unsafe { ffi::sw_count_stop(self.0, &mut counts) };
        std::mem::forget(self);
        counts
    }
}

impl Drop for Counting {
    /// If `work` panics.
    fn drop(&mut self) {
        // SAFETY: counting was started, and has not been stopped.
        unsafe { ffi::sw_count_stop(self.0, &mut OperatorCounts::default()) };
    }
}
