//! What of a trainer a checkpoint has, and how a trainer begins with it.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock};

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use shardwise_checkpoint::{Band, Checkpoint, FILE_BYTES, SaveId, UnitLayout, UnitReader};
use shardwise_comm::{Group, Pending};
use shardwise_model::{Model, Parameter, Unit};
use shardwise_plan::Dtype;
use shardwise_torch::tch::{Device, Tensor};
use shardwise_torch::{Block, storage};
use shardwise_zero::{Saved, StartError};

use crate::agreement::agreed;
use crate::outliers::PassedOver;
use crate::{Error, Options, Ranks, Result, Trainer};

/// What training needs to go on, beside tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Steps so far.
    pub step: u64,
    /// How many of them updated anything.
    pub updates: u32,
    /// How many were skipped.
    pub skipped: u64,
    /// What the loss is multiplied by for the backward pass, where that moves.
    pub loss_scale: Option<f64>,
    /// Since when it has gone well.
    pub good_steps: u32,
    /// Steps that are not taken again, past and to come.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub passed_over: Vec<PassedOver>,
}

/// A file that this rank writes, with a copy of what is in it.
pub(crate) struct OwnFile {
    /// The unit's place in the model.
    pub(crate) unit: usize,
    /// The file's place among the unit's.
    pub(crate) file: usize,
    pub(crate) name: String,
    parts: Mutex<Vec<Part>>,
    copied: OnceLock<std::result::Result<Vec<Bytes>, String>>,
}

/// A part of a file.
enum Part {
    Copied(Bytes),
    /// A tensor of the trainer's, which stays as it is until the next update.
    Tensor(Tensor),
}

impl OwnFile {
    /// All of it, one part after the other. What has not been copied yet is copied now, or waited for where another thread is
    /// at it.
    pub(crate) fn contents(&self) -> std::result::Result<&[Bytes], String> {
        let copied = self.copied.get_or_init(|| {
            let mut parts = self.parts.lock().map_err(|_| "a thread that copied it has panicked".to_string())?;
            std::mem::take(&mut *parts).into_iter().map(Part::copied).collect()
        });
        copied.as_deref().map_err(String::clone)
    }
}

/// How a model is laid out in a checkpoint that `owners` ranks write.
pub(crate) fn layouts(model: &Model, options: &Options, owners: usize) -> Vec<UnitLayout> {
    let unit = |(turn, unit): (usize, &Unit)| UnitLayout {
        name: unit.name().to_string(),
        bands: bands(unit.parameters(), options),
        owners,
        turn,
        file_bytes: FILE_BYTES,
    };
    model.units().iter().enumerate().map(unit).collect()
}

/// The buffers of a unit, in the order of [`shardwise_zero::ShardedUnit::saved`].
fn bands(parameters: &[Parameter], options: &Options) -> Vec<Band> {
    let band = |dtype, trainable: bool, name: &dyn Fn(&Parameter) -> String| Band {
        dtype,
        tensors: parameters
            .iter()
            .filter(|parameter| parameter.trainable == trainable)
            .map(|parameter| shardwise_checkpoint::Tensor { name: name(parameter), shape: shape(parameter) })
            .collect(),
    };
    let masters = band(Dtype::F32, true, &|parameter| parameter.name.clone());
    let states = options.optimizer.state_names().iter();
    let states = states.map(|state| band(Dtype::F32, true, &|parameter| state_name(parameter, state)));
    let frozen = band(options.precision.parameters, false, &|parameter| parameter.name.clone());
    std::iter::once(masters).chain(states).chain([frozen]).collect()
}

fn state_name(parameter: &Parameter, state: &str) -> String {
    format!("{}/{state}", parameter.name)
}

pub(crate) fn shape(parameter: &Parameter) -> Vec<u64> {
    parameter.shape.iter().map(|&size| size as u64).collect()
}

impl Trainer {
    /// Where it stands.
    pub fn progress(&self) -> Progress {
        Progress {
            step: self.steps,
            updates: self.shards[self.first_trained].updates(),
            skipped: self.skipped,
            loss_scale: self.scale.moving(),
            good_steps: self.scale.good_steps(),
            passed_over: self.passed_over.clone(),
        }
    }

    pub(crate) fn layouts(&self) -> Vec<UnitLayout> {
        layouts(&self.model, &self.options, self.ranks.groups.shard.size())
    }

    /// What this rank is to write, its own slices and those that others send it. Replicas have the same, and take turns. Only
    /// what the next step would touch is copied here; the next update waits until the rest has been. Where a rank has no memory
    /// for its copies, no rank has a snapshot, and all of them know why.
    pub(crate) fn snapshot(
        &mut self,
        layouts: &[UnitLayout],
        save: SaveId,
    ) -> Result<std::result::Result<Arc<Vec<OwnFile>>, String>> {
        self.unbroken(|trainer| trainer.take_snapshot(layouts, save))
    }

    fn take_snapshot(
        &mut self,
        layouts: &[UnitLayout],
        save: SaveId,
    ) -> Result<std::result::Result<Arc<Vec<OwnFile>>, String>> {
        let Ranks { world, groups } = &self.ranks;
        let (replicas, replica) = (groups.replicate.size(), groups.replicate.rank());
        let mut fails = self.position.copy_fails();
        let mut own_files = Vec::new();
        for (unit, (layout, shard)) in layouts.iter().zip(&mut self.shards).enumerate() {
            shard.settle()?;
            let prepared = match unit % replicas == replica {
                _ if std::mem::take(&mut fails) => Err("the copy was told to fail".to_string()),
                true => prepare(layout, save, &shard.saved(), groups.shard.rank()),
                false => Ok(Vec::new()),
            };
            // Unit by unit, so that what is copied for other ranks is a unit's at most. Nobody waits for what a rank could not copy.
            let prepared = prepared.map_err(|error| format!("unit {}: {error}", layout.name));
            let prepared = match agreed(world, prepared)? {
                Ok(prepared) => prepared,
                Err(error) => return Ok(Err(error)),
            };
            own_files.extend(exchange(unit, prepared, world, |owner| groups.shard.ranks().rank_at(owner))?);
        }
        let own_files = Arc::new(own_files);
        self.snapshot = Arc::downgrade(&own_files);
        Ok(Ok(own_files))
    }

    /// Nothing is updated while a snapshot still reads it.
    pub(crate) fn finish_snapshot(&mut self) {
        let files = std::mem::take(&mut self.snapshot).upgrade();
        for file in files.iter().flat_map(|files| files.iter()) {
            // What could not be copied, the save reports.
            drop(file.contents());
        }
    }

    /// A trainer whose parameters are a checkpoint's, and which has not trained yet.
    pub fn loaded(model: Model, ranks: Ranks, options: Options, checkpoint: &Checkpoint) -> Result<Self> {
        let mut readers = Readers { checkpoint, open: None };
        let owned = |unit: &Unit| {
            let of = |parameter: &Parameter| (parameter.name.clone(), unit.name().to_string());
            unit.parameters().iter().map(of).collect::<Vec<_>>()
        };
        let unit_of: HashMap<String, String> = model.units().iter().flat_map(owned).collect();
        Trainer::new(model, ranks, options, &mut |parameter, range, elements| {
            readers.read(&unit_of[&parameter.name], parameter, &parameter.name, range, elements)
        })
    }

    /// A trainer that goes on from a checkpoint, of any number of ranks and any stage.
    pub fn resumed(model: Model, ranks: Ranks, options: Options, checkpoint: &Checkpoint) -> Result<Self> {
        let progress: Progress = serde_json::from_value(checkpoint.manifest().training["progress"].clone())
            .map_err(|error| Error::Checkpoint(format!("{}: its progress: {error}", checkpoint.name())))?;
        let units: Vec<(String, Vec<Parameter>)> =
            model.units().iter().map(|unit| (unit.name().to_string(), unit.parameters().to_vec())).collect();
        let optimizer = options.optimizer.clone();
        let mut trainer = Trainer::loaded(model, ranks, options, checkpoint)?;
        let mut readers = Readers { checkpoint, open: None };
        let states = optimizer.state_names();
        // Before the first update they are what they begin with, and an imported checkpoint has none.
        let shards = trainer.shards.iter_mut().zip(&units).filter(|_| progress.updates > 0);
        for (shard, (unit, parameters)) in shards {
            shard.resume(progress.updates, &mut |parameter, state, range, elements| {
                let parameter = &parameters[parameter];
                readers.read(unit, parameter, &state_name(parameter, states[state]), range, elements)
            })?;
        }
        trainer.steps = progress.step;
        trainer.skipped = progress.skipped;
        trainer.passed_over = progress.passed_over;
        trainer.scale.resume(progress.loss_scale, progress.good_steps);
        Ok(trainer)
    }
}

/// The unit of a checkpoint that is being read: parameters are asked for unit by unit.
struct Readers<'a> {
    checkpoint: &'a Checkpoint,
    open: Option<(String, UnitReader)>,
}

impl Readers<'_> {
    fn read(
        &mut self,
        unit: &str,
        parameter: &Parameter,
        tensor: &str,
        range: Range<usize>,
        elements: &mut [f32],
    ) -> std::result::Result<(), StartError> {
        if self.open.as_ref().is_none_or(|(name, _)| name != unit) {
            self.open = Some((unit.to_string(), self.checkpoint.unit(unit)?));
        }
        let (_, reader) = self.open.as_mut().expect("it has just been opened");
        Ok(reader.read_f32(tensor, &shape(parameter), range.start as u64..range.end as u64, elements)?)
    }
}

/// A file before ranks exchange their parts of it, with all the memory that this takes.
enum Prepared {
    /// Another rank writes it, and is sent these parts.
    Sent { writer: usize, parts: Vec<Block> },
    /// This rank writes it.
    Written { file: usize, name: String, parts: Vec<Content> },
}

/// A part of a file that this rank writes.
enum Content {
    Here(Part),
    /// Its owner sends it, and there is room for it.
    Coming {
        owner: usize,
        room: Block,
    },
}

/// The same while it is on its way.
enum Arriving {
    Here(Part),
    Coming(Pending<Block>),
}

impl Arriving {
    fn wait(self) -> Result<Part> {
        match self {
            Arriving::Here(part) => Ok(part),
            Arriving::Coming(pending) => Ok(Part::Copied(into_bytes(pending.wait()?))),
        }
    }
}

/// Copies what has to be copied of a unit that `me`, one of its owners, has `saved`, and gets the memory for what others send.
fn prepare(
    layout: &UnitLayout,
    save: SaveId,
    saved: &[Saved],
    me: usize,
) -> std::result::Result<Vec<Prepared>, String> {
    let mut prepared = Vec::new();
    for (file, plan) in layout.files(save).into_iter().enumerate() {
        let segments = plan.segments.iter().filter(|segment| segment.bytes > 0);
        if plan.writer != me {
            let own = segments.filter(|segment| segment.owner == me);
            let parts = own.map(|segment| copy(&saved[segment.band].tensor)).collect::<std::result::Result<_, _>>()?;
            prepared.push(Prepared::Sent { writer: plan.writer, parts });
            continue;
        }
        let mut parts = vec![Content::Here(Part::Copied(plan.header.into()))];
        for segment in segments {
            let Saved { tensor, stays } = &saved[segment.band];
            parts.push(match segment.owner == me {
                true if *stays => Content::Here(Part::Tensor(tensor.shallow_clone())),
                true => Content::Here(Part::Copied(into_bytes(copy(tensor)?))),
                false => {
                    let len = (segment.range.end - segment.range.start) as usize;
                    let room = Block::new(layout.bands[segment.band].dtype, len, Device::Cpu);
                    Content::Coming { owner: segment.owner, room: room.map_err(|error| first_line(&error))? }
                }
            });
        }
        prepared.push(Prepared::Written { file, name: plan.name, parts });
    }
    Ok(prepared)
}

/// Sends and receives the parts of a unit's files; the files that this rank writes.
fn exchange(
    unit: usize,
    prepared: Vec<Prepared>,
    world: &Group,
    world_rank: impl Fn(usize) -> usize,
) -> Result<Vec<OwnFile>> {
    let label = "checkpoint";
    let (mut sent, mut written) = (Vec::new(), Vec::new());
    for of_file in prepared {
        match of_file {
            Prepared::Sent { writer, parts } => {
                sent.extend(parts.into_iter().map(|part| world.send(label, world_rank(writer), part)));
            }
            Prepared::Written { file, name, parts } => {
                let begin = |part: Content| match part {
                    Content::Here(part) => Arriving::Here(part),
                    Content::Coming { owner, room } => Arriving::Coming(world.receive(label, world_rank(owner), room)),
                };
                written.push((file, name, parts.into_iter().map(begin).collect::<Vec<_>>()));
            }
        }
    }
    let mut own_files = Vec::new();
    for (file, name, parts) in written {
        let parts = Mutex::new(parts.into_iter().map(Arriving::wait).collect::<Result<_>>()?);
        own_files.push(OwnFile { unit, file, name, parts, copied: OnceLock::new() });
    }
    for pending in sent {
        pending.wait()?;
    }
    Ok(own_files)
}

impl Part {
    fn copied(self) -> std::result::Result<Bytes, String> {
        match self {
            Part::Copied(bytes) => Ok(bytes),
            Part::Tensor(tensor) => Ok(into_bytes(copy(&tensor)?)),
        }
    }
}

/// A tensor's elements in memory of the host, which libtorch's allocator keeps for the next save.
fn copy(tensor: &Tensor) -> std::result::Result<Block, String> {
    let copy = tensor.f_to_device_(Device::Cpu, tensor.kind(), false, true).map_err(|error| first_line(&error))?;
    storage::take(&copy, "it has been copied").map_err(|error| first_line(&error))
}

/// What libtorch says of an error. What follows is its stack.
fn first_line(error: &dyn std::error::Error) -> String {
    error.to_string().lines().next().unwrap_or_default().to_string()
}

fn into_bytes(memory: Block) -> Bytes {
    Bytes::from_owner(Copy(memory))
}

struct Copy(Block);

impl AsRef<[u8]> for Copy {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes().expect("it was copied to the host")
    }
}
