//! Any number of ranks at any stage can resume from a checkpoint of four ranks at stage 3, with the same losses as without a break.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use shardwise_checkpoint::hugging_face::{self, ExportOptions, Weights};
use shardwise_checkpoint::{Checkpoint, Store, elements};
use shardwise_comm::{Group, mpi};
use shardwise_harness::{Launch, ranks};
use shardwise_model::{Batch, IGNORED, LlamaConfig, Model};
use shardwise_plan::Dtype;
use shardwise_run::save;
use shardwise_torch::tch::{Device, Kind, Tensor};
use shardwise_train::{
    DynamicScale, LossScale, OffloadPlace, Offloading, OnNonFinite, Options, Ranks, Schedule, Trainer, init,
};
use shardwise_zero::{AdamW, FloatsMut, Optimizer, Precision, Sharding};

const VOCAB_SIZE: i64 = 101;
/// The micro-batches of a step on all ranks.
const MICRO_BATCHES: i64 = 24;
const FOLDER: &str = "SHARDWISE_TEST_FOLDER";

/// A model with sizes that hardly divide evenly, and a frozen parameter.
fn model() -> Model {
    let llama = LlamaConfig {
        num_key_value_heads: 3,
        loss_chunk_tokens: 10,
        ..LlamaConfig::new(VOCAB_SIZE as usize, 36, 3, 6, 53)
    };
    let mut model = Model::from_config(llama).unwrap();
    model.freeze(&["model.layers.1.mlp.up_proj".to_string()]).unwrap();
    model
}

fn options(stage: u8, precision: Precision) -> Options {
    let adamw = AdamW { lr: 0., beta1: 0.9, beta2: 0.95, weight_decay: 0.1, eps: 1e-8 };
    let is_f16 = precision == Precision::F16;
    Options {
        precision,
        max_grad_norm: Some(0.5),
        // Large enough that steps are skipped, so that the scale has changed when it is saved.
        loss_scale: match is_f16 {
            true => LossScale::Dynamic(DynamicScale { initial: 1e9, window: 2, ..DynamicScale::DEFAULT }),
            false => LossScale::Fixed(1.),
        },
        on_nonfinite: if is_f16 { OnNonFinite::Skip } else { OnNonFinite::Stop },
        ..Options::new(Sharding::stage(stage).unwrap(), Optimizer::AdamW(adamw), Schedule::constant(3e-3))
    }
}

/// Optimizer state, gradients and, if they are sharded, parameters on a disk.
fn offload(folder: &Path, stage: u8) -> Offloading {
    let folder = Some(OffloadPlace::Disk(folder.to_path_buf()));
    let parameters = folder.clone().filter(|_| stage == 3);
    Offloading { optimizer: folder.clone(), parameters, gradients: folder, ..Offloading::default() }
}

fn world() -> Arc<Group> {
    Arc::new(mpi::world(mpi::Options { timeout: Duration::from_secs(60), ..mpi::Options::default() }).unwrap())
}

/// A micro-batch of a step by its global index, the same on any rank. Some targets are ignored.
fn batch(step: i64, micro: i64) -> Batch {
    let numbers = Tensor::arange(12, (Kind::Int64, Device::Cpu)).view([1, 12]);
    let tokens = (numbers * 7 + step * 31 + micro * 57).remainder(VOCAB_SIZE);
    let targets = (&tokens * 3 + 1).remainder(VOCAB_SIZE);
    let ignored = (&tokens + micro).remainder(4).eq(0);
    Batch::new(tokens, targets.masked_fill(&ignored, IGNORED))
}

fn train(trainer: &mut Trainer, world: &Group, steps: std::ops::Range<i64>) -> Vec<f64> {
    let (rank, size) = (world.rank() as i64, world.size() as i64);
    let step = |step| {
        let batches: Vec<Batch> = (0..MICRO_BATCHES / size).map(|index| batch(step, index * size + rank)).collect();
        trainer.step(&batches).unwrap().loss
    };
    steps.map(step).collect()
}

fn folder() -> PathBuf {
    PathBuf::from(std::env::var(FOLDER).unwrap())
}

fn store(folder: &Path) -> Arc<Store> {
    Arc::new(Store::create(folder.to_str().unwrap()).unwrap())
}

/// All tensors of a checkpoint, as bits of f64, which holds every dtype exactly: master weights, moments and frozen parameters.
fn contents(checkpoint: &Checkpoint) -> Vec<(String, Dtype, Vec<u64>)> {
    let mut all = Vec::new();
    for unit in &checkpoint.manifest().units {
        let mut reader = checkpoint.unit(&unit.name).unwrap();
        for tensor in reader.table().tensors.clone() {
            let len = elements(&tensor.shape).unwrap();
            let mut elements = vec![0f64; len as usize];
            reader.read_floats(&tensor.name, &tensor.shape, 0..len, FloatsMut::F64(&mut elements)).unwrap();
            all.push((tensor.name, tensor.dtype, elements.iter().map(|x| x.to_bits()).collect()));
        }
    }
    all.sort();
    all
}

/// The number of steps before the save. In f16 the loss scale has to come down first.
fn steps_before(precision: Precision) -> i64 {
    if precision == Precision::F16 { 14 } else { 3 }
}

/// The number of ranks that save.
fn saved_by(precision: Precision) -> usize {
    if precision == Precision::F64 { 2 } else { 4 }
}

/// Ranks at stage 3 train, save, and train three more steps, whose losses are written to a file.
fn save_run(precision: Precision) {
    let (world, folder) = (world(), folder());
    let ranks = Ranks::sharded(world.clone());
    let mut options = options(3, precision);
    if precision == Precision::BF16 {
        options.offload = offload(&folder, 3);
    }
    let mut trainer = Trainer::new(model(), ranks, options, &mut init::from_seed(5)).unwrap();
    let before = steps_before(precision);
    train(&mut trainer, &world, 0..before);
    save(&mut trainer, &store(&folder), json!({})).unwrap();
    let progress = trainer.progress();
    assert!(progress.updates > 0 && (progress.skipped > 0) == (precision == Precision::F16), "{progress:?}");
    let losses = train(&mut trainer, &world, before..before + 3);
    save(&mut trainer, &store(&folder), json!({})).unwrap();
    if world.rank() == 0 {
        // As bits, because decimals may not round-trip.
        let bits: Vec<u64> = losses.iter().map(|loss| loss.to_bits()).collect();
        std::fs::write(folder.join("losses.json"), serde_json::to_vec(&bits).unwrap()).unwrap();
    }
    world.barrier("saved").wait().unwrap();
}

/// Resumes from that checkpoint at every stage and in every layout, in memory or with offloading.
fn resume_and_compare(precision: Precision) {
    let (world, folder) = (world(), folder());
    let store = store(&folder);
    let before = steps_before(precision);
    let checkpoint = Checkpoint::open(&store, before as u64).unwrap();
    let bits: Vec<u64> = serde_json::from_slice(&std::fs::read(folder.join("losses.json")).unwrap()).unwrap();
    let expected: Vec<f64> = bits.into_iter().map(f64::from_bits).collect();
    let saved = contents(&checkpoint);
    let tolerance = if precision == Precision::F64 { 1e-12 } else { 1e-5 };
    // In half precision, sums over replicas round, so only the same layout gives the same bits.
    let most_replicas = if [Precision::F32, Precision::F64].contains(&precision) { world.size() } else { 1 };
    for replicas in (1..=most_replicas).filter(|replicas| world.size().is_multiple_of(*replicas)) {
        let ranks = Ranks::hybrid(world.clone(), replicas).unwrap();
        for stage in 0..=3 {
            let case = format!("{} ranks, {replicas} replicas, stage {stage}", world.size());
            let mut options = options(stage, precision);
            if stage % 2 == 1 {
                options.offload = offload(&folder, stage);
            }
            let mut trainer = Trainer::resume(model(), ranks.clone(), options, &checkpoint).unwrap();
            assert_eq!(serde_json::to_value(trainer.progress()).unwrap(), checkpoint.manifest().training["progress"]);

            // Saving what was loaded gives the same checkpoint.
            let again = folder.join(format!("again-{}-{replicas}-{stage}", world.size()));
            let again = self::store(&again);
            save(&mut trainer, &again, json!({})).unwrap();
            assert!(contents(&Checkpoint::open(&again, before as u64).unwrap()) == saved, "{case}: other numbers");

            let losses = train(&mut trainer, &world, before..before + 3);
            for (loss, expected) in losses.iter().zip(&expected) {
                assert!(
                    (loss - expected).abs() <= tolerance * expected.abs(),
                    "{case}: {losses:?}, and not {expected:?}"
                );
            }
            // The same number of ranks in one replica adds in the same order.
            if world.size() == saved_by(precision) && replicas == 1 {
                assert_eq!(losses, expected, "{case}");
                save(&mut trainer, &again, json!({})).unwrap();
                let ended = Checkpoint::open(&store, before as u64 + 3).unwrap();
                assert!(
                    contents(&Checkpoint::open(&again, before as u64 + 3).unwrap()) == contents(&ended),
                    "{case}: other bits"
                );
            }
        }
    }
}

/// A temporary folder of the test. That of a rank is inside it.
fn scratch() -> tempfile::TempDir {
    std::env::var(FOLDER).map_or_else(|_| tempfile::tempdir(), tempfile::tempdir_in).unwrap()
}

fn launch(ranks: usize, folder: &Path) -> Launch {
    Launch::ranks(ranks).variable(FOLDER, folder.to_str().unwrap()).timeout(Duration::from_secs(300))
}

#[test]
fn a_checkpoint_is_read_by_any_number_of_ranks_at_any_stage() {
    let folder = scratch();
    ranks!(launch(4, folder.path()), || save_run(Precision::F32));
    ranks!(launch(1, folder.path()), || resume_and_compare(Precision::F32));
    ranks!(launch(2, folder.path()), || resume_and_compare(Precision::F32));
    ranks!(launch(3, folder.path()), || resume_and_compare(Precision::F32));
    ranks!(launch(4, folder.path()), || resume_and_compare(Precision::F32));
    ranks!(launch(8, folder.path()), || resume_and_compare(Precision::F32));
}

#[test]
fn f64_resumes_with_the_same_bits_and_is_exported() {
    let folder = scratch();
    ranks!(launch(2, folder.path()), || save_run(Precision::F64));
    ranks!(launch(2, folder.path()), || resume_and_compare(Precision::F64));
    let store = store(folder.path());
    let checkpoint = Checkpoint::open(&store, steps_before(Precision::F64) as u64).unwrap();
    let saved = contents(&checkpoint);
    assert!(saved.iter().all(|(_, dtype, _)| *dtype == Dtype::F64));
    let is_finer = |bits: &u64| f64::from(f64::from_bits(*bits) as f32).to_bits() != *bits;
    assert!(saved.iter().any(|(.., elements)| elements.iter().any(is_finer)), "some numbers need more than f32");

    let exported = folder.path().join("exported");
    let options = ExportOptions { dtype: Dtype::F64, file_bytes: 1 << 30 };
    let config = json!({ "model_type": "llama" });
    hugging_face::export(&checkpoint, &self::store(&exported), &config, None, &options, &mut |_| ()).unwrap();
    let weights = Weights::open(exported.to_str().unwrap()).unwrap();
    assert_eq!(weights.config().unwrap().unwrap()["dtype"], "float64");
    let ranks = Ranks::sharded(Arc::new(shardwise_comm::single::group()));
    let mut from_export = init::from_weights(&weights);
    let mut trainer = Trainer::new(model(), ranks, self::options(0, Precision::F64), &mut from_export).unwrap();
    let again = self::store(&folder.path().join("again"));
    save(&mut trainer, &again, json!({})).unwrap();
    let parameters = |contents: Vec<(String, Dtype, Vec<u64>)>| -> Vec<_> {
        contents.into_iter().filter(|(name, ..)| !name.contains('/')).collect()
    };
    let loaded = contents(&Checkpoint::open(&again, 0).unwrap());
    assert!(parameters(loaded) == parameters(saved), "the exported parameters are those of the checkpoint");
}

#[test]
fn bf16_resumes_with_the_same_bits() {
    let folder = scratch();
    ranks!(launch(4, folder.path()), || save_run(Precision::BF16));
    ranks!(launch(4, folder.path()), || resume_and_compare(Precision::BF16));
}

#[test]
fn f16_resumes_with_the_same_scale_and_bits() {
    let folder = scratch();
    ranks!(launch(4, folder.path()), || save_run(Precision::F16));
    ranks!(launch(4, folder.path()), || resume_and_compare(Precision::F16));
}

#[test]
fn a_checkpoint_of_another_model_is_refused_by_name() {
    let folder = scratch();
    ranks!(launch(2, folder.path()), || {
        let world = world();
        let store = store(&self::folder());
        let ranks = Ranks::sharded(world.clone());
        let mut trainer =
            Trainer::new(model(), ranks.clone(), options(3, Precision::F32), &mut init::from_seed(5)).unwrap();
        save(&mut trainer, &store, json!({})).unwrap();
        let checkpoint = Checkpoint::open(&store, 0).unwrap();
        let wider = Model::from_config(LlamaConfig::new(VOCAB_SIZE as usize, 48, 3, 6, 53)).unwrap();
        let refused = Trainer::resume(wider, ranks, options(3, Precision::F32), &checkpoint).err().unwrap().to_string();
        assert!(refused.contains("model.embed_tokens.weight") && refused.contains("[101, 36]"), "{refused}");
    });
}
