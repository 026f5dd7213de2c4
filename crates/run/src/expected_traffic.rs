//! The expected traffic of a step, by collective. The meter compares the measured traffic with it.
//!
//! With N ranks, a rank sends about Ψ(N−1)/N elements to all-gather a tensor of Ψ elements, as many to reduce-scatter it, and twice
//! as many to all-reduce it. How often each unit is gathered and reduced follows from the stage and from the step (`step`). The
//! counts are exact: they use the actual size of each rank's shard. They do not include token counts, losses and norms.

use shardwise_comm::{Group, Verb};
use shardwise_train::Trainer;
use shardwise_zero::Sharding;

/// Bytes by collective, in the order of [`Verb::ALL`].
pub(crate) type ByVerb = [u64; Verb::ALL.len()];

/// The bytes that a rank is expected to send.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ExpectedTraffic {
    /// Sent in every step.
    pub(crate) step: ByVerb,
    /// Also sent in every step whose update is not skipped.
    pub(crate) update: ByVerb,
}

impl ExpectedTraffic {
    /// The expected traffic of this rank with this many micro-batches per step.
    pub(crate) fn of(trainer: &Trainer, micro_batches: usize) -> Self {
        let Sharding { optimizer, gradients, parameters } = trainer.options().sharding;
        let (shard, replicate) = (&trainer.ranks().groups.shard, &trainer.ranks().groups.replicate);
        let precision = trainer.options().precision;
        let (parameter_bytes, gradient_bytes) = (precision.param_dtype.bytes(), precision.reduce_dtype.bytes());
        let units = trainer.model().units();
        let mut expected = ExpectedTraffic::default();
        let reductions = if trainer.options().reduce_each_micro_batch { micro_batches } else { 1 };
        for (index, unit) in units.iter().enumerate() {
            let [trainable, frozen] = elements(unit);
            if parameters {
                let tied = unit.tied().map_or([0; 2], |tied| elements(&units[tied.unit]));
                let sent: usize = [trainable, frozen].iter().chain(&tied).map(|&len| sent_by_gather(shard, len)).sum();
                // The last unit stays gathered for its backward pass; an embedding's backward pass reads no parameters.
                let again =
                    index >= trainer.first_trainable() && index + 1 < units.len() && unit.backward_reads_parameters();
                let times = micro_batches * (1 + usize::from(again));
                expected.step[Verb::AllGather as usize] += (times * sent * parameter_bytes) as u64;
            } else if optimizer {
                expected.update[Verb::AllGather as usize] +=
                    (sent_by_gather(shard, trainable) * parameter_bytes) as u64;
            }
            let (verb, sent, summed) = match (gradients, optimizer) {
                (false, false) => (
                    Verb::AllReduce,
                    sent_by_reduce_scatter(shard, trainable) + sent_by_gather(shard, trainable),
                    trainable,
                ),
                _ => (
                    Verb::ReduceScatter,
                    sent_by_reduce_scatter(shard, trainable),
                    shard.partition(trainable).part_len(shard.rank()),
                ),
            };
            let between = sent_by_reduce_scatter(replicate, summed) + sent_by_gather(replicate, summed);
            expected.step[verb as usize] += (reductions * sent * gradient_bytes) as u64;
            expected.step[Verb::AllReduce as usize] += (reductions * between * gradient_bytes) as u64;
        }
        expected
    }
}

/// The numbers of a unit's trainable and frozen elements, which are sent separately.
fn elements(unit: &shardwise_model::Unit) -> [usize; 2] {
    [true, false].map(|trainable| {
        unit.parameters().iter().filter(|parameter| parameter.trainable == trainable).map(|p| p.elements()).sum()
    })
}

/// The elements that this rank sends to all-gather a tensor of `len` elements.
fn sent_by_gather(group: &Group, len: usize) -> usize {
    group.partition(len).part_len(group.rank()) * (group.size() - 1)
}

/// The elements that this rank sends to reduce-scatter a tensor of `len` elements.
fn sent_by_reduce_scatter(group: &Group, len: usize) -> usize {
    len - group.partition(len).part_len(group.rank())
}
