//! Runs whose losses, norms, parameters and optimizer states are compared bit by bit.

#![allow(dead_code, reason = "each test file uses a part")]

use std::sync::Arc;
use std::time::Duration;

use shardwise_comm::{Group, mpi};
use shardwise_model::{Batch, Model};
use shardwise_plan::{Axis, Mesh};
use shardwise_torch::tch::{Device, Kind, Tensor};
use shardwise_train::{DynamicScale, LossScale, OnNonFinite, Options, Ranks, Schedule, Trainer, init};
use shardwise_zero::{AdamW, Optimizer, Precision, Sharding};

use super::{VOCAB_SIZE, llama};

/// AdamW with clipping.
pub(crate) fn options(stage: u8, precision: Precision) -> Options {
    let adamw = AdamW { lr: 0., beta1: 0.9, beta2: 0.95, weight_decay: 0.1, eps: 1e-8 };
    let sharding = Sharding::stage(stage).unwrap();
    Options {
        precision,
        max_grad_norm: Some(0.5),
        ..Options::new(sharding, Optimizer::AdamW(adamw), Schedule::constant(1e-2))
    }
}

/// The same in f16, with a loss scale that starts so high that the first steps overflow and are skipped.
pub(crate) fn overflowing(options: Options) -> Options {
    let loss_scale = LossScale::Dynamic(DynamicScale { initial: 2f64.powi(22), ..DynamicScale::DEFAULT });
    Options { precision: Precision::F16, loss_scale, on_nonfinite: OnNonFinite::Skip, ..options }
}

/// A model with a frozen embedding, and frozen parameters next to trained ones.
pub(crate) fn partly_frozen() -> Model {
    let mut model = llama();
    model.freeze(&["model.embed_tokens".to_string(), "model.layers.1.mlp".to_string()]).unwrap();
    model
}

/// Four ranks as two replicas, in pairs that share layers, and as the stages of a pipeline; each time two of them shard.
pub(crate) fn layouts(world: &Arc<Group>) -> [Ranks; 3] {
    let mesh = |axes: [(Axis, usize); 2]| Ranks::on_mesh(world.clone(), Mesh::new(&axes).unwrap()).unwrap();
    let hybrid = Ranks::hybrid(world.clone(), 2).unwrap();
    [hybrid, mesh([(Axis::Shard, 2), (Axis::Tensor, 2)]), mesh([(Axis::Pipeline, 2), (Axis::Shard, 2)])]
}

pub(crate) fn world() -> Arc<Group> {
    Arc::new(mpi::world(mpi::Options { timeout: Duration::from_secs(60), ..mpi::Options::default() }).unwrap())
}

pub(crate) fn trainer(ranks: &Ranks, options: Options) -> Trainer {
    Trainer::new(llama(), ranks.clone(), options, &mut init::from_seed(5)).unwrap()
}

pub(crate) fn batch(step: i64, rank: usize) -> Batch {
    let numbers = Tensor::arange(3 * 12, (Kind::Int64, Device::Cpu)).view([3, 12]);
    let tokens = (numbers * 7 + step * 31 + rank as i64 * 57).remainder(VOCAB_SIZE);
    Batch::new(tokens.shallow_clone(), (tokens * 3 + 1).remainder(VOCAB_SIZE))
}

pub(crate) fn micro_batches(step: i64, rank: usize, number: i64) -> Vec<Batch> {
    (0..number).map(|index| batch(number * step + index, rank)).collect()
}

/// Losses and norms, and all that a checkpoint has, as bits.
pub(crate) fn train(mut trainer: Trainer, steps: i64, number: i64) -> (Vec<u64>, Vec<u8>) {
    let rank = trainer.ranks().data_rank();
    let mut numbers = Vec::new();
    for step in 0..steps {
        let report = trainer.step(&micro_batches(step, rank, number)).unwrap();
        numbers.extend([report.loss.to_bits(), report.grad_norm.to_bits(), u64::from(report.skipped.is_some())]);
    }
    (numbers, saved(&mut trainer))
}

/// All that a checkpoint has.
pub(crate) fn saved(trainer: &mut Trainer) -> Vec<u8> {
    let mut bytes = Vec::new();
    for unit in 0..trainer.model().units().len() {
        for saved in trainer.checkpoint_tensors(unit).unwrap().into_iter().flatten() {
            let elements = saved.tensor.contiguous().view_dtype(Kind::Uint8).view(-1);
            bytes.extend(Vec::<u8>::try_from(elements).unwrap());
        }
    }
    bytes
}
