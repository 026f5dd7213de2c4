//! Generation gives the same tokens with and without a cache, on any number of ranks; evaluation gives the loss of a step.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use shardwise_comm::{mpi, single};
use shardwise_harness::{Launch, ranks};
use shardwise_model::{Batch, Gpt2Config, IGNORED, LlamaConfig, Model, ModelConfig, MoeConfig, QkNorm};
use shardwise_torch::tch::{Device, Kind, Tensor};
use shardwise_train::{Options, Ranks, Sampling, Schedule, Trainer, generate, init};
use shardwise_zero::{AdamW, Optimizer, Precision, Sharding};

const VOCAB_SIZE: i64 = 101;
const SEQ_LEN: usize = 48;
const PROMPT: [i64; 5] = [3, 1, 41, 59, 26];

/// One model for each kind of attention. Their weights are large, so that texts do not repeat a single token.
fn models() -> Vec<(&'static str, Model)> {
    let small = LlamaConfig {
        loss_chunk_tokens: 10,
        initializer_range: 0.3,
        ..LlamaConfig::new(VOCAB_SIZE as usize, 36, 3, 6, 53)
    };
    let gpt2 = Gpt2Config { initializer_range: 0.3, ..Gpt2Config::new(VOCAB_SIZE as usize, SEQ_LEN, 36, 2, 6) };
    let configs: [(&str, ModelConfig); 5] = [
        ("Llama", LlamaConfig { num_key_value_heads: 2, tie_word_embeddings: true, ..small.clone() }.into()),
        ("Mistral", LlamaConfig { num_key_value_heads: 3, sliding_window: Some(7), ..small.clone() }.into()),
        (
            "Qwen 3",
            LlamaConfig { num_key_value_heads: 3, head_dim: 8, qk_norm: Some(QkNorm::PerHead), ..small.clone() }.into(),
        ),
        ("Mixtral", LlamaConfig { moe: Some(MoeConfig::new(5, 2, 20)), ..small }.into()),
        ("GPT-2", gpt2.into()),
    ];
    configs.into_iter().map(|(name, config)| (name, Model::from_config(config).unwrap())).collect()
}

fn trainer(model: Model, ranks: &Ranks, stage: u8, rate: f64) -> Trainer {
    let adamw = AdamW { lr: 0., beta1: 0.9, beta2: 0.95, weight_decay: 0.1, eps: 1e-8 };
    let sharding = Sharding::stage(stage).unwrap();
    let options = Options::new(sharding, Optimizer::AdamW(adamw), Schedule::constant(rate));
    Trainer::new(model, ranks.clone(), options, &mut init::from_seed(5)).unwrap()
}

fn alone() -> Ranks {
    Ranks::sharded(Arc::new(single::group()))
}

fn text(trainer: &mut Trainer, most: usize, sampling: &Sampling) -> Vec<i64> {
    generate(trainer, &PROMPT, most, &[], sampling, &mut |_| ControlFlow::Continue(())).unwrap()
}

/// The same without a cache: the whole sequence for every token.
fn text_without_cache(trainer: &mut Trainer, most: usize) -> Vec<i64> {
    let mut tokens = PROMPT.to_vec();
    for _ in 0..most {
        let logits = trainer.logits(&Tensor::from_slice(&tokens).view([1, -1])).unwrap();
        tokens.push(logits.select(1, -1).argmax(1, false).int64_value(&[0]));
    }
    tokens.split_off(PROMPT.len())
}

fn assert_is_a_text(name: &str, tokens: &[i64]) {
    let mut different = tokens.to_vec();
    different.sort_unstable();
    different.dedup();
    assert!(different.len() > 4, "{name}: a text that could fail to be the same: {tokens:?}");
}

#[test]
fn the_cache_changes_no_token() {
    for (name, model) in models() {
        let mut trainer = trainer(model, &alone(), 0, 0.);
        let expected = text_without_cache(&mut trainer, 40);
        assert_is_a_text(name, &expected);
        assert_eq!(text(&mut trainer, 40, &Sampling::GREEDY), expected, "{name}");
    }
}

#[test]
fn ranks_generate_together() {
    ranks!(Launch::ranks(2).timeout(Duration::from_secs(120)), || {
        let world =
            Arc::new(mpi::world(mpi::Options { timeout: Duration::from_secs(60), ..mpi::Options::default() }).unwrap());
        let (sharded, shared) = (Ranks::sharded(world.clone()), Ranks::parallel(world, 1, 2).unwrap());
        let chance = Sampling { temperature: 0.8, top_k: Some(20), top_p: Some(0.9), seed: 11 };
        for ranks in [sharded, shared] {
            for ((name, model), (_, whole)) in models().into_iter().zip(models()) {
                let name = format!("{name}, layers shared by {}", ranks.tensor.size());
                let mut together = trainer(model, &ranks, 3, 0.);
                let mut single = trainer(whole, &alone(), 0, 0.);
                let found = text(&mut together, 30, &Sampling::GREEDY);
                assert_eq!(found, text_without_cache(&mut together, 30), "{name}");
                assert_eq!(found, text(&mut single, 30, &Sampling::GREEDY), "{name}");
                assert_eq!(text(&mut together, 30, &chance), text(&mut single, 30, &chance), "{name}, by chance");
                assert_eq!(evaluation_and_loss(&mut together, &ranks), [0.; 2], "{name}");
            }
        }
    });
}

#[test]
fn a_seed_decides_the_text() {
    let (_, model) = models().remove(0);
    let mut trainer = trainer(model, &alone(), 0, 0.);
    let chance = Sampling { temperature: 1., top_k: Some(3), top_p: None, seed: 1 };
    let tokens = text(&mut trainer, 30, &chance);
    assert_eq!(text(&mut trainer, 30, &chance), tokens);
    assert_ne!(text(&mut trainer, 30, &Sampling { seed: 2, ..chance }), tokens);
    // Each is one of the three most likely.
    let all: Vec<i64> = PROMPT.iter().chain(&tokens).copied().collect();
    let logits = trainer.logits(&Tensor::from_slice(&all).view([1, -1])).unwrap();
    let (_, likeliest) = logits.topk(3, -1, true, true);
    for (place, token) in tokens.iter().enumerate() {
        let allowed = likeliest.select(1, (PROMPT.len() + place) as i64 - 1).eq(*token).any().int64_value(&[]);
        assert_eq!(allowed, 1, "token {place}");
    }
    assert_ne!(tokens, text(&mut trainer, 30, &Sampling::GREEDY));
    assert_eq!(text(&mut trainer, 30, &Sampling { top_p: Some(1e-6), ..chance }), text_without_cache(&mut trainer, 30));
}

#[test]
fn a_text_ends() {
    let (_, model) = models().pop().unwrap();
    let mut trainer = trainer(model, &alone(), 0, 0.);
    let all = text(&mut trainer, 1000, &Sampling::GREEDY);
    // The last token is computed from a sequence that fills all positions.
    assert_eq!(all.len(), SEQ_LEN - PROMPT.len() + 1);
    let place = (1..all.len()).find(|&place| !all[..place].contains(&all[place])).unwrap();
    let mut shown = Vec::new();
    let mut until = |stop: &[i64], most| {
        shown.clear();
        let mut each = |token| {
            shown.push(token);
            if shown.len() == most { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let tokens = generate(&mut trainer, &PROMPT, 1000, stop, &Sampling::GREEDY, &mut each).unwrap();
        assert_eq!(tokens, shown);
        tokens
    };
    assert_eq!(until(&[all[place]], 1000), all[..place]);
    assert_eq!(until(&[], 3), all[..3]);
    let mut fail = |prompt: &[i64]| {
        let mut each = |_| ControlFlow::Continue(());
        generate(&mut trainer, prompt, 1, &[], &Sampling::GREEDY, &mut each).unwrap_err().to_string()
    };
    assert_eq!(fail(&[1; 49]), "the prompt has 49 tokens, but the model has only 48 positions; shorten the prompt");
    assert!(fail(&[]).contains("the prompt has no tokens"));
}

fn batch(number: i64) -> Batch {
    let numbers = Tensor::arange(3 * 12, (Kind::Int64, Device::Cpu)).view([3, 12]);
    let tokens = (numbers * 7 + number * 57).remainder(VOCAB_SIZE);
    let targets = (&tokens * 3 + 1).remainder(VOCAB_SIZE);
    let ignored = (&tokens + number).remainder(4).eq(0);
    let targets = targets.masked_fill(&ignored, IGNORED);
    let documents = Tensor::arange(12, (Kind::Int64, Device::Cpu)).ge(5).to_kind(Kind::Int64).repeat([3, 1]);
    match number % 2 == 1 {
        true => Batch::packed(tokens, targets, &documents).unwrap(),
        false => Batch::new(tokens, targets),
    }
}

/// The difference between an evaluation and a step's report, in loss and tokens.
fn evaluation_and_loss(trainer: &mut Trainer, ranks: &Ranks) -> [f64; 2] {
    let first = 2 * ranks.data_rank() as i64;
    let batches = [batch(first), batch(first + 1)];
    let found = trainer.evaluate(&batches).unwrap();
    let report = trainer.step(&batches).unwrap();
    [found.loss_sum / found.tokens as f64 - report.loss, found.tokens as f64 - report.tokens as f64]
}

#[test]
fn an_evaluation_is_the_loss_of_a_step() {
    for (name, model) in models() {
        let mut trainer = trainer(model, &alone(), 0, 1e-2);
        assert_eq!(evaluation_and_loss(&mut trainer, &alone()), [0.; 2], "{name}");
        // Also after a step.
        assert_eq!(evaluation_and_loss(&mut trainer, &alone()), [0.; 2], "{name}");
    }
}

#[test]
fn ignored_targets_can_be_evaluated() {
    let (_, model) = models().remove(0);
    let mut trainer = trainer(model, &alone(), 0, 0.);
    let nothing = Batch { targets: batch(0).targets.fill_(IGNORED), ..batch(0) };
    let found = trainer.evaluate(&[nothing]).unwrap();
    assert_eq!((found.loss_sum, found.tokens), (0., 0));
    assert!(trainer.evaluate(&[]).unwrap_err().to_string().contains("0 micro-batches"));
}

#[test]
fn half_precision_generates() {
    let (_, model) = models().remove(1);
    let adamw = AdamW { lr: 0., beta1: 0.9, beta2: 0.95, weight_decay: 0.1, eps: 1e-8 };
    let options = Options::new(Sharding::stage(0).unwrap(), Optimizer::AdamW(adamw), Schedule::constant(0.));
    let options = Options { precision: Precision::BF16, ..options };
    let mut trainer = Trainer::new(model, alone(), options, &mut init::from_seed(5)).unwrap();
    assert_is_a_text("bf16", &text(&mut trainer, 30, &Sampling::GREEDY));
}
