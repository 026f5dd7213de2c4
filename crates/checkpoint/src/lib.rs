//! Crash-safe sharded checkpoints that any number of ranks can read.
//!
//! A checkpoint is a folder, `step-00000100`. It has safetensors files with the shards of tensors; a table for each unit of the
//! model, which locates the shards and lists a hash for every piece of every file; and a manifest with the hashes of the
//! tables. The manifest is written last, atomically: a folder with a manifest is a checkpoint, a folder without one is not. The
//! file names of each save are unique, so saving a step again leaves the earlier checkpoint intact until the new manifest
//! replaces the old one. `docs/src/checkpoints.md` describes the format.
//!
//! This crate does not know what a tensor means, does not need libtorch, and does not communicate with other ranks.
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
//!     checkpoint.verify(&mut |_bytes| ())?; // read everything and compare hashes
//!     for unit in &checkpoint.manifest().units {
//!         let reader = checkpoint.unit(&unit.name)?;
//!         println!("step {step}, {}: {} tensors", unit.name, reader.table().tensors.len());
//!     }
//! }
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod byte_source;
mod direct;
mod dtype;
mod error;
mod hash;
pub mod hugging_face;
mod layout;
mod load;
mod manifest;
mod region;
mod retention;
pub mod safetensors;
mod save;
mod save_id;
mod store;

pub use byte_source::ByteSource;
pub use error::{Error, Result};
pub use hash::Hash;
pub use layout::{FILE_BYTES, FilePlan, FlatBuffer, Owners, Segment, Tensor, UnitLayout};
pub use load::{Checkpoint, UnitReader};
pub use manifest::{FORMAT, FileEntry, Manifest, ManifestError, ShardEntry, Table, TensorEntry, UnitEntry};
pub use region::{Overlap, Region, Run, elements};
pub use retention::RetentionPolicy;
pub use save::{UPLOAD_BYTES, write_file, write_manifest, write_parts, write_table};
pub use save_id::SaveId;
pub use store::{Store, lower_priority, step_folder};
