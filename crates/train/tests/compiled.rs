//! Compiled units train like any others: the same bits at every stage, with recomputation, accumulation and a pipeline.
//!
//! The packages are those of `python/tests/packages`.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use shardwise_checkpoint::hugging_face::Weights;
use shardwise_comm::{Group, mpi};
use shardwise_harness::{Launch, ranks};
use shardwise_model::{Batch, IGNORED, Model, Package};
use shardwise_plan::{Axis, Dtype, Mesh};
use shardwise_torch::tch::{Device, Kind, Tensor, no_grad};
use shardwise_train::{ActivationCheckpointing, Options, PipelineSchedule, Ranks, Schedule, Trainer, init};
use shardwise_zero::{AdamW, Optimizer, Precision, Sharding};

const STEPS: i64 = 5;

fn packages() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(shardwise_harness::packages().unwrap()).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<PathBuf> = entries.filter(|path| path.join("package.json").exists()).collect();
    // The batches below are tokens.
    found.retain(|path| Package::open(path).unwrap().vocab_size().is_some());
    found.sort();
    found
}

fn world() -> Arc<Group> {
    Arc::new(mpi::world(mpi::Options { timeout: Duration::from_secs(60), ..mpi::Options::default() }).unwrap())
}

fn options(model: &Model, stage: u8, activation_checkpointing: ActivationCheckpointing) -> Options {
    let precision = match model.package().unwrap().manifest().dtype {
        Dtype::F32 => Precision::F32,
        _ => Precision::BF16,
    };
    let optimizer = Optimizer::AdamW(AdamW { weight_decay: 0.1, ..AdamW::default() });
    Options {
        precision,
        activation_checkpointing,
        max_grad_norm: Some(0.5),
        ..Options::new(Sharding::stage(stage).unwrap(), optimizer, Schedule::constant(2e-3))
    }
}

/// A micro-batch of the package's shape, the same on any rank. Some targets are ignored.
fn batch(model: &Model, step: i64, micro: i64) -> Batch {
    let package = model.package().unwrap();
    let shape: Vec<i64> = package.manifest().inputs.shape.iter().map(|&size| size as i64).collect();
    let vocab_size = package.vocab_size().unwrap() as i64;
    let numbers = Tensor::arange(shape.iter().product::<i64>(), (Kind::Int64, Device::Cpu)).view(&shape[..]);
    let tokens = (numbers * 7 + step * 31 + micro * 57).remainder(vocab_size);
    let targets = (&tokens * 3 + 1).remainder(vocab_size);
    let ignored = (&tokens + micro).remainder(4).eq(0);
    Batch::new(tokens, targets.masked_fill(&ignored, IGNORED))
}

/// Losses and norms of all steps and of an evaluation, and the parameters of this rank's units.
type Trained = (Vec<[u64; 2]>, Vec<(String, Tensor)>);

fn train(path: &Path, ranks: &Ranks, set: impl FnOnce(&Model) -> Options, micro: i64) -> Trained {
    let model = Model::from_package(path).unwrap();
    let options = set(&model);
    let names: Vec<Vec<String>> =
        model.units().iter().map(|unit| unit.parameters().iter().map(|p| p.name.clone()).collect()).collect();
    let (rank, size) = (ranks.data_rank() as i64, ranks.data_size() as i64);
    let batches = |step| (0..micro).map(|index| batch(&model, step, index * size + rank)).collect::<Vec<_>>();
    // The last step has the data of the first, so that their losses compare.
    let steps: Vec<Vec<Batch>> = (0..STEPS).map(|step| batches(step % 2)).collect();
    let held_out = batches(99);
    let weights = Weights::open(&path.join("weights.safetensors").display().to_string()).unwrap();
    let mut trainer = Trainer::new(model, ranks.clone(), options, &mut init::from_weights(&weights)).unwrap();
    let own: Vec<usize> = (0..names.len()).filter(|&unit| trainer.has_unit(unit)).collect();
    let mut numbers = Vec::new();
    for batches in &steps {
        let report = trainer.step(batches).unwrap();
        assert_eq!(report.without_gradient, Vec::<String>::new());
        numbers.push([report.loss, report.grad_norm].map(f64::to_bits));
    }
    let evaluation = trainer.evaluate(&held_out).unwrap();
    numbers.push([evaluation.loss_sum.to_bits(), evaluation.tokens]);
    let mut parameters = Vec::new();
    for (shard, unit) in trainer.shards_mut().zip(own) {
        shard.gather().unwrap();
        let copies = shard.parameters().iter().map(|tensor| no_grad(|| tensor.detach().copy()));
        parameters.extend(names[unit].iter().cloned().zip(copies));
        shard.release().unwrap();
    }
    (numbers, parameters)
}

fn assert_learns((numbers, _): &Trained, what: &str) {
    let (first, last) = (f64::from_bits(numbers[0][0]), f64::from_bits(numbers[STEPS as usize - 1][0]));
    assert!(last < 0.995 * first, "{what}: it learns: {first} to {last}");
}

fn assert_same(found: &Trained, expected: &Trained, what: &str) {
    assert_eq!(found.0, expected.0, "{what}: other losses or norms");
    for (name, found) in &found.1 {
        let (_, expected) = expected.1.iter().find(|(known, _)| known == name).unwrap();
        assert!(found.equal(expected), "{what}: {name} has other bits");
    }
}

#[test]
fn stages_and_recomputation_give_the_same_bits() {
    ranks!(Launch::ranks(2).timeout(Duration::from_secs(500)), || {
        let ranks = Ranks::sharded(world());
        for path in packages() {
            for micro in [1, 3] {
                let run =
                    |stage, checkpointing| train(&path, &ranks, |model| options(model, stage, checkpointing), micro);
                let expected = run(0, ActivationCheckpointing::None);
                assert_learns(&expected, &path.display().to_string());
                for stage in 0..4 {
                    for checkpointing in [ActivationCheckpointing::None, ActivationCheckpointing::Full] {
                        let what = format!("{}, stage {stage}, {checkpointing:?}, {micro}", path.display());
                        assert_same(&run(stage, checkpointing), &expected, &what);
                    }
                }
            }
        }
    });
}

#[test]
fn hybrid_sharding_gives_the_same_bits_at_every_stage() {
    ranks!(Launch::ranks(4).timeout(Duration::from_secs(500)), || {
        let mesh = Mesh::new(&[(Axis::Replicate, 2), (Axis::Shard, 2)]).unwrap();
        let world = world();
        let (hybrid, sharded) = (Ranks::on_mesh(world.clone(), mesh).unwrap(), Ranks::sharded(world));
        for path in packages() {
            let run =
                |ranks, stage| train(&path, ranks, |model| options(model, stage, ActivationCheckpointing::None), 2);
            let (expected, alone) = (run(&hybrid, 1), run(&sharded, 3));
            for stage in [2, 3] {
                assert_same(&run(&hybrid, stage), &expected, &format!("{}, stage {stage}", path.display()));
            }
            // Replicas are summed in another order.
            let [found, expected] = [&expected, &alone].map(|(numbers, _)| f64::from_bits(numbers[0][0]));
            assert!((found / expected - 1.).abs() < 1e-5, "{}: {found} and {expected}", path.display());
        }
    });
}

#[test]
fn a_pipeline_gives_the_same_bits() {
    ranks!(Launch::ranks(2).timeout(Duration::from_secs(500)), || {
        let ranks = Ranks::on_mesh(world(), Mesh::new(&[(Axis::Pipeline, 2), (Axis::Shard, 1)]).unwrap()).unwrap();
        let schedules = [PipelineSchedule::GPipe, PipelineSchedule::OneFOneB, PipelineSchedule::ZeroBubbleH1];
        for path in packages() {
            for (stage, schedule) in [1, 3, 3].into_iter().zip(&schedules) {
                let set = |model: &Model| Options {
                    pipeline_schedule: schedule.clone(),
                    ..options(model, stage, ActivationCheckpointing::None)
                };
                let alone = |model: &Model| Options {
                    sum_tied_shares_apart: true,
                    ..options(model, stage, ActivationCheckpointing::None)
                };
                let expected = train(&path, &ranks.of_stage(), alone, 4);
                let found = train(&path, &ranks, set, 4);
                assert!(found.1.len() < expected.1.len(), "a rank has the units of its stage only");
                assert_same(&found, &expected, &format!("{}, stage {stage}, {schedule}", path.display()));
            }
        }
    });
}

#[test]
fn tensor_parallelism_is_refused() {
    ranks!(2, || {
        let ranks = Ranks::on_mesh(world(), Mesh::new(&[(Axis::Shard, 1), (Axis::Tensor, 2)]).unwrap()).unwrap();
        for path in packages() {
            let model = Model::from_package(&path).unwrap();
            let options = options(&model, 3, ActivationCheckpointing::None);
            let error = Trainer::new(model, ranks.clone(), options, &mut init::from_seed(1)).err().unwrap();
            assert!(error.to_string().contains("cannot be split among ranks"), "{error}");
        }
    });
}
