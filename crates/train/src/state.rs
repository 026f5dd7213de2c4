//! Saving a trainer to a checkpoint, and restoring one.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use shardwise_checkpoint::{Checkpoint, FILE_BYTES, FlatBuffer, SaveId, UnitLayout, UnitReader};
use shardwise_comm::{Group, Pending};
use shardwise_model::{Model, Parameter, Unit};
use shardwise_plan::Dtype;
use shardwise_torch::Block;
use shardwise_torch::tch::Device;
use shardwise_zero::{CheckpointTensor, InitError};

use crate::agreement::agree;
use crate::rollback::SkippedBatch;
use crate::snapshot::{Builder, Content, Snapshot, copy, first_line, into_bytes};
use crate::{Error, Options, Ranks, Result, Trainer};

/// Everything that is needed to resume training, except tensors. Checkpoints store it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// The number of steps so far.
    pub step: u64,
    /// The number of updates so far.
    pub updates: u32,
    /// The number of steps so far whose update was skipped.
    pub skipped: u64,
    /// The loss scale, if it is dynamic.
    pub loss_scale: Option<f64>,
    /// The number of steps without overflow since the loss scale last changed.
    pub good_steps: u32,
    /// The number of overflows until the loss scale is halved, if the hysteresis is more than 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hysteresis_left: Option<u32>,
    /// The batches to skip after a rollback, including those already skipped.
    #[serde(default, rename = "passed_over", skip_serializing_if = "Vec::is_empty")]
    pub skipped_batches: Vec<SkippedBatch>,
}

/// The layout of a model in a checkpoint written by `owners` ranks.
pub(crate) fn layouts(model: &Model, options: &Options, owners: usize) -> Vec<UnitLayout> {
    let unit = |(index, unit): (usize, &Unit)| UnitLayout {
        name: unit.name().to_string(),
        buffers: buffers(unit.parameters(), options),
        owners,
        index,
        file_bytes: FILE_BYTES,
    };
    model.units().iter().enumerate().map(unit).collect()
}

/// The flat buffers of a unit in a checkpoint, in the order of [`shardwise_zero::ShardedUnit::checkpoint_tensors`].
fn buffers(parameters: &[Parameter], options: &Options) -> Vec<FlatBuffer> {
    let buffer = |dtype, trainable: bool, name: &dyn Fn(&Parameter) -> String| FlatBuffer {
        dtype,
        tensors: parameters
            .iter()
            .filter(|parameter| parameter.trainable == trainable)
            .map(|parameter| shardwise_checkpoint::Tensor { name: name(parameter), shape: shape(parameter) })
            .collect(),
    };
    let masters = buffer(Dtype::F32, true, &|parameter| parameter.name.clone());
    let states = options.optimizer.state_names().iter();
    let states = states.map(|state| buffer(Dtype::F32, true, &|parameter| state_name(parameter, state)));
    let frozen = buffer(options.precision.param_dtype, false, &|parameter| parameter.name.clone());
    std::iter::once(masters).chain(states).chain([frozen]).collect()
}

fn state_name(parameter: &Parameter, state: &str) -> String {
    format!("{}/{state}", parameter.name)
}

pub(crate) fn shape(parameter: &Parameter) -> Vec<u64> {
    parameter.shape.iter().map(|&size| size as u64).collect()
}

impl Trainer {
    /// The trainer's progress, as checkpoints store it.
    pub fn progress(&self) -> Progress {
        Progress {
            step: self.steps,
            updates: self.shards[self.first_trainable].updates(),
            skipped: self.skipped,
            loss_scale: self.loss_scaler.dynamic_value(),
            good_steps: self.loss_scaler.good_steps(),
            hysteresis_left: self.loss_scaler.hysteresis_left(),
            skipped_batches: self.skipped_batches.clone(),
        }
    }

    pub(crate) fn layouts(&self) -> Vec<UnitLayout> {
        layouts(&self.model, &self.options, self.ranks.groups.shard.size())
    }

    /// Takes a snapshot of what this rank writes: its own shards, which stay in place, and those that other ranks send it. Replicas hold
    /// the same shards, so they divide the units among themselves. At most `buffer_bytes` of copies exist at a time while the snapshot is
    /// written. If a rank has no memory for what it sends and receives, no rank gets a snapshot, and all get that rank's error.
    pub(crate) fn snapshot(
        &mut self,
        layouts: &[UnitLayout],
        save: SaveId,
        buffer_bytes: usize,
    ) -> Result<std::result::Result<Arc<Snapshot>, String>> {
        self.unless_broken(|trainer| trainer.take_snapshot(layouts, save, buffer_bytes))
    }

    fn take_snapshot(
        &mut self,
        layouts: &[UnitLayout],
        save: SaveId,
        buffer_bytes: usize,
    ) -> Result<std::result::Result<Arc<Snapshot>, String>> {
        let Ranks { world, groups } = &self.ranks;
        let (replicas, replica) = (groups.replicate.size(), groups.replicate.rank());
        let mut fails = self.position.should_fail_copy();
        let mut builder = Builder::default();
        for (unit, (layout, shard)) in layouts.iter().zip(&mut self.shards).enumerate() {
            shard.wait_for_update()?;
            let prepared = match unit % replicas == replica {
                _ if std::mem::take(&mut fails) => Err("the copy failed by fault injection".to_string()),
                true => prepare(layout, save, &shard.checkpoint_tensors(), groups.shard.rank()),
                false => Ok(Vec::new()),
            };
            // Unit by unit, so that at most one unit is copied for other ranks at a time. The agreement ensures that no rank
            // waits for a copy that failed.
            let prepared = prepared.map_err(|error| format!("unit {}: {error}", layout.name));
            let prepared = match agree(world, prepared)? {
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

    /// Creates a trainer at step 0 with the parameters of a checkpoint.
    pub fn load_weights(model: Model, ranks: Ranks, options: Options, checkpoint: &Checkpoint) -> Result<Self> {
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

    /// Resumes training from a checkpoint, which may come from any number of ranks and any stage.
    pub fn resume(model: Model, ranks: Ranks, options: Options, checkpoint: &Checkpoint) -> Result<Self> {
        let progress: Progress = serde_json::from_value(checkpoint.manifest().training["progress"].clone())
            .map_err(|error| Error::Checkpoint(format!("{}: its progress: {error}", checkpoint.name())))?;
        let units: Vec<(String, Vec<Parameter>)> =
            model.units().iter().map(|unit| (unit.name().to_string(), unit.parameters().to_vec())).collect();
        let optimizer = options.optimizer.clone();
        let mut trainer = Trainer::load_weights(model, ranks, options, checkpoint)?;
        let mut readers = Readers { checkpoint, open: None };
        let states = optimizer.state_names();
        // Before the first update optimizer states have their initial values, and an imported checkpoint does not contain them.
        let shards = trainer.shards.iter_mut().zip(&units).filter(|_| progress.updates > 0);
        for (shard, (unit, parameters)) in shards {
            shard.resume(progress.updates, &mut |parameter, state, range, elements| {
                let parameter = &parameters[parameter];
                readers.read(unit, parameter, &state_name(parameter, states[state]), range, elements)
            })?;
        }
        trainer.steps = progress.step;
        trainer.skipped = progress.skipped;
        trainer.skipped_batches = progress.skipped_batches;
        trainer.loss_scaler.resume(progress.loss_scale, progress.good_steps, progress.hysteresis_left);
        Ok(trainer)
    }
}

/// The reader of the current unit. Parameters are requested unit by unit.
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
    ) -> std::result::Result<(), InitError> {
        if self.open.as_ref().is_none_or(|(name, _)| name != unit) {
            self.open = Some((unit.to_string(), self.checkpoint.unit(unit)?));
        }
        let (_, reader) = self.open.as_mut().expect("opened above");
        Ok(reader.read_f32(tensor, &shape(parameter), range.start as u64..range.end as u64, elements)?)
    }
}

/// A file before the ranks exchange its parts. All memory for the exchange is allocated.
enum Prepared {
    /// Another rank writes the file; it receives these parts.
    Sent { writer: usize, parts: Vec<Block> },
    /// This rank writes the file.
    Written { file: usize, name: String, parts: Vec<Part> },
}

/// A part of a file that this rank writes.
enum Part {
    Local(Content),
    /// The owner will send it; `memory` is allocated for it.
    Remote {
        owner: usize,
        memory: Block,
    },
}

/// A part while it is being received.
enum PendingPart {
    Local(Content),
    Remote(Pending<Block>),
}

impl PendingPart {
    fn wait(self) -> Result<Content> {
        match self {
            PendingPart::Local(content) => Ok(content),
            PendingPart::Remote(pending) => Ok(Content::Bytes(into_bytes(pending.wait()?))),
        }
    }
}

/// Copies the parts of `saved` (the shards of owner `me`) that other ranks write, and allocates memory for the parts that they send.
fn prepare(
    layout: &UnitLayout,
    save: SaveId,
    saved: &[CheckpointTensor],
    me: usize,
) -> std::result::Result<Vec<Prepared>, String> {
    let mut prepared = Vec::new();
    for (file, plan) in layout.files(save).into_iter().enumerate() {
        let segments = plan.segments.iter().filter(|segment| segment.bytes > 0);
        if plan.writer != me {
            let own = segments.filter(|segment| segment.owner == me);
            let parts =
                own.map(|segment| copy(&saved[segment.buffer].tensor)).collect::<std::result::Result<_, _>>()?;
            prepared.push(Prepared::Sent { writer: plan.writer, parts });
            continue;
        }
        let mut parts = vec![Part::Local(Content::Bytes(plan.header.into()))];
        for segment in segments {
            let CheckpointTensor { tensor, is_stable } = &saved[segment.buffer];
            parts.push(match segment.owner == me {
                true => Part::Local(Content::Tensor { tensor: tensor.shallow_clone(), is_lent: !is_stable }),
                false => {
                    let len = (segment.range.end - segment.range.start) as usize;
                    let memory = Block::new(layout.buffers[segment.buffer].dtype, len, Device::Cpu);
                    Part::Remote { owner: segment.owner, memory: memory.map_err(|error| first_line(&error))? }
                }
            });
        }
        prepared.push(Prepared::Written { file, name: plan.name, parts });
    }
    Ok(prepared)
}

/// A file that this rank writes: its index among the unit's files, its name and its contents.
type Written = (usize, String, Vec<Content>);

/// Sends and receives the parts of a unit's files. Returns the files that this rank writes.
fn exchange(prepared: Vec<Prepared>, world: &Group, world_rank: impl Fn(usize) -> usize) -> Result<Vec<Written>> {
    let label = "checkpoint";
    let (mut sent, mut written) = (Vec::new(), Vec::new());
    for of_file in prepared {
        match of_file {
            Prepared::Sent { writer, parts } => {
                sent.extend(parts.into_iter().map(|part| world.send(label, world_rank(writer), part)));
            }
            Prepared::Written { file, name, parts } => {
                let receive = |part: Part| match part {
                    Part::Local(content) => PendingPart::Local(content),
                    Part::Remote { owner, memory } => {
                        PendingPart::Remote(world.receive(label, world_rank(owner), memory))
                    }
                };
                written.push((file, name, parts.into_iter().map(receive).collect::<Vec<_>>()));
            }
        }
    }
    let mut own_files = Vec::new();
    for (file, name, parts) in written {
        own_files.push((file, name, parts.into_iter().map(PendingPart::wait).collect::<Result<_>>()?));
    }
    for pending in sent {
        pending.wait()?;
    }
    Ok(own_files)
}
