//! The assignment of a unit's bytes to files, and of files to writers.
//!
//! A unit consists of flat buffers of one dtype each, which hold its tensors one after the other: the masters, the first
//! moments, and so on. Each buffer is sharded among some of the owners: all of them or, if it has one part of tensors that are split
//! by tensor parallelism, every n-th. A file has the shards of consecutive owners, as many as make it large enough; so the number of
//! files depends on the number of bytes and units, not on the number of owners. Whole tensors are stored under their own name and
//! shape, so that a unit in one file is plain safetensors.

use std::collections::HashMap;
use std::ops::Range;

use shardwise_plan::{Dtype, Partition, Slice};

use crate::manifest::{FileEntry, PIECE_BYTES, ShardEntry, Table, TensorEntry, UnitEntry};
use crate::region::{Region, elements};
use crate::{Hash, SaveId, safetensors};

/// The default minimum size of a file.
pub const FILE_BYTES: u64 = 64 << 20;

/// A tensor in a flat buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// The parameter's name, with a suffix for optimizer state.
    pub name: String,
    /// The shape of the whole tensor.
    pub shape: Vec<u64>,
    /// The part of it that is in the buffer; `None` for all of it.
    pub slice: Option<Slice>,
}

impl Tensor {
    /// A whole tensor.
    pub fn whole(name: impl Into<String>, shape: Vec<u64>) -> Self {
        Tensor { name: name.into(), shape, slice: None }
    }

    fn elements(&self) -> u64 {
        elements(&self.kept_shape()).expect("a tensor in memory has a number of elements")
    }

    /// The shape of what is in the buffer.
    fn kept_shape(&self) -> Vec<u64> {
        let mut shape = self.shape.clone();
        if let Some(slice) = &self.slice {
            shape[slice.dimension] = slice.len() as u64;
            if let Some(experts) = &slice.experts {
                shape[0] = experts.len() as u64;
            }
        }
        shape
    }

    /// A range of what is in the buffer, as a region of the whole tensor.
    fn region(&self, range: Range<u64>) -> Region {
        match &self.slice {
            Some(slice) => Region::of_slice(&self.shape, slice).part(range),
            None => Region::flat(range),
        }
    }

    /// The name of what is in the buffer: that of the tensor, with the ranges of a slice.
    fn kept_name(&self) -> String {
        match &self.slice {
            Some(Slice { dimension, ranges, experts }) => {
                let text = |range: &Range<usize>| format!("{}..{}", range.start, range.end);
                let of_experts = experts.as_ref().map(|experts| format!("[0: {}]", text(experts))).unwrap_or_default();
                let ranges: Vec<String> = ranges.iter().map(text).collect();
                format!("{}{of_experts}[{dimension}: {}]", self.name, ranges.join(", "))
            }
            None => self.name.clone(),
        }
    }
}

/// The owners of a buffer's shards: blocks of the same size at the same distance, and in each of them every `stride`-th owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owners {
    /// The first.
    pub first: usize,
    /// The difference between one and the next in a block.
    pub stride: usize,
    /// How many there are in a block.
    pub per_block: usize,
    /// The difference between the first of a block and the first of the next.
    pub block_stride: usize,
    /// How many there are.
    pub count: usize,
}

impl Owners {
    /// All owners of a unit.
    pub fn all(count: usize) -> Self {
        Owners::every(1, 0, count)
    }

    /// `count` owners, every `stride`-th from `first` on.
    pub fn every(stride: usize, first: usize, count: usize) -> Self {
        Owners { first, stride, per_block: count, block_stride: stride * count, count }
    }

    /// The shards that owners in this range have.
    fn shards(&self, owners: &Range<usize>) -> Range<usize> {
        let before = |owner: usize| {
            let distance = owner.saturating_sub(self.first);
            let in_block = (distance % self.block_stride).div_ceil(self.stride).min(self.per_block);
            (distance / self.block_stride * self.per_block + in_block).min(self.count)
        };
        before(owners.start)..before(owners.end)
    }

    fn owner(&self, shard: usize) -> usize {
        self.first + shard / self.per_block * self.block_stride + shard % self.per_block * self.stride
    }
}

/// A flat buffer with tensors of one dtype.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlatBuffer {
    /// The dtype.
    pub dtype: Dtype,
    /// The tensors, in order.
    pub tensors: Vec<Tensor>,
    /// The owners of its shards.
    pub owners: Owners,
}

impl FlatBuffer {
    fn len(&self) -> u64 {
        self.tensors.iter().map(Tensor::elements).sum()
    }
}

/// How a unit is split into shards and files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitLayout {
    /// The unit's name.
    pub name: String,
    /// The unit's buffers.
    pub buffers: Vec<FlatBuffer>,
    /// The number of owners.
    pub owners: usize,
    /// The unit's index in the model. Owners take turns as writers, so that several write at once.
    pub index: usize,
    /// The minimum size of a file, if the unit is that large; usually [`FILE_BYTES`].
    pub file_bytes: u64,
}

/// A file to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilePlan {
    /// The file's name.
    pub name: String,
    /// The owner that writes it.
    pub writer: usize,
    /// The safetensors header.
    pub header: Vec<u8>,
    /// The data after the header, in order.
    pub segments: Vec<Segment>,
}

/// One owner's shard of a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The owner.
    pub owner: usize,
    /// The index of the buffer.
    pub buffer: usize,
    /// The range of the buffer's elements.
    pub range: Range<u64>,
    /// The size in bytes.
    pub bytes: u64,
}

impl FilePlan {
    /// The size of the file.
    pub fn bytes(&self) -> u64 {
        self.header.len() as u64 + self.segments.iter().map(|segment| segment.bytes).sum::<u64>()
    }

    /// The number of pieces, each with a hash.
    pub fn pieces(&self) -> usize {
        self.bytes().div_ceil(PIECE_BYTES) as usize
    }
}

impl UnitLayout {
    /// Plans the files of a save.
    pub fn files(&self, save: SaveId) -> Vec<FilePlan> {
        self.groups().enumerate().map(|(index, owners)| self.file(index, owners, save)).collect()
    }

    /// Creates the table of these files. `pieces` are the hashes of all pieces, file by file.
    pub fn table(&self, save: SaveId, pieces: &[Hash]) -> Table {
        let mut rest = pieces;
        let mut files = Vec::new();
        let mut tensors: Vec<TensorEntry> = Vec::new();
        // Slices of one tensor are in several buffers.
        let mut entry_of: HashMap<&str, usize> = HashMap::new();
        for (buffer, tensor) in self.buffers.iter().flat_map(|buffer| buffer.tensors.iter().map(move |t| (buffer, t))) {
            entry_of.entry(&tensor.name).or_insert_with(|| {
                let (name, shape) = (tensor.name.clone(), tensor.shape.clone());
                tensors.push(TensorEntry { name, dtype: buffer.dtype, shape, shards: Vec::new() });
                tensors.len() - 1
            });
        }
        for (index, (plan, owners)) in self.files(save).iter().zip(self.groups()).enumerate() {
            let (own, others) = rest.split_at(plan.pieces());
            rest = others;
            files.push(FileEntry { name: plan.name.clone(), bytes: plan.bytes(), pieces: own.to_vec() });
            let mut offset_bytes = plan.header.len() as u64;
            for part in self.parts(owners) {
                let tensor = self.tensor(part.tensor);
                let shard = ShardEntry { file: index as u32, offset_bytes, region: tensor.region(part.range.clone()) };
                tensors[entry_of[tensor.name.as_str()]].shards.push(shard);
                offset_bytes += part.bytes();
            }
        }
        // A tensor without elements has no shards.
        Table { files, tensors }
    }

    /// Creates the manifest's entry for this unit.
    pub fn entry(&self, save: SaveId, table: &Table) -> UnitEntry {
        let text = table.to_json();
        UnitEntry {
            name: self.name.clone(),
            table: format!("{}.{save}.json", self.name),
            table_bytes: text.len() as u64,
            table_hash: Hash::of(&text),
        }
    }

    /// The range of owners of each file.
    fn groups(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let bytes: u64 = self.buffers.iter().map(|buffer| buffer.len() * buffer.dtype.bytes() as u64).sum();
        let files = (bytes / self.file_bytes).clamp(1, self.owners as u64) as usize;
        let owners = Partition::new(self.owners, files);
        (0..files).map(move |file| owners.range(file))
    }

    fn file(&self, index: usize, owners: Range<usize>, save: SaveId) -> FilePlan {
        let entries: Vec<safetensors::Entry> = self.parts(owners.clone()).map(|part| part.entry(self)).collect();
        let mut segments = Vec::new();
        for (index, buffer) in self.buffers.iter().enumerate() {
            let cut = Partition::new(buffer.len() as usize, buffer.owners.count);
            segments.extend(buffer.owners.shards(&owners).map(|shard| {
                let (range, owner) = (cut.range(shard), buffer.owners.owner(shard));
                let bytes = (range.len() * buffer.dtype.bytes()) as u64;
                Segment { owner, buffer: index, range: range.start as u64..range.end as u64, bytes }
            }));
        }
        FilePlan {
            name: format!("{}-{index}.{save}.safetensors", self.name),
            writer: owners.start + self.index % owners.len(),
            header: safetensors::header(&entries),
            segments,
        }
    }

    /// The parts of tensors in the shards of these owners, in file order.
    fn parts(&self, owners: Range<usize>) -> impl Iterator<Item = Part> {
        let mut tensors_before = 0;
        self.buffers.iter().flat_map(move |buffer| {
            let cut = Partition::new(buffer.len() as usize, buffer.owners.count);
            let shards = buffer.owners.shards(&owners);
            let (from, to) = match shards.is_empty() {
                true => (0, 0),
                false => (cut.range(shards.start).start as u64, cut.range(shards.end - 1).end as u64),
            };
            let (first, mut offset) = (tensors_before, 0);
            tensors_before += buffer.tensors.len();
            let parts: Vec<Part> = buffer
                .tensors
                .iter()
                .enumerate()
                .filter_map(|(index, tensor)| {
                    let whole = offset..offset + tensor.elements();
                    offset = whole.end;
                    let (start, end) = (whole.start.max(from), whole.end.min(to));
                    let range = start.checked_sub(whole.start)?..end.checked_sub(whole.start)?;
                    (range.start < range.end).then_some(Part { tensor: first + index, range, dtype: buffer.dtype })
                })
                .collect();
            parts
        })
    }

    fn tensor(&self, index: usize) -> &Tensor {
        self.buffers
            .iter()
            .flat_map(|buffer| &buffer.tensors)
            .nth(index)
            .expect("a part belongs to a tensor of the unit")
    }
}

/// A part of a tensor in a file.
struct Part {
    /// The index of the tensor, counted through all buffers.
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
            true => (tensor.kept_name(), tensor.kept_shape()),
            false => (
                format!("{}[{}..{}]", tensor.kept_name(), self.range.start, self.range.end),
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
        let buffer = prop::collection::vec(shape, 0..4);
        (prop::collection::vec(buffer, 1..4), 1usize..9, 0usize..9, 1u64..9000).prop_map(
            |(buffers, owners, index, file_bytes)| {
                let buffers = buffers.into_iter().enumerate().map(|(b, shapes)| FlatBuffer {
                    dtype: [Dtype::F32, Dtype::Bf16][b % 2],
                    tensors: shapes
                        .into_iter()
                        .enumerate()
                        .map(|(t, shape)| Tensor::whole(format!("{b}.{t}"), shape))
                        .collect(),
                    owners: Owners::all(owners),
                });
                UnitLayout { name: "unit".to_string(), buffers: buffers.collect(), owners, index, file_bytes }
            },
        )
    }

    proptest! {
        #[test]
        fn tables_match_files(unit in layout()) {
            let save = SaveId::from(7);
            let files = unit.files(save);
            let pieces: usize = files.iter().map(FilePlan::pieces).sum();
            let table = unit.table(save, &vec![Hash::of(b""); pieces]);
            prop_assert_eq!(table.check(), Ok(()));
            for (index, plan) in files.iter().enumerate() {
                prop_assert!(plan.segments.iter().any(|segment| segment.owner == plan.writer));
                // Header and table agree on the offsets, and the file has nothing else.
                let found = safetensors::parse(&plan.header[8..], plan.bytes()).unwrap();
                let mut begins: Vec<u64> = found.values().map(|found| found.bytes.start).collect();
                let mut offsets: Vec<u64> = table.tensors.iter().flat_map(|tensor| &tensor.shards)
                    .filter(|shard| shard.file as usize == index).map(|shard| shard.offset_bytes).collect();
                begins.sort_unstable();
                offsets.sort_unstable();
                prop_assert_eq!(begins, offsets);
                let in_tensors: u64 = found.values().map(|found| found.bytes.end - found.bytes.start).sum();
                prop_assert_eq!(plan.header.len() as u64 + in_tensors, plan.bytes());
            }
        }
    }

    #[test]
    fn owners_are_found_by_range() {
        let blocks = Owners { first: 3, stride: 2, per_block: 3, block_stride: 12, count: 9 };
        for owners in [Owners::all(5), Owners::every(4, 2, 3), blocks] {
            let all: Vec<usize> = (0..owners.count).map(|shard| owners.owner(shard)).collect();
            assert!(all.is_sorted(), "{all:?}");
            for range in (0..40).flat_map(|start| (start..40).map(move |end| start..end)) {
                let expected: Vec<usize> = (0..all.len()).filter(|shard| range.contains(&all[*shard])).collect();
                let found: Vec<usize> = owners.shards(&range).collect();
                assert_eq!(found, expected, "{owners:?}, {range:?}");
            }
        }
    }

    #[test]
    fn the_number_of_files_depends_on_size_not_on_owners() {
        let tensors = vec![Tensor::whole("w", vec![1 << 12, 1 << 14])];
        let unit = |owners| UnitLayout {
            name: "block.0".to_string(),
            buffers: vec![FlatBuffer { dtype: Dtype::F32, tensors: tensors.clone(), owners: Owners::all(owners) }],
            owners,
            index: 5,
            file_bytes: FILE_BYTES,
        };
        // 256 MiB.
        assert_eq!(unit(2).files(SaveId::from(1)).len(), 2);
        assert_eq!(unit(1000).files(SaveId::from(1)).len(), 4);
        assert_eq!(unit(1000).files(SaveId::from(1))[1].writer, 255);
    }
}
