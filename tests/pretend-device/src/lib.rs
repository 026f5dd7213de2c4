//! A device that exists only in tests, to try device code on a machine without a GPU.
//!
//! A test that calls [`device`] has an accelerator in libtorch: tensors that are not on the CPU, kernels that run on them, and
//! copies between both. It is strict where a GPU would be:
//!
//! - The host cannot read or write device memory. Following a tensor's pointer is a segmentation fault.
//! - Fresh memory is not zero, and freed memory is overwritten and used again at once.
//! - Tensors on the CPU and on the device do not mix in one operator, except scalars.
//!
//! The kernels are the CPU's, so a computation has the same bits as on the CPU, and [`Counts`] tells what it would have asked of a GPU:
//! launches, copies, and how often the host waits.
//!
//! It has one stream, and every call has ended when it returns. So it finds host code that touches device memory, and work that the
//! host should not do, but not a missing wait between streams.

use std::ops::{Add, Sub};

use shardwise_torch::tch::Device;

/// What the device has been asked to do since the program started. Subtract two to get what happened in between.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Counts {
    /// Kernels launched, including copies within the device. Views are free.
    pub launches: u64,
    /// Copies from the host to the device.
    pub host_to_device: u64,
    /// Copies from the device to the host, including single values.
    pub device_to_host: u64,
    /// How often the host waited for the device: for a value, or in a copy that is not `non_blocking`.
    pub synchronizations: u64,
    /// Blocks of memory requested.
    pub allocations: u64,
}

impl Counts {
    /// The counts so far, over all threads.
    pub fn now() -> Self {
        let mut counts = Counts::default();
        // SAFETY: a struct of the same layout, which the call fills.
        unsafe { sw_pretend_counts(&mut counts) };
        counts
    }
}

impl Counts {
    fn combine(self, other: Counts, combine: impl Fn(u64, u64) -> u64) -> Counts {
        Counts {
            launches: combine(self.launches, other.launches),
            host_to_device: combine(self.host_to_device, other.host_to_device),
            device_to_host: combine(self.device_to_host, other.device_to_host),
            synchronizations: combine(self.synchronizations, other.synchronizations),
            allocations: combine(self.allocations, other.allocations),
        }
    }
}

impl Add for Counts {
    type Output = Counts;

    fn add(self, other: Counts) -> Counts {
        self.combine(other, |a, b| a + b)
    }
}

impl Sub for Counts {
    type Output = Counts;

    fn sub(self, earlier: Counts) -> Counts {
        self.combine(earlier, |a, b| a - b)
    }
}

/// The device. `tch` has no name for it, and addresses it by that of another which Linux does not have.
pub fn device() -> Device {
    // The linker keeps the device, which registers itself when the program starts, only if something of it is called.
    Counts::now();
    Device::Mps
}

unsafe extern "C" {
    fn sw_pretend_counts(out: *mut Counts);
}
