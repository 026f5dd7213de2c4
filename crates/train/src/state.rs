//! What of a trainer a checkpoint has, and how a trainer begins with it.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use shardwise_checkpoint::{Band, Checkpoint, FILE_BYTES, SaveId, UnitLayout, UnitReader};
use shardwise_comm::{Group, Pending};
use shardwise_model::{Model, Parameter, Unit};
use shardwise_plan::Dtype;
use shardwise_torch::Block;
use shardwise_torch::tch::Device;
use shardwise_zero::{Saved, StartError};

use crate::agreement::agreed;
use crate::outliers::PassedOver;
use crate::snapshot::{Builder, Content, Snapshot, copy, first_line, into_bytes};
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
    /// How many more overflows it takes for the loss scale to be halved, where that is not one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hysteresis_left: Option<u32>,
    /// Steps that are not taken again, past and to come.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub passed_over: Vec<PassedOver>,
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
            hysteresis_left: self.scale.hysteresis_left(),
            passed_over: self.passed_over.clone(),
        }
    }

    pub(crate) fn layouts(&self) -> Vec<UnitLayout> {
        layouts(&self.model, &self.options, self.ranks.groups.shard.size())
    }

    /// What this rank is to write, its own slices, which stay where they are, and those that others send it. Replicas have the same,
    /// and take turns. While it is written, `buffer_bytes` of it may be copied. Where a rank has no memory for what it sends and
    /// receives, no rank has a snapshot, and all of them know why.
    pub(crate) fn snapshot(
        &mut self,
        layouts: &[UnitLayout],
        save: SaveId,
        buffer_bytes: usize,
    ) -> Result<std::result::Result<Arc<Snapshot>, String>> {
        self.unbroken(|trainer| trainer.take_snapshot(layouts, save, buffer_bytes))
    }

    fn take_snapshot(
        &mut self,
        layouts: &[UnitLayout],
        save: SaveId,
        buffer_bytes: usize,
    ) -> Result<std::result::Result<Arc<Snapshot>, String>> {
        let Ranks { world, groups } = &self.ranks;
        let (replicas, replica) = (groups.replicate.size(), groups.replicate.rank());
        let mut fails = self.position.copy_fails();
        let mut builder = Builder::default();
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
            for (file, name, contents) in exchange(prepared, world, |owner| groups.shard.ranks().rank_at(owner))? {
                builder.add(unit, file, name, contents);
            }
        }
        let snapshot = Arc::new(builder.finish(buffer_bytes));
        self.snapshot = Some(Arc::downgrade(&snapshot));
        Ok(Ok(snapshot))
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
        trainer.scale.resume(progress.loss_scale, progress.good_steps, progress.hysteresis_left);
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
    Written { file: usize, name: String, parts: Vec<Part> },
}

/// A part of a file that this rank writes.
enum Part {
    Here(Content),
    /// Its owner sends it, and there is room for it.
    Coming {
        owner: usize,
        room: Block,
    },
}

/// The same while it is on its way.
enum Arriving {
    Here(Content),
    Coming(Pending<Block>),
}

impl Arriving {
    fn wait(self) -> Result<Content> {
        match self {
            Arriving::Here(content) => Ok(content),
            Arriving::Coming(pending) => Ok(Content::Bytes(into_bytes(pending.wait()?))),
        }
    }
}

/// Copies what of a unit other ranks write and `me`, one of its owners, has `saved`, and gets the memory for what they send.
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
        let mut parts = vec![Part::Here(Content::Bytes(plan.header.into()))];
        for segment in segments {
            let Saved { tensor, stays } = &saved[segment.band];
            parts.push(match segment.owner == me {
                true => Part::Here(Content::Tensor { tensor: tensor.shallow_clone(), is_lent: !stays }),
                false => {
                    let len = (segment.range.end - segment.range.start) as usize;
                    let room = Block::new(layout.bands[segment.band].dtype, len, Device::Cpu);
                    Part::Coming { owner: segment.owner, room: room.map_err(|error| first_line(&error))? }
                }
            });
        }
        prepared.push(Prepared::Written { file, name: plan.name, parts });
    }
    Ok(prepared)
}

/// A file that this rank writes: its place among the unit's, its name, and what is in it.
type Written = (usize, String, Vec<Content>);

/// Sends and receives the parts of a unit's files; those that this rank writes.
fn exchange(prepared: Vec<Prepared>, world: &Group, world_rank: impl Fn(usize) -> usize) -> Result<Vec<Written>> {
    let label = "checkpoint";
    let (mut sent, mut written) = (Vec::new(), Vec::new());
    for of_file in prepared {
        match of_file {
            Prepared::Sent { writer, parts } => {
                sent.extend(parts.into_iter().map(|part| world.send(label, world_rank(writer), part)));
            }
            Prepared::Written { file, name, parts } => {
                let begin = |part: Part| match part {
                    Part::Here(content) => Arriving::Here(content),
                    Part::Coming { owner, room } => Arriving::Coming(world.receive(label, world_rank(owner), room)),
                };
                written.push((file, name, parts.into_iter().map(begin).collect::<Vec<_>>()));
            }
        }
    }
    let mut own_files = Vec::new();
    for (file, name, parts) in written {
        own_files.push((file, name, parts.into_iter().map(Arriving::wait).collect::<Result<_>>()?));
    }
    for pending in sent {
        pending.wait()?;
    }
    Ok(own_files)
}
