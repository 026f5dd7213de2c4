//! The expected traffic of a step, by collective. The meter compares the measured traffic with it.
//!
//! It follows from the step's program (`shardwise_plan::program`): what each instruction sends, and how much of it this rank sends.
//! The counts are exact. They do not include token counts, losses and norms. Where ranks divide sequences of packed documents, the counts are
//! those of one document: what ranks send each other depends on the documents, and is usually less. Where ranks hold different experts, they are
//! those of a balanced router.

use shardwise_comm::Verb;
use shardwise_plan::program::{CollectiveKind, ModelParallel, Sent, traffic};
use shardwise_train::{StepShape, Trainer, unit_specs};

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
    /// Also sent in every step to which the one before has left updates.
    pub(crate) deferred: ByVerb,
}

impl ExpectedTraffic {
    /// The expected traffic of this rank in steps of this shape.
    pub(crate) fn of(trainer: &mut Trainer, shape: StepShape) -> Result<Self> {
        let program = trainer.program(shape.micro_batches)?;
        let (options, ranks) = (trainer.options(), trainer.ranks());
        let (policy, layout) = (options.policy(shape.micro_batches), ranks.layout(options.precision));
        let place = ModelParallel::of_rank(&ranks.mesh(), ranks.world.rank());
        let units = unit_specs(trainer.model(), options, &place, shape);
        let sent = traffic(&program, &units, &policy, &layout);
        let [step, update, deferred] = [&sent.step, &sent.update, &sent.deferred].map(by_verb);
        Ok(ExpectedTraffic { step, update, deferred })
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
