//! What a checkpoint says of itself: a manifest, and a table for each unit. Both are untrusted until they have been checked.
//!
//! The manifest is small whatever the model: a line for each unit, with the hash of the unit's table. A table lists the unit's
//! tensors, their slices, the files that these are in, and a hash for every piece of every file. So a rank reads metadata
//! in proportion to the units that it needs, and what it reads of a file it can check without reading the rest.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use shardwise_plan::Dtype;

use crate::Hash;
use crate::place::{Place, elements};

/// The version of the format that this crate writes, and the newest that it reads.
pub const FORMAT: u32 = 1;

/// The bytes of a file that share a hash; the last piece of a file may be shorter.
pub(crate) const PIECE_BYTES: u64 = 1 << 20;

/// The longest manifest that is read; there is a line for each unit.
pub(crate) const MANIFEST_BYTES_MAX: u64 = 64 << 20;
/// The longest table that is read; there are 67 bytes for each mebibyte of a unit.
pub(crate) const TABLE_BYTES_MAX: u64 = 256 << 20;
const UNITS_MAX: usize = 1 << 16;
const NAME_BYTES_MAX: usize = 512;

/// `manifest.json`. A checkpoint is there when its manifest is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`FORMAT`].
    pub format: u32,
    /// What wrote it.
    pub written_by: String,
    /// The step after which it was written.
    pub step: u64,
    /// What training needs to go on beside tensors: this crate does not look at it.
    pub training: serde_json::Value,
    /// The units in the order of the model.
    pub units: Vec<UnitEntry>,
}

/// One unit in the manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnitEntry {
    /// The unit's name.
    pub name: String,
    /// The file with its table.
    pub table: String,
    /// That file's length.
    pub table_bytes: u64,
    /// That file's hash.
    pub table_hash: Hash,
}

/// What a unit's table says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    /// The files with its tensors.
    pub files: Vec<FileEntry>,
    /// Its tensors.
    pub tensors: Vec<TensorEntry>,
}

/// A file of tensors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Its name in the checkpoint's folder.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// The hashes of its pieces, in order.
    pub pieces: Vec<Hash>,
}

/// A tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// Its name in the whole model; a parameter's, or a parameter's with what is kept of it: `….weight/first_moment`.
    pub name: String,
    /// The type of its elements.
    #[serde(with = "crate::dtype")]
    pub dtype: Dtype,
    /// Its whole shape.
    pub shape: Vec<u64>,
    /// Its slices, which together are all of it, none twice.
    pub slices: Vec<SliceEntry>,
}

/// A slice of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SliceEntry {
    /// Which of the table's files it is in.
    pub file: u32,
    /// Where it begins in that file.
    pub offset_bytes: u64,
    /// What of the tensor it is.
    pub place: Place,
}

/// What is wrong with a manifest or a table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "their messages say it")]
pub enum Fault {
    #[error("it cannot be read: {0}")]
    Syntax(String),
    #[error("its own hash is not that of what it says")]
    Hash,
    #[error("it is of format {0}, and this program reads formats 1 to {FORMAT}: use a newer one")]
    Format(u32),
    #[error("it has {units} units, and at most {UNITS_MAX} are read")]
    Units { units: usize },
    #[error("{0:?} is no name of a file: names have letters, digits, '.', '_' and '-', and do not begin with '.'")]
    FileName(String),
    #[error("the name {0:?} is there twice")]
    Twice(String),
    #[error("{name}: {problem}")]
    Tensor { name: String, problem: &'static str },
    #[error("{name} has {bytes} bytes, and {pieces} hashes: there should be one for every {PIECE_BYTES} bytes")]
    Pieces { name: String, bytes: u64, pieces: usize },
}

/// The manifest as it stands in its file: with its own hash.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sealed<'a> {
    blake3: Hash,
    #[serde(borrow)]
    manifest: &'a RawValue,
}

impl Manifest {
    /// The manifest's file.
    pub fn file() -> &'static str {
        "manifest.json"
    }

    /// As it is written.
    pub fn sealed(&self) -> Vec<u8> {
        let manifest = serde_json::value::to_raw_value(self).expect("a manifest is made of what JSON has");
        let sealed = Sealed { blake3: Hash::of(manifest.get().as_bytes()), manifest: &manifest };
        serde_json::to_vec(&sealed).expect("as above")
    }

    /// Reads and checks.
    pub fn parse(text: &[u8]) -> Result<Self, Fault> {
        // The format first: a newer one may have keys that are not known here.
        #[derive(Deserialize)]
        struct Versioned {
            format: u32,
        }
        let syntax = |error: serde_json::Error| Fault::Syntax(error.to_string());
        let sealed: Sealed<'_> = serde_json::from_slice(text).map_err(syntax)?;
        if Hash::of(sealed.manifest.get().as_bytes()) != sealed.blake3 {
            return Err(Fault::Hash);
        }
        let Versioned { format } = serde_json::from_str(sealed.manifest.get()).map_err(syntax)?;
        if !(1..=FORMAT).contains(&format) {
            return Err(Fault::Format(format));
        }
        let manifest: Manifest = serde_json::from_str(sealed.manifest.get()).map_err(syntax)?;
        if manifest.units.len() > UNITS_MAX {
            return Err(Fault::Units { units: manifest.units.len() });
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
    /// As it is written.
    pub fn text(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a table is made of what JSON has")
    }

    /// Reads and checks.
    pub fn parse(text: &[u8]) -> Result<Self, Fault> {
        let table: Table = serde_json::from_slice(text).map_err(|error| Fault::Syntax(error.to_string()))?;
        table.check()?;
        Ok(table)
    }

    /// Whether it can be believed: names are names of files here, slices lie within their tensors and files, and together
    /// are all of every tensor.
    pub fn check(&self) -> Result<(), Fault> {
        unique(self.files.iter().map(|file| &file.name))?;
        unique(self.tensors.iter().map(|tensor| &tensor.name))?;
        for file in &self.files {
            file_name(&file.name)?;
            if file.bytes.div_ceil(PIECE_BYTES) != file.pieces.len() as u64 {
                let FileEntry { name, bytes, pieces } = file;
                return Err(Fault::Pieces { name: name.clone(), bytes: *bytes, pieces: pieces.len() });
            }
        }
        for tensor in &self.tensors {
            tensor.check(&self.files).map_err(|problem| Fault::Tensor { name: tensor.name.clone(), problem })?;
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
        // The widest type, so that it can be written in any.
        whole.checked_mul(8).ok_or("its shape is too large")?;
        let mut count = 0u64;
        for slice in &self.slices {
            let file = files.get(slice.file as usize).ok_or("a slice is in no file of the table")?;
            if !slice.place.fits(&self.shape) {
                return Err("a slice is not within the tensor");
            }
            let bytes = slice.place.len() * self.dtype.bytes() as u64;
            if slice.offset_bytes.checked_add(bytes).is_none_or(|end| end > file.bytes) {
                return Err("a slice is not within its file");
            }
            count = count.checked_add(slice.place.len()).ok_or("its slices are too many")?;
        }
        if count != whole {
            return Err("its slices are not all of it, or some of it twice");
        }
        Ok(())
    }
}

fn unique<'a>(names: impl Iterator<Item = &'a String>) -> Result<(), Fault> {
    let mut seen = BTreeSet::new();
    for name in names {
        if !seen.insert(name) {
            return Err(Fault::Twice(name.clone()));
        }
    }
    Ok(())
}

/// A name that leads nowhere else.
fn file_name(name: &str) -> Result<(), Fault> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let good = !name.is_empty() && name.len() <= NAME_BYTES_MAX && !name.starts_with('.') && name.chars().all(plain);
    if good { Ok(()) } else { Err(Fault::FileName(name.to_string())) }
}
