//! The device mesh, its groups, partitions of buffers, dtypes, learning rate schedules, and the configurations of models.
//!
//! This crate is arithmetic: the coordinates of a rank on the mesh, the ranks of a group, the part of a buffer that belongs to a
//! rank, the names and shapes of a model's parameters, the learning rate of a step. It holds no tensors, does not communicate, and
//! builds without libtorch or MPI, so the layout of a cluster of ten thousand ranks can be computed on a laptop. Nothing in it
//! grows with the world size: a group is an index expression, not a list.
//!
//! ```
//! use shardwise_plan::{Axis, Mesh, Partition};
//!
//! // Eight ranks: two replicas of a model, each in four shards.
//! let mesh = Mesh::new(&[(Axis::Replicate, 2), (Axis::Shard, 4)])?;
//! assert_eq!(mesh.group(5, &[Axis::Shard]).iter().collect::<Vec<_>>(), [4, 5, 6, 7]);
//! assert_eq!(mesh.group(5, &[Axis::Replicate]).iter().collect::<Vec<_>>(), [1, 5]);
//!
//! // Ten elements among four ranks.
//! let partition = Partition::new(10, 4);
//! assert_eq!((0..4).map(|rank| partition.range(rank).len()).collect::<Vec<_>>(), [3, 3, 2, 2]);
//! # Ok::<(), shardwise_plan::MeshError>(())
//! ```

#![forbid(unsafe_code)]

mod cgroup;
mod config_error;
mod context_parallel;
mod dtype;
mod floats;
mod hugging_face;
mod int8;
mod loss_scale;
mod mesh;
mod mixture_of_experts;
mod model_config;
pub mod package;
mod parameters;
mod partition;
pub mod pipeline;
pub mod pipeline_partition;
pub mod program;
mod rope_scaling;
pub mod schedule;
mod tensor_parallel;

pub use cgroup::cgroup_memory_limit;
pub use config_error::ConfigError;
pub use context_parallel::{ContextAttention, ContextPlace, ContextSplit, Segment, choose_ulysses, divide_heads};
pub use dtype::Dtype;
pub use floats::FloatsMut;
pub use int8::{INT8_BLOCK, int8_bytes};
pub use loss_scale::DynamicScale;
pub use mesh::{Axis, Coordinates, LayerPlace, Mesh, MeshError, RankSet};
pub use mixture_of_experts::{ExpertParameters, MoeConfig, MoeNames, RouterConfig, ScoringFunc};
pub use model_config::{Gpt2Config, LlamaConfig, ModelConfig, QkNorm, check_chunks_not_shared};
pub use parameters::{ParameterShape, check_frozen_prefixes};
pub use partition::{Partition, most_equal_parts};
pub use rope_scaling::{Llama3Rope, RopeScaling, YarnRope, rotary_frequencies};
pub use tensor_parallel::{Slice, SliceRun, Split, TensorPlacement};
