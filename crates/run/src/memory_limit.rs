//! How much memory a rank may use, and how much it does: on its device, or on the host if it computes on the CPU.

use shardwise_plan::cgroup_memory_limit;
use shardwise_torch::device::{DeviceMemory, memory, reset_peak};
use shardwise_torch::take_peak_bytes;
use shardwise_torch::tch::Device;

/// The memory limit of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryLimit {
    /// The limit in bytes.
    pub bytes: usize,
    /// What sets the limit, as the subject of a sentence.
    pub what: &'static str,
    /// What counts towards it.
    pub counts: Counted,
}

/// What counts towards a memory limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    /// A process's resident memory.
    Resident,
    /// Its own data: not its libraries, and not memory that it shares.
    Data,
    /// Its address space.
    AddressSpace,
    /// The memory that it holds on a device.
    Device(Device),
}

impl Counted {
    /// What counts now, in bytes.
    pub(crate) fn read(self) -> usize {
        match self {
            Counted::Resident => read_status("VmRSS:"),
            Counted::Data => read_status("VmData:"),
            Counted::AddressSpace => read_status("VmSize:"),
            Counted::Device(device) => memory_of(device).reserved_bytes,
        }
    }
}

impl MemoryLimit {
    /// The memory limit of a rank that computes on `device`, and shares its host with others.
    pub fn of(device: Device, ranks_here: usize) -> Option<Self> {
        match device {
            Device::Cpu => MemoryLimit::of_host(ranks_here, Counted::Resident.read()),
            device => {
                let DeviceMemory { free_bytes, reserved_bytes, .. } = memory(device).ok()?;
                let what = "the free memory of its GPU";
                Some(MemoryLimit { bytes: free_bytes + reserved_bytes, what, counts: Counted::Device(device) })
            }
        }
    }

    /// A rank's limit on its host: the lowest of the process's resource limits, its share of its cgroup's limit, and its share of
    /// the host's available memory plus what the rank already uses.
    pub fn of_host(ranks_here: usize, resident_bytes: usize) -> Option<Self> {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let limits = read("/proc/self/limits");
        let own = |name: &str| -> Option<usize> {
            let line = limits.lines().find(|line| line.starts_with(name))?;
            line[name.len()..].split_whitespace().next()?.parse().ok()
        };
        let group = cgroup_memory_limit(std::process::id(), ranks_here, |path| std::fs::read_to_string(path).ok());
        let meminfo = read("/proc/meminfo");
        let available = meminfo
            .lines()
            .find(|line| line.starts_with("MemAvailable:"))
            .and_then(|line| line.split_whitespace().nth(1)?.parse::<usize>().ok())
            .map(|kib| kib << 10);
        let share = |bytes: usize| bytes / ranks_here.max(1);
        let plus_own = |bytes: usize| share(bytes) + resident_bytes;
        [
            (own("Max data size"), "the limit of a process's data (ulimit -d)", Counted::Data),
            (own("Max address space"), "the limit of a process's address space (ulimit -v)", Counted::AddressSpace),
            (group, "this rank's share of its cgroup's memory", Counted::Resident),
            (available.map(plus_own), "this rank's share of the memory that is available", Counted::Resident),
        ]
        .into_iter()
        .filter_map(|(bytes, what, counts)| Some(MemoryLimit { bytes: bytes?, what, counts }))
        .min_by_key(|limit| limit.bytes)
    }
}

/// The memory that a rank holds now, and the most that it has held.
pub(crate) fn memory_now_and_peak(device: Device) -> [u64; 2] {
    let [now, peak] = match device {
        Device::Cpu => ["VmRSS:", "VmHWM:"].map(read_status),
        device => {
            let DeviceMemory { reserved_bytes, peak_bytes, .. } = memory_of(device);
            [reserved_bytes, peak_bytes.max(reserved_bytes)]
        }
    };
    [now as u64, peak as u64]
}

/// The most that tensors have held since the last call.
pub(crate) fn take_tensor_peak(device: Device) -> usize {
    match device {
        Device::Cpu => take_peak_bytes(),
        device => {
            let peak = memory_of(device).peak_bytes;
            // It has just answered.
            let _ = reset_peak(device);
            peak
        }
    }
}

/// Zeros if the device does not say: a figure that is missing does not end a run.
fn memory_of(device: Device) -> DeviceMemory {
    memory(device).unwrap_or_default()
}

/// A field of `/proc/self/status`, in bytes.
fn read_status(key: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with(key));
    line.and_then(|line| line.split_whitespace().nth(1)?.parse::<usize>().ok()).map_or(0, |kib| kib << 10)
}
