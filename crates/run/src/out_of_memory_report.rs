//! What is reported when memory runs out.

use std::fmt;

use shardwise_journal::format::format_memory_fixed;

use crate::memory_limit::MemoryLimit;

/// Explains an out-of-memory error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutOfMemoryReport {
    /// The phase and the unit in which it occurred.
    pub location: String,
    /// The size of the allocation that failed, if known.
    pub asked_bytes: Option<usize>,
    /// The rank's memory in use at that moment.
    pub in_use: MemoryInUse,
    /// The rank's memory limit, if known.
    pub limit: Option<MemoryLimit>,
    /// The estimate made before the run.
    pub estimate_bytes: usize,
    /// The smallest change to the recipe that should fit: the settings, and the memory that they need.
    pub remedy: Option<(Vec<&'static str>, usize)>,
    /// The first line of the original error.
    pub error: String,
}

/// A rank's memory in use, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryInUse {
    /// Parameters, in the type in which units compute.
    pub parameters: usize,
    /// Reduced gradients.
    pub gradients: usize,
    /// Master weights and optimizer state.
    pub optimizer: usize,
    /// Unsharded parameters and gradients of units.
    pub unsharded: usize,
    /// Activations and all other tensors.
    pub rest: usize,
    /// The process itself: libraries, stacks, and free memory that the allocator keeps.
    pub process: usize,
}

impl MemoryInUse {
    /// The sum of all parts.
    pub fn total(&self) -> usize {
        let MemoryInUse { parameters, gradients, optimizer, unsharded, rest, process } = *self;
        parameters + gradients + optimizer + unsharded + rest + process
    }
}

impl fmt::Display for OutOfMemoryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OutOfMemoryReport { location, asked_bytes, in_use, limit, estimate_bytes, remedy, error } = self;
        let asked = asked_bytes
            .map_or(String::new(), |bytes| format!(" allocating {} ({bytes} bytes)", format_memory_fixed(bytes)));
        writeln!(f, "out of memory{asked} in {location}; the rank's memory in use was")?;
        for (what, bytes) in [
            ("parameters", in_use.parameters),
            ("gradients", in_use.gradients),
            ("optimizer", in_use.optimizer),
            ("unsharded units", in_use.unsharded),
            ("activations, rest", in_use.rest),
            ("process", in_use.process),
        ] {
            writeln!(f, "  {what:17} {:>10}", format_memory_fixed(bytes))?;
        }
        writeln!(f, "  {:17} {:>10}", "total", format_memory_fixed(in_use.total()))?;
        match limit {
            Some(MemoryLimit { bytes, what, .. }) => write!(f, "{what} is {}", format_memory_fixed(*bytes))?,
            None => write!(f, "the memory limit is not known")?,
        }
        writeln!(f, ", and the estimate for this run was {}", format_memory_fixed(*estimate_bytes))?;
        match remedy {
            Some((keys, bytes)) => {
                writeln!(f, "{} should fit, with about {}", keys.join(" and "), format_memory_fixed(*bytes))?
            }
            None => writeln!(
                f,
                "no setting makes it fit on these ranks: use more ranks, a smaller batch or a smaller model"
            )?,
        }
        write!(f, "({error})")
    }
}
