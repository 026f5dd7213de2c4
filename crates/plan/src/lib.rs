//! What can be decided before a byte moves.
//!
//! This crate is arithmetic on small integers: which rank stands where on the device mesh, which ranks form a group,
//! which part of a buffer belongs to whom. It holds no tensors, opens no connections and builds without libtorch and
//! MPI, so that a plan can be made on a laptop for a cluster of ten thousand ranks. Nothing in it grows with the
//! world: a group is an index expression, not a list.

#![forbid(unsafe_code)]

mod dtype;
mod mesh;
mod partition;

pub use dtype::Dtype;
pub use mesh::{Axis, Coordinates, Mesh, MeshError, RankSet};
pub use partition::Partition;
