//! Reading checkpoints: only the requested ranges, verified against their hashes.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use shardwise_plan::{Dtype, FloatsMut};

use crate::manifest::{FileEntry, MANIFEST_BYTES_MAX, Manifest, PIECE_BYTES, TABLE_BYTES_MAX, Table, TensorEntry};
use crate::region::{Overlap, Region};
use crate::store::step_folder;
use crate::{Error, Hash, Result, Store};

/// An open checkpoint, with its manifest in memory.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    store: Arc<Store>,
    folder: String,
    manifest: Arc<Manifest>,
}

impl Checkpoint {
    /// Opens the checkpoint of a step.
    pub fn open(store: &Arc<Store>, step: u64) -> Result<Self> {
        let folder = step_folder(step);
        let path = format!("{folder}/{}", Manifest::file_name());
        let text = store.read(&path, MANIFEST_BYTES_MAX)?;
        let manifest = Manifest::parse(&text).map_err(|error| Error::Manifest { path: store.display(&path), error })?;
        if manifest.step != step {
            return Err(store.damaged_error(&path, format!("it is the manifest of step {}", manifest.step)));
        }
        Ok(Checkpoint { store: store.clone(), folder, manifest: Arc::new(manifest) })
    }

    /// The manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The checkpoint's address.
    pub fn name(&self) -> String {
        self.store.display(&self.folder)
    }

    /// Opens a unit: reads and verifies its table.
    pub fn unit(&self, name: &str) -> Result<UnitReader> {
        let entry = self.manifest.units.iter().find(|unit| unit.name == name);
        let entry = entry.ok_or_else(|| self.mismatch(format!("it has no unit {name}")))?;
        let path = format!("{}/{}", self.folder, entry.table);
        let text = self.store.read(&path, TABLE_BYTES_MAX)?;
        if text.len() as u64 != entry.table_bytes || Hash::of(&text) != entry.table_hash {
            return Err(self.store.damaged_error(&path, "it is not the table that the manifest names".to_string()));
        }
        let table = Table::parse(&text).map_err(|error| Error::Manifest { path: self.store.display(&path), error })?;
        let index = table.tensors.iter().enumerate().map(|(index, tensor)| (tensor.name.clone(), index)).collect();
        let length_checked = table.files.iter().map(|_| false).collect();
        Ok(UnitReader { checkpoint: self.clone(), table, index, length_checked, last: None })
    }

    /// Reads everything and compares the hashes. `progress` is called before each read, with its number of bytes.
    pub fn verify(&self, progress: &mut dyn FnMut(u64)) -> Result<()> {
        for unit in &self.manifest.units {
            let mut reader = self.unit(&unit.name)?;
            for file in 0..reader.table.files.len() {
                let bytes = reader.table.files[file].bytes;
                for from in (0..bytes).step_by(READ_BYTES as usize) {
                    let range = from..bytes.min(from + READ_BYTES);
                    progress(range.end - range.start);
                    reader.pieces(file, range)?;
                }
            }
        }
        Ok(())
    }

    /// Checks that the tables can be read, and that all files exist and have the right lengths. Does not read the files.
    pub fn check_files(&self) -> Result<()> {
        let found: BTreeMap<String, u64> = self.store.files(&self.folder)?.into_iter().collect();
        for unit in &self.manifest.units {
            for FileEntry { name, bytes, .. } in &self.unit(&unit.name)?.table.files {
                check_length(&self.store, &format!("{}/{name}", self.folder), found.get(name).copied(), *bytes)?;
            }
        }
        Ok(())
    }

    /// The total size of the files, from the tables.
    pub fn bytes(&self) -> Result<u64> {
        let unit = |name: &str| Ok(self.unit(name)?.table.files.iter().map(|file| file.bytes).sum::<u64>());
        self.manifest.units.iter().map(|entry| unit(&entry.name)).sum()
    }

    fn mismatch(&self, problem: String) -> Error {
        Error::Mismatch { folder: self.name(), problem }
    }
}

/// The size of one read.
const READ_BYTES: u64 = 16 * PIECE_BYTES;

/// Reads tensors of a unit.
#[derive(Debug)]
pub struct UnitReader {
    checkpoint: Checkpoint,
    table: Table,
    index: BTreeMap<String, usize>,
    /// Which files are known to have the right length.
    length_checked: Vec<bool>,
    /// The piece that was read last: the next request often starts in it.
    last: Option<(usize, u64, Bytes)>,
}

impl UnitReader {
    /// The unit's table.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Reads elements of a tensor of this shape, and converts them to the dtype of `elements`.
    pub fn read_floats(&mut self, name: &str, shape: &[u64], range: Range<u64>, elements: FloatsMut<'_>) -> Result<()> {
        let tensor = self.tensor(name)?;
        if tensor.shape != shape {
            let problem = format!("{name} has shape {:?} in the checkpoint, but {shape:?} in the model", tensor.shape);
            return Err(self.checkpoint.mismatch(problem));
        }
        let dtype = tensor.dtype;
        if !is_float(dtype) {
            return Err(self.checkpoint.mismatch(format!("{name} has dtype {dtype}, not f64, f32, bf16 or f16")));
        }
        let mut bytes = vec![0; elements.len() * dtype.bytes()];
        self.read(name, &Region::flat(range), &mut bytes)?;
        convert(dtype, &bytes, elements);
        Ok(())
    }

    /// Reads the bytes of a region of a tensor.
    pub fn read(&mut self, name: &str, region: &Region, out: &mut [u8]) -> Result<()> {
        let tensor = self.tensor(name)?;
        let (size, shape) = (tensor.dtype.bytes() as u64, tensor.shape.clone());
        if !region.fits(&shape) || region.len() * size != out.len() as u64 {
            return Err(self
                .checkpoint
                .mismatch(format!("{name} has shape {shape:?}; the requested region is outside")));
        }
        let mut runs: Vec<(usize, u64, Overlap)> = Vec::new();
        for shard in &tensor.shards {
            let overlaps = shard.region.overlaps(region, &shape);
            runs.extend(overlaps.into_iter().map(|run| (shard.file as usize, shard.offset_bytes, run)));
        }
        runs.sort_unstable_by_key(|(.., run)| run.to);
        let mut next = 0;
        for (file, offset, run) in runs {
            if run.to != next {
                return Err(self.incomplete(name));
            }
            let from = offset + run.from * size..offset + (run.from + run.len) * size;
            let to = (run.to * size) as usize..((run.to + run.len) * size) as usize;
            self.copy(file, from, &mut out[to])?;
            next += run.len;
        }
        if next == region.len() { Ok(()) } else { Err(self.incomplete(name)) }
    }

    fn incomplete(&self, name: &str) -> Error {
        let problem = format!("the shards of {name} do not cover it exactly once");
        Error::Damaged { path: self.checkpoint.name(), problem }
    }

    fn tensor(&self, name: &str) -> Result<&TensorEntry> {
        let index = self.index.get(name).ok_or_else(|| self.checkpoint.mismatch(format!("it has no tensor {name}")))?;
        Ok(&self.table.tensors[*index])
    }

    fn copy(&mut self, file: usize, range: Range<u64>, out: &mut [u8]) -> Result<()> {
        let mut from = range.start;
        while from < range.end {
            let to = range.end.min(from / PIECE_BYTES * PIECE_BYTES + READ_BYTES);
            let (begin, bytes) = match &self.last {
                Some((of, begin, bytes)) if *of == file && (*begin..*begin + bytes.len() as u64).contains(&from) => {
                    (*begin, bytes.clone())
                }
                _ => self.pieces(file, from..to)?,
            };
            let here = from..to.min(begin + bytes.len() as u64);
            let target = (here.start - range.start) as usize..(here.end - range.start) as usize;
            out[target].copy_from_slice(&bytes[(here.start - begin) as usize..(here.end - begin) as usize]);
            from = here.end;
            // Keep the last piece: the next request may start in it.
            let last = (here.end - 1 - begin) / PIECE_BYTES * PIECE_BYTES;
            self.last = Some((file, begin + last, bytes.slice(last as usize..)));
        }
        Ok(())
    }

    /// Reads and verifies the pieces of a file that contain these bytes, and returns them with their offset.
    fn pieces(&mut self, file: usize, range: Range<u64>) -> Result<(u64, Bytes)> {
        let FileEntry { name, bytes: file_bytes, pieces } = &self.table.files[file];
        let path = format!("{}/{name}", self.checkpoint.folder);
        let store = &self.checkpoint.store;
        if !self.length_checked[file] {
            check_length(store, &path, store.file_len(&path)?, *file_bytes)?;
            self.length_checked[file] = true;
        }
        let begin = range.start / PIECE_BYTES * PIECE_BYTES;
        let end = file_bytes.min(&(range.end.div_ceil(PIECE_BYTES) * PIECE_BYTES)).to_owned();
        let bytes = store.read_range(&path, begin..end)?;
        for (index, piece) in bytes.chunks(PIECE_BYTES as usize).enumerate() {
            let index = index + (begin / PIECE_BYTES) as usize;
            if Hash::of(piece) != pieces[index] {
                let from = index as u64 * PIECE_BYTES;
                let problem = format!("bytes {from} to {} are not what was written", from + piece.len() as u64);
                return Err(store.damaged_error(&path, problem));
            }
        }
        Ok((begin, bytes))
    }
}

/// Checks that a file exists and has the expected length.
fn check_length(store: &Store, path: &str, found: Option<u64>, expected: u64) -> Result<()> {
    match found {
        Some(found) if found == expected => Ok(()),
        Some(found) => Err(store.damaged_error(path, format!("it has {found} bytes, but should have {expected}"))),
        None => Err(store.damaged_error(path, "it is missing".to_string())),
    }
}

/// Whether [`convert`] can convert elements of this dtype.
pub(crate) fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::Bf16 | Dtype::F16)
}

/// Converts f64, f32, bf16 or f16 elements to the dtype of `elements`.
pub(crate) fn convert(dtype: Dtype, bytes: &[u8], elements: FloatsMut<'_>) {
    match (dtype, elements) {
        (Dtype::F64, elements) => elements.write(bytes.as_chunks().0.iter().map(|&eight| f64::from_le_bytes(eight))),
        (_, FloatsMut::F32(elements)) => convert_to_f32(dtype, bytes, elements),
        (_, wide) => {
            let mut narrow = vec![0f32; wide.len()];
            convert_to_f32(dtype, bytes, &mut narrow);
            wide.write(narrow.into_iter().map(f64::from));
        }
    }
}

fn convert_to_f32(dtype: Dtype, bytes: &[u8], elements: &mut [f32]) {
    let halves = || bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
    match dtype {
        Dtype::F32 => {
            for (element, four) in elements.iter_mut().zip(bytes.chunks_exact(4)) {
                *element = f32::from_le_bytes([four[0], four[1], four[2], four[3]]);
            }
        }
        Dtype::Bf16 => halves().map(bf16::from_bits).collect::<Vec<_>>().convert_to_f32_slice(elements),
        Dtype::F16 => halves().map(f16::from_bits).collect::<Vec<_>>().convert_to_f32_slice(elements),
        other => panic!("parameters cannot be {other}"),
    }
}
