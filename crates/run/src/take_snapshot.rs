//! Takes the snapshot of a checkpoint: decides which rank writes what, and exchanges the parts that other ranks write.

use std::sync::Arc;

use shardwise_checkpoint::{SaveId, UnitLayout};
use shardwise_comm::{Group, Pending};
use shardwise_torch::tch::Device;
use shardwise_torch::{Block, Stream};
use shardwise_train::{Ranks, Trainer};
use shardwise_zero::CheckpointTensor;

use crate::agreement::agree;
use crate::error::Result;
use crate::position::PositionTracker;
use crate::snapshot::{Builder, Content, SavedTensor, Snapshot, copy, first_line, into_bytes};

/// Takes a snapshot of what this rank writes: its own shards, which stay in place, and those that other ranks send it. Replicas hold
/// the same shards, so they divide the units among themselves. At most `buffer_bytes` of copies exist at a time while the snapshot is
/// written. If a rank has no memory for what it sends and receives, no rank gets a snapshot, and all get that rank's error.
pub(crate) fn take_snapshot(
    trainer: &mut Trainer,
    layouts: &[UnitLayout],
    save: SaveId,
    buffer_bytes: usize,
    position: &PositionTracker,
) -> Result<std::result::Result<Arc<Snapshot>, String>> {
    let snapshot = exchange_and_build(trainer, layouts, save, buffer_bytes, position);
    if let Err(error) = &snapshot {
        trainer.mark_broken(error);
    }
    snapshot
}

fn exchange_and_build(
    trainer: &mut Trainer,
    layouts: &[UnitLayout],
    save: SaveId,
    buffer_bytes: usize,
    position: &PositionTracker,
) -> Result<std::result::Result<Arc<Snapshot>, String>> {
    let Ranks { world, groups, replicated, .. } = trainer.ranks().clone();
    let (replicas, replica) = (groups.replicate.size(), groups.replicate.rank());
    let mut fails = position.should_fail_copy();
    let mut builder = Builder::default();
    for (unit, layout) in layouts.iter().enumerate() {
        let saved = trainer.checkpoint_tensors(unit)?;
        let prepared = match unit % replicas == replica {
            _ if std::mem::take(&mut fails) => Err("the copy failed by fault injection".to_string()),
            true if trainer.has_unit(unit) => prepare(layout, save, &saved, replicated.shard.rank()),
            _ => Ok(Vec::new()),
        };
        // Unit by unit, so that at most one unit is copied for other ranks at a time. The agreement ensures that no rank waits for a
        // copy that failed.
        let prepared = prepared.map_err(|error| format!("unit {}: {error}", layout.name));
        let prepared = match agree(&world, prepared)? {
            Ok(prepared) => prepared,
            Err(error) => return Ok(Err(error)),
        };
        builder.start_unit(trainer.has_unit(unit).then(|| trainer.lease_tensors(unit)));
        for (file, name, contents) in exchange(prepared, &world, |owner| replicated.shard.ranks().rank_at(owner))? {
            builder.add(file, name, contents);
        }
    }
    let stream = trainer.snapshot_stream();
    if let Some(stream) = &stream {
        stream.wait_for(&Stream::current(trainer.options().device)?)?;
    }
    Ok(Ok(Arc::new(builder.finish(buffer_bytes, stream, trainer.options().update_in_backward))))
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

/// Copies the parts of `saved` (the shards of owner `me`, by buffer) that other ranks write, and allocates memory for the parts that
/// they send.
fn prepare(
    layout: &UnitLayout,
    save: SaveId,
    saved: &[Option<CheckpointTensor>],
    me: usize,
) -> std::result::Result<Vec<Prepared>, String> {
    let saved = |buffer: usize| saved[buffer].as_ref().expect("an owner of a shard has it");
    let mut prepared = Vec::new();
    for (file, plan) in layout.files(save).into_iter().enumerate() {
        let segments = plan.segments.iter().filter(|segment| segment.bytes > 0);
        if plan.writer != me {
            let own = segments.filter(|segment| segment.owner == me);
            let parts =
                own.map(|segment| copy(&saved(segment.buffer).tensor)).collect::<std::result::Result<_, _>>()?;
            prepared.push(Prepared::Sent { writer: plan.writer, parts });
            continue;
        }
        let mut parts = vec![Part::Local(Content::Bytes(plan.header.into()))];
        for segment in segments {
            let own = || {
                let CheckpointTensor { tensor, index, is_stable, is_detachable } = saved(segment.buffer);
                let (tensor, index, is_detachable) = (tensor.shallow_clone(), *index, *is_detachable);
                SavedTensor { tensor, index, is_lent: !is_stable, is_detachable }
            };
            parts.push(match segment.owner == me {
                true => Part::Local(Content::Tensor(own())),
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use shardwise_checkpoint::ByteSource;
    use shardwise_comm::single;
    use shardwise_model::{Batch, LlamaConfig, Model};
    use shardwise_plan::{Axis, Mesh};
    use shardwise_pretend_device::device;
    use shardwise_torch::tch::{self, Kind, Tensor};
    use shardwise_train::{OffloadPlace, Offloading, Options, Schedule, init};
    use shardwise_zero::{AdamW, Optimizer, Precision, Sharding};

    use super::*;
    use crate::snapshot::{PieceReader, TensorSet, WriterGuard, release_tensors};

    const STATE_BYTES_MIN: usize = 300_000;

    fn trainer(stage: u8, precision: Precision, place: Option<OffloadPlace>) -> Trainer {
        let adamw = AdamW { lr: 0., beta1: 0.9, beta2: 0.95, weight_decay: 0.1, eps: 1e-8 };
        let sharding = Sharding::stage(stage).unwrap();
        let device = if place == Some(OffloadPlace::Host) { device() } else { Device::Cpu };
        let parameters = place.clone().filter(|_| stage == 3);
        let offload = Offloading { optimizer: place, parameters, ..Offloading::default() };
        let options = Options::new(sharding, Optimizer::AdamW(adamw), Schedule::constant(3e-3));
        let options = Options { precision, offload, device, ..options };
        let mut model = Model::from_config(LlamaConfig::new(101, 36, 3, 6, 53)).unwrap();
        model.freeze(&["model.layers.1.mlp.up_proj".to_string()]).unwrap();
        let ranks = match device {
            Device::Cpu => Ranks::sharded(Arc::new(single::group())),
            device => {
                let mesh = Mesh::new(&[(Axis::Shard, 1)]).unwrap();
                Ranks::on_device(Arc::new(single::group()), mesh, |_| Ok(single::group_on(device))).unwrap()
            }
        };
        Trainer::new(model, ranks, options, &mut init::from_seed(5)).unwrap()
    }

    fn batch(step: i64) -> [Batch; 1] {
        let numbers = Tensor::arange(12, (Kind::Int64, Device::Cpu)).view([1, 12]);
        let tokens = (numbers * 7 + step * 31).remainder(101);
        [Batch::new(tokens.shallow_clone(), (tokens * 3 + 1).remainder(101))]
    }

    fn snapshot(trainer: &mut Trainer, buffer_bytes: usize) -> Arc<Snapshot> {
        let (layouts, save) = (trainer.checkpoint_layouts(), SaveId::from(7));
        take_snapshot(trainer, &layouts, save, buffer_bytes, &PositionTracker::default()).unwrap().unwrap()
    }

    fn write(snapshot: &Snapshot) -> Vec<Vec<u8>> {
        let read = |piece: PieceReader<'_>| piece.read_all().unwrap();
        let file = |file: usize| snapshot.parts(file).flatten().flat_map(read).collect();
        (0..snapshot.files.len()).map(file).collect()
    }

    /// The bytes of a blocking save.
    fn saved(trainer: &mut Trainer) -> Vec<Vec<u8>> {
        let snapshot = snapshot(trainer, 0);
        let writer = WriterGuard::new(&snapshot);
        write(writer.snapshot())
    }

    #[test]
    fn updates_during_a_save_change_neither_its_bytes_nor_the_training() {
        // libtorch looks for devices at the first backward pass, which has threads of its own there.
        device();
        tch::set_num_threads(1);
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let places = [None, Some(OffloadPlace::Disk(folder.path().to_path_buf())), Some(OffloadPlace::Host)];
        for (stage, precision) in (0..=3).flat_map(|stage| [(stage, Precision::F32), (stage, Precision::BF16)]) {
            // Room for everything, or for less than a unit; optimizer state and sharded parameters in memory, on a disk, or on the
            // host of a device.
            for (buffer_bytes, place) in places.iter().flat_map(|place| [(usize::MAX, place), (20_000, place)]) {
                let what = format!("stage {stage}, {precision:?}, {buffer_bytes} bytes, {place:?}");
                let mut plain = trainer(stage, precision, None);
                let mut trainer = trainer(stage, precision, place.clone());
                for step in 0..2 {
                    plain.step(&batch(step)).unwrap();
                    trainer.step(&batch(step)).unwrap();
                }
                let expected = saved(&mut trainer);
                assert!(expected.concat().len() > STATE_BYTES_MIN, "{what}");

                let snapshot = snapshot(&mut trainer, buffer_bytes);
                let writer = WriterGuard::new(&snapshot);
                // With room for everything, nothing is written before the update is complete.
                let (start, starts) = std::sync::mpsc::channel();
                let written = std::thread::spawn(move || {
                    starts.recv().unwrap();
                    write(writer.snapshot())
                });
                if buffer_bytes < usize::MAX {
                    start.send(()).unwrap();
                }
                let world = trainer.ranks().world.clone();
                release_tensors(&world, Some(&snapshot), TensorSet::Lent, &mut |_| None).unwrap();
                let gradients = trainer.compute_gradients(&batch(2)).unwrap();
                let mut released = 0;
                let updated = trainer.apply_update_with(gradients, &mut |shard, unit| {
                    released += 1;
                    let mut detach = |tensor: usize| shard.detach_checkpoint_tensor(tensor).ok();
                    Ok(release_tensors(&world, Some(&snapshot), TensorSet::Unit(unit), &mut detach)?)
                });
                updated.unwrap();
                assert_eq!(released, trainer.checkpoint_layouts().len(), "{what}: every unit is trainable");
                let _ = start.send(());
                assert!(written.join().unwrap() == expected, "{what}: another checkpoint");

                plain.step(&batch(2)).unwrap();
                assert!(saved(&mut trainer) == saved(&mut plain), "{what}: other training");
                assert_eq!(trainer.step(&batch(3)).unwrap().loss, plain.step(&batch(3)).unwrap().loss, "{what}");
            }
        }
    }

    #[test]
    fn an_update_fails_while_a_snapshot_is_not_released() {
        let mut trainer = trainer(2, Precision::F32, None);
        let snapshot = snapshot(&mut trainer, usize::MAX);
        let before = saved(&mut trainer);
        let error = trainer.step(&batch(0)).unwrap_err().to_string();
        assert!(error.contains("a save still reads the tensors of"), "{error}");
        assert!(saved(&mut trainer) == before, "nothing was updated");
        drop(snapshot);
        trainer.step(&batch(0)).unwrap();
        assert!(saved(&mut trainer) != before);
    }
}
