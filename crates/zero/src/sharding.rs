//! What of a unit is sliced, among whom, and in which types it is kept.

use std::sync::Arc;

use shardwise_comm::Group;
use shardwise_plan::Dtype;

use crate::{Error, Result};

/// What a rank keeps only its slice of, between uses. ZeRO's stages are settings of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sharding {
    /// The optimizer's state. Costs nothing: who updates a slice needs no other's state.
    pub optimizer: bool,
    /// The gradients, once they are reduced.
    pub gradients: bool,
    /// The parameters. Costs a gather before each use.
    pub parameters: bool,
}

impl Sharding {
    /// ZeRO's stage 0 (nothing sliced), 1 (optimizer state), 2 (and gradients) or 3 (and parameters).
    pub fn stage(stage: u8) -> Result<Self> {
        match stage {
            0..=3 => Ok(Sharding { optimizer: stage >= 1, gradients: stage >= 2, parameters: stage >= 3 }),
            _ => Err(Error::Stage(stage)),
        }
    }
}

/// Who holds what: the ranks of `shard` have one slice each of a unit, those of `replicate` have the same slice. Plain ZeRO
/// has one replica; hybrid sharding has several, each of which gathers among its own ranks and shares its sums with the
/// others.
#[derive(Clone)]
pub struct Groups {
    /// The ranks among which a unit is cut.
    pub shard: Arc<Group>,
    /// The ranks that hold this rank's slice, in other replicas.
    pub replicate: Arc<Group>,
}

impl Groups {
    /// One replica, cut among all ranks of `shard`.
    pub fn sharded(shard: Arc<Group>) -> Self {
        Groups { shard, replicate: Arc::new(shardwise_comm::single::group()) }
    }
}

/// In which types numbers are kept and sent. Optimizer state and the parameters that it updates are f32 throughout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Precision {
    /// Parameters as units compute with them, and as they are gathered. Where this is not f32, a rank keeps an f32 master of
    /// what it updates beside them.
    pub parameters: Dtype,
    /// Gradients, as they are added up over micro-batches and sent to be reduced. The reduction itself adds in f32.
    pub gradients: Dtype,
}

impl Precision {
    /// Everything in f32.
    pub const F32: Precision = Precision { parameters: Dtype::F32, gradients: Dtype::F32 };
    /// bf16 with f32 masters and f32 reduction.
    pub const BF16: Precision = Precision { parameters: Dtype::Bf16, gradients: Dtype::F32 };
    /// f16 with f32 masters and f32 reduction. Gradients need a loss scale.
    pub const F16: Precision = Precision { parameters: Dtype::F16, gradients: Dtype::F32 };
}
