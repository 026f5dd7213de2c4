//! Names, layouts and bytes on disk: checkpoints that a crash cannot tear, and that any number of ranks can read.
//!
//! A checkpoint is a folder, `step-00000100`. In it are safetensors files with the slices of tensors, a table for each unit of
//! the model, which says what is where and has a hash for every piece of every file, and a manifest with the tables' hashes.
//! The manifest is written last, and at once: what has one is a checkpoint, what has none is nothing. Files of a save have names
//! of that save's own, so that saving a step again leaves the earlier checkpoint whole until the new manifest replaces the old
//! one. `docs/src/checkpoints.md` describes the format.
//!
//! Nothing here knows what a tensor means, needs libtorch, or talks to other ranks.
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use shardwise_checkpoint::{Checkpoint, Store};
//!
//! # fn main() -> Result<(), shardwise_checkpoint::Error> {
//! let store = Arc::new(Store::open("runs/small")?); // or s3://bucket/folder
//! for step in store.steps()? {
//!     let checkpoint = Checkpoint::open(&store, step)?;
//!     checkpoint.verify(&mut |_bytes| ())?; // all of it against its hashes
//!     for unit in &checkpoint.manifest().units {
//!         let reader = checkpoint.unit(&unit.name)?;
//!         println!("step {step}, {}: {} tensors", unit.name, reader.table().tensors.len());
//!     }
//! }
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod direct;
mod dtype;
mod error;
mod hash;
pub mod hugging_face;
mod keep;
mod layout;
mod load;
mod manifest;
mod place;
pub mod safetensors;
mod save;
mod store;

pub use error::{Error, Result};
pub use hash::Hash;
pub use keep::Keep;
pub use layout::{Band, FILE_BYTES, FilePlan, Segment, Tensor, UnitLayout};
pub use load::{Checkpoint, UnitReader};
pub use manifest::{FORMAT, Fault, FileEntry, Manifest, SliceEntry, Table, TensorEntry, UnitEntry};
pub use place::{Place, Run, Shared, elements};
pub use save::{SaveId, UPLOAD_BYTES, write_file, write_manifest, write_parts, write_table};
pub use store::{Store, folder_of, yield_to_others};
