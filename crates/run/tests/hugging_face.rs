//! Models of Hugging Face's `transformers`: loaded in shards, compared by logits, trained, exported, and loaded by `transformers`.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use shardwise_checkpoint::hugging_face::{ExportOptions, Weights, export};
use shardwise_checkpoint::{Checkpoint, Store};
use shardwise_comm::mpi;
use shardwise_harness::{Launch, ranks, run_with_transformers};
use shardwise_model::{Batch, Model, ModelConfig};
use shardwise_plan::Dtype;
use shardwise_run::save;
use shardwise_torch::tch::Tensor;
use shardwise_train::{Options, Ranks, Schedule, Trainer, init};
use shardwise_zero::{AdamW, Optimizer, Sharding};

const FAMILIES: [&str; 14] = [
    "llama2",
    "llama3",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen3-moe",
    "qwen3-moe-normalized",
    "olmoe",
    "gpt2",
    "linear",
    "dynamic",
    "yarn",
    "yarn-tuned",
];
const FOLDER: &str = "SHARDWISE_TEST_FOLDER";

fn python(verb: &str, folder: &Path) {
    println!("{}", run_with_transformers("hugging_face.py", &[Path::new(verb), folder]).unwrap());
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Loads a family's model on all ranks at stage 3, compares its logits, trains it for ten steps and exports it.
fn train_and_export(world: &Arc<shardwise_comm::Group>, folder: &Path, family: &str) {
    let weights = Weights::open(text(&folder.join(family))).unwrap();
    let config = weights.config().unwrap().unwrap();
    let model = Model::from_config(ModelConfig::from_hugging_face(&config).unwrap()).unwrap();
    let adamw = AdamW { lr: 0., beta1: 0.9, beta2: 0.95, weight_decay: 0.1, eps: 1e-8 };
    let options = Options::new(Sharding::stage(3).unwrap(), Optimizer::AdamW(adamw), Schedule::constant(1e-3));
    let ranks = Ranks::sharded(world.clone());
    let mut trainer = Trainer::new(model, ranks, options, &mut init::from_weights(&weights)).unwrap();

    let theirs: HashMap<String, Tensor> =
        Tensor::read_safetensors(folder.join(format!("{family}.safetensors"))).unwrap().into_iter().collect();
    let tokens = &theirs["tokens"];
    let difference = (trainer.logits(tokens).unwrap() - &theirs["logits"]).abs().max().double_value(&[]);
    assert!(difference < 1e-4, "{family}: logits differ by {difference}");

    let batch = Batch::new(tokens.narrow(1, 0, 23).contiguous(), tokens.narrow(1, 1, 23).contiguous());
    let losses: Vec<f64> = (0..10).map(|_| trainer.step(std::slice::from_ref(&batch)).unwrap().loss).collect();
    assert!(losses[9] < losses[0], "{family}: {losses:?}");
    let ours = trainer.logits(tokens).unwrap();
    let saved = Arc::new(Store::create(text(&folder.join(family).join("saved"))).unwrap());
    save(&mut trainer, &saved, json!({})).unwrap();
    if world.rank() == 0 {
        let named = [("tokens", tokens), ("logits", &ours)];
        Tensor::write_safetensors(&named, folder.join(format!("{family}.trained.safetensors"))).unwrap();
        let checkpoint = Checkpoint::open(&saved, 10).unwrap();
        let to = Store::create(text(&folder.join(family).join("exported"))).unwrap();
        let like = Store::open(text(&folder.join(family))).unwrap();
        let how = ExportOptions { dtype: Dtype::F32, file_bytes: 100_000 };
        export(&checkpoint, &to, &config, Some(&like), &how, &mut |_| ()).unwrap();
    }
    world.barrier("exported").wait().unwrap();
}

#[test]
fn every_family_goes_in_and_out() {
    // The folder of a rank is inside that of the test.
    let folder = std::env::var(FOLDER).map_or_else(|_| tempfile::tempdir(), tempfile::tempdir_in).unwrap();
    if std::env::var_os(FOLDER).is_none() {
        python("make", folder.path());
    }
    let launch = Launch::ranks(3).variable(FOLDER, text(folder.path())).timeout(Duration::from_secs(300));
    ranks!(launch, || {
        let world =
            Arc::new(mpi::world(mpi::Options { timeout: Duration::from_secs(60), ..mpi::Options::default() }).unwrap());
        let folder = PathBuf::from(std::env::var(FOLDER).unwrap());
        FAMILIES.iter().for_each(|family| train_and_export(&world, &folder, family));
    });
    python("check", folder.path());
}
