//! Hugging Face checkpoints: reading weights by range, exporting and importing.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use bytes::Bytes;
use half::{bf16, f16};
use serde::Deserialize;
use serde_json::json;
use shardwise_plan::{Dtype, FloatsMut, ModelConfig};

use crate::load::{convert, is_float};
use crate::manifest::TensorEntry;
use crate::region::elements;
use crate::safetensors::{self, Entry, TensorInfo};
use crate::save::{UPLOAD_BYTES, write_in_parts, write_manifest, write_table};
use crate::store::step_folder;
use crate::{
    Checkpoint, Error, FILE_BYTES, FORMAT, FlatBuffer, Manifest, Owners, Result, SaveId, Store, Tensor, UnitLayout,
    UnitReader,
};

/// The name of the file with the model's configuration.
pub const CONFIG: &str = "config.json";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// The files that an export removes before it writes anything.
const REPLACED: [&str; 3] = [CONFIG, SINGLE, INDEX];

/// The largest files that are accepted.
const CONFIG_BYTES_MAX: u64 = 1 << 20;
const INDEX_BYTES_MAX: u64 = 64 << 20;
const COPIED_BYTES_MAX: u64 = 256 << 20;

/// Files that accompany the weights, and are copied unchanged.
const COMPANIONS: [&str; 9] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
];

/// The number of elements that are read and converted at once; they fit in the cache.
const READ_ELEMENTS: usize = 1 << 18;

const READABLE: &str = "but only f64, f32, bf16 and f16 can be read";

/// Weights in safetensors files. Opening them reads only the headers.
#[derive(Debug)]
pub struct Weights {
    store: Store,
    files: Vec<String>,
    /// The tensors by name, with the indices of their files.
    tensors: BTreeMap<String, (usize, TensorInfo)>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Weights {
    /// Opens a safetensors file, or a folder with `model.safetensors` or an index of several files.
    pub fn open(address: &str) -> Result<Self> {
        if let Some((folder, file)) = split_file(address) {
            return Weights::from_files(Store::open(folder)?, vec![file.to_string()]);
        }
        let store = Store::open(address)?;
        if store.file_len(SINGLE)?.is_some() {
            return Weights::from_files(store, vec![SINGLE.to_string()]);
        }
        if store.file_len(INDEX)?.is_none() {
            let problem = format!("it has neither {SINGLE} nor {INDEX}");
            return Err(Error::Address { address: address.to_string(), problem });
        }
        let index: Index = serde_json::from_slice(&store.read(INDEX, INDEX_BYTES_MAX)?)
            .map_err(|error| store.damaged_error(INDEX, error.to_string()))?;
        let mut files: Vec<String> = index.weight_map.into_values().collect();
        files.sort();
        files.dedup();
        if let Some(file) = files.iter().find(|file| file.contains('/') || file.starts_with('.')) {
            return Err(store.damaged_error(INDEX, format!("{file:?} is not the name of a file in the same folder")));
        }
        Weights::from_files(store, files)
    }

    fn from_files(store: Store, files: Vec<String>) -> Result<Self> {
        let mut tensors = BTreeMap::new();
        for (index, file) in files.iter().enumerate() {
            let bytes = store.file_len(file)?.ok_or_else(|| store.damaged_error(file, "it is missing".to_string()))?;
            let short = || store.damaged_error(file, "it is too short for a safetensors file".to_string());
            if bytes < 8 {
                return Err(short());
            }
            let first: [u8; 8] = store.read_range(file, 0..8)?.as_ref().try_into().map_err(|_| short())?;
            let damaged = |problem: String| store.damaged_error(file, problem);
            let len = safetensors::header_len(first, bytes).map_err(damaged)?;
            let header = if len == 0 { Bytes::new() } else { store.read_range(file, 8..8 + len)? };
            for (name, found) in safetensors::parse(&header, bytes).map_err(damaged)? {
                if let Some((other, _)) = tensors.insert(name.clone(), (index, found)) {
                    return Err(store.damaged_error(file, format!("{name} is also in {}", files[other])));
                }
            }
        }
        Ok(Weights { store, files, tensors })
    }

    /// `config.json`, if it exists.
    pub fn config(&self) -> Result<Option<serde_json::Value>> {
        config(&self.store)
    }

    /// The tensors, by name.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &TensorInfo)> {
        self.tensors.iter().map(|(name, (_, found))| (name.as_str(), found))
    }

    /// Reads elements of a tensor of this shape, and converts them to the dtype of `out`. In the file, the name may lack the prefix
    /// `model.`, or have GPT-2's prefix `transformer.`. If the name has a star, the file has a tensor for each expert, and the first
    /// dimension of `shape` is the expert.
    pub fn read_floats(&self, name: &str, shape: &[u64], range: Range<u64>, out: FloatsMut<'_>) -> Result<()> {
        match expert_tensor(name, 0) {
            Some(_) => self.read_experts(name, shape, range, out),
            None => self.read_tensor(name, shape, range, out),
        }
    }

    /// Reads elements of the stacked tensors of all experts.
    fn read_experts(&self, name: &str, shape: &[u64], range: Range<u64>, mut out: FloatsMut<'_>) -> Result<()> {
        let mismatch = |problem: String| Error::Mismatch { folder: self.store.display(""), problem };
        let (Some(&experts), of_expert) = (shape.first(), elements(shape.get(1..).unwrap_or_default()).unwrap_or(0))
        else {
            return Err(mismatch(format!("{name} has no dimension for experts in the model")));
        };
        if let Some(more) = expert_tensor(name, experts).filter(|more| self.find(more).is_some()) {
            return Err(mismatch(format!("there is a tensor {more}, but the model has only {experts} experts")));
        }
        if of_expert == 0
            || range.end > experts * of_expert
            || range.end.checked_sub(range.start) != Some(out.len() as u64)
        {
            return Err(mismatch(format!("{name} has shape {shape:?}; the requested range is outside")));
        }
        let mut at = range.start;
        while at < range.end {
            let expert = at / of_expert;
            let first = expert * of_expert;
            let end = range.end.min(first + of_expert);
            let (part, rest) = out.split_at((end - at) as usize);
            let tensor = expert_tensor(name, expert).unwrap_or_default();
            self.read_tensor(&tensor, &shape[1..], at - first..end - first, part)?;
            (out, at) = (rest, end);
        }
        Ok(())
    }

    fn find(&self, name: &str) -> Option<&(usize, TensorInfo)> {
        let names = [
            Some(name.to_string()),
            Some(format!("transformer.{name}")),
            name.strip_prefix("model.").map(String::from),
        ];
        names.into_iter().flatten().find_map(|name| self.tensors.get(&name))
    }

    fn read_tensor(&self, name: &str, shape: &[u64], range: Range<u64>, out: FloatsMut<'_>) -> Result<()> {
        let mismatch = |problem: String| Error::Mismatch { folder: self.store.display(""), problem };
        let (file, found) = self.find(name).ok_or_else(|| mismatch(format!("there is no tensor {name}")))?;
        if found.shape != shape {
            let problem = format!("{name} has shape {:?}, but {shape:?} in the model", found.shape);
            return Err(mismatch(problem));
        }
        let dtype = match &found.dtype {
            Ok(dtype) if is_float(*dtype) => *dtype,
            Ok(dtype) => return Err(mismatch(format!("{name} has dtype {dtype}, {READABLE}"))),
            Err(dtype) => return Err(mismatch(format!("{name} has dtype {dtype}, {READABLE}"))),
        };
        if range.end > elements(shape).unwrap_or(0) || range.end.checked_sub(range.start) != Some(out.len() as u64) {
            return Err(mismatch(format!("{name} has shape {shape:?}; the requested range is outside")));
        }
        let size = dtype.bytes() as u64;
        let mut from = found.bytes.start + range.start * size;
        let mut buffer = vec![0; out.len().min(READ_ELEMENTS) * dtype.bytes()];
        for piece in out.chunks(READ_ELEMENTS) {
            let bytes = &mut buffer[..piece.len() * dtype.bytes()];
            self.store.read_into(&self.files[*file], from, bytes)?;
            from += bytes.len() as u64;
            convert(dtype, bytes, piece);
        }
        Ok(())
    }
}

/// The name of an expert's tensor, of a stack of them whose name has a star in its place.
fn expert_tensor(stack: &str, expert: u64) -> Option<String> {
    stack.split_once(".*.").map(|(before, after)| format!("{before}.{expert}.{after}"))
}

/// The name of the stack of tensors to which an expert's tensor belongs.
fn stack_of(tensor: &str) -> Option<String> {
    let (before, rest) = tensor.split_once(".experts.")?;
    let (expert, after) = rest.split_once('.')?;
    expert.bytes().all(|digit| digit.is_ascii_digit()).then(|| format!("{before}.experts.*.{after}"))
}

/// Splits the address of a safetensors file into folder and file.
fn split_file(address: &str) -> Option<(&str, &str)> {
    address.ends_with(".safetensors").then(|| match address.rsplit_once('/') {
        Some(("", file)) => ("/", file),
        Some((folder, file)) => (folder, file),
        None => (".", address),
    })
}

fn config(store: &Store) -> Result<Option<serde_json::Value>> {
    if store.file_len(CONFIG)?.is_none() {
        return Ok(None);
    }
    let text = store.read(CONFIG, CONFIG_BYTES_MAX)?;
    serde_json::from_slice(&text).map(Some).map_err(|error| store.damaged_error(CONFIG, error.to_string()))
}

/// Options for [`export`].
#[derive(Clone, Debug)]
pub struct ExportOptions {
    /// The dtype of the exported weights: f64, f32, bf16 or f16.
    pub dtype: Dtype,
    /// The maximum size of a file, unless a single tensor is larger.
    pub file_bytes: u64,
}

/// A tensor to export.
struct ExportedTensor {
    unit: String,
    /// The tensor in the checkpoint.
    tensor: TensorEntry,
    /// Its first element there.
    first: u64,
    entry: Entry,
}

/// Returns the first file of a Hugging Face checkpoint that exists in a folder, which [`export`] would remove.
pub fn first_existing_file(store: &Store) -> Result<Option<&'static str>> {
    for file in REPLACED {
        if store.file_len(file)?.is_some() {
            return Ok(Some(file));
        }
    }
    Ok(None)
}

/// Exports the parameters of a checkpoint in Hugging Face's format, with `config` as its configuration. Copies the tokenizer
/// and other settings from `like`, a Hugging Face checkpoint. `progress` is called with the size of each piece in bytes. Uses
/// only a few MiB of memory.
pub fn export(
    checkpoint: &Checkpoint,
    to: &Store,
    config: &serde_json::Value,
    like: Option<&Store>,
    export: &ExportOptions,
    progress: &mut dyn FnMut(u64),
) -> Result<()> {
    let refuse = |problem: &str| Err(Error::Mismatch { folder: checkpoint.name(), problem: problem.to_string() });
    if !is_float(export.dtype) {
        return refuse("it can only be exported as f64, f32, bf16 or f16");
    }
    if !config.is_object() {
        return refuse("its model has no Hugging Face configuration");
    }
    // Leftovers of an earlier export must not be mistaken for this one's.
    for file in REPLACED {
        to.remove(file)?;
    }
    let prefix = if config["model_type"] == "gpt2" { "transformer." } else { "" };
    let files = plan_files(checkpoint, prefix, export)?;
    let name = |index: usize| match files.len() {
        1 => SINGLE.to_string(),
        many => format!("model-{:05}-of-{many:05}.safetensors", index + 1),
    };
    let mut map = BTreeMap::new();
    let mut total_size = 0u64;
    for (index, tensors) in files.iter().enumerate() {
        let entries: Vec<Entry> = tensors.iter().map(|tensor| tensor.entry.clone()).collect();
        for entry in &entries {
            map.insert(entry.name.clone(), name(index));
            total_size = total_size.saturating_add(tensor_bytes(&entry.shape, entry.dtype));
        }
        let mut open: Option<(&str, UnitReader)> = None;
        let read = |index: usize, range: Range<u64>, out: FloatsMut<'_>| {
            let ExportedTensor { unit, tensor, first, .. } = &tensors[index];
            let mut reader = match open.take() {
                Some((of, reader)) if of == unit => reader,
                _ => checkpoint.unit(unit)?,
            };
            reader.read_floats(&tensor.name, &tensor.shape, first + range.start..first + range.end, out)?;
            open = Some((unit, reader));
            Ok(())
        };
        let lens = entries.iter().map(|entry| elements(&entry.shape).unwrap_or(0)).collect();
        let ready = safetensors::header(&entries);
        let stream = Stream { lens, dtype: export.dtype, read, at: (0, 0), ready, progress: &mut *progress };
        write_in_parts(to, &name(index), stream)?;
    }
    if files.len() > 1 {
        let index = json!({ "metadata": { "total_size": total_size }, "weight_map": map });
        to.write(INDEX, pretty(&index))?;
    }
    let mut config = config.clone();
    if let Some(config) = config.as_object_mut() {
        config.remove("torch_dtype");
    }
    config["dtype"] = json!(match export.dtype {
        Dtype::Bf16 => "bfloat16",
        Dtype::F16 => "float16",
        Dtype::F64 => "float64",
        _ => "float32",
    });
    if let Some(like) = like {
        for file in COMPANIONS {
            if like.file_len(file)?.is_some() {
                to.write(file, like.read(file, COPIED_BYTES_MAX)?)?;
            }
        }
    }
    if to.file_len(COMPANIONS[0])?.is_none() {
        to.write(COMPANIONS[0], pretty(&json!({ "_from_model_config": true })))?;
    }
    // Write it last, so that a folder with it is complete.
    to.write(CONFIG, pretty(&config))
}

fn pretty(value: &serde_json::Value) -> Vec<u8> {
    serde_json::to_vec_pretty(value).expect("a JSON value can be written")
}

fn tensor_bytes(shape: &[u64], dtype: Dtype) -> u64 {
    elements(shape).unwrap_or(0).saturating_mul(dtype.bytes() as u64)
}

/// Assigns the tensors to files: unit by unit, and by name within a unit, because the order in a checkpoint depends on the layout that
/// wrote it.
fn plan_files(checkpoint: &Checkpoint, prefix: &str, export: &ExportOptions) -> Result<Vec<Vec<ExportedTensor>>> {
    let mut files: Vec<Vec<ExportedTensor>> = vec![Vec::new()];
    let (mut file_bytes, mut names) = (0u64, BTreeSet::new());
    // A compiled model's parameters have their full names already.
    let prefix = if checkpoint.manifest().training["package"].is_string() { "" } else { prefix };
    for unit in &checkpoint.manifest().units {
        let reader = checkpoint.unit(&unit.name)?;
        // Skip optimizer state.
        let parameters = reader.table().tensors.iter().filter(|tensor| !tensor.name.contains('/'));
        let mut parameters: Vec<&TensorEntry> = parameters.collect();
        parameters.sort_by(|one, other| one.name.cmp(&other.name));
        for tensor in parameters {
            if !names.insert(tensor.name.clone()) {
                let problem = format!("two of its units have a tensor named {}", tensor.name);
                return Err(Error::Mismatch { folder: checkpoint.name(), problem });
            }
            for (name, shape, first) in exported_parts(tensor) {
                let bytes = tensor_bytes(&shape, export.dtype);
                if file_bytes > 0 && bytes > export.file_bytes.saturating_sub(file_bytes) {
                    files.push(Vec::new());
                    file_bytes = 0;
                }
                file_bytes = bytes.saturating_add(file_bytes);
                let entry = Entry { name: format!("{prefix}{name}"), dtype: export.dtype, shape };
                let exported = ExportedTensor { unit: unit.name.clone(), tensor: tensor.clone(), first, entry };
                files.last_mut().expect("the list is never empty").push(exported);
            }
        }
    }
    Ok(files)
}

/// The name, shape and first element of each tensor of an export: one for each expert, if it is a stack of them.
fn exported_parts(tensor: &TensorEntry) -> Vec<(String, Vec<u64>, u64)> {
    let Some((&experts, of_expert)) = tensor.shape.split_first().filter(|_| tensor.name.contains(".*.")) else {
        return vec![(tensor.name.clone(), tensor.shape.clone(), 0)];
    };
    let len = elements(of_expert).unwrap_or(0);
    let part = |expert| Some((expert_tensor(&tensor.name, expert)?, of_expert.to_vec(), expert * len));
    (0..experts).filter_map(part).collect()
}

/// Imports weights as a checkpoint of step 0, from which a run resumes as from any other. It has no optimizer state: that
/// starts at zero.
pub fn import(weights: &Weights, to: &Store, progress: &mut dyn FnMut(u64)) -> Result<()> {
    let config = weights.config()?;
    let tied =
        config.as_ref().is_some_and(|config| config["tie_word_embeddings"] == true || config["model_type"] == "gpt2");
    // The experts of other models are not stacked.
    let has_experts = config
        .as_ref()
        .is_none_or(|config| ModelConfig::from_hugging_face(config).is_ok_and(|config| config.moe().is_some()));
    let stack = |name: &str| stack_of(name).filter(|_| has_experts);
    let mut experts: BTreeMap<String, u64> = BTreeMap::new();
    for (name, _) in weights.tensors() {
        if let Some(stack) = stack(name) {
            *experts.entry(stack).or_default() += 1;
        }
    }
    let mut units: BTreeMap<(usize, usize), Vec<(Tensor, String)>> = BTreeMap::new();
    for (name, found) in weights.tensors() {
        let (name, shape) = match stack(name) {
            // Its first tensor stands for all of them.
            Some(stack) => match experts.remove(&stack) {
                Some(experts) => (stack, [&[experts], &found.shape[..]].concat()),
                None => continue,
            },
            None => (name.to_string(), found.shape.clone()),
        };
        let name = name.as_str();
        let own = name.strip_prefix("transformer.").unwrap_or(name);
        // A checkpoint without a head has no prefix.
        let headless = own.starts_with("layers.") || own.starts_with("embed_tokens.") || own == "norm.weight";
        let own = if headless { format!("model.{own}") } else { own.to_string() };
        let own = own.as_str();
        if is_buffer(own) || tied && own == "lm_head.weight" {
            continue;
        }
        let tensor = Tensor::whole(own, shape);
        units.entry(unit_of(own)).or_default().push((tensor, name.to_string()));
    }
    let save = SaveId::new();
    let mut entries = Vec::new();
    for (index, ((part, block), tensors)) in units.into_iter().enumerate() {
        let name = match part {
            0 => "embedding".to_string(),
            1 => format!("block.{block}"),
            _ => "head".to_string(),
        };
        let dtype_of = |name: &str| {
            let first = expert_tensor(name, 0).unwrap_or_else(|| name.to_string());
            weights.tensors.get(&first).map(|(_, found)| &found.dtype)
        };
        let is_f64 = tensors.iter().any(|(_, name)| dtype_of(name) == Some(&Ok(Dtype::F64)));
        let dtype = if is_f64 { Dtype::F64 } else { Dtype::F32 };
        let tensors_of_unit = tensors.iter().map(|(tensor, _)| tensor.clone()).collect();
        let buffer = FlatBuffer { dtype, tensors: tensors_of_unit, owners: Owners::all(1) };
        let layout = UnitLayout { name, buffers: vec![buffer], owners: 1, index, file_bytes: FILE_BYTES };
        let plan = layout.files(save).remove(0);
        let header = plan.header;
        let read = |index: usize, range: Range<u64>, out: FloatsMut<'_>| {
            let (tensor, name) = &tensors[index];
            weights.read_floats(name, &tensor.shape, range, out)
        };
        let lens = tensors.iter().map(|(tensor, _)| elements(&tensor.shape).unwrap_or(0)).collect();
        let stream = Stream { lens, dtype, read, at: (0, 0), ready: header, progress: &mut *progress };
        let pieces = write_in_parts(to, &format!("{}/{}", step_folder(0), plan.name), stream)?;
        let table = layout.table(save, &pieces);
        let entry = layout.entry(save, &table);
        // Names come from an untrusted file, and two of them may have become the same.
        table.check().map_err(|error| Error::Manifest { path: to.display(&entry.table), error })?;
        write_table(to, 0, &entry, &table)?;
        entries.push(entry);
    }
    let progress = json!({ "step": 0, "updates": 0, "skipped": 0, "loss_scale": null, "good_steps": 0 });
    let training = json!({ "progress": progress, "model": config, "began_with": weights.store.display("") });
    let written_by = format!("shardwise {}", env!("CARGO_PKG_VERSION"));
    write_manifest(to, &Manifest { format: FORMAT, written_by, step: 0, training, units: entries }, &mut || ())
}

/// The unit of a parameter, as a sort key: 0 before the blocks, 1 and the number of a block, or 2 after the blocks.
fn unit_of(name: &str) -> (usize, usize) {
    let inner = name.strip_prefix("model.").unwrap_or(name);
    let block = inner.strip_prefix("layers.").or_else(|| inner.strip_prefix("h."));
    match block.and_then(|rest| rest.split('.').next()?.parse().ok()) {
        Some(block) => (1, block),
        None if ["embed_tokens.", "wte.", "wpe."].iter().any(|start| inner.starts_with(start)) => (0, 0),
        None => (2, 0),
    }
}

/// Whether a tensor is not a parameter but a buffer, which older files have: a mask, or frequencies that follow from the
/// configuration.
fn is_buffer(name: &str) -> bool {
    [".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"].iter().any(|ending| name.ends_with(ending))
}

/// A file's bytes in parts of `UPLOAD_BYTES`: `ready` first, then the tensors, which are read a few elements at a time.
struct Stream<'a, R> {
    /// The number of elements of each tensor.
    lens: Vec<u64>,
    dtype: Dtype,
    /// Reads a range of elements of the tensor with the given index.
    read: R,
    /// The next tensor and element.
    at: (usize, u64),
    ready: Vec<u8>,
    progress: &'a mut dyn FnMut(u64),
}

impl<R: FnMut(usize, Range<u64>, FloatsMut<'_>) -> Result<()>> Stream<'_, R> {
    /// Reads some elements of the next tensor.
    fn read_more(&mut self) -> Result<()> {
        let (index, from) = self.at;
        let to = self.lens[index].min(from + (1 << 20));
        let before = self.ready.len();
        if self.dtype == Dtype::F64 {
            let mut read = vec![0f64; (to - from) as usize];
            (self.read)(index, from..to, FloatsMut::F64(&mut read))?;
            self.ready.extend(read.iter().flat_map(|x| x.to_le_bytes()));
        } else {
            let mut read = vec![0f32; (to - from) as usize];
            (self.read)(index, from..to, FloatsMut::F32(&mut read))?;
            self.extend_narrow(&read);
        }
        (self.progress)((self.ready.len() - before) as u64);
        self.at = if to == self.lens[index] { (index + 1, 0) } else { (index, to) };
        Ok(())
    }

    /// Converts elements that were read in f32, and adds their bytes.
    fn extend_narrow(&mut self, read: &[f32]) {
        match self.dtype {
            Dtype::Bf16 => self.ready.extend(read.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes())),
            Dtype::F16 => self.ready.extend(read.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes())),
            _ => self.ready.extend(read.iter().flat_map(|x| x.to_le_bytes())),
        }
    }
}

impl<R: FnMut(usize, Range<u64>, FloatsMut<'_>) -> Result<()>> Iterator for Stream<'_, R> {
    type Item = Result<Vec<Bytes>>;

    fn next(&mut self) -> Option<Self::Item> {
        while (self.ready.len() as u64) < UPLOAD_BYTES && self.at.0 < self.lens.len() {
            if let Err(error) = self.read_more() {
                return Some(Err(error));
            }
        }
        if self.ready.is_empty() {
            return None;
        }
        let rest = self.ready.split_off((UPLOAD_BYTES as usize).min(self.ready.len()));
        Some(Ok(vec![std::mem::replace(&mut self.ready, rest).into()]))
    }
}
