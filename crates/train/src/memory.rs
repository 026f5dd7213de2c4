//! When memory runs out in the midst of a run: who asked for how much, what the rank had, and what would fit.
//!
//! Before a run, `fit` refuses what cannot fit. It estimates, and other programs take memory too; so it happens all the same,
//! and then what was measured corrects the estimate that the remedy is looked for with.

use std::fmt;

use shardwise_torch::allocated_bytes;
use shardwise_zero::Bytes;

use crate::fit::{Limit, Need, gib, limit, remedy};
use crate::host;
use crate::meter::resident_bytes;
use crate::recipe::Recipe;
use crate::{Error, Trainer};

/// Memory that there was not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// The phase and the unit.
    pub place: String,
    /// How much was asked for, where it is known.
    pub asked_bytes: Option<usize>,
    /// What the rank had at that moment.
    pub held: Held,
    /// What limits it, where that is known.
    pub limit: Option<Limit>,
    /// What the run was thought to need.
    pub estimate_bytes: usize,
    /// The least change of the recipe that would fit: which keys to what, and what it needs then.
    pub remedy: Option<(Vec<&'static str>, usize)>,
    /// What was said of it underneath.
    pub said: String,
}

/// Bytes that a rank has, by what for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Parameters, in the type in which units compute.
    pub parameters: usize,
    /// Gradients, once reduced.
    pub gradients: usize,
    /// f32 masters and optimizer state.
    pub optimizer: usize,
    /// Whole units on their way.
    pub in_flight: usize,
    /// Activations, and whatever else tensors and their copies have.
    pub rest: usize,
    /// The process itself: libraries, stacks, and what is kept for the next use.
    pub process: usize,
}

impl Held {
    /// All of it.
    pub fn total(&self) -> usize {
        let Held { parameters, gradients, optimizer, in_flight, rest, process } = *self;
        parameters + gradients + optimizer + in_flight + rest + process
    }
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shortage { place, asked_bytes, held, limit, estimate_bytes, remedy, said } = self;
        let asked = asked_bytes.map_or("more".to_string(), |bytes| format!("{} ({bytes} bytes) more", gib(bytes)));
        writeln!(f, "out of memory in {place}, which asked for {asked}; the rank had")?;
        for (what, bytes) in [
            ("parameters", held.parameters),
            ("gradients", held.gradients),
            ("optimizer", held.optimizer),
            ("units in flight", held.in_flight),
            ("activations, rest", held.rest),
            ("process", held.process),
        ] {
            writeln!(f, "  {what:17} {:>10}", gib(bytes))?;
        }
        writeln!(f, "  {:17} {:>10}", "together", gib(held.total()))?;
        match limit {
            Some(Limit { bytes, what, .. }) => write!(f, "{what} is {}", gib(*bytes))?,
            None => write!(f, "what limits it is not known")?,
        }
        writeln!(f, ", and the run was thought to need {}", gib(*estimate_bytes))?;
        match remedy {
            Some((keys, bytes)) => writeln!(f, "{} should fit, with about {}", keys.join(" and "), gib(*bytes))?,
            None => writeln!(
                f,
                "no setting makes it fit on these ranks: use more ranks, a smaller batch or a smaller model"
            )?,
        }
        write!(f, "({said})")
    }
}

/// An error with what there is to say of it, if it is that there was no memory left.
pub(crate) fn explained(recipe: &Recipe, trainer: &Trainer, error: Error) -> Error {
    let Some(out) = error.out_of_memory() else { return error };
    let (Bytes { parameters, gradients, optimizer }, in_flight) = trainer.bytes();
    let in_use = out.in_use_bytes.unwrap_or_else(allocated_bytes);
    let limit = limit(host::ranks_here(trainer.ranks.world.size()), resident_bytes("VmRSS:") as usize);
    // What tensors have been given up since then, the process still has.
    let counted = resident_bytes(limit.map_or("VmRSS:", |limit| limit.counts)) as usize;
    let held = Held {
        parameters,
        gradients,
        optimizer,
        in_flight,
        rest: in_use.saturating_sub(parameters + gradients + optimizer + in_flight),
        process: counted.saturating_sub(in_use),
    };
    let ranks = trainer.ranks.world.size();
    let estimate = Need::of(recipe, ranks).unwrap_or_default();
    let asked = out.asked_bytes.unwrap_or(0);
    let remedy = limit.and_then(|limit| {
        // What the process itself takes need not be estimated any more.
        let of_tensors = |need: Need| need.total() - need.process;
        let left = limit.bytes.saturating_sub(held.process);
        let (room, low) = room(left, of_tensors(estimate), held.total() - held.process + asked, asked);
        let (keys, need) = remedy(recipe, ranks, room + estimate.process)?;
        Some((keys, of_tensors(need) + low + held.process))
    });
    Error::OutOfMemory(Box::new(Shortage {
        place: error.place(trainer.position.read().phase),
        asked_bytes: out.asked_bytes,
        held,
        limit,
        estimate_bytes: estimate.total(),
        remedy,
        // What follows is libtorch's stack.
        said: error.to_string().lines().next().unwrap_or_default().to_string(),
    }))
}

/// What an estimate may be at most to fit after all, and by how much estimates were too low: what has not fitted must not seem to.
fn room(limit: usize, estimate: usize, measured: usize, asked: usize) -> (usize, usize) {
    let low = measured.saturating_sub(estimate);
    (limit.saturating_sub(low).min(estimate.saturating_sub(asked.max(1))), low)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_estimate_that_was_too_low_is_corrected() {
        // Thought to need 500 of 1000, and has met the limit at 1010.
        assert_eq!(room(1000, 500, 1010, 10), (490, 510));
        // Thought to need more than there was.
        assert_eq!(room(1000, 2000, 1010, 10), (1000, 0));
        // Others have taken the memory: it must become less all the same.
        assert_eq!(room(1000, 500, 400, 10), (490, 0));
    }

    #[test]
    fn a_shortage_is_told_with_figures_and_a_remedy() {
        let mib = |count: usize| count << 20;
        let held = Held {
            parameters: mib(10),
            gradients: mib(20),
            optimizer: mib(30),
            in_flight: mib(4),
            rest: mib(300),
            process: mib(200),
        };
        let limit = Limit { bytes: mib(600), what: "the limit of a process's data (ulimit -d)", counts: "VmData:" };
        let shortage = Shortage {
            place: "the forward pass of unit block.3".to_string(),
            asked_bytes: Some(mib(64)),
            held,
            limit: Some(limit),
            estimate_bytes: mib(550),
            remedy: Some((vec!["recomputation = \"selective\""], mib(420))),
            said: "libtorch: no".to_string(),
        };
        let expected = "out of memory in the forward pass of unit block.3, which asked for 64 MiB (67108864 bytes) more; the rank had
  parameters            10 MiB
  gradients             20 MiB
  optimizer             30 MiB
  units in flight        4 MiB
  activations, rest    300 MiB
  process              200 MiB
  together             564 MiB
the limit of a process's data (ulimit -d) is 600 MiB, and the run was thought to need 550 MiB
recomputation = \"selective\" should fit, with about 420 MiB
(libtorch: no)";
        assert_eq!(shortage.to_string(), expected);
        let vague = Shortage { asked_bytes: None, limit: None, remedy: None, ..shortage };
        let said = vague.to_string();
        assert!(
            said.contains("asked for more;") && said.contains("is not known, and") && said.contains("more ranks"),
            "{said}"
        );
    }
}
