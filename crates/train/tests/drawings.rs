//! The guide's drawings of a step show the calls of a real step, in order.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use shardwise_comm::mpi;
use shardwise_harness::ranks;
use shardwise_model::{Batch, LlamaConfig, Model};
use shardwise_torch::tch::{Device, Kind, Tensor};
use shardwise_train::{Options, Ranks, Schedule, Trainer, init};
use shardwise_zero::{AdamW, Optimizer, Sharding};

/// The calls of a drawing.
fn drawn(stage: u8, shape: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/src/drawings");
    let text = std::fs::read_to_string(folder.join(format!("stage-{stage}-{shape}.svg"))).unwrap();
    text.split_once("data-calls=\"").unwrap().1.split_once('"').unwrap().0.to_string()
}

#[test]
fn a_step_makes_the_calls_that_are_drawn() {
    ranks!(2, || {
        let options = mpi::Options { timeout: Duration::from_secs(60), ..mpi::Options::default() };
        let ranks = Ranks::sharded(Arc::new(mpi::world(options).unwrap()));
        for stage in 0..4 {
            // As in the drawings: three blocks and an untied head.
            let model = Model::from_config(LlamaConfig::new(64, 32, 3, 4, 48)).unwrap();
            let units: Vec<String> = model.units().iter().map(|unit| unit.name().to_string()).collect();
            let adamw = AdamW { lr: 0., beta1: 0.9, beta2: 0.95, weight_decay: 0.1, eps: 1e-8 };
            let options =
                Options::new(Sharding::stage(stage).unwrap(), Optimizer::AdamW(adamw), Schedule::constant(1e-3));
            let mut trainer = Trainer::new(model, ranks.clone(), options, &mut init::from_seed(1)).unwrap();
            let tokens = Tensor::arange(16, (Kind::Int64, Device::Cpu)).view([2, 8]);
            let batch = [Batch::new(tokens.shallow_clone(), tokens)];
            trainer.step(&batch).unwrap();
            let before = ranks.world.flight_recorder().read().len();
            trainer.step(&batch).unwrap();
            let made = ranks.world.flight_recorder().read().split_off(before);
            let made = made.into_iter().filter(|entry| units.iter().any(|unit| **unit == *entry.call.label));
            let made: Vec<String> = made.map(|entry| format!("{} {}", entry.call.verb, entry.call.label)).collect();
            for shape in ["wide", "narrow"] {
                assert_eq!(drawn(stage, shape), made.join(", "), "stage {stage}");
            }
        }
    });
}
