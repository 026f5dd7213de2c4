//! Training in f64, where only the order of additions differs between layouts: ranks with micro-batches at any stage train like one
//! rank with one batch, to twelve digits. A bug that f32 hides in its rounding shows here.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use shardwise_comm::{mpi, single};
use shardwise_harness::ranks;
use shardwise_model::{Batch, IGNORED, LlamaConfig, Model};
use shardwise_plan::Dtype;
use shardwise_torch::tch::{Device, Kind, Tensor};
use shardwise_train::{Options, Ranks, Sampling, Schedule, Trainer, generate, init};
use shardwise_zero::{AdamW, Elements, Elementwise, Lamb, Optimizer, Precision, Sgd, Sharding};

const VOCAB_SIZE: i64 = 101;
const STEPS: i64 = 10;
/// The micro-batches of a step on all ranks. Divides among 1, 2 and 3 ranks.
const MICRO_BATCHES: i64 = 6;
const ADAMW: AdamW = AdamW { lr: 0., beta1: 0.9, beta2: 0.95, weight_decay: 0.1, eps: 1e-8 };

/// A model with sizes that hardly divide evenly.
fn model() -> Model {
    let llama = LlamaConfig {
        num_key_value_heads: 3,
        loss_chunk_tokens: 10,
        ..LlamaConfig::new(VOCAB_SIZE as usize, 36, 2, 6, 53)
    };
    Model::from_config(llama).unwrap()
}

fn options(stage: u8, optimizer: &Optimizer) -> Options {
    Options {
        precision: Precision::F64,
        max_grad_norm: Some(0.5),
        ..Options::new(Sharding::stage(stage).unwrap(), optimizer.clone(), Schedule::constant(3e-3))
    }
}

/// A micro-batch of a step by its global index, the same on any rank. Some targets are ignored.
fn batch(step: i64, micro: i64) -> Batch {
    let numbers = Tensor::arange(2 * 12, (Kind::Int64, Device::Cpu)).view([2, 12]);
    let tokens = (numbers * 7 + step * 31 + micro * 57).remainder(VOCAB_SIZE);
    let targets = (&tokens * 3 + 1).remainder(VOCAB_SIZE);
    let ignored = (&tokens + micro).remainder(4).eq(0);
    Batch::new(tokens, targets.masked_fill(&ignored, IGNORED))
}

/// This rank's micro-batches of a step. A single rank has them all in one, so that even sums over tokens are in another order.
fn own_batches(ranks: &Ranks, step: i64) -> Vec<Batch> {
    let (rank, size) = (ranks.world.rank() as i64, ranks.world.size() as i64);
    let own: Vec<Batch> = (0..MICRO_BATCHES / size).map(|index| batch(step, index * size + rank)).collect();
    let join = |part: fn(&Batch) -> &Tensor| Tensor::cat(&own.iter().map(part).collect::<Vec<_>>(), 0);
    match size {
        1 => vec![Batch::new(join(|batch| &batch.inputs), join(|batch| &batch.targets))],
        _ => own,
    }
}

/// The results of a training run: the losses and gradient norms of its steps, the loss of an evaluation, the parameters, and
/// generated tokens.
struct Results {
    numbers: Vec<f64>,
    parameters: Vec<Tensor>,
    generated: Vec<i64>,
}

fn train(ranks: &Ranks, options: Options) -> Results {
    let mut trainer = Trainer::new(model(), ranks.clone(), options, &mut init::from_seed(5)).unwrap();
    let mut numbers = Vec::new();
    for step in 0..STEPS {
        let report = trainer.step(&own_batches(ranks, step)).unwrap();
        numbers.extend([report.loss, report.grad_norm]);
    }
    numbers.push(trainer.evaluate(&own_batches(ranks, STEPS)).unwrap().loss_sum);
    let generated =
        generate(&mut trainer, &[1, 2, 3], 5, &[], &Sampling::GREEDY, &mut |_| ControlFlow::Continue(())).unwrap();
    let mut parameters = Vec::new();
    for shard in trainer.shards_mut() {
        shard.gather().unwrap();
        parameters.extend(shard.parameters().iter().map(|parameter| parameter.detach().copy()));
        shard.release().unwrap();
    }
    Results { numbers, parameters, generated }
}

fn assert_near(found: &Results, expected: &Results, what: &str) {
    for (found, expected) in found.numbers.iter().zip(&expected.numbers) {
        assert!((found / expected - 1.).abs() < 1e-12, "{what}: {found} is not {expected}");
    }
    for (index, (found, expected)) in found.parameters.iter().zip(&expected.parameters).enumerate() {
        assert_eq!(found.kind(), Kind::Double);
        let difference = (found - expected).abs().max().double_value(&[]) / expected.abs().max().double_value(&[]);
        assert!(difference < 1e-12, "{what}: parameter {index} differs by {difference:e}");
    }
    assert_eq!(found.generated, expected.generated, "{what}");
}

/// Sign descent with momentum, smoothed so that a sum that is almost zero makes almost no difference.
#[derive(Debug)]
struct SmoothSign;

impl Elementwise for SmoothSign {
    fn state_names(&self) -> &[&str] {
        &["momentum"]
    }

    fn update(&self, elements: Elements) -> shardwise_torch::Result<()> {
        let Elements { mut parameters, grads, mut state, lr, .. } = elements;
        let momentum = state[0].f_lerp_(&grads, 0.1)?;
        let _ = parameters.f_sub_(&momentum.f_tanh()?.f_mul_scalar(lr)?)?;
        Ok(())
    }
}

fn alone() -> Ranks {
    Ranks::sharded(Arc::new(single::group()))
}

fn launched(size: usize) -> Ranks {
    let world = mpi::world(mpi::Options { timeout: Duration::from_secs(60), ..mpi::Options::default() }).unwrap();
    assert_eq!(world.size(), size);
    Ranks::sharded(Arc::new(world))
}

fn compare_stages(ranks: &Ranks) {
    let adamw = Optimizer::AdamW(ADAMW);
    let expected = train(&alone(), options(0, &adamw));
    assert!(expected.numbers[2 * STEPS as usize - 2] < 0.99 * expected.numbers[0], "it learns: {:?}", expected.numbers);
    for stage in 0..=3 {
        assert_near(&train(ranks, options(stage, &adamw)), &expected, &format!("AdamW, stage {stage}"));
    }
}

fn compare_optimizers(ranks: &Ranks) {
    for optimizer in [
        Optimizer::Sgd(Sgd { lr: 0., momentum: 0.9, weight_decay: 0.02 }),
        Optimizer::Lamb(Lamb { lr: 0., beta1: 0.9, beta2: 0.999, weight_decay: 0.1, eps: 1e-6 }),
        Optimizer::custom(SmoothSign),
    ] {
        let expected = train(&alone(), options(0, &optimizer));
        assert_near(&train(ranks, options(3, &optimizer)), &expected, &format!("{optimizer:?}"));
    }
}

#[test]
fn f64_trains_like_one_rank_on_2_ranks() {
    ranks!(2, || compare_stages(&launched(2)));
}

#[test]
fn f64_trains_like_one_rank_on_3_ranks() {
    ranks!(3, || {
        let ranks = launched(3);
        compare_stages(&ranks);
        compare_optimizers(&ranks);
    });
}

#[test]
fn f64_needs_no_masters() {
    let options = options(0, &Optimizer::AdamW(ADAMW));
    let mut trainer = Trainer::new(model(), alone(), options, &mut init::from_seed(5)).unwrap();
    let elements = trainer.model().elements();
    let (bytes, _) = trainer.bytes();
    assert_eq!((bytes.parameters, bytes.optimizer), (8 * elements, 2 * 8 * elements));
    trainer.step(&[batch(0, 0)]).unwrap();
}

#[test]
fn f64_is_for_parameters_and_gradients_alike() {
    for (param_dtype, reduce_dtype) in [(Dtype::F64, Dtype::F32), (Dtype::F64, Dtype::Bf16), (Dtype::F32, Dtype::F64)] {
        let precision = Precision { param_dtype, reduce_dtype };
        let options = Options { precision, ..options(3, &Optimizer::AdamW(ADAMW)) };
        let error = options.check().unwrap_err().to_string();
        assert!(error.contains("use f64 for both or for neither"), "{error}");
    }
}
