//! Takes the snapshot of a checkpoint: decides which rank writes what, and exchanges the parts that other ranks write.

use std::sync::Arc;

use shardwise_checkpoint::{SaveId, UnitLayout};
use shardwise_comm::{Group, Pending};
use shardwise_torch::Block;
use shardwise_torch::tch::Device;
use shardwise_train::{Ranks, Trainer};
use shardwise_zero::CheckpointTensor;

use crate::agreement::agree;
use crate::error::Result;
use crate::position::PositionTracker;
use crate::snapshot::{Builder, Content, Snapshot, copy, first_line, into_bytes};

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
    let Ranks { world, groups } = trainer.ranks().clone();
    let (replicas, replica) = (groups.replicate.size(), groups.replicate.rank());
    let mut fails = position.should_fail_copy();
    let mut builder = Builder::default();
    for (unit, layout) in layouts.iter().enumerate() {
        let saved = trainer.checkpoint_tensors(unit)?;
        let prepared = match unit % replicas == replica {
            _ if std::mem::take(&mut fails) => Err("the copy failed by fault injection".to_string()),
            true => prepare(layout, save, &saved, groups.shard.rank()),
            false => Ok(Vec::new()),
        };
        // Unit by unit, so that at most one unit is copied for other ranks at a time. The agreement ensures that no rank waits for a
        // copy that failed.
        let prepared = prepared.map_err(|error| format!("unit {}: {error}", layout.name));
        let prepared = match agree(&world, prepared)? {
            Ok(prepared) => prepared,
            Err(error) => return Ok(Err(error)),
        };
        for (file, name, contents) in exchange(prepared, &world, |owner| groups.shard.ranks().rank_at(owner))? {
            builder.add(unit, file, name, contents);
        }
    }
    Ok(Ok(Arc::new(builder.finish(buffer_bytes, Some(trainer.lease_tensors())))))
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
