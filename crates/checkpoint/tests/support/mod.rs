//! Checkpoints without a model: their contents follow from the names.

#![allow(dead_code, reason = "each test uses some of it")]

use std::sync::Arc;

use serde_json::json;
use shardwise_checkpoint::{
    Checkpoint, FORMAT, FlatBuffer, Hash, Manifest, Owners, SaveId, Store, Tensor, UnitLayout, elements, write_file,
    write_manifest, write_table,
};
use shardwise_plan::{Dtype, FloatsMut};

/// Units of tensors with these shapes, each with a master and two moments, in files of at least `file_bytes`.
pub(crate) fn units(shapes: &[&[&[u64]]], owners: usize, file_bytes: u64) -> Vec<UnitLayout> {
    let unit = |(unit, shapes): (usize, &&[&[u64]])| {
        let buffer = |ending: &str| FlatBuffer {
            dtype: Dtype::F32,
            tensors: shapes
                .iter()
                .enumerate()
                .map(|(index, shape)| Tensor::whole(format!("unit.{unit}.{index}{ending}"), shape.to_vec()))
                .collect(),
            owners: Owners::all(owners),
        };
        let buffers = vec![buffer(""), buffer("/first_moment"), buffer("/second_moment")];
        UnitLayout { name: format!("unit.{unit}"), buffers, owners, index: unit, file_bytes }
    };
    shapes.iter().enumerate().map(unit).collect()
}

/// Element `index` of a tensor in the checkpoint of a step.
pub(crate) fn element(step: u64, name: &str, index: u64) -> f32 {
    at(key(step, name), index)
}

fn key(step: u64, name: &str) -> u64 {
    name.bytes().fold(step, |key, byte| key.wrapping_mul(31).wrapping_add(u64::from(byte)))
}

fn at(key: u64, index: u64) -> f32 {
    let mixed = (key ^ index).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 40) as f32
}

/// The bytes of some elements of a buffer.
fn bytes(step: u64, buffer: &FlatBuffer, range: std::ops::Range<u64>) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(4 * (range.end - range.start) as usize);
    let mut begin = 0;
    for tensor in &buffer.tensors {
        let end = begin + elements(&tensor.shape).unwrap();
        let key = key(step, &tensor.name);
        for index in range.start.max(begin)..range.end.min(end) {
            bytes.extend(at(key, index - begin).to_le_bytes());
        }
        begin = end;
    }
    bytes
}

/// Writes a checkpoint as all its owners together would.
pub(crate) fn save(store: &Store, step: u64, layouts: &[UnitLayout], save: SaveId) {
    write_manifest(store, &save_but_manifest(store, step, layouts, save), &mut || ()).unwrap();
}

/// Writes everything except the manifest, and returns it.
pub(crate) fn save_but_manifest(store: &Store, step: u64, layouts: &[UnitLayout], save: SaveId) -> Manifest {
    let mut units = Vec::new();
    for layout in layouts {
        let mut pieces: Vec<Hash> = Vec::new();
        for file in layout.files(save) {
            let segments =
                file.segments.iter().map(|segment| bytes(step, &layout.buffers[segment.buffer], segment.range.clone()));
            let contents: Vec<_> = std::iter::once(file.header.clone()).chain(segments).map(Into::into).collect();
            pieces.extend(write_file(store, step, &file.name, &contents).unwrap());
        }
        let table = layout.table(save, &pieces);
        let entry = layout.entry(save, &table);
        write_table(store, step, &entry, &table).unwrap();
        units.push(entry);
    }
    let training = json!({ "progress": { "step": step } });
    Manifest { format: FORMAT, written_by: "a test".to_string(), step, training, units }
}

/// Reads a whole checkpoint, and compares it with what was written.
pub(crate) fn load(store: &Arc<Store>, step: u64, layouts: &[UnitLayout]) -> Result<(), shardwise_checkpoint::Error> {
    let checkpoint = Checkpoint::open(store, step)?;
    for layout in layouts {
        let mut reader = checkpoint.unit(&layout.name)?;
        for tensor in layout.buffers.iter().flat_map(|buffer| &buffer.tensors) {
            let len = elements(&tensor.shape).unwrap();
            let mut found = vec![0f32; len as usize];
            reader.read_floats(&tensor.name, &tensor.shape, 0..len, FloatsMut::F32(&mut found))?;
            let key = key(step, &tensor.name);
            for (index, found) in found.iter().enumerate() {
                assert_eq!(*found, at(key, index as u64), "{} {index}", tensor.name);
            }
        }
    }
    Ok(())
}

/// The newest step that can be read, and the errors of the later ones.
pub(crate) fn newest(store: &Arc<Store>, layouts: &[UnitLayout]) -> (Option<u64>, Vec<shardwise_checkpoint::Error>) {
    let mut reasons = Vec::new();
    for step in store.steps().unwrap() {
        match load(store, step, layouts) {
            Ok(()) => return (Some(step), reasons),
            Err(error) => reasons.push(error),
        }
    }
    (None, reasons)
}
