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
//! Calls are asynchronous, as on a GPU: a stream is a thread with a queue, and memory that is freed is used again by later calls of the
//! same stream. [`set_seed`] makes streams pause now and then, so that a missing wait between two of them shows. Operators
//! whose results have shapes that only the CPU's kernel can tell are the exception: the host waits for all calls before them.
//!
//! Besides the device in libtorch there are libraries that stand in for CUDA's driver and for NCCL, with which ranks on these devices
//! communicate. NCCL's calls move real data between real processes.

use std::num::NonZeroU64;
use std::ops::{Add, Sub};
use std::sync::OnceLock;

use libloading::Library;
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
        unsafe { (libraries().counts)(&mut counts) };
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
    libraries();
    Device::Mps
}

/// Lets streams pause between calls, at points that depend on the seed. Without a seed they do not.
pub fn set_seed(seed: Option<NonZeroU64>) {
    // SAFETY: sets a number.
    unsafe { (libraries().set_seed)(seed.map_or(0, NonZeroU64::get)) };
}

/// From now on, nothing is computed, and memory is not written: a model of any size has room, and its calls can be counted. Operators whose
/// results have shapes that only the CPU's kernel can tell are still computed, on zeros.
pub fn set_shapes_only() {
    // SAFETY: sets a flag.
    unsafe { (libraries().set_shapes_only)() };
}

/// The libraries to put into `LD_PRELOAD`, for a program that is to have the device without knowing about it.
pub const PRELOAD: &str = concat!(env!("OUT_DIR"), "/libshardwise_pretend_device.so:", env!("OUT_DIR"), "/libnccl.so");

struct Libraries {
    counts: unsafe extern "C" fn(*mut Counts),
    set_seed: unsafe extern "C" fn(u64),
    set_shapes_only: unsafe extern "C" fn(),
}

/// Loads the device, which registers itself with libtorch, and the library that stands in for NCCL. The one that stands in for the
/// driver comes with them. Whoever loads a library of the same name afterwards gets these.
fn libraries() -> &'static Libraries {
    static LIBRARIES: OnceLock<Libraries> = OnceLock::new();
    LIBRARIES.get_or_init(|| {
        // SAFETY: our own libraries, which are never unloaded, and functions of the types that they have there.
        unsafe {
            let [device, nccl] = PRELOAD.split(':').collect::<Vec<_>>().try_into().expect("two paths");
            let open = |path: &str| Box::leak(Box::new(Library::new(path).expect("the library was built")));
            let device = open(device);
            open(nccl);
            Libraries {
                counts: *device.get(b"sw_pretend_counts").expect("the device has this function"),
                set_seed: *device.get(b"sw_pretend_set_seed").expect("the device has this function"),
                set_shapes_only: *device.get(b"sw_pretend_set_shapes_only").expect("the device has this function"),
            }
        }
    })
}
