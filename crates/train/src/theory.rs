//! What a step has to send of parameters and gradients, by verb: the theory that the meter is compared with.
//!
//! A whole of Ψ elements costs a rank of N about Ψ(N−1)/N to gather, as much to reduce and scatter, and twice that to all-reduce.
//! How often that happens to which unit follows from the stage and from the order of the step (`step`). It is counted exactly,
//! with the slices that ranks really have, and without what ranks tell each other besides: counts, losses, norms.

use shardwise_comm::{Group, Verb};
use shardwise_zero::Sharding;

use crate::{Accumulation, Trainer};

/// Bytes for every verb, in the order of [`Verb::ALL`].
pub(crate) type ByVerb = [u64; Verb::ALL.len()];

/// What a rank has to send.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Theory {
    /// In every step.
    pub(crate) step: ByVerb,
    /// And in one whose update is made.
    pub(crate) update: ByVerb,
}

impl Theory {
    /// Of a trainer's rank, with so many micro-batches in a step.
    pub(crate) fn of(trainer: &Trainer, micro_batches: usize) -> Self {
        let Sharding { optimizer, gradients, parameters } = trainer.options.sharding;
        let (shard, replicate) = (&trainer.ranks.groups.shard, &trainer.ranks.groups.replicate);
        let precision = trainer.options.precision;
        let (parameter_bytes, gradient_bytes) = (precision.parameters.bytes(), precision.gradients.bytes());
        let units = trainer.model.units();
        let mut theory = Theory::default();
        let reductions = if trainer.options.accumulation == Accumulation::Sharded { micro_batches } else { 1 };
        for (index, unit) in units.iter().enumerate() {
            let [trained, frozen] = elements(unit);
            if parameters {
                let tied = unit.tied().map_or([0; 2], |tied| elements(&units[tied.unit]));
                let whole: usize = [trained, frozen].iter().chain(&tied).map(|&len| gathered(shard, len)).sum();
                // The last unit is still whole when its backward pass comes; a table is not read in it.
                let again =
                    index >= trainer.first_trained && index + 1 < units.len() && unit.backward_reads_parameters();
                let times = micro_batches * (1 + usize::from(again));
                theory.step[Verb::AllGather as usize] += (times * whole * parameter_bytes) as u64;
            } else if optimizer {
                theory.update[Verb::AllGather as usize] += (gathered(shard, trained) * parameter_bytes) as u64;
            }
            let (verb, sent, summed) = match (gradients, optimizer) {
                (false, false) => (Verb::AllReduce, scattered(shard, trained) + gathered(shard, trained), trained),
                _ => (Verb::ReduceScatter, scattered(shard, trained), shard.partition(trained).part_len(shard.rank())),
            };
            let between = scattered(replicate, summed) + gathered(replicate, summed);
            theory.step[verb as usize] += (reductions * sent * gradient_bytes) as u64;
            theory.step[Verb::AllReduce as usize] += (reductions * between * gradient_bytes) as u64;
        }
        theory
    }
}

/// A unit's own elements: those that are trained and those that are not, which travel apart.
fn elements(unit: &shardwise_model::Unit) -> [usize; 2] {
    [true, false].map(|trainable| {
        unit.parameters().iter().filter(|parameter| parameter.trainable == trainable).map(|p| p.elements()).sum()
    })
}

/// What this rank sends of a whole that everybody gets.
fn gathered(group: &Group, len: usize) -> usize {
    group.partition(len).part_len(group.rank()) * (group.size() - 1)
}

/// What this rank sends of a whole of which everybody gets the sum of a part.
fn scattered(group: &Group, len: usize) -> usize {
    len - group.partition(len).part_len(group.rank())
}
