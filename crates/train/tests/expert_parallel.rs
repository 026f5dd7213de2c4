//! Experts that ranks divide compute what one rank computes: the same gradients and losses to twelve digits in f64, and at one layout the
//! same bits at every stage.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use shardwise_comm::{Verb, mpi, single};
use shardwise_harness::{Launch, ranks};
use shardwise_model::{Batch, IGNORED, LlamaConfig, Model, MoeConfig, Parameter, RouterConfig, ScoringFunc, cut};
use shardwise_plan::{Axis, Mesh};
use shardwise_torch::tch::{Device, Kind, Tensor, no_grad};
use shardwise_train::{
    ActivationCheckpointing, Options, PipelineSchedule, Ranks, Report, Sampling, Schedule, Trainer, generate, init,
};
use shardwise_zero::{AdamW, FloatsMut, Lamb, Optimizer, Precision, Sgd, Sharding};

const VOCAB_SIZE: i64 = 101;
const SEQUENCES: i64 = 2;
const POSITIONS: i64 = 11;
const EXPERTS: usize = 8;
const EXPERTS_PER_TOKEN: usize = 3;
/// All micro-batches of a step, which the ranks divide.
const MICRO_BATCHES: i64 = 4;
const STEPS: i64 = 20;
/// Enough for bits to differ, if they do.
const FEW_STEPS: i64 = 3;
/// The largest difference, relative to the number, or to the largest element of a tensor.
const TOLERANCE: f64 = 1e-12;

const CHECKPOINTING: [ActivationCheckpointing; 3] =
    [ActivationCheckpointing::None, ActivationCheckpointing::Selective, ActivationCheckpointing::Full];

fn model(router: RouterConfig, shared: usize) -> Model {
    // Without shared experts, tokens are dropped.
    let capacity_factor = (shared == 0).then_some(1.25);
    let moe = MoeConfig::new(EXPERTS, EXPERTS_PER_TOKEN, 10);
    let moe = MoeConfig { router, n_shared_experts: shared, capacity_factor, ..moe };
    let llama = LlamaConfig { num_key_value_heads: 2, loss_chunk_tokens: 10, ..LlamaConfig::new(101, 24, 2, 4, 40) };
    Model::from_config(LlamaConfig { moe: Some(moe), ..llama }).unwrap()
}

fn softmax() -> RouterConfig {
    RouterConfig { router_aux_loss_coef: 0.1, router_z_loss_coef: 0.01, ..RouterConfig::default() }
}

fn sigmoid() -> RouterConfig {
    let (scoring_func, routed_scaling_factor) = (ScoringFunc::Sigmoid, 2.5);
    RouterConfig {
        scoring_func,
        routed_scaling_factor,
        n_group: 4,
        topk_group: 2,
        router_bias_update_rate: 0.01,
        ..softmax()
    }
}

/// A micro-batch of a step by its global index, the same on any rank. Some targets are ignored, and some sequences are packed.
fn batch(step: i64, micro: i64) -> Batch {
    let numbers = Tensor::arange(SEQUENCES * POSITIONS, (Kind::Int64, Device::Cpu)).view([SEQUENCES, POSITIONS]);
    let tokens = (numbers.shallow_clone() * 7 + step * 31 + micro * 57).remainder(VOCAB_SIZE);
    let targets = (&tokens * 3 + 1).remainder(VOCAB_SIZE);
    let ignored = (&tokens + micro).remainder(4).eq(0);
    let targets = targets.masked_fill(&ignored, IGNORED);
    match step % 3 {
        0 => Batch::packed(tokens, targets, &(numbers + step).floor_divide_scalar(4)).unwrap(),
        _ => Batch::new(tokens, targets),
    }
}

fn options(stage: u8, activation_checkpointing: ActivationCheckpointing, optimizer: Optimizer) -> Options {
    Options {
        activation_checkpointing,
        precision: Precision::F64,
        max_grad_norm: Some(0.5),
        ..Options::new(Sharding::stage(stage).unwrap(), optimizer, Schedule::constant(1e-2))
    }
}

fn adamw() -> Optimizer {
    // A large epsilon, because Adam's direction at a gradient of almost zero is rounding error.
    Optimizer::AdamW(AdamW { weight_decay: 0.1, eps: 1e-4, ..AdamW::default() })
}

/// Plain gradient descent with a learning rate of one, so that a step changes each parameter by its gradient.
fn descend(stage: u8) -> Options {
    let sgd = Optimizer::Sgd(Sgd { lr: 0., momentum: 0., weight_decay: 0. });
    let options = options(stage, ActivationCheckpointing::None, sgd);
    Options { max_grad_norm: None, schedule: Schedule::constant(1.), ..options }
}

fn alone() -> Ranks {
    Ranks::sharded(Arc::new(single::group()))
}

fn ranks_of(sizes: &[(Axis, usize)]) -> Ranks {
    let world =
        Arc::new(mpi::world(mpi::Options { timeout: Duration::from_secs(60), ..mpi::Options::default() }).unwrap());
    let mesh = Mesh::divide(world.size(), sizes).unwrap();
    Ranks::on_mesh(world, mesh).unwrap()
}

/// Losses, gradient norms, those of units, and the tokens of each expert; and the biases and parameters in the end.
struct Trained {
    numbers: Vec<f64>,
    expert_tokens: Vec<Vec<Vec<u64>>>,
    dropped_tokens: Vec<Vec<u64>>,
    expert_biases: Vec<Vec<f32>>,
    parameters: Vec<Vec<Tensor>>,
}

fn train(model: Model, ranks: &Ranks, options: Options, steps: i64) -> Trained {
    let mut trainer = Trainer::new(model, ranks.clone(), options, &mut init::from_seed(5)).unwrap();
    let (rank, size) = (ranks.data_rank() as i64, ranks.data_size() as i64);
    let (mut numbers, mut expert_tokens, mut dropped_tokens) = (Vec::new(), Vec::new(), Vec::new());
    for step in 0..steps {
        let own = (0..MICRO_BATCHES / size).map(|index| batch(step, index * size + rank));
        let own: Vec<Batch> = own.map(|whole| ranks.context.split(whole).unwrap()).collect();
        let Report { loss, grad_norm, unit_norms, expert_tokens: tokens, dropped_tokens: dropped, .. } =
            trainer.step(&own).unwrap();
        numbers.extend([loss, grad_norm].into_iter().chain(unit_norms));
        expert_tokens.push(tokens);
        dropped_tokens.push(dropped);
    }
    numbers.push(trainer.evaluate(&[ranks.context.split(batch(99, rank)).unwrap()]).unwrap().loss_sum);
    let expert_biases = trainer.progress().expert_biases;
    Trained { numbers, expert_tokens, dropped_tokens, expert_biases, parameters: parameters(&mut trainer) }
}

fn parameters(trainer: &mut Trainer) -> Vec<Vec<Tensor>> {
    let copy = |tensor: &Tensor| no_grad(|| tensor.detach().copy());
    let mut all = Vec::new();
    for shard in trainer.shards_mut() {
        shard.gather().unwrap();
        all.push(shard.parameters().iter().map(copy).collect());
        shard.release().unwrap();
    }
    all
}

/// Compares what a rank has with its part of what one rank alone has.
fn assert_close(model: &Model, ranks: &Ranks, found: &Trained, expected: &Trained, what: &str) {
    assert_eq!(found.expert_tokens, expected.expert_tokens, "{what}");
    assert_eq!(found.dropped_tokens, expected.dropped_tokens, "{what}");
    assert_eq!(found.expert_biases, expected.expert_biases, "{what}");
    // The evaluation has as many sequences as ranks that read data.
    let compared = expected.numbers.len() - usize::from(ranks.data_size() > 1);
    for (index, (found, expected)) in found.numbers.iter().zip(&expected.numbers[..compared]).enumerate() {
        let is_close = (found - expected).abs() <= TOLERANCE * expected.abs();
        assert!(is_close, "{what}: number {index} is {found} instead of {expected}");
    }
    let place = ranks.mesh().layer_place(ranks.world.rank());
    for (unit, (found, expected)) in model.units().iter().zip(found.parameters.iter().zip(&expected.parameters)) {
        for (parameter, (found, whole)) in unit.parameters().iter().zip(found.iter().zip(expected)) {
            let expected = match parameter.kept_slice(place) {
                Some(slice) => cut(whole, &slice).unwrap(),
                None => whole.shallow_clone(),
            };
            assert_eq!(found.size(), expected.size(), "{what}: {}", parameter.name);
            let error = (found - expected).abs().max().double_value(&[]) / whole.abs().max().double_value(&[]);
            assert!(error < TOLERANCE, "{what}: {} differs by {error:.1e}", parameter.name);
        }
    }
}

fn assert_same_bits(found: &Trained, expected: &Trained, what: &str) {
    assert_eq!(found.numbers, expected.numbers, "{what}");
    assert_eq!(found.expert_tokens, expected.expert_tokens, "{what}");
    assert_eq!(found.dropped_tokens, expected.dropped_tokens, "{what}");
    assert_eq!(found.expert_biases, expected.expert_biases, "{what}");
    let pairs = found.parameters.iter().flatten().zip(expected.parameters.iter().flatten());
    pairs.for_each(|(found, expected)| assert!(found.equal(expected), "{what}: other parameters"));
}

/// Compares training on a mesh with training on one rank, at all stages and with all kinds of activation checkpointing.
fn compare(sizes: &[(Axis, usize)]) {
    let ranks = ranks_of(sizes);
    for (router, shared) in [(softmax(), 0), (sigmoid(), 1)] {
        let what = format!("{}, {:?}", ranks.mesh(), router.scoring_func);
        let expected = train(model(router, shared), &alone(), descend(0), 1);
        for stage in 0..4 {
            let found = train(model(router, shared), &ranks, descend(stage), 1);
            assert_close(&model(router, shared), &ranks, &found, &expected, &format!("{what}: gradients"));
        }
        let run = |ranks: &Ranks, stage, checkpointing, steps| {
            train(model(router, shared), ranks, options(stage, checkpointing, adamw()), steps)
        };
        let plain = |ranks: &Ranks, steps| run(ranks, 0, ActivationCheckpointing::None, steps);
        assert_close(&model(router, shared), &ranks, &plain(&ranks, STEPS), &plain(&alone(), STEPS), &what);
        let first = plain(&ranks, FEW_STEPS);
        for (stage, checkpointing) in (0..4).flat_map(|stage| CHECKPOINTING.map(|how| (stage, how))) {
            let found = run(&ranks, stage, checkpointing, FEW_STEPS);
            assert_same_bits(&found, &first, &format!("{what}, stage {stage}, {checkpointing:?}"));
        }
    }
}

#[test]
fn experts_on_2_ranks_train_as_on_one() {
    ranks!(Launch::ranks(2).timeout(Duration::from_secs(300)), || compare(&[(Axis::Expert, 2)]));
}

#[test]
fn experts_on_4_ranks_train_as_on_one() {
    ranks!(Launch::ranks(4).timeout(Duration::from_secs(300)), || compare(&[(Axis::Expert, 4)]));
}

#[test]
fn sharded_experts_train_as_on_one_rank() {
    ranks!(Launch::ranks(4).timeout(Duration::from_secs(300)), || compare(&[(Axis::Expert, 2)]));
}

#[test]
fn replicas_of_divided_experts_train_as_one_rank() {
    let sizes = [(Axis::Expert, 2), (Axis::Replicate, 2)];
    ranks!(Launch::ranks(4).timeout(Duration::from_secs(300)), move || compare(&sizes));
}

#[test]
fn experts_that_are_divided_twice_train_as_on_one_rank() {
    let sizes = [(Axis::Expert, 2), (Axis::Tensor, 2)];
    ranks!(Launch::ranks(4).timeout(Duration::from_secs(300)), move || compare(&sizes));
}

#[test]
fn experts_of_divided_sequences_train_as_on_one_rank() {
    for axis in [Axis::Ring, Axis::Ulysses] {
        let sizes = [(Axis::Expert, 2), (axis, 2)];
        ranks!(Launch::ranks(4).timeout(Duration::from_secs(300)), move || {
            let ranks = ranks_of(&sizes);
            // The loss that balances experts needs whole sequences; a bias does not.
            let router = RouterConfig { router_bias_update_rate: 0.01, ..RouterConfig::default() };
            let run = |ranks: &Ranks, stage, checkpointing, steps| {
                train(model(router, 1), ranks, options(stage, checkpointing, adamw()), steps)
            };
            let plain = |ranks: &Ranks, steps| run(ranks, 0, ActivationCheckpointing::None, steps);
            assert_close(
                &model(router, 1),
                &ranks,
                &plain(&ranks, STEPS),
                &plain(&alone(), STEPS),
                &ranks.mesh().to_string(),
            );
            let first = plain(&ranks, FEW_STEPS);
            for (stage, checkpointing) in [(1, CHECKPOINTING[2]), (2, CHECKPOINTING[0]), (3, CHECKPOINTING[1])] {
                let found = run(&ranks, stage, checkpointing, FEW_STEPS);
                assert_same_bits(&found, &first, &format!("{}, stage {stage}", ranks.mesh()));
            }
        });
    }
}

#[test]
fn stages_of_a_pipeline_divide_their_experts() {
    let sizes = [(Axis::Expert, 2), (Axis::Pipeline, 2)];
    ranks!(Launch::ranks(4).timeout(Duration::from_secs(300)), move || {
        let ranks = ranks_of(&sizes);
        let expected = train(model(sigmoid(), 1), &alone(), options(0, ActivationCheckpointing::None, adamw()), 5);
        for (stage, checkpointing, pipeline_schedule) in [
            (0, ActivationCheckpointing::None, PipelineSchedule::OneFOneB),
            (1, ActivationCheckpointing::Full, PipelineSchedule::OneFOneB),
            (2, ActivationCheckpointing::None, PipelineSchedule::ZeroBubbleH1),
        ] {
            let options = Options { pipeline_schedule, ..options(stage, checkpointing, adamw()) };
            let found = train(model(sigmoid(), 1), &ranks, options, 5);
            assert_eq!(found.expert_tokens, expected.expert_tokens);
            assert_eq!(found.expert_biases, expected.expert_biases);
            let last = expected.numbers.len() - 1;
            for (found, expected) in found.numbers.iter().zip(&expected.numbers[..last]) {
                assert!((found - expected).abs() / expected.abs() < TOLERANCE, "{found} instead of {expected}");
            }
        }
    });
}

#[test]
fn in_16_bits_stages_of_divided_experts_have_the_same_bits() {
    ranks!(2, || {
        let ranks = ranks_of(&[(Axis::Expert, 2)]);
        let run = |stage, checkpointing| {
            let options = Options { precision: Precision::BF16, ..options(stage, checkpointing, adamw()) };
            train(model(softmax(), 1), &ranks, options, FEW_STEPS)
        };
        let expected = run(0, ActivationCheckpointing::None);
        for (stage, checkpointing) in [(1, CHECKPOINTING[1]), (2, CHECKPOINTING[2]), (3, CHECKPOINTING[0])] {
            assert_same_bits(&run(stage, checkpointing), &expected, &format!("stage {stage}, {checkpointing:?}"));
        }
    });
}

#[test]
fn parts_of_divided_experts_can_be_frozen() {
    ranks!(2, || {
        let ranks = ranks_of(&[(Axis::Expert, 2)]);
        let experts = "model.layers.1.mlp.experts.*.up_proj";
        for trained in ["model.layers.1.mlp.gate.", experts, "model.layers.1.mlp.shared_experts", "model.layers.0"] {
            let run = |ranks: &Ranks, checkpointing| {
                let mut model = model(softmax(), 1);
                let names = model.units().iter().flat_map(|unit| unit.parameters()).map(|p| p.name.clone());
                let frozen: Vec<String> = names.filter(|name| !name.starts_with(trained)).collect();
                model.freeze(&frozen).unwrap();
                train(model, ranks, options(3, checkpointing, adamw()), FEW_STEPS)
            };
            let expected = run(&alone(), ActivationCheckpointing::None);
            for checkpointing in CHECKPOINTING {
                let found = run(&ranks, checkpointing);
                assert_close(&model(softmax(), 1), &ranks, &found, &expected, &format!("{trained}, {checkpointing:?}"));
            }
        }
    });
}

#[test]
fn divided_experts_generate_the_tokens_of_one_rank() {
    ranks!(4, || {
        let tokens = |ranks: &Ranks| {
            let options = options(3, ActivationCheckpointing::None, adamw());
            let mut trainer =
                Trainer::new(model(sigmoid(), 1), ranks.clone(), options, &mut init::from_seed(5)).unwrap();
            let each = &mut |_| ControlFlow::Continue(());
            generate(&mut trainer, &[3, 14, 15, 92], 8, &[], &Sampling::GREEDY, each).unwrap()
        };
        assert_eq!(tokens(&ranks_of(&[(Axis::Expert, 2)])), tokens(&alone()));
    });
}

#[test]
fn lamb_sees_each_tensor_of_experts_as_one() {
    ranks!(4, || {
        let lamb = || Optimizer::Lamb(Lamb { lr: 0., beta1: 0.9, beta2: 0.99, weight_decay: 0.1, eps: 1e-4 });
        let run = |ranks: &Ranks, stage| {
            train(model(softmax(), 0), ranks, options(stage, ActivationCheckpointing::None, lamb()), 5)
        };
        let (ranks, expected) = (ranks_of(&[(Axis::Expert, 2), (Axis::Tensor, 2)]), run(&alone(), 0));
        for stage in [0, 3] {
            assert_close(&model(softmax(), 0), &ranks, &run(&ranks, stage), &expected, &format!("stage {stage}"));
        }
    });
}

/// A trainer whose router gives all experts the same score, so that all tokens choose the first ones.
fn undecided(ranks: &Ranks, options: Options) -> Trainer {
    let mut from_seed = init::from_seed(5);
    let mut init =
        |parameter: &Parameter, range, elements: FloatsMut<'_>| match parameter.name.ends_with("mlp.gate.weight") {
            true => {
                elements.fill(0.);
                Ok(())
            }
            false => from_seed(parameter, range, elements),
        };
    Trainer::new(model(RouterConfig::default(), 1), ranks.clone(), options, &mut init).unwrap()
}

#[test]
fn a_rank_may_get_all_tokens_and_others_none() {
    ranks!(4, || {
        let ranks = ranks_of(&[(Axis::Expert, 4)]);
        for checkpointing in CHECKPOINTING {
            let options = |stage| options(stage, checkpointing, adamw());
            let all: Vec<Batch> = (0..4).map(|micro| batch(0, micro)).collect();
            let expected = undecided(&alone(), options(0)).step(&all).unwrap();
            let own = &all[ranks.data_rank()..=ranks.data_rank()];
            let found = undecided(&ranks, options(3)).step(own).unwrap();
            let tokens = 4 * (SEQUENCES * POSITIONS) as u64;
            assert_eq!(found.expert_tokens[1], [tokens, tokens, tokens, 0, 0, 0, 0, 0]);
            for (found, expected) in [(found.loss, expected.loss), (found.grad_norm, expected.grad_norm)] {
                assert!((found - expected).abs() / expected < TOLERANCE, "{found} instead of {expected}");
            }
            assert_eq!(found.without_gradient, Vec::<String>::new());
        }
    });
}

#[test]
fn ranks_send_the_rows_that_other_ranks_have_experts_for() {
    ranks!(2, || {
        let ranks = ranks_of(&[(Axis::Expert, 2)]);
        let step = |ranks: &Ranks, micro: usize| {
            let options = options(1, ActivationCheckpointing::None, adamw());
            let mut trainer =
                Trainer::new(model(softmax(), 1), ranks.clone(), options, &mut init::from_seed(5)).unwrap();
            trainer.step(&[batch(1, micro as i64)]).unwrap().expert_tokens
        };
        // The rows of the two ranks, by the rank that has their experts.
        let rows = [0, 1].map(|micro| {
            let counts = step(&alone(), micro);
            let of_rank = |rank: usize| counts.iter().flat_map(move |of_unit| of_unit.chunks(EXPERTS / 2).nth(rank));
            [0, 1].map(|rank| of_rank(rank).flatten().sum::<u64>())
        });
        ranks.world.meter().reset();
        step(&ranks, ranks.data_rank());
        let metered = ranks.world.meter().read();
        let sent: u64 =
            metered.iter().filter(|(key, _)| key.verb == Verb::AllToAll).map(|(_, count)| count.bytes).sum();
        let (own, other) = (ranks.data_rank(), 1 - ranks.data_rank());
        let (features, element_bytes, blocks, count_bytes) = (24, 8, 2, 8);
        let counts = blocks * (EXPERTS as u64 / 2) * count_bytes;
        // To the experts in the forward pass, and with the weights of outputs in the backward pass; and back.
        let columns = 2 * features + 1;
        assert_eq!(sent, counts + (rows[own][other] + rows[other][own]) * columns * element_bytes);
    });
}

#[test]
fn experts_that_ranks_cannot_divide_are_refused() {
    ranks!(3, || {
        let ranks = ranks_of(&[(Axis::Expert, 3)]);
        let refused = |model: Model| {
            let options = options(0, ActivationCheckpointing::None, adamw());
            Trainer::new(model, ranks.clone(), options, &mut init::from_seed(5)).err().unwrap().to_string()
        };
        assert!(refused(model(softmax(), 0)).contains("3 ranks cannot hold equally many of the 8 experts"));
        let dense = Model::from_config(LlamaConfig::new(101, 24, 2, 4, 40)).unwrap();
        assert!(refused(dense).contains("the model has no experts"));
    });
}
