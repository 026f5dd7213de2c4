//! Which bytes of a unit go into which file, and who writes it.
//!
//! A unit is a few bands: flat buffers of one type that hold its tensors one after the other, as masters, as first moments, and
//! so on. All bands are cut among the same owners. A file has the slices of owners that stand next to each other, as many as
//! make it worth a file; so the number of files follows from the number of bytes and units, however many owners there are.
//! Whole tensors stand in a file under their own name and shape, so that a unit in one file is plain safetensors.

use std::ops::Range;

use shardwise_plan::{Dtype, Partition};

use crate::manifest::{FileEntry, PIECE_BYTES, SliceEntry, Table, TensorEntry};
use crate::place::{Place, elements};
use crate::{Hash, SaveId, safetensors};

/// How long a file is at least, unless somebody wants it otherwise.
pub const FILE_BYTES: u64 = 64 << 20;

/// A tensor of a band.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Its name in the whole model.
    pub name: String,
    /// Its whole shape.
    pub shape: Vec<u64>,
}

impl Tensor {
    fn elements(&self) -> u64 {
        elements(&self.shape).expect("a tensor in memory has a number of elements")
    }
}

/// A flat buffer with tensors of one type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Band {
    /// Their type.
    pub dtype: Dtype,
    /// In their order.
    pub tensors: Vec<Tensor>,
}

impl Band {
    fn len(&self) -> u64 {
        self.tensors.iter().map(Tensor::elements).sum()
    }
}

/// A unit, as it is cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitLayout {
    /// The unit's name.
    pub name: String,
    /// Its buffers.
    pub bands: Vec<Band>,
    /// Among how many owners each of them is cut.
    pub owners: usize,
    /// The unit's place in the model. Owners take turns as writers, so that they write side by side.
    pub turn: usize,
    /// How long a file is at least, where the unit has as many bytes: [`FILE_BYTES`].
    pub file_bytes: u64,
}

/// A file to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilePlan {
    /// Its name.
    pub name: String,
    /// Which owner writes it.
    pub writer: usize,
    /// How it begins.
    pub header: Vec<u8>,
    /// What follows, in order.
    pub segments: Vec<Segment>,
}

/// One owner's slice of a band.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Whose.
    pub owner: usize,
    /// Of which band.
    pub band: usize,
    /// Which of its elements.
    pub range: Range<u64>,
    /// How many bytes.
    pub bytes: u64,
}

impl FilePlan {
    /// The file's length.
    pub fn bytes(&self) -> u64 {
        self.header.len() as u64 + self.segments.iter().map(|segment| segment.bytes).sum::<u64>()
    }

    /// How many hashes it has.
    pub fn pieces(&self) -> usize {
        self.bytes().div_ceil(PIECE_BYTES) as usize
    }
}

impl UnitLayout {
    /// The files that a save with this id makes of it.
    pub fn files(&self, save: SaveId) -> Vec<FilePlan> {
        self.groups().enumerate().map(|(index, owners)| self.file(index, owners, save)).collect()
    }

    /// The table that says what is in them. `pieces` are the hashes of their pieces, one file's after the other's.
    pub fn table(&self, save: SaveId, pieces: &[Hash]) -> Table {
        let mut rest = pieces;
        let mut files = Vec::new();
        let mut tensors: Vec<TensorEntry> = Vec::new();
        for band in &self.bands {
            tensors.extend(band.tensors.iter().map(|tensor| TensorEntry {
                name: tensor.name.clone(),
                dtype: band.dtype,
                shape: tensor.shape.clone(),
                slices: Vec::new(),
            }));
        }
        for (index, (plan, owners)) in self.files(save).iter().zip(self.groups()).enumerate() {
            let (own, others) = rest.split_at(plan.pieces());
            rest = others;
            files.push(FileEntry { name: plan.name.clone(), bytes: plan.bytes(), pieces: own.to_vec() });
            let mut offset_bytes = plan.header.len() as u64;
            for part in self.parts(owners) {
                let place = Place::flat(part.range.clone());
                tensors[part.tensor].slices.push(SliceEntry { file: index as u32, offset_bytes, place });
                offset_bytes += part.bytes();
            }
        }
        // A tensor without elements has no slices, and needs none.
        Table { files, tensors }
    }

    /// The owners whose slices share a file, for each file.
    fn groups(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let bytes: u64 = self.bands.iter().map(|band| band.len() * band.dtype.bytes() as u64).sum();
        let files = (bytes / self.file_bytes).clamp(1, self.owners as u64) as usize;
        let owners = Partition::new(self.owners, files);
        (0..files).map(move |file| owners.range(file))
    }

    fn file(&self, index: usize, owners: Range<usize>, save: SaveId) -> FilePlan {
        let entries: Vec<safetensors::Entry> = self.parts(owners.clone()).map(|part| part.entry(self)).collect();
        let mut segments = Vec::new();
        for (index, band) in self.bands.iter().enumerate() {
            let cut = Partition::new(band.len() as usize, self.owners);
            segments.extend(owners.clone().map(|owner| {
                let range = cut.range(owner);
                let bytes = (range.len() * band.dtype.bytes()) as u64;
                Segment { owner, band: index, range: range.start as u64..range.end as u64, bytes }
            }));
        }
        FilePlan {
            name: format!("{}-{index}.{save}.safetensors", self.name),
            writer: owners.start + self.turn % owners.len(),
            header: safetensors::header(&entries),
            segments,
        }
    }

    /// The parts of tensors that these owners have, in the order of the file.
    fn parts(&self, owners: Range<usize>) -> impl Iterator<Item = Part> {
        let mut tensors_before = 0;
        self.bands.iter().flat_map(move |band| {
            let cut = Partition::new(band.len() as usize, self.owners);
            let (from, to) = (cut.range(owners.start).start as u64, cut.range(owners.end - 1).end as u64);
            let (first, mut begin) = (tensors_before, 0);
            tensors_before += band.tensors.len();
            let parts: Vec<Part> = band
                .tensors
                .iter()
                .enumerate()
                .filter_map(|(index, tensor)| {
                    let standing = begin..begin + tensor.elements();
                    begin = standing.end;
                    let (start, end) = (standing.start.max(from), standing.end.min(to));
                    let range = start.checked_sub(standing.start)?..end.checked_sub(standing.start)?;
                    (range.start < range.end).then_some(Part { tensor: first + index, range, dtype: band.dtype })
                })
                .collect();
            parts
        })
    }

    fn tensor(&self, index: usize) -> &Tensor {
        self.bands.iter().flat_map(|band| &band.tensors).nth(index).expect("a part is of a tensor of the unit")
    }
}

/// A part of a tensor in a file.
struct Part {
    /// Counted through all bands.
    tensor: usize,
    range: Range<u64>,
    dtype: Dtype,
}

impl Part {
    fn bytes(&self) -> u64 {
        (self.range.end - self.range.start) * self.dtype.bytes() as u64
    }

    fn entry(&self, unit: &UnitLayout) -> safetensors::Entry {
        let tensor = unit.tensor(self.tensor);
        let (name, shape) = match self.range == (0..tensor.elements()) {
            true => (tensor.name.clone(), tensor.shape.clone()),
            false => (
                format!("{}[{}..{}]", tensor.name, self.range.start, self.range.end),
                vec![self.range.end - self.range.start],
            ),
        };
        safetensors::Entry { name, dtype: self.dtype, shape }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use proptest::prelude::*;

    use super::*;

    fn layout() -> impl Strategy<Value = UnitLayout> {
        let shape = prop::collection::vec(0u64..50, 0..3);
        let band = prop::collection::vec(shape, 0..4);
        (prop::collection::vec(band, 1..4), 1usize..9, 0usize..9, 1u64..9000).prop_map(
            |(bands, owners, turn, file_bytes)| {
                let bands = bands.into_iter().enumerate().map(|(b, shapes)| Band {
                    dtype: [Dtype::F32, Dtype::Bf16][b % 2],
                    tensors: shapes
                        .into_iter()
                        .enumerate()
                        .map(|(t, shape)| Tensor { name: format!("{b}.{t}"), shape })
                        .collect(),
                });
                UnitLayout { name: "unit".to_string(), bands: bands.collect(), owners, turn, file_bytes }
            },
        )
    }

    proptest! {
        #[test]
        fn a_table_is_of_what_the_files_have(unit in layout()) {
            let save = SaveId::from(7);
            let files = unit.files(save);
            let pieces: usize = files.iter().map(FilePlan::pieces).sum();
            let table = unit.table(save, &vec![Hash::of(b""); pieces]);
            prop_assert_eq!(table.check(), Ok(()));
            for (index, plan) in files.iter().enumerate() {
                prop_assert!(plan.segments.iter().any(|segment| segment.owner == plan.writer));
                // What the header says is where the table says it is, and there is nothing else.
                let found = safetensors::parse(&plan.header[8..], plan.bytes()).unwrap();
                let mut begins: Vec<u64> = found.values().map(|found| found.bytes.start).collect();
                let mut offsets: Vec<u64> = table.tensors.iter().flat_map(|tensor| &tensor.slices)
                    .filter(|slice| slice.file as usize == index).map(|slice| slice.offset_bytes).collect();
                begins.sort_unstable();
                offsets.sort_unstable();
                prop_assert_eq!(begins, offsets);
                let in_tensors: u64 = found.values().map(|found| found.bytes.end - found.bytes.start).sum();
                prop_assert_eq!(plan.header.len() as u64 + in_tensors, plan.bytes());
            }
        }
    }

    #[test]
    fn files_are_by_size_not_by_owner() {
        let tensors = vec![Tensor { name: "w".to_string(), shape: vec![1 << 12, 1 << 14] }];
        let unit = |owners| UnitLayout {
            name: "block.0".to_string(),
            bands: vec![Band { dtype: Dtype::F32, tensors: tensors.clone() }],
            owners,
            turn: 5,
            file_bytes: FILE_BYTES,
        };
        // 256 MiB.
        assert_eq!(unit(2).files(SaveId::from(1)).len(), 2);
        assert_eq!(unit(1000).files(SaveId::from(1)).len(), 4);
        assert_eq!(unit(1000).files(SaveId::from(1))[1].writer, 255);
    }
}
