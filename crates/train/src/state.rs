//! Saving a trainer to a checkpoint, and restoring one.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use shardwise_checkpoint::{Checkpoint, FILE_BYTES, FlatBuffer, Owners, UnitLayout, UnitReader};
use shardwise_model::{Model, Parameter, Unit};
use shardwise_plan::program::Place;
use shardwise_plan::{Axis, FloatsMut, LayerPlace, Mesh};
use shardwise_zero::{CheckpointTensor, InitError};

use crate::error::{Error, Result};
use crate::init::{for_each_run, shape};
use crate::options::{Options, Ranks};
use crate::progress::{Progress, SkippedBatch};
use crate::step::Trainer;

/// The layout of a model in a checkpoint that the ranks of a mesh write.
pub fn checkpoint_layouts(model: &Model, options: &Options, mesh: &Mesh) -> Vec<UnitLayout> {
    let unit = |(index, unit): (usize, &Unit)| UnitLayout {
        name: unit.name().to_string(),
        buffers: buffers(unit.parameters(), options, mesh).into_iter().map(|(buffer, _)| buffer).collect(),
        owners: shards(mesh) * mesh.size(Axis::Expert) * mesh.size(Axis::Tensor),
        index,
        file_bytes: FILE_BYTES,
    };
    model.units().iter().enumerate().map(unit).collect()
}

/// The number of ranks that shard the same experts.
fn shards(mesh: &Mesh) -> usize {
    mesh.size(Axis::Shard) * mesh.context_size()
}

/// Which of the ranks that hold the parts of a layer have a buffer.
#[derive(Clone, Copy)]
struct Holders {
    /// The tensor-parallel rank, unless all have it.
    tensor: Option<usize>,
    /// The expert-parallel rank, unless all have it.
    expert: Option<usize>,
}

impl Holders {
    fn has(self, place: LayerPlace) -> bool {
        self.tensor.is_none_or(|rank| rank == place.tensor.index)
            && self.expert.is_none_or(|rank| rank == place.expert.index)
    }
}

/// The flat buffers of a unit in a checkpoint, each with the ranks that have it: first those with the parts of each tensor-parallel rank,
/// then those with the parameters that all of these ranks have, then those with the experts of each rank.
fn buffers(parameters: &[Parameter], options: &Options, mesh: &Mesh) -> Vec<(FlatBuffer, Holders)> {
    let (shard, experts, tensor) = (shards(mesh), mesh.size(Axis::Expert), mesh.size(Axis::Tensor));
    let place = |tensor_index: usize, expert_index: usize| LayerPlace {
        tensor: Place { size: tensor, index: tensor_index },
        expert: Place { size: experts, index: expert_index },
    };
    let first = place(0, 0);
    let (divided, others): (Vec<&Parameter>, Vec<&Parameter>) =
        parameters.iter().partition(|parameter| parameter.is_divided_by_expert(first));
    let (replicated, split): (Vec<&Parameter>, Vec<&Parameter>) =
        others.into_iter().partition(|parameter| parameter.is_replicated(first.tensor));
    let mut buffers = Vec::new();
    let mut add = |parameters: &[&Parameter], place: LayerPlace, owners, holders: Holders| {
        let added = buffers_of(parameters, options, place, owners);
        buffers.extend(added.into_iter().map(|buffer| (buffer, holders)));
    };
    for index in (0..tensor).filter(|_| !split.is_empty() || parameters.is_empty()) {
        let owners = Owners::every(tensor, index, shard * experts);
        add(&split, place(index, 0), owners, Holders { tensor: Some(index), expert: None });
    }
    if !replicated.is_empty() {
        let owners = Owners::all(shard * experts * tensor);
        add(&replicated, first, owners, Holders { tensor: None, expert: None });
    }
    let parts = (0..experts).flat_map(|expert| (0..tensor).map(move |tensor| (expert, tensor)));
    for (expert, index) in parts.filter(|_| !divided.is_empty()) {
        // The ranks that divide a sequence hold the same experts, and are consecutive.
        let (per_block, block_stride) = (mesh.context_size(), experts * mesh.context_size() * tensor);
        let first = expert * mesh.context_size() * tensor + index;
        let owners = Owners { first, stride: tensor, per_block, block_stride, count: shard };
        add(&divided, place(index, expert), owners, Holders { tensor: Some(index), expert: Some(expert) });
    }
    buffers
}

/// The flat buffers of parameters that are sharded among the same ranks, in the order of
/// [`shardwise_zero::ShardedUnit::checkpoint_tensors`].
fn buffers_of(parameters: &[&Parameter], options: &Options, place: LayerPlace, owners: Owners) -> Vec<FlatBuffer> {
    let buffer = |dtype, trainable: bool, name: &dyn Fn(&Parameter) -> String| FlatBuffer {
        dtype,
        tensors: parameters
            .iter()
            .filter(|parameter| parameter.trainable == trainable)
            .map(|parameter| shardwise_checkpoint::Tensor {
                name: name(parameter),
                shape: shape(parameter),
                slice: parameter.kept_slice(place),
            })
            .collect(),
        owners,
    };
    let state_dtype = options.precision.state_dtype();
    let masters = buffer(state_dtype, true, &|parameter| parameter.name.clone());
    let states = options.optimizer.state_names().iter();
    let states = states.map(|state| buffer(state_dtype, true, &|parameter| state_name(parameter, state)));
    let frozen = buffer(options.precision.param_dtype, false, &|parameter| parameter.name.clone());
    std::iter::once(masters).chain(states).chain([frozen]).collect()
}

fn state_name(parameter: &Parameter, state: &str) -> String {
    format!("{}/{state}", parameter.name)
}

/// Keeps a unit's tensors as they are: while a lease exists, an update of the unit fails. Whoever reads tensors of
/// [`Trainer::checkpoint_tensors`] while training continues holds one, and drops it when [`Trainer::apply_update_with`] is about to update the
/// unit, or whatever else updates it: [`Trainer::compute_gradients_with`] or [`Trainer::finish_update_with`].
pub struct TensorLease {
    _lease: Arc<()>,
}

impl Trainer {
    /// The trainer's progress, as checkpoints store it.
    pub fn progress(&self) -> Progress {
        Progress {
            step: self.steps,
            updates: self.updates,
            skipped: self.skipped,
            loss_scale: self.loss_scaler.dynamic_value(),
            good_steps: self.loss_scaler.good_steps(),
            hysteresis_left: self.loss_scaler.hysteresis_left(),
            skipped_batches: self.skipped_batches.clone(),
            expert_biases: self.expert_biases.stored(),
        }
    }

    /// The layout of this trainer's checkpoints.
    pub fn checkpoint_layouts(&self) -> Vec<UnitLayout> {
        checkpoint_layouts(&self.model, &self.options, &self.ranks.mesh())
    }

    /// Whether this rank holds a unit. With a pipeline, it holds those of its own stage.
    pub fn has_unit(&self, unit: usize) -> bool {
        self.shards.has(unit)
    }

    /// How many trainable units this rank's stage has fewer than the stage that has the most.
    pub fn fewer_updates(&self) -> usize {
        let trainable = |stage| self.trainable_units(stage).count();
        let most = (0..self.ranks.pipeline.size()).map(trainable).max().unwrap_or(0);
        most - trainable(self.ranks.pipeline.rank())
    }

    /// The units of this rank's stage that have trainable parameters.
    pub fn own_trainable_units(&self) -> impl Iterator<Item = usize> + '_ {
        self.trainable_units(self.ranks.pipeline.rank())
    }

    fn trainable_units(&self, stage: usize) -> impl Iterator<Item = usize> + '_ {
        let is_trained = move |&unit: &usize| self.stage_of_unit[unit] == stage && self.unit_specs[unit].trainable > 0;
        (0..self.unit_specs.len()).filter(is_trained)
    }

    /// This rank's shards of a unit, as a checkpoint stores them, once the last update is complete: one for each buffer of its layout
    /// that this rank owns a shard of, and none for a unit of another stage. They share memory with the trainer: hold a
    /// [`Trainer::lease_tensors`] while reading them. All ranks call it together, because it finishes an update that waits for the next step
    /// ([`Trainer::finish_update`]).
    pub fn checkpoint_tensors(&mut self, unit: usize) -> Result<Vec<Option<CheckpointTensor>>> {
        self.finish_update()?;
        self.unless_broken(|trainer| {
            if !trainer.shards.has(unit) {
                return Ok(Vec::new());
            }
            trainer.shards[unit].wait_for_update()?;
            let mut own = trainer.shards[unit].checkpoint_tensors()?.into_iter();
            let (parameters, place) = (trainer.model.units()[unit].parameters(), trainer.layer_place());
            let buffers = buffers(parameters, &trainer.options, &trainer.ranks.mesh()).into_iter();
            Ok(buffers.map(|(_, holders)| if holders.has(place) { own.next() } else { None }).collect())
        })
    }

    /// Prevents updates of a unit until the lease is dropped.
    pub fn lease_tensors(&self, unit: usize) -> TensorLease {
        TensorLease { _lease: self.leases[unit].clone() }
    }

    pub(crate) fn check_no_lease(&self, unit: usize) -> Result<()> {
        match Arc::strong_count(&self.leases[unit]) {
            1 => Ok(()),
            _ => Err(Error::Options(format!(
                "a save still reads the tensors of {} that this update would overwrite",
                self.model.units()[unit].name(),
            ))),
        }
    }

    /// The batches to skip after a rollback, including those already skipped.
    pub fn skipped_batches(&self) -> &[SkippedBatch] {
        &self.skipped_batches
    }

    /// Sets the batches to skip.
    pub fn set_skipped_batches(&mut self, batches: Vec<SkippedBatch>) {
        self.skipped_batches = batches;
    }

    /// Skips the next step if its batch caused a spike: counts the step, so that the schedule advances, but updates nothing.
    pub fn skip_batch(&mut self) -> Option<SkippedBatch> {
        let next = self.skipped_batches.iter().find(|batch| batch.step == self.steps + 1)?.clone();
        self.steps += 1;
        Some(next)
    }

    /// Creates a trainer at step 0 with the parameters of a checkpoint.
    pub fn load_weights(model: Model, ranks: Ranks, options: Options, checkpoint: &Checkpoint) -> Result<Self> {
        let mut readers = Readers { checkpoint, open: None };
        let owned = |unit: &Unit| {
            let of = |parameter: &Parameter| (parameter.name.clone(), unit.name().to_string());
            unit.parameters().iter().map(of).collect::<Vec<_>>()
        };
        let unit_of: HashMap<String, String> = model.units().iter().flat_map(owned).collect();
        let mut trainer = Trainer::new(model, ranks, options, &mut |parameter, range, elements| {
            readers.read(&unit_of[&parameter.name], parameter, &parameter.name, range, elements)
        })?;
        trainer.expert_biases.load(&trainer.model, trainer.options.device, checkpoint)?;
        Ok(trainer)
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
        let place = trainer.layer_place();
        let states = optimizer.state_names();
        // Before the first update optimizer states have their initial values, and an imported checkpoint does not contain them.
        for (index, shard) in trainer.shards.iter_mut().filter(|_| progress.updates > 0) {
            let (unit, parameters) = &units[index];
            shard.resume(progress.updates, &mut |parameter, state, range, elements| {
                let parameter = &parameters[parameter];
                let (slice, name) = (parameter.kept_slice(place), state_name(parameter, states[state]));
                for_each_run(parameter, slice.as_ref(), range, elements, &mut |range, elements| {
                    readers.read(unit, parameter, &name, range, elements)
                })
            })?;
        }
        trainer.steps = progress.step;
        trainer.updates = progress.updates;
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
        elements: FloatsMut<'_>,
    ) -> std::result::Result<(), InitError> {
        if self.open.as_ref().is_none_or(|(name, _)| name != unit) {
            self.open = Some((unit.to_string(), self.checkpoint.unit(unit)?));
        }
        let (_, reader) = self.open.as_mut().expect("opened above");
        Ok(reader.read_floats(tensor, &shape(parameter), range.start as u64..range.end as u64, elements)?)
    }
}
