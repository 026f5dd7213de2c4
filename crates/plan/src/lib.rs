//! What can be decided before a byte moves.
//!
//! This crate is arithmetic on small integers: which rank stands where on the device mesh, which ranks form a group,
//! which part of a buffer belongs to whom. It holds no tensors, opens no connections and builds without libtorch and
//! MPI, so that a plan can be made on a laptop for a cluster of ten thousand ranks. Nothing in it grows with the
//! world: a group is an index expression, not a list.
//!
//! ```
//! use shardwise_plan::{Axis, Mesh, Partition};
//!
//! // Eight ranks: two replicas of a model, each in four slices.
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

mod dtype;
mod mesh;
mod partition;

pub use dtype::Dtype;
pub use mesh::{Axis, Coordinates, Mesh, MeshError, RankSet};
pub use partition::Partition;
