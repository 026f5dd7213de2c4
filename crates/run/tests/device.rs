//! Checkpoints of a device: written through host memory, and read by any other device.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::num::NonZeroU64;
use std::sync::Arc;

use serde_json::json;
use shardwise_checkpoint::{Checkpoint, Store};
use shardwise_comm::single;
use shardwise_model::{Batch, LlamaConfig, Model};
use shardwise_plan::{Axis, Mesh};
use shardwise_pretend_device::{device, set_seed};
use shardwise_run::save;
use shardwise_torch::tch::{self, Device, Kind, Tensor};
use shardwise_train::{Options, Ranks, Schedule, Trainer, init};
use shardwise_zero::{AdamW, Optimizer, Precision, Sharding};

fn model() -> Model {
    Model::from_config(LlamaConfig::new(101, 36, 2, 6, 53)).unwrap()
}

fn ranks(device: Device) -> Ranks {
    let mesh = Mesh::new(&[(Axis::Shard, 1)]).unwrap();
    Ranks::on_device(Arc::new(single::group()), mesh, |_| Ok(single::group_on(device))).unwrap()
}

fn options(stage: u8, device: Device) -> Options {
    let (sharding, optimizer) = (Sharding::stage(stage).unwrap(), Optimizer::AdamW(AdamW::default()));
    Options { precision: Precision::BF16, device, ..Options::new(sharding, optimizer, Schedule::constant(1e-2)) }
}

/// The losses of two steps.
fn train(trainer: &mut Trainer) -> [u64; 2] {
    let tokens = Tensor::arange(26, (Kind::Int64, Device::Cpu)).view([2, 13]);
    let batch = Batch::new(tokens.narrow(1, 0, 12).copy(), tokens.narrow(1, 1, 12).copy());
    [(); 2].map(|()| trainer.step(std::slice::from_ref(&batch)).unwrap().loss.to_bits())
}

#[test]
fn a_run_continues_on_another_device_with_the_same_bits() {
    tch::set_num_threads(1);
    for stage in [0, 3] {
        let mut expected = None;
        for (from, to) in [(Device::Cpu, Device::Cpu), (device(), Device::Cpu), (Device::Cpu, device())] {
            let folder = tempfile::tempdir().unwrap();
            let store = Arc::new(Store::create(folder.path().to_str().unwrap()).unwrap());
            let mut trainer =
                Trainer::new(model(), ranks(from), options(stage, from), &mut init::from_seed(5)).unwrap();
            train(&mut trainer);
            save(&mut trainer, &store, json!({})).unwrap();
            let checkpoint = Checkpoint::open(&store, 2).unwrap();
            let mut resumed = Trainer::resume(model(), ranks(to), options(stage, to), &checkpoint).unwrap();
            let losses = train(&mut resumed);
            assert_eq!(losses, *expected.get_or_insert(losses), "stage {stage}, from {from:?} to {to:?}");
        }
    }
}

/// A snapshot is copied next to what training queues, and waits for the update before it.
#[test]
fn a_checkpoint_has_what_the_step_left_for_every_seed() {
    tch::set_num_threads(1);
    let mut expected = None;
    let device = device();
    for seed in 0..8 {
        set_seed(NonZeroU64::new(seed));
        let folder = tempfile::tempdir().unwrap();
        let store = Arc::new(Store::create(folder.path().to_str().unwrap()).unwrap());
        let mut trainer = Trainer::new(model(), ranks(device), options(3, device), &mut init::from_seed(5)).unwrap();
        train(&mut trainer);
        save(&mut trainer, &store, json!({})).unwrap();
        let checkpoint = Checkpoint::open(&store, 2).unwrap();
        let (on_cpu, options) = (ranks(Device::Cpu), options(3, Device::Cpu));
        let losses = train(&mut Trainer::resume(model(), on_cpu, options, &checkpoint).unwrap());
        assert_eq!(losses, *expected.get_or_insert(losses), "seed {seed}");
    }
}
