//! Pipeline partitioning: which units form a stage, how often each stage is replicated, and how many micro-batches it keeps in
//! flight, so that the slowest stage is as fast as possible and every worker's memory suffices.
//!
//! [`partition_stages`] takes a profile of the units, the workers with their links, and constraints. It is the optimizer of
//! PipeDream (Narayanan et al., SOSP 2019) with two kinds of [`Replication`]: a grid of stages × replicas, which a [`Mesh`] can run,
//! and PipeDream's own, where each stage has its own number of replicas, for comparison. It does not choose a micro-batch size or
//! a schedule, and it does not build programs: a partition is the input of a builder.
//!
//! # The cost model
//! All times are per micro-batch of the whole job. A stage has `r` replicas; with `C` the sum of its units' forward and backward
//! times, `w` the bytes of its parameters, and `a` the bytes of the activations at one of its two boundaries (their gradients, which
//! travel back, have as many):
//!
//! ```text
//! compute_s    = C / r                                      replicas take turns with micro-batches
//! reduce_s     = 2 (r − 1) / r · w / bandwidth / k          a ring all-reduce of the gradients, every k micro-batches
//! transfer_s   = max over both boundaries of 2 a / (r · bandwidth)
//! time_s       = max(compute_s + reduce_s, transfer_s)      messages overlap with computation, the all-reduce does not
//! bottleneck_s = max of time_s over all stages
//! in_flight    = ⌈(r + workers of later stages) / r⌉        1F1B; with equal replication, stage s of S has S − s
//! memory_bytes = ⌈w · (replicated + sharded / r)⌉ + in_flight · kept_bytes
//! ```
//!
//! `k` is the number of micro-batches in a step if gradients are reduced once per step, and `r` if they are reduced after each
//! round of micro-batches, as in PipeDream ([`GradientReduction`]). With `m` micro-batches in a step, a stage has at most `m` replicas,
//! and at most `⌈m / r⌉` micro-batches are in flight on one.
//!
//! Bandwidths are those of one worker, and depend on where the workers are ([`Workers`]). The stages of a grid are on consecutive
//! workers, as on the mesh, and use the slowest link among the workers that communicate: those of a stage for the all-reduce,
//! those of both stages for a transfer. Uneven stages are not placed. Each one is assumed to have the best place possible:
//! its all-reduce uses the fastest link that connects `r` workers, and its transfers the fastest that connects `r + 1`. The result is a
//! lower bound for every placement, and never worse than the best grid.
//!
//! The bubble of a synchronous pipeline and latencies are not modeled; [`simulate`](crate::program::simulate) has them.
//!
//! # The search
//! Both searches are exact. A grid has few shapes, one per divisor of the number of workers. For each shape, the cut is found by dynamic
//! programming over (stage, unit). With uneven replication, the bottleneck is found by bisection: for each candidate, dynamic
//! programming finds the fewest workers with which units `i..` stay below it. Fewer workers for the later stages
//! never hurt the earlier ones, because they leave more workers and fewer micro-batches in flight, so one number per unit is enough.
//!
//! ```
//! use shardwise_plan::pipeline_partition::{
//!     Constraints, GradientReduction, Replication, StateBytes, UnitProfile, Workers, partition_stages,
//! };
//!
//! let unit = |name: &str, forward_s| UnitProfile {
//!     name: name.to_string(),
//!     forward_s,
//!     backward_s: 2. * forward_s,
//!     output_bytes: 1 << 20,
//!     parameter_bytes: 1 << 24,
//!     kept_bytes: 1 << 22,
//! };
//! let units = [unit("embedding", 0.001), unit("block.0", 0.01), unit("block.1", 0.01), unit("head", 0.01)];
//! // Two hosts of two workers.
//! let workers = Workers::on_hosts(4, 2, 1e11, 1e9);
//! let constraints = Constraints {
//!     replication: Replication::Grid { stages: Some(2) },
//!     reduction: GradientReduction::EachStep { micro_batches: 16 },
//!     state: StateBytes { replicated: 4., sharded: 0. },
//!     memory_bytes_max: None,
//! };
//! let plan = partition_stages(&units, &workers, &constraints)?;
//! assert_eq!([plan.stages[0].units.clone(), plan.stages[1].units.clone()], [0..2, 2..4]);
//! assert_eq!([plan.stages[0].in_flight, plan.stages[1].in_flight], [2, 1]);
//! assert!(plan.is_runnable);
//! # Ok::<(), shardwise_plan::pipeline_partition::PartitionError>(())
//! ```
//!
//! [`Mesh`]: crate::Mesh

mod cost_model;
mod error;
mod grid;
mod problem;
mod stage_plan;
mod uneven;

pub use cost_model::{CostModel, StageCut};
pub use error::PartitionError;
pub use problem::{Constraints, GradientReduction, LinkLevel, Replication, StateBytes, UnitProfile, Workers};
pub use stage_plan::{PlannedStage, StagePlan};

/// Cuts a chain of units into pipeline stages and replicates them, so that the slowest stage is as fast as possible.
///
/// Among equally fast plans, a grid has the fewest stages, and an uneven plan uses the fewest workers.
pub fn partition_stages(
    units: &[UnitProfile],
    workers: &Workers,
    constraints: &Constraints,
) -> Result<StagePlan, PartitionError> {
    let model = CostModel::new(units, workers, constraints)?;
    match constraints.replication {
        Replication::Grid { stages } => grid::search(&model, stages),
        Replication::Uneven => uneven::search(&model),
    }
}
