//! The metadata of a checkpoint: a manifest, and a table for each unit. Both are untrusted until they are checked.
//!
//! The manifest is small for any model: an entry for each unit, with the hash of the unit's table. A table lists the unit's
//! tensors, their shards, the files, and a hash for every piece of every file. So a rank reads metadata in proportion to the
//! units that it needs, and can verify what it reads of a file without reading the rest.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use shardwise_plan::Dtype;

use crate::Hash;
use crate::region::{Region, elements};

/// The format version that this crate writes, and the newest that it reads.
pub const FORMAT: u32 = 1;

/// The size of a piece of a file. Each piece has a hash; the last one may be shorter.
pub(crate) const PIECE_BYTES: u64 = 1 << 20;

/// The largest manifest that is accepted; it has an entry for each unit.
pub(crate) const MANIFEST_BYTES_MAX: u64 = 64 << 20;
/// The largest table that is accepted; it has 67 bytes for each MiB of a unit.
pub(crate) const TABLE_BYTES_MAX: u64 = 256 << 20;
const UNITS_MAX: usize = 1 << 16;
const NAME_BYTES_MAX: usize = 512;

/// `manifest.json`. A checkpoint exists once its manifest does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The format version: [`FORMAT`].
    pub format: u32,
    /// The program that wrote it.
    pub written_by: String,
    /// The step after which it was written.
    pub step: u64,
    /// The training state besides tensors; opaque to this crate.
    pub training: serde_json::Value,
    /// The units, in model order.
    pub units: Vec<UnitEntry>,
}

/// One unit in the manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnitEntry {
    /// The unit's name.
    pub name: String,
    /// The file with the unit's table.
    pub table: String,
    /// The size of that file.
    pub table_bytes: u64,
    /// The hash of that file.
    pub table_hash: Hash,
}

/// The table of a unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    /// The files.
    pub files: Vec<FileEntry>,
    /// The tensors.
    pub tensors: Vec<TensorEntry>,
}

/// A file of tensors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// The name in the checkpoint's folder.
    pub name: String,
    /// The size of the file.
    pub bytes: u64,
    /// The hashes of the pieces, in order.
    pub pieces: Vec<Hash>,
}

/// A tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// The name in the model: a parameter's, with a suffix for optimizer state (`….weight/first_moment`).
    pub name: String,
    /// The dtype.
    #[serde(with = "crate::dtype")]
    pub dtype: Dtype,
    /// The unsharded shape.
    pub shape: Vec<u64>,
    /// The shards, which cover the tensor exactly once.
    #[serde(rename = "slices")]
    pub shards: Vec<ShardEntry>,
}

/// A shard of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardEntry {
    /// The index of its file in the table.
    pub file: u32,
    /// Its offset in that file.
    pub offset_bytes: u64,
    /// The region of the tensor that it holds.
    #[serde(rename = "place")]
    pub region: Region,
}

/// An invalid manifest or table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum ManifestError {
    #[error("it cannot be read: {0}")]
    Syntax(String),
    #[error("its contents do not match its hash")]
    Hash,
    #[error("it has format {0}, but this version reads formats 1 to {FORMAT}; use a newer version")]
    Format(u32),
    #[error("it has {units} units; the maximum is {UNITS_MAX}")]
    Units { units: usize },
    #[error("{0:?} is not a valid file name: use letters, digits, '.', '_' and '-', and do not start with '.'")]
    FileName(String),
    #[error("the name {0:?} appears twice")]
    Duplicate(String),
    #[error("{name}: {problem}")]
    Tensor { name: String, problem: &'static str },
    #[error("{name} has {bytes} bytes and {pieces} hashes, but should have one for every {PIECE_BYTES} bytes")]
    Pieces { name: String, bytes: u64, pieces: usize },
}

/// The contents of the manifest's file: the manifest and its hash.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sealed<'a> {
    blake3: Hash,
    #[serde(borrow)]
    manifest: &'a RawValue,
}

impl Manifest {
    /// The name of the manifest's file.
    pub fn file_name() -> &'static str {
        "manifest.json"
    }

    /// Serializes the manifest with its hash.
    pub fn to_json(&self) -> Vec<u8> {
        let manifest = serde_json::value::to_raw_value(self).expect("a manifest can be written as JSON");
        let sealed = Sealed { blake3: Hash::of(manifest.get().as_bytes()), manifest: &manifest };
        serde_json::to_vec(&sealed).expect("as above")
    }

    /// Parses and checks a manifest.
    pub fn parse(text: &[u8]) -> Result<Self, ManifestError> {
        // The format first: a newer one may have unknown keys.
        #[derive(Deserialize)]
        struct Versioned {
            format: u32,
        }
        let syntax = |error: serde_json::Error| ManifestError::Syntax(error.to_string());
        let sealed: Sealed<'_> = serde_json::from_slice(text).map_err(syntax)?;
        if Hash::of(sealed.manifest.get().as_bytes()) != sealed.blake3 {
            return Err(ManifestError::Hash);
        }
        let Versioned { format } = serde_json::from_str(sealed.manifest.get()).map_err(syntax)?;
        if !(1..=FORMAT).contains(&format) {
            return Err(ManifestError::Format(format));
        }
        let manifest: Manifest = serde_json::from_str(sealed.manifest.get()).map_err(syntax)?;
        if manifest.units.len() > UNITS_MAX {
            return Err(ManifestError::Units { units: manifest.units.len() });
        }
        unique(manifest.units.iter().map(|unit| &unit.name))?;
        unique(manifest.units.iter().map(|unit| &unit.table))?;
        for unit in &manifest.units {
            file_name(&unit.table)?;
            file_name(&unit.name)?;
        }
        Ok(manifest)
    }
}

impl Table {
    /// Serializes the table.
    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a table can be written as JSON")
    }

    /// Parses and checks a table.
    pub fn parse(text: &[u8]) -> Result<Self, ManifestError> {
        let table: Table = serde_json::from_slice(text).map_err(|error| ManifestError::Syntax(error.to_string()))?;
        table.check()?;
        Ok(table)
    }

    /// Checks that file names are valid, that shards lie within their tensors and files, and that they cover every tensor
    /// exactly once.
    pub fn check(&self) -> Result<(), ManifestError> {
        unique(self.files.iter().map(|file| &file.name))?;
        unique(self.tensors.iter().map(|tensor| &tensor.name))?;
        for file in &self.files {
            file_name(&file.name)?;
            if file.bytes.div_ceil(PIECE_BYTES) != file.pieces.len() as u64 {
                let FileEntry { name, bytes, pieces } = file;
                return Err(ManifestError::Pieces { name: name.clone(), bytes: *bytes, pieces: pieces.len() });
            }
        }
        for tensor in &self.tensors {
            tensor
                .check(&self.files)
                .map_err(|problem| ManifestError::Tensor { name: tensor.name.clone(), problem })?;
        }
        Ok(())
    }
}

impl TensorEntry {
    fn check(&self, files: &[FileEntry]) -> Result<(), &'static str> {
        if self.name.len() > NAME_BYTES_MAX {
            return Err("its name is too long");
        }
        let whole = elements(&self.shape).ok_or("its shape is too large")?;
        // The size in the widest dtype must not overflow either.
        whole.checked_mul(8).ok_or("its shape is too large")?;
        let mut count = 0u64;
        for shard in &self.shards {
            let file = files.get(shard.file as usize).ok_or("a shard refers to a file that is not in the table")?;
            if !shard.region.fits(&self.shape) {
                return Err("a shard is not within the tensor");
            }
            let bytes = shard.region.len() * self.dtype.bytes() as u64;
            if shard.offset_bytes.checked_add(bytes).is_none_or(|end| end > file.bytes) {
                return Err("a shard is not within its file");
            }
            count = count.checked_add(shard.region.len()).ok_or("its shards have too many elements")?;
        }
        if count != whole {
            return Err("its shards do not cover it exactly once");
        }
        Ok(())
    }
}

fn unique<'a>(names: impl Iterator<Item = &'a String>) -> Result<(), ManifestError> {
    let mut seen = BTreeSet::new();
    for name in names {
        if !seen.insert(name) {
            return Err(ManifestError::Duplicate(name.clone()));
        }
    }
    Ok(())
}

/// Checks that a file name stays within its folder.
fn file_name(name: &str) -> Result<(), ManifestError> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let good = !name.is_empty() && name.len() <= NAME_BYTES_MAX && !name.starts_with('.') && name.chars().all(plain);
    if good { Ok(()) } else { Err(ManifestError::FileName(name.to_string())) }
}
