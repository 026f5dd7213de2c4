//! What is sharded, among which ranks, and in which dtypes.

use std::sync::Arc;

use shardwise_comm::Group;
use shardwise_plan::Dtype;

/// The groups of hybrid sharding (FSDP2: HSDP with a two-dimensional mesh). Each replica shards its units among its own ranks,
/// gathers them there, and all-reduces gradients with the other replicas. Plain ZeRO has one replica.
#[derive(Clone)]
pub struct Groups {
    /// The ranks of this replica, among which each unit is sharded.
    pub shard: Arc<Group>,
    /// The ranks that hold the same shard, one in each replica.
    pub replicate: Arc<Group>,
}

impl Groups {
    /// One replica, sharded among all ranks of `shard`.
    pub fn sharded(shard: Arc<Group>) -> Self {
        let replicate = Arc::new(shardwise_comm::single::group_on(shard.device()));
        Groups { shard, replicate }
    }
}

/// Mixed precision (FSDP2: `MixedPrecisionPolicy`). Optimizer state and the parameters that it updates are f32, or f64 if all
/// parameters are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Precision {
    /// The dtype of parameters in the computation and in all-gathers. If it is bf16 or f16, a rank also keeps f32 master copies
    /// of the shards that it updates.
    pub param_dtype: Dtype,
    /// The dtype in which gradients are accumulated over micro-batches and sent, unless a program says that they travel in `param_dtype`, in
    /// which they were computed. The reduction itself accumulates in f32, or in f64 if this is f64.
    pub reduce_dtype: Dtype,
}

impl Precision {
    /// Everything in f64, to check numerics.
    pub const F64: Precision = Precision { param_dtype: Dtype::F64, reduce_dtype: Dtype::F64 };
    /// Everything in f32.
    pub const F32: Precision = Precision { param_dtype: Dtype::F32, reduce_dtype: Dtype::F32 };
    /// bf16 with f32 masters and f32 reduction.
    pub const BF16: Precision = Precision { param_dtype: Dtype::Bf16, reduce_dtype: Dtype::F32 };
    /// f16 with f32 masters and f32 reduction. Gradients need a loss scale.
    pub const F16: Precision = Precision { param_dtype: Dtype::F16, reduce_dtype: Dtype::F32 };

    /// The dtype of optimizer state, and of the parameters that the optimizer updates.
    pub const fn state_dtype(self) -> Dtype {
        match self.param_dtype {
            Dtype::F64 => Dtype::F64,
            _ => Dtype::F32,
        }
    }

    /// Whether the optimizer updates master copies of the parameters, and not the parameters themselves.
    pub fn has_masters(self) -> bool {
        self.param_dtype != self.state_dtype()
    }
}
