//! The expected traffic of a step, by collective. The meter compares the measured traffic with it.
//!
//! It follows from the step's program (`shardwise_plan::program`): what each instruction sends, and how much of it this rank sends.
//! The counts are exact. They do not include token counts, losses and norms.

use shardwise_comm::Verb;
use shardwise_plan::program::{CollectiveKind, Layout, ModelParallel, Sent, traffic};
use shardwise_train::{Ranks, Trainer};

use crate::error::Result;

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
    pub(crate) fn of(trainer: &mut Trainer, micro_batches: usize) -> Result<Self> {
        let program = trainer.program(micro_batches)?;
        let policy = trainer.options().policy(micro_batches);
        let Ranks { groups, .. } = trainer.ranks();
        let precision = trainer.options().precision;
        let layout = Layout {
            shard: groups.shard.size(),
            replicate: groups.replicate.size(),
            shard_rank: groups.shard.rank(),
            replicate_rank: groups.replicate.rank(),
            parameter_bytes: precision.param_dtype.bytes(),
            gradient_bytes: precision.reduce_dtype.bytes(),
            model_parallel: ModelParallel::NONE,
        };
        let sent = traffic(&program, trainer.unit_specs(), &policy, &layout);
        Ok(ExpectedTraffic { step: by_verb(&sent.step), update: by_verb(&sent.update) })
    }
}

fn by_verb(sent: &Sent) -> ByVerb {
    let mut bytes = ByVerb::default();
    bytes[Verb::AllGather as usize] = sent.kind_bytes(CollectiveKind::AllGather);
    bytes[Verb::ReduceScatter as usize] = sent.kind_bytes(CollectiveKind::ReduceScatter);
    bytes[Verb::AllReduce as usize] = sent.kind_bytes(CollectiveKind::AllReduce);
    bytes[Verb::AllToAll as usize] = sent.kind_bytes(CollectiveKind::AllToAll);
    bytes[Verb::Send as usize] = sent.message_bytes();
    bytes
}
