//! A checkpoint of ranks that share layers, hold different experts or hold the stages of a pipeline is read by any other layout, with the same
//! bits, and exports the same files.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use shardwise_checkpoint::hugging_face::{self, ExportOptions};
use shardwise_checkpoint::{Checkpoint, Store, elements};
use shardwise_comm::{Group, mpi};
use shardwise_harness::{Launch, ranks};
use shardwise_model::{Batch, Gpt2Config, LlamaConfig, Model, ModelConfig, MoeConfig, RouterConfig};
use shardwise_plan::{Axis, Dtype, Mesh};
use shardwise_run::save;
use shardwise_torch::tch::{Device, Kind, Tensor};
use shardwise_train::{Options, Ranks, Schedule, Trainer, init};
use shardwise_zero::{AdamW, FloatsMut, Optimizer, Sharding};

const VOCAB_SIZE: i64 = 101;
const STEPS: i64 = 2;
const FOLDER: &str = "SHARDWISE_TEST_FOLDER";

/// The number of stages, replicas, shards, ranks that hold different experts, ranks that divide each sequence, and ranks that share each layer.
type Layout = [usize; 6];

/// The layouts of four ranks, and two of six.
const LAYOUTS: [Layout; 8] = [
    [1, 1, 4, 1, 1, 1],
    [1, 1, 2, 1, 1, 2],
    [1, 1, 1, 1, 1, 4],
    [1, 2, 1, 1, 1, 2],
    [1, 1, 3, 1, 1, 2],
    [2, 1, 2, 1, 1, 1],
    [2, 1, 1, 1, 1, 2],
    [3, 2, 1, 1, 1, 1],
];

/// The layouts of a model with experts.
const LAYOUTS_OF_EXPERTS: [Layout; 8] = [
    [1, 1, 4, 1, 1, 1],
    [1, 1, 2, 2, 1, 1],
    [1, 1, 1, 4, 1, 1],
    [1, 1, 1, 2, 1, 2],
    [2, 1, 1, 2, 1, 1],
    [1, 1, 1, 2, 2, 1],
    [1, 1, 1, 1, 2, 2],
    [1, 1, 1, 2, 3, 1],
];

/// The layouts of a model.
fn layouts_of(model: &str) -> &'static [Layout] {
    if model == "experts" { &LAYOUTS_OF_EXPERTS } else { &LAYOUTS }
}

/// A Llama whose key heads several ranks use, with a frozen matrix that is split and a frozen norm that is not, a GPT-2 with a
/// fused matrix, and a Llama with experts, some of which are frozen.
fn models() -> [(&'static str, Model); 3] {
    let llama = LlamaConfig {
        num_key_value_heads: 3,
        head_dim: 4,
        tie_word_embeddings: true,
        ..LlamaConfig::new(VOCAB_SIZE as usize, 20, 2, 12, 53)
    };
    let gpt2 = Gpt2Config::new(VOCAB_SIZE as usize, 8, 36, 2, 12);
    let router = RouterConfig { router_bias_update_rate: 0.01, ..RouterConfig::default() };
    let moe = Some(MoeConfig { n_shared_experts: 1, router, ..MoeConfig::new(4, 2, 9) });
    let experts = LlamaConfig { moe, ..LlamaConfig::new(VOCAB_SIZE as usize, 24, 2, 4, 53) };
    [
        ("llama", ModelConfig::from(llama), &["model.layers.0.mlp.up_proj", "model.layers.1.input_layernorm"][..]),
        ("gpt2", gpt2.into(), &[]),
        ("experts", experts.into(), &["model.layers.0.mlp.experts.*.up_proj"]),
    ]
    .map(|(name, config, frozen)| {
        let mut model = Model::from_config(config).unwrap();
        model.freeze(frozen).unwrap();
        (name, model)
    })
}

fn model(name: &str) -> Model {
    models().into_iter().find(|(other, _)| *other == name).unwrap().1
}

fn options() -> Options {
    let adamw = AdamW { lr: 0., beta1: 0.9, beta2: 0.95, weight_decay: 0.1, eps: 1e-8 };
    Options::new(Sharding::stage(3).unwrap(), Optimizer::AdamW(adamw), Schedule::constant(3e-3))
}

fn world() -> Arc<Group> {
    Arc::new(mpi::world(mpi::Options { timeout: Duration::from_secs(60), ..mpi::Options::default() }).unwrap())
}

fn batch(step: i64, reader: i64) -> Batch {
    let numbers = Tensor::arange(2 * 7, (Kind::Int64, Device::Cpu)).view([2, 7]);
    let tokens = (numbers * 7 + step * 31 + reader * 57).remainder(VOCAB_SIZE);
    let targets = (&tokens * 3 + 1).remainder(VOCAB_SIZE);
    Batch::new(tokens, targets)
}

fn store(model: &str, layout: Layout, what: &str) -> Arc<Store> {
    let folder = PathBuf::from(std::env::var(FOLDER).unwrap());
    let folder = folder.join(format!("{model}-{}{what}", layout.map(|size| size.to_string()).join("-")));
    Arc::new(Store::create(folder.to_str().unwrap()).unwrap())
}

fn place_ranks(world: &Arc<Group>, [stages, replicas, _, experts, context, tensor]: Layout) -> Ranks {
    let sizes = [
        (Axis::Pipeline, stages),
        (Axis::Replicate, replicas),
        (Axis::Expert, experts),
        (Axis::Ring, context),
        (Axis::Tensor, tensor),
    ];
    Ranks::on_mesh(world.clone(), Mesh::divide(world.size(), &sizes).unwrap()).unwrap()
}

/// The layouts of a model that this world can have.
fn own_layouts(world: &Group, model: &str) -> impl Iterator<Item = Layout> {
    let size = world.size();
    layouts_of(model).iter().copied().filter(move |layout| layout.iter().product::<usize>() == size)
}

/// Trains and saves in every layout.
fn save_all() {
    let world = world();
    for (name, _) in models() {
        for layout in own_layouts(&world, name) {
            let (model, ranks) = (model(name), place_ranks(&world, layout));
            let reader = ranks.data_rank() as i64;
            let mut trainer = Trainer::new(model, ranks, options(), &mut init::from_seed(5)).unwrap();
            for step in 0..STEPS {
                let own = trainer.ranks().context.split(batch(step, reader)).unwrap();
                trainer.step(&[own]).unwrap();
            }
            save(&mut trainer, &store(name, layout, ""), json!({})).unwrap();
        }
    }
}

/// All tensors of a checkpoint, as bits.
fn contents(checkpoint: &Checkpoint) -> Vec<(String, Vec<u32>)> {
    let mut all = Vec::new();
    for unit in &checkpoint.manifest().units {
        let mut reader = checkpoint.unit(&unit.name).unwrap();
        for tensor in reader.table().tensors.clone() {
            let len = elements(&tensor.shape).unwrap();
            let mut elements = vec![0f32; len as usize];
            reader.read_floats(&tensor.name, &tensor.shape, 0..len, FloatsMut::F32(&mut elements)).unwrap();
            all.push((tensor.name, elements.iter().map(|x| x.to_bits()).collect()));
        }
    }
    all.sort();
    all
}

/// The bytes of the files of an export.
fn exported(checkpoint: &Checkpoint, store: &Arc<Store>) -> Vec<(String, Vec<u8>)> {
    let options = ExportOptions { dtype: Dtype::F32, file_bytes: 1 << 30 };
    hugging_face::export(checkpoint, store, &json!({ "model_type": "llama" }), None, &options, &mut |_| ()).unwrap();
    let folder = store.display("");
    let mut files: Vec<_> = std::fs::read_dir(Path::new(&folder))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_file())
        .map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), std::fs::read(path).unwrap()))
        .collect();
    files.sort();
    files
}

/// Loads every checkpoint in every layout of this world, and saves it again.
fn load_all() {
    let world = world();
    for (name, _) in models() {
        for layout in own_layouts(&world, name) {
            for &saved_by in layouts_of(name) {
                let what = format!("{name}: saved by {saved_by:?}, loaded by {layout:?}");
                let checkpoint = Checkpoint::open(&store(name, saved_by, ""), STEPS as u64).unwrap();
                let (model, ranks) = (model(name), place_ranks(&world, layout));
                let mut trainer = Trainer::resume(model, ranks, options(), &checkpoint).unwrap();
                let again = store(name, layout, &format!("-again-{saved_by:?}"));
                save(&mut trainer, &again, json!({})).unwrap();
                if world.rank() == 0 {
                    let loaded = Checkpoint::open(&again, STEPS as u64).unwrap();
                    assert!(contents(&loaded) == contents(&checkpoint), "{what}: other numbers");
                    let [found, expected] = [&loaded, &checkpoint].map(|saved| &saved.manifest().training["progress"]);
                    assert_eq!(found, expected, "{what}");
                    assert_eq!(found["expert_biases"].is_array(), name == "experts", "{what}: {found}");
                    let [one, other] = ["-exported", "-exported-again"]
                        .map(|ending| store(name, layout, &format!("{ending}-{saved_by:?}")));
                    let files = exported(&loaded, &one);
                    assert!(files.len() > 1 && files == exported(&checkpoint, &other), "{what}: another export");
                }
            }
        }
    }
    world.barrier("loaded").wait().unwrap();
}

#[test]
fn a_checkpoint_of_any_layout_is_read_by_any_other() {
    let folder = std::env::var(FOLDER).map_or_else(|_| tempfile::tempdir(), tempfile::tempdir_in).unwrap();
    let launch = |ranks| {
        let launch = Launch::ranks(ranks).variable(FOLDER, folder.path().to_str().unwrap());
        launch.timeout(Duration::from_secs(300))
    };
    ranks!(launch(4), save_all);
    ranks!(launch(6), save_all);
    ranks!(launch(4), load_all);
    ranks!(launch(6), load_all);
}
