//! Explains running out of memory: which allocation failed, what memory was in use, and which settings would fit.
//!
//! `shardwise train` refuses recipes that do not fit according to the estimate. Since that is only an estimate, and other programs use
//! memory too, a run can still run out of memory. The measured usage then corrects the estimate with which settings that fit are found.

use std::fmt;

use shardwise_torch::allocated_bytes;
use shardwise_zero::Bytes;

use crate::host;
use crate::memory_estimate::{MemoryEstimate, MemoryLimit, find_settings_that_fit, format_bytes, memory_limit};
use crate::meter::resident_bytes;
use crate::recipe::Recipe;
use crate::{Error, Trainer};

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
    /// f32 master weights and optimizer state.
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
        let asked =
            asked_bytes.map_or(String::new(), |bytes| format!(" allocating {} ({bytes} bytes)", format_bytes(bytes)));
        writeln!(f, "out of memory{asked} in {location}; the rank's memory in use was")?;
        for (what, bytes) in [
            ("parameters", in_use.parameters),
            ("gradients", in_use.gradients),
            ("optimizer", in_use.optimizer),
            ("unsharded units", in_use.unsharded),
            ("activations, rest", in_use.rest),
            ("process", in_use.process),
        ] {
            writeln!(f, "  {what:17} {:>10}", format_bytes(bytes))?;
        }
        writeln!(f, "  {:17} {:>10}", "total", format_bytes(in_use.total()))?;
        match limit {
            Some(MemoryLimit { bytes, what, .. }) => write!(f, "{what} is {}", format_bytes(*bytes))?,
            None => write!(f, "the memory limit is not known")?,
        }
        writeln!(f, ", and the estimate for this run was {}", format_bytes(*estimate_bytes))?;
        match remedy {
            Some((keys, bytes)) => {
                writeln!(f, "{} should fit, with about {}", keys.join(" and "), format_bytes(*bytes))?
            }
            None => writeln!(
                f,
                "no setting makes it fit on these ranks: use more ranks, a smaller batch or a smaller model"
            )?,
        }
        write!(f, "({error})")
    }
}

/// Explains an out-of-memory error, and returns other errors unchanged.
pub(crate) fn explain_out_of_memory(recipe: &Recipe, trainer: &Trainer, error: Error) -> Error {
    let Some(out) = error.out_of_memory() else { return error };
    let (Bytes { parameters, gradients, optimizer }, unsharded) = trainer.bytes();
    let allocated = out.in_use_bytes.unwrap_or_else(allocated_bytes);
    let limit = memory_limit(host::ranks_here(trainer.ranks.world.size()), resident_bytes("VmRSS:") as usize);
    // Memory of tensors that were freed since the failure counts towards the process.
    let counted = resident_bytes(limit.map_or("VmRSS:", |limit| limit.counts)) as usize;
    let in_use = MemoryInUse {
        parameters,
        gradients,
        optimizer,
        unsharded,
        rest: allocated.saturating_sub(parameters + gradients + optimizer + unsharded),
        process: counted.saturating_sub(allocated),
    };
    let ranks = trainer.ranks.world.size();
    let estimate = MemoryEstimate::of(recipe, ranks).unwrap_or_default();
    let asked = out.asked_bytes.unwrap_or(0);
    let remedy = limit.and_then(|limit| {
        // The process's own memory is now known and need not be estimated.
        let of_tensors = |estimate: MemoryEstimate| estimate.total() - estimate.process;
        let left = limit.bytes.saturating_sub(in_use.process);
        let (room, low) = remaining_room(left, of_tensors(estimate), in_use.total() - in_use.process + asked, asked);
        let (keys, fitting) = find_settings_that_fit(recipe, ranks, room + estimate.process)?;
        Some((keys, of_tensors(fitting) + low + in_use.process))
    });
    Error::OutOfMemory(Box::new(OutOfMemoryReport {
        location: error.location(trainer.position.read().phase),
        asked_bytes: out.asked_bytes,
        in_use,
        limit,
        estimate_bytes: estimate.total(),
        remedy,
        // The rest is libtorch's stack trace.
        error: error.to_string().lines().next().unwrap_or_default().to_string(),
    }))
}

/// The largest estimate that should fit, and by how much the estimate was too low. The recipe that just failed must not seem to fit.
fn remaining_room(limit: usize, estimate: usize, measured: usize, asked: usize) -> (usize, usize) {
    let low = measured.saturating_sub(estimate);
    (limit.saturating_sub(low).min(estimate.saturating_sub(asked.max(1))), low)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_estimate_that_was_too_low_is_corrected() {
        // Estimated at 500 of 1000, but failed at 1010.
        assert_eq!(remaining_room(1000, 500, 1010, 10), (490, 510));
        // Estimated at more than the limit.
        assert_eq!(remaining_room(1000, 2000, 1010, 10), (1000, 0));
        // Other programs took the memory: the new settings must still need less than the old ones.
        assert_eq!(remaining_room(1000, 500, 400, 10), (490, 0));
    }

    #[test]
    fn the_report_has_figures_and_a_remedy() {
        let mib = |count: usize| count << 20;
        let in_use = MemoryInUse {
            parameters: mib(10),
            gradients: mib(20),
            optimizer: mib(30),
            unsharded: mib(4),
            rest: mib(300),
            process: mib(200),
        };
        let limit =
            MemoryLimit { bytes: mib(600), what: "the limit of a process's data (ulimit -d)", counts: "VmData:" };
        let shortage = OutOfMemoryReport {
            location: "the forward pass of unit block.3".to_string(),
            asked_bytes: Some(mib(64)),
            in_use,
            limit: Some(limit),
            estimate_bytes: mib(550),
            remedy: Some((vec!["activation_checkpointing = \"selective\""], mib(420))),
            error: "libtorch: no".to_string(),
        };
        let expected = "out of memory allocating 64 MiB (67108864 bytes) in the forward pass of unit block.3; the rank's memory in use was
  parameters            10 MiB
  gradients             20 MiB
  optimizer             30 MiB
  unsharded units        4 MiB
  activations, rest    300 MiB
  process              200 MiB
  total                564 MiB
the limit of a process's data (ulimit -d) is 600 MiB, and the estimate for this run was 550 MiB
activation_checkpointing = \"selective\" should fit, with about 420 MiB
(libtorch: no)";
        assert_eq!(shortage.to_string(), expected);
        let vague = OutOfMemoryReport { asked_bytes: None, limit: None, remedy: None, ..shortage };
        let said = vague.to_string();
        assert!(
            said.starts_with("out of memory in the ")
                && said.contains("is not known, and")
                && said.contains("more ranks"),
            "{said}"
        );
    }
}
