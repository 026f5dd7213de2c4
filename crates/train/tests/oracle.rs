//! Training against the oracle in `reference/`: stage 3 on 4 ranks, with uneven counts of tokens per rank and micro-batch, and
//! one plain PyTorch process that sees the same tokens as one batch. 50 steps of AdamW, the same losses and norms.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use shardwise_comm::mpi;
use shardwise_harness::{Launch, ranks};
use shardwise_model::{Batch, Gpt2, IGNORED, Llama, Model};
use shardwise_torch::tch::{Device, Kind, Tensor};
use shardwise_train::{Options, Ranks, Recomputation, Schedule, Trainer, start};
use shardwise_zero::{AdamW, Optimizer, Sharding};

const VOCABULARY: i64 = 101;
const STEPS: i64 = 50;
const RANKS: i64 = 4;
const MICRO_BATCHES: i64 = 2;
const ADAMW: AdamW = AdamW { rate: 3e-3, beta1: 0.9, beta2: 0.95, weight_decay: 0.1, epsilon: 1e-8 };
const CLIP_NORM: f64 = 0.5;

/// All sequences of a step, of all ranks and micro-batches. Later ones have fewer and fewer targets that count.
fn step_batch(step: i64) -> Batch {
    let sequences = RANKS * MICRO_BATCHES * 2;
    let numbers = Tensor::arange(sequences * 12, (Kind::Int64, Device::Cpu)).view([sequences, 12]);
    let tokens = (&numbers * &numbers + numbers * 7 + step * 31).remainder(VOCABULARY);
    let targets = (&tokens * 3 + 1).remainder(VOCABULARY);
    let place = Tensor::arange(12, (Kind::Int64, Device::Cpu));
    let end = Tensor::arange(sequences, (Kind::Int64, Device::Cpu)).view([sequences, 1]);
    let ignored = place.ge_tensor(&(end.neg() * 3 / 4 + 12));
    Batch::new(tokens, targets.masked_fill(&ignored, IGNORED))
}

fn own_batches(step: i64, rank: i64) -> Vec<Batch> {
    let all = step_batch(step);
    let part = |tensor: &Tensor, index: i64| tensor.narrow(0, (index * RANKS + rank) * 2, 2).contiguous();
    let batch = |index| Batch::new(part(&all.inputs, index), part(&all.targets, index));
    (0..MICRO_BATCHES).map(batch).collect()
}

/// What the oracle prints: losses and norms.
fn oracle(name: &str, family: &str, model: &Model, initial: &[Tensor]) -> Vec<[f64; 2]> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    let python = shardwise_harness::python().unwrap();
    let folder = std::env::temp_dir().join(format!("shardwise-oracle-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let config = format!(
        r#"{{ {family}, "clip_norm": {CLIP_NORM},
             "adamw": {{ "rate": {}, "beta1": {}, "beta2": {}, "weight_decay": {}, "epsilon": {} }} }}"#,
        ADAMW.rate, ADAMW.beta1, ADAMW.beta2, ADAMW.weight_decay, ADAMW.epsilon
    );
    std::fs::write(folder.join("config.json"), config).unwrap();
    let batches: Vec<Batch> = (0..STEPS).map(step_batch).collect();
    let stacked = |part: fn(&Batch) -> &Tensor| Tensor::stack(&batches.iter().map(part).collect::<Vec<_>>(), 0);
    let (tokens, targets) = (stacked(|batch| &batch.inputs), stacked(|batch| &batch.targets));
    let names = model.units().iter().flat_map(|unit| unit.parameters().iter().map(|p| p.name.as_str()));
    let mut tensors: Vec<(&str, &Tensor)> = names.zip(initial).collect();
    tensors.extend([("tokens", &tokens), ("targets", &targets)]);
    Tensor::write_safetensors(&tensors, folder.join("in.safetensors")).unwrap();
    let output = Command::new(python)
        .arg(root.join("reference/train.py"))
        .args([folder.join("config.json"), folder.join("in.safetensors")])
        .output()
        .unwrap();
    std::fs::remove_dir_all(folder).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let numbers = |line: &str| -> [f64; 2] {
        let numbers: Vec<f64> = line.split(' ').map(|word| word.parse().unwrap()).collect();
        numbers.try_into().unwrap()
    };
    String::from_utf8_lossy(&output.stdout).lines().map(numbers).collect()
}

fn agrees(name: &str, family: &str, model: impl Fn() -> Model) {
    let group =
        Arc::new(mpi::world(mpi::Options { time_limit: Duration::from_secs(100), ..mpi::Options::default() }).unwrap());
    assert_eq!(group.size() as i64, RANKS);
    let sharding = Sharding::stage(3).unwrap();
    let options = Options {
        recomputation: Recomputation::Full,
        clip_norm: Some(CLIP_NORM),
        ..Options::new(sharding, Optimizer::AdamW(ADAMW), Schedule::constant(ADAMW.rate))
    };
    let ranks = Ranks::sharded(group.clone());
    let mut trainer = Trainer::new(model(), ranks, options, &mut start::from_seed(11)).unwrap();
    let mut initial = Vec::new();
    for shard in trainer.shards_mut() {
        shard.gather().unwrap();
        initial.extend(shard.parameters().iter().map(|tensor| tensor.detach().copy()));
        shard.release().unwrap();
    }
    let expected = match group.rank() {
        0 => oracle(name, family, &model(), &initial),
        _ => Vec::new(),
    };
    let mut worst = [0f64; 2];
    for step in 0..STEPS {
        let report = trainer.step(&own_batches(step, group.rank() as i64)).unwrap();
        if let Some(expected) = expected.get(step as usize) {
            for (place, found) in [report.loss, report.gradient_norm].into_iter().enumerate() {
                let difference = (found / expected[place] - 1.).abs();
                worst[place] = worst[place].max(difference);
                assert!(difference < 1e-5, "step {step}: {found} is not {} ({difference:e})", expected[place]);
            }
        }
    }
    if group.rank() == 0 {
        assert_eq!(expected.len() as i64, STEPS);
        println!("{name}: losses agree to {:.1e}, norms to {:.1e}", worst[0], worst[1]);
    }
}

#[test]
fn llama_trains_like_the_oracle() {
    ranks!(Launch::ranks(4), || {
        let llama = || Llama { kv_heads: 3, head_chunk: 10, ..Llama::new(VOCABULARY as usize, 36, 2, 6, 53) };
        let shape = llama();
        let family = format!(
            r#""family": "llama", "blocks": {}, "head_width": {}, "rope_base": {}, "norm_epsilon": {}, "tied": false"#,
            shape.blocks, shape.head_width, shape.rope_base, shape.norm_epsilon
        );
        agrees("llama", &family, || llama().model().unwrap());
    });
}

#[test]
fn gpt_2_trains_like_the_oracle() {
    ranks!(Launch::ranks(4), || {
        let gpt2 = || Gpt2::new(VOCABULARY as usize, 16, 36, 2, 6);
        let family = format!(
            r#""family": "gpt2", "blocks": {}, "heads": {}, "norm_epsilon": {}"#,
            gpt2().blocks,
            gpt2().heads,
            gpt2().norm_epsilon
        );
        agrees("gpt-2", &family, || gpt2().model().unwrap());
    });
}
