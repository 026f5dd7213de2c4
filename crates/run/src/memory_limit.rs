//! How much memory a rank may use.

/// The memory limit of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryLimit {
    /// The limit in bytes.
    pub bytes: usize,
    /// What sets the limit, as the subject of a sentence.
    pub what: &'static str,
    /// The field of `/proc/self/status` that counts towards it.
    pub counts: &'static str,
}

impl MemoryLimit {
    /// Whether it counts only a process's own data: not its libraries, and not memory that it shares.
    pub(crate) fn counts_only_data(&self) -> bool {
        self.counts == "VmData:"
    }
}

/// The memory limit of a rank: the lowest of the process's resource limits, its share of the control group's limit, and its share of
/// the host's available memory plus what the rank already uses.
pub fn memory_limit(ranks_here: usize, resident_bytes: usize) -> Option<MemoryLimit> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let limits = read("/proc/self/limits");
    let own = |name: &str| -> Option<usize> {
        let line = limits.lines().find(|line| line.starts_with(name))?;
        line[name.len()..].split_whitespace().next()?.parse().ok()
    };
    let group: Option<usize> = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"]
        .iter()
        .find_map(|path| read(path).trim().parse().ok());
    let meminfo = read("/proc/meminfo");
    let available = meminfo
        .lines()
        .find(|line| line.starts_with("MemAvailable:"))
        .and_then(|line| line.split_whitespace().nth(1)?.parse::<usize>().ok())
        .map(|kib| kib << 10);
    let share = |bytes: usize| bytes / ranks_here.max(1);
    let plus_own = |bytes: usize| share(bytes) + resident_bytes;
    [
        (own("Max data size"), "the limit of a process's data (ulimit -d)", "VmData:"),
        (own("Max address space"), "the limit of a process's address space (ulimit -v)", "VmSize:"),
        (group.map(share), "this rank's share of its control group's memory", "VmRSS:"),
        (available.map(plus_own), "this rank's share of the memory that is available", "VmRSS:"),
    ]
    .into_iter()
    .filter_map(|(bytes, what, counts)| Some(MemoryLimit { bytes: bytes?, what, counts }))
    .min_by_key(|limit| limit.bytes)
}
