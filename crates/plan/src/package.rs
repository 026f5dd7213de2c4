//! Compiled packages: what a folder of compiled units says about itself.
//!
//! A package is a model that a Python tool has cut into units and compiled ahead of time. Its manifest, `package.json`, lists the units
//! with their parameters, and the functions that compute them with the shapes that they were compiled for. The manifest alone is
//! enough to plan a run. It is untrusted until [`Package::open`] has checked it. The compiled code is loaded by `shardwise-model`.

mod check;
mod manifest;

use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::Value;
use sha2::{Digest, Sha256};

pub use manifest::{
    CompiledFile, PackageCheckpointing, PackageDevice, PackageFunction, PackageInit, PackageManifest, PackageParameter,
    PackageTie, PackageUnit, SavedValue, TensorSpec, ValueDtype, ValueSpec,
};

use crate::{ConfigError, Dtype};

/// The format that this version reads.
pub const PACKAGE_FORMAT: u64 = 1;

/// The largest manifest and the largest config.json that are accepted.
const MANIFEST_BYTES_MAX: u64 = 64 << 20;

/// A compiled package.
#[derive(Clone, Debug, PartialEq)]
pub struct Package {
    folder: PathBuf,
    manifest: PackageManifest,
    config: Option<Value>,
    hash: String,
}

impl Package {
    /// Reads and checks the manifest of a package. Loads no code.
    pub fn open(folder: impl Into<PathBuf>) -> Result<Package, ConfigError> {
        let folder = folder.into();
        let path = folder.join("package.json");
        let at = |path: &Path, problem: String| ConfigError {
            key: "package",
            problem: format!("{}: {problem}", path.display()),
        };
        let bytes = read(&path).map_err(|problem| at(&path, problem))?;
        // The format decides what the other keys mean, so it is looked at first.
        let any: Value =
            serde_json::from_slice(&bytes).map_err(|error| at(&path, format!("it is not JSON: {error}")))?;
        let format = any.get("format").and_then(Value::as_u64);
        if format != Some(PACKAGE_FORMAT) {
            let found = format.map_or("no format".to_string(), |format| format!("format {format}"));
            let problem =
                format!("it has {found}, but this version reads format {PACKAGE_FORMAT}: compile the model again");
            return Err(at(&path, problem));
        }
        let manifest: PackageManifest = serde_json::from_slice(&bytes).map_err(|error| at(&path, error.to_string()))?;
        manifest.check().map_err(|problem| at(&path, problem))?;
        let mut hashed = bytes;
        let path = folder.join("config.json");
        let config = match path.exists() {
            true => {
                let bytes = read(&path).map_err(|problem| at(&path, problem))?;
                hashed.extend(&bytes);
                Some(serde_json::from_slice(&bytes).map_err(|error| at(&path, format!("it is not JSON: {error}")))?)
            }
            false => None,
        };
        Ok(Package { folder, manifest, config, hash: sha256(&hashed) })
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The manifest.
    pub fn manifest(&self) -> &PackageManifest {
        &self.manifest
    }

    /// The model's Hugging Face `config.json`, if it has one.
    pub fn config(&self) -> Option<&Value> {
        self.config.as_ref()
    }

    /// The SHA-256 of the manifest and of config.json, in hexadecimal. The manifest has the hashes of all compiled files, so two packages
    /// with the same hash are the same.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// Reads a compiled file, and checks that it is the one that the manifest lists.
    pub fn read_file(&self, file: &CompiledFile) -> Result<Vec<u8>, ConfigError> {
        let path = self.folder.join(&file.file);
        let at = |problem: String| ConfigError { key: "package", problem: format!("{}: {problem}", path.display()) };
        let bytes = std::fs::read(&path).map_err(|error| at(error.to_string()))?;
        let found = sha256(&bytes);
        if found != file.sha256 {
            let problem = format!(
                "its SHA-256 is {found}, but package.json lists {}: it was changed, so it is not loaded; compile the model again",
                file.sha256
            );
            return Err(at(problem));
        }
        Ok(bytes)
    }

    /// The size of the vocabulary, if the inputs are token ids: that of `config.json`, or the rows of the first unit's first matrix,
    /// the embedding.
    pub fn vocab_size(&self) -> Option<usize> {
        if self.manifest.inputs.dtype != Dtype::I64 {
            return None;
        }
        let in_config = |config: &Value| {
            let size = config.get("vocab_size").or_else(|| config.get("text_config")?.get("vocab_size"))?;
            size.as_u64().map(|size| size as usize)
        };
        let first = &self.manifest.units[0];
        let table = first.parameters.iter().find(|parameter| parameter.shape.len() == 2);
        self.config.as_ref().and_then(in_config).or_else(|| table.map(|table| table.shape[0]))
    }
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    let file = std::fs::File::open(path).map_err(|error| error.to_string())?;
    let mut bytes = Vec::new();
    file.take(MANIFEST_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    match bytes.len() as u64 > MANIFEST_BYTES_MAX {
        true => Err(format!("it is longer than {MANIFEST_BYTES_MAX} bytes")),
        false => Ok(bytes),
    }
}

/// The SHA-256 of bytes, in hexadecimal.
fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests;
