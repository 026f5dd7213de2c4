//! Explains running out of memory: which allocation failed, what memory was in use, and which settings would fit.
//!
//! `shardwise train` refuses recipes that do not fit according to the estimate. Since that is only an estimate, and other programs use
//! memory too, a run can still run out of memory. The measured usage then corrects the estimate with which settings that fit are found.

use shardwise_recipe::Recipe;
use shardwise_torch::allocated_bytes;
use shardwise_torch::device::memory;
use shardwise_torch::tch::Device;
use shardwise_train::Trainer;
use shardwise_zero::Bytes;

use crate::error::Error;
use crate::host;
use crate::memory_estimate::{MemoryEstimate, find_settings_that_fit};
use crate::memory_limit::{Counted, MemoryLimit};
use crate::out_of_memory_report::{MemoryInUse, OutOfMemoryReport};
use crate::phase::Phase;

/// Explains an out-of-memory error in this phase, and returns other errors unchanged.
pub(crate) fn explain_out_of_memory(recipe: &Recipe, trainer: &Trainer, phase: Phase, error: Error) -> Error {
    let Some(out) = error.out_of_memory() else { return error };
    let (Bytes { parameters, gradients, optimizer }, unsharded) = trainer.bytes();
    let device = trainer.options().device;
    let allocated = out.in_use_bytes.unwrap_or_else(|| allocated_on(device));
    let limit = MemoryLimit::of(device, host::ranks_here(trainer.ranks().world.size()));
    // Memory of tensors that were freed since the failure counts towards the process.
    let counted = limit.map_or(Counted::Resident, |limit| limit.counts).read();
    let in_use = MemoryInUse {
        parameters,
        gradients,
        optimizer,
        unsharded,
        rest: allocated.saturating_sub(parameters + gradients + optimizer + unsharded),
        process: counted.saturating_sub(allocated),
    };
    let ranks = trainer.ranks().world.size();
    let estimate = MemoryEstimate::of(recipe, ranks).unwrap_or_default();
    let asked = out.asked_bytes.unwrap_or(0);
    let remedy = limit.and_then(|limit| {
        // The process's own memory is now known and need not be estimated.
        let left = limit.bytes.saturating_sub(in_use.process);
        let (room, low) = remaining_room(left, estimate.tensors(), in_use.total() - in_use.process + asked, asked);
        let (keys, fitting) = find_settings_that_fit(recipe, ranks, room)?;
        Some((keys, fitting.tensors() + low + in_use.process))
    });
    Error::OutOfMemory(Box::new(OutOfMemoryReport {
        location: error.location(phase),
        asked_bytes: out.asked_bytes,
        in_use,
        limit,
        estimate_bytes: estimate.total(),
        remedy,
        // The rest is libtorch's stack trace.
        error: error.to_string().lines().next().unwrap_or_default().to_string(),
    }))
}

/// The memory that tensors hold.
fn allocated_on(device: Device) -> usize {
    match device {
        Device::Cpu => allocated_bytes(),
        device => memory(device).map_or(0, |memory| memory.allocated_bytes),
    }
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
            MemoryLimit { bytes: mib(600), what: "the limit of a process's data (ulimit -d)", counts: Counted::Data };
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
