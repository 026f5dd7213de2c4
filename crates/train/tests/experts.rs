//! Mixtures of experts: the same bits at every stage, and every token is processed and counted once by each of its experts.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::sync::Arc;
use std::time::Duration;

use shardwise_comm::{mpi, single};
use shardwise_harness::{Launch, ranks};
use shardwise_model::{Batch, IGNORED, LlamaConfig, Model, MoeConfig, Parameter, RouterConfig, ScoringFunc};
use shardwise_torch::tch::{Device, Kind, Tensor, set_num_threads};
use shardwise_train::{
    ActivationCheckpointing, DynamicScale, LossScale, OnNonFinite, Options, Ranks, Schedule, Trainer, init,
};
use shardwise_zero::{AdamW, FloatsMut, Optimizer, Precision, Sharding};

const VOCAB_SIZE: i64 = 101;
const SEQUENCES: i64 = 3;
const POSITIONS: i64 = 12;
const EXPERTS: usize = 6;
const EXPERTS_PER_TOKEN: usize = 2;
/// All micro-batches of a step, which the ranks divide.
const MICRO_BATCHES: i64 = 4;
const STEPS: i64 = 20;
/// Enough for bits to differ, if they do.
const FEW_STEPS: i64 = 4;

const CHECKPOINTING: [ActivationCheckpointing; 3] =
    [ActivationCheckpointing::None, ActivationCheckpointing::Selective, ActivationCheckpointing::Full];

fn model(router: RouterConfig) -> Model {
    let moe = MoeConfig { router, n_shared_experts: 1, ..MoeConfig::new(EXPERTS, EXPERTS_PER_TOKEN, 19) };
    let llama = LlamaConfig { num_key_value_heads: 3, loss_chunk_tokens: 10, ..LlamaConfig::new(101, 36, 2, 6, 53) };
    Model::from_config(LlamaConfig { moe: Some(moe), ..llama }).unwrap()
}

fn balanced(scoring_func: ScoringFunc) -> RouterConfig {
    RouterConfig { scoring_func, router_aux_loss_coef: 0.1, router_z_loss_coef: 0.01, ..RouterConfig::default() }
}

/// A micro-batch of a step by its global index, the same on any rank. Some targets are ignored.
fn batch(step: i64, micro: i64) -> Batch {
    let numbers = Tensor::arange(SEQUENCES * POSITIONS, (Kind::Int64, Device::Cpu)).view([SEQUENCES, POSITIONS]);
    let tokens = (numbers * 7 + step * 31 + micro * 57).remainder(VOCAB_SIZE);
    let targets = (&tokens * 3 + 1).remainder(VOCAB_SIZE);
    let ignored = (&tokens + micro).remainder(4).eq(0);
    Batch::new(tokens, targets.masked_fill(&ignored, IGNORED))
}

fn options(stage: u8, activation_checkpointing: ActivationCheckpointing, precision: Precision) -> Options {
    let optimizer = Optimizer::AdamW(AdamW { weight_decay: 0.1, eps: 1e-4, ..AdamW::default() });
    Options {
        activation_checkpointing,
        precision,
        max_grad_norm: Some(0.5),
        ..Options::new(Sharding::stage(stage).unwrap(), optimizer, Schedule::constant(1e-2))
    }
}

/// Losses and gradient norms, and the tokens of each expert.
#[derive(Clone, Debug, PartialEq)]
struct Trained {
    numbers: Vec<[f64; 2]>,
    expert_tokens: Vec<Vec<Vec<u64>>>,
}

fn train(model: Model, ranks: &Ranks, options: Options, steps: i64) -> Trained {
    let mut trainer = Trainer::new(model, ranks.clone(), options, &mut init::from_seed(5)).unwrap();
    let (rank, size) = (ranks.data_rank() as i64, ranks.data_size() as i64);
    let mut trained = Trained { numbers: Vec::new(), expert_tokens: Vec::new() };
    for step in 0..steps {
        let own: Vec<Batch> = (0..MICRO_BATCHES / size).map(|index| batch(step, index * size + rank)).collect();
        let report = trainer.step(&own).unwrap();
        trained.numbers.push([report.loss, report.grad_norm]);
        trained.expert_tokens.push(report.expert_tokens);
        // An evaluation is not counted.
        trainer.evaluate(&own).unwrap();
    }
    trained
}

fn alone() -> Ranks {
    Ranks::sharded(Arc::new(single::group()))
}

fn compare(size: usize) {
    let world =
        Arc::new(mpi::world(mpi::Options { timeout: Duration::from_secs(60), ..mpi::Options::default() }).unwrap());
    assert_eq!(world.size(), size);
    let ranks = Ranks::sharded(world);
    for scoring_func in [ScoringFunc::Softmax, ScoringFunc::Sigmoid] {
        let router = balanced(scoring_func);
        let run = |ranks: &Ranks, stage, checkpointing, precision, steps| {
            train(model(router), ranks, options(stage, checkpointing, precision), steps)
        };
        for precision in [Precision::F64, Precision::F32] {
            let first = run(&ranks, 0, ActivationCheckpointing::None, precision, FEW_STEPS);
            for (stage, checkpointing) in (0..4).flat_map(|stage| CHECKPOINTING.map(|how| (stage, how))) {
                let found = run(&ranks, stage, checkpointing, precision, FEW_STEPS);
                assert_eq!(found, first, "{scoring_func:?}, {precision:?}, stage {stage}, {checkpointing:?}");
            }
        }
        let plain = |ranks| run(ranks, 0, ActivationCheckpointing::None, Precision::F64, STEPS);
        let (found, expected) = (plain(&ranks), plain(&alone()));
        assert_eq!(found.expert_tokens, expected.expert_tokens);
        for (found, expected) in found.numbers.iter().flatten().zip(expected.numbers.iter().flatten()) {
            let error = (found - expected).abs() / expected;
            assert!(error < 1e-12, "{scoring_func:?}: {found} instead of {expected} ({error:.1e})");
        }
    }
}

#[test]
fn experts_train_alike_on_2_ranks() {
    ranks!(Launch::ranks(2).timeout(Duration::from_secs(500)), || compare(2));
}

#[test]
fn experts_train_alike_on_4_ranks() {
    ranks!(Launch::ranks(4).timeout(Duration::from_secs(500)), || compare(4));
}

#[test]
fn every_token_is_counted_once_by_each_of_its_experts() {
    set_num_threads(1);
    let all = (SEQUENCES * POSITIONS * MICRO_BATCHES) as u64 * EXPERTS_PER_TOKEN as u64;
    for checkpointing in CHECKPOINTING {
        let options = options(0, checkpointing, Precision::F32);
        let trained = train(model(balanced(ScoringFunc::Softmax)), &alone(), options, 2);
        for counts in trained.expert_tokens {
            let [embedding, blocks @ .., head] = &counts[..] else { panic!("{counts:?}") };
            assert!(embedding.is_empty() && head.is_empty());
            for block in blocks {
                assert_eq!((block.len(), block.iter().sum::<u64>()), (EXPERTS, all), "{checkpointing:?}");
            }
        }
    }
}

/// A model whose experts are balanced by a bias.
fn biased() -> Model {
    model(RouterConfig { router_bias_update_rate: 0.01, ..RouterConfig::default() })
}

#[test]
fn biases_change_with_each_update_of_their_block_and_not_otherwise() {
    set_num_threads(1);
    let biases = |model: Model, options: Options| {
        let mut trainer = Trainer::new(model, alone(), options, &mut init::from_seed(5)).unwrap();
        let report = trainer.step(&[batch(0, 0)]).unwrap();
        let all = trainer.progress().expert_biases;
        assert_eq!(all.iter().map(Vec::len).collect::<Vec<_>>(), [0, EXPERTS, EXPERTS, 0]);
        (report, all)
    };
    let plain = options(0, ActivationCheckpointing::None, Precision::F32);
    let (report, trained) = biases(biased(), plain.clone());
    let mean = (SEQUENCES * POSITIONS) as u64 * EXPERTS_PER_TOKEN as u64 / EXPERTS as u64;
    for (tokens, biases) in report.expert_tokens.iter().zip(&trained) {
        for (&tokens, &bias) in tokens.iter().zip(biases) {
            let expected = 0.01 * (mean as f32 - tokens as f32).signum() * f32::from(u8::from(tokens != mean));
            assert_eq!(bias, expected, "{tokens} tokens, with a mean of {mean}");
        }
    }
    assert!(trained.iter().flatten().any(|bias| *bias != 0.));

    let mut frozen = biased();
    frozen.freeze(&["model.layers.0.".to_string()]).unwrap();
    let (_, partly) = biases(frozen, plain.clone());
    assert_eq!(partly[1], [0.; EXPERTS]);
    assert_eq!(partly[2], trained[2]);

    let overflowing = DynamicScale { initial: f64::from(f32::MAX), ..DynamicScale::DEFAULT };
    let skipping = Options { loss_scale: LossScale::Dynamic(overflowing), on_nonfinite: OnNonFinite::Skip, ..plain };
    let (report, skipped) = biases(biased(), skipping);
    assert!(report.skipped.is_some());
    assert!(skipped.iter().flatten().all(|bias| *bias == 0.), "{skipped:?}");
}

#[test]
fn the_balance_loss_is_a_mean_over_targets() {
    set_num_threads(1);
    let gradient_norm = |micro_batches: &[Batch], loss_scale: LossScale| {
        let options = Options { loss_scale, ..options(0, ActivationCheckpointing::None, Precision::F64) };
        let ranks = alone();
        let mut trainer =
            Trainer::new(model(balanced(ScoringFunc::Softmax)), ranks, options, &mut init::from_seed(5)).unwrap();
        trainer.step(micro_batches).unwrap().grad_norm
    };
    let expected = gradient_norm(&[batch(0, 0)], LossScale::Fixed(1.));
    for (found, what) in [
        (gradient_norm(&[batch(0, 0), batch(0, 0)], LossScale::Fixed(1.)), "the same micro-batch twice"),
        (gradient_norm(&[batch(0, 0)], LossScale::Fixed(1024.)), "a loss scale"),
    ] {
        assert!((found / expected - 1.).abs() < 1e-12, "{what}: {found} instead of {expected}");
    }
}

#[test]
fn all_tokens_may_choose_the_same_experts() {
    let options = options(3, ActivationCheckpointing::Full, Precision::F32);
    let mut from_seed = init::from_seed(5);
    let mut init = |parameter: &Parameter, range, elements: FloatsMut<'_>| {
        match parameter.name.ends_with("mlp.gate.weight") {
            // All scores are equal, so that the first experts are chosen.
            true => {
                elements.fill(0.);
                Ok(())
            }
            false => from_seed(parameter, range, elements),
        }
    };
    let mut trainer = Trainer::new(model(RouterConfig::default()), alone(), options, &mut init).unwrap();
    let report = trainer.step(&[batch(0, 0)]).unwrap();
    let tokens = (SEQUENCES * POSITIONS) as u64;
    assert_eq!(report.expert_tokens[1], [tokens, tokens, 0, 0, 0, 0]);
    assert!(report.loss.is_finite() && report.grad_norm > 0.);
    assert_eq!(report.without_gradient, Vec::<String>::new());
}
