//! All stages give bitwise identical losses, norms and parameters.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use std::sync::Arc;
use std::time::Duration;

use shardwise_comm::{Group, ReduceOp, mpi};
use shardwise_harness::{Launch, ranks};
use shardwise_model::{Batch, IGNORED, LlamaConfig, Model};
use shardwise_plan::{Dtype, Partition};
use shardwise_torch::tch::{Device, Kind, Tensor};
use shardwise_train::{
    ActivationCheckpointing, DynamicScale, LossScale, OnNonFinite, Options, Ranks, Schedule, Trainer, init,
};
use shardwise_zero::{AdamW, FloatsMut, Lamb, Optimizer, Precision, Sgd, ShardedUnit, Sharding};
use support::{VOCAB_SIZE, gpt2, llama};

fn options(stage: u8, activation_checkpointing: ActivationCheckpointing) -> Options {
    let adamw = AdamW { lr: 0., beta1: 0.9, beta2: 0.95, weight_decay: 0.1, eps: 1e-8 };
    let sharding = Sharding::stage(stage).unwrap();
    Options {
        activation_checkpointing,
        max_grad_norm: Some(0.5),
        ..Options::new(sharding, Optimizer::AdamW(adamw), Schedule::constant(1e-2))
    }
}

fn world() -> Arc<Group> {
    Arc::new(mpi::world(mpi::Options { timeout: Duration::from_secs(60), ..mpi::Options::default() }).unwrap())
}

fn trainer(model: Model, ranks: &Ranks, options: Options) -> Trainer {
    Trainer::new(model, ranks.clone(), options, &mut init::from_seed(5)).unwrap()
}

/// A micro-batch of a step by its global index, the same on any rank. Some targets are ignored.
fn batch(step: i64, micro: i64) -> Batch {
    let numbers = Tensor::arange(3 * 12, (Kind::Int64, Device::Cpu)).view([3, 12]);
    let tokens = (numbers * 7 + step * 31 + micro * 57).remainder(VOCAB_SIZE);
    let targets = (&tokens * 3 + 1).remainder(VOCAB_SIZE);
    let ignored = (&tokens + micro).remainder(4).eq(0);
    Batch::new(tokens, targets.masked_fill(&ignored, IGNORED))
}

/// Losses and norms, and final parameters, as bits.
type Bits = (Vec<u64>, Vec<u32>);

fn train(model: Model, ranks: &Ranks, options: Options, steps: i64, micro: i64) -> Bits {
    let mut trainer = trainer(model, ranks, options);
    let mut numbers = Vec::new();
    let (rank, size) = (ranks.world.rank() as i64, ranks.world.size() as i64);
    for step in 0..steps {
        let batches: Vec<Batch> = (0..micro).map(|index| batch(step, index * size + rank)).collect();
        let report = trainer.step(&batches).unwrap();
        numbers.extend([report.loss.to_bits(), report.grad_norm.to_bits()]);
    }
    (numbers, parameters(&mut trainer))
}

fn parameters(trainer: &mut Trainer) -> Vec<u32> {
    let mut parameters = Vec::new();
    for shard in trainer.shards_mut() {
        shard.gather().unwrap();
        for tensor in shard.parameters() {
            let elements = tensor.detach().to_kind(Kind::Float).contiguous().view(-1);
            parameters.extend(Vec::<f32>::try_from(elements).unwrap().iter().map(|x| x.to_bits()));
        }
        shard.release().unwrap();
    }
    parameters
}

fn assert_learns(bits: &Bits) {
    let (first, last) = (f64::from_bits(bits.0[0]), f64::from_bits(bits.0[bits.0.len() - 2]));
    assert!(last < 0.9 * first, "it learns: {first} to {last}");
}

/// Enough to learn something. A different bit in one step makes all later steps differ.
const STEPS: i64 = 10;

const CHECKPOINTING: [ActivationCheckpointing; 3] =
    [ActivationCheckpointing::None, ActivationCheckpointing::Selective, ActivationCheckpointing::Full];

fn same_bits(size: usize) {
    let ranks = Ranks::sharded(world());
    assert_eq!(ranks.world.size(), size);
    let every = |run: &dyn Fn(Options, &str)| {
        for stage in [0, 1, 2, 3] {
            for activation_checkpointing in CHECKPOINTING {
                run(
                    options(stage, activation_checkpointing),
                    &format!("stage {stage}, activation checkpointing {activation_checkpointing:?}"),
                );
            }
        }
    };
    for micro in [1, 4] {
        let expected = train(llama(), &ranks, options(0, ActivationCheckpointing::None), STEPS, micro);
        assert_learns(&expected);
        // The first of these repeats the same setting.
        every(&|options, what| {
            let found = train(llama(), &ranks, options, STEPS, micro);
            assert!(found.0 == expected.0, "{what}, {micro} micro-batches: other losses or norms");
            assert!(found.1 == expected.1, "{what}, {micro} micro-batches: other parameters");
        });
    }
    let expected = train(gpt2(), &ranks, options(0, ActivationCheckpointing::None), 10, 2);
    every(&|options, what| assert!(train(gpt2(), &ranks, options, 10, 2) == expected, "GPT-2, {what}"));
    for precision in [Precision::BF16, Precision { reduce_dtype: Dtype::Bf16, ..Precision::BF16 }] {
        let narrow = |options: Options| Options { precision, ..options };
        let expected = train(llama(), &ranks, narrow(options(0, ActivationCheckpointing::None)), STEPS, 2);
        assert_learns(&expected);
        let settings = [0, 1, 2, 3].map(|stage| (stage, ActivationCheckpointing::None));
        for (stage, activation_checkpointing) in
            settings.into_iter().chain(CHECKPOINTING.map(|activation_checkpointing| (3, activation_checkpointing)))
        {
            let found = train(llama(), &ranks, narrow(options(stage, activation_checkpointing)), STEPS, 2);
            assert!(found == expected, "{precision:?}, stage {stage}, {activation_checkpointing:?}");
        }
    }
}

#[test]
fn stages_give_the_same_bits_on_2_ranks() {
    ranks!(Launch::ranks(2).timeout(Duration::from_secs(500)), || same_bits(2));
}

#[test]
fn stages_give_the_same_bits_on_3_ranks() {
    ranks!(Launch::ranks(3).timeout(Duration::from_secs(500)), || same_bits(3));
}

#[test]
fn stages_give_the_same_bits_on_4_ranks() {
    ranks!(Launch::ranks(4).timeout(Duration::from_secs(500)), || same_bits(4));
}

#[test]
fn replicas_optimizers_and_prefetch_change_no_bit_between_stages() {
    ranks!(Launch::ranks(4).timeout(Duration::from_secs(300)), || {
        let world = world();
        let sharded = Ranks::sharded(world.clone());
        let hybrid = Ranks::hybrid(world, 2).unwrap();
        assert_eq!((hybrid.groups.shard.size(), hybrid.groups.replicate.size()), (2, 2));
        let sgd = Sgd { lr: 0., momentum: 0.9, weight_decay: 0.01 };
        let lamb = Lamb { lr: 0., beta1: 0.9, beta2: 0.99, weight_decay: 0.05, eps: 1e-6 };
        let with = |optimizer: Optimizer, rate| {
            move |options| Options { optimizer: optimizer.clone(), schedule: Schedule::constant(rate), ..options }
        };
        let same = |what: &str, ranks: &Ranks, change: &dyn Fn(Options) -> Options| -> Bits {
            let bits = |stage| train(llama(), ranks, change(options(stage, ActivationCheckpointing::None)), 16, 2);
            let expected = bits(0);
            assert_learns(&expected);
            (1..4).for_each(|stage| assert!(bits(stage) == expected, "{what}, stage {stage}"));
            expected
        };
        let plain = same("plain", &sharded, &|options| options);
        same("two replicas", &hybrid, &|options| options);
        for prefetch in [0, 5] {
            let what = format!("prefetch {prefetch}");
            let bits = same(&what, &sharded, &|options| Options { prefetch, ..options });
            assert!(plain == bits, "{what} change nothing");
        }
        same("SGD", &sharded, &with(Optimizer::Sgd(sgd), 0.3));
        same("LAMB", &sharded, &with(Optimizer::Lamb(lamb), 0.02));
        same("LAMB on two replicas", &hybrid, &with(Optimizer::Lamb(lamb), 0.02));
    });
}

/// The gradients of the first step: for each unit, this rank's shard of their sum. After one step SGD's momentum holds them,
/// without further rounding.
fn first_gradients(ranks: &Ranks, stage: u8, micro_batches: &[Batch]) -> Vec<Vec<f32>> {
    let optimizer = Optimizer::Sgd(Sgd { lr: 0., momentum: 0.9, weight_decay: 0. });
    let options = Options { optimizer, max_grad_norm: None, ..options(stage, ActivationCheckpointing::None) };
    let mut trainer = trainer(llama(), ranks, options);
    trainer.step(micro_batches).unwrap();
    let momentum = |shard: &mut ShardedUnit| {
        shard.wait_for_update().unwrap();
        Vec::<f32>::try_from(&shard.checkpoint_tensors().unwrap()[1].tensor).unwrap()
    };
    trainer.shards_mut().map(momentum).collect()
}

/// Hybrid sharding sums gradients within each replica, then between replicas. This order differs from that of one replica, so the
/// bits differ, but by no more than a known bound. Here they are compared with the sum of the same contributions in f64.
///
/// If no term of a sum passes through more than k additions, the sum is off by at most γ(k) · Σ|g|, where γ(k) = k·u / (1 − k·u)
/// and u = 2⁻²⁴, half of f32's epsilon (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2). In S shards of R
/// replicas, an element has S·R terms, one from each rank, and each passes through at most k = (S − 1) + (R − 1) additions.
///
/// Nothing else in the comparison is rounded. A rank's contribution is what it computes alone, divided by the number of ranks: all
/// have the same number of tokens, and the number of ranks is a power of two.
#[test]
fn hybrid_sums_are_within_the_f32_rounding_bound_of_f64_sums() {
    ranks!(Launch::ranks(4).timeout(Duration::from_secs(100)), || {
        let world = world();
        let (rank, size) = (world.rank(), world.size());
        let own_batch = |index: usize| {
            let inputs = batch(1, (index * size + rank) as i64).inputs;
            let targets = (&inputs * 3 + 1).remainder(VOCAB_SIZE);
            Batch::new(inputs, targets)
        };
        let micro_batches: Vec<Batch> = (0..2).map(own_batch).collect();
        let alone = first_gradients(&Ranks::sharded(Arc::new(shardwise_comm::single::group())), 0, &micro_batches);
        let sum_over_ranks = |term: fn(f64) -> f64| -> Vec<Vec<f64>> {
            let sum = |unit: &Vec<f32>| {
                let terms: Vec<f64> = unit.iter().map(|&g| term(f64::from(g) / size as f64)).collect();
                world.all_reduce("f64 reference", ReduceOp::Sum, terms).wait().unwrap()
            };
            alone.iter().map(sum).collect()
        };
        let (exact, magnitudes) = (sum_over_ranks(|g| g), sum_over_ranks(f64::abs));
        let unit_roundoff = f64::from(f32::EPSILON) / 2.;
        for replicas in [1, 2, 4] {
            let ranks = Ranks::hybrid(world.clone(), replicas).unwrap();
            let shards = size / replicas;
            let error = (shards - 1 + replicas - 1) as f64 * unit_roundoff;
            let gamma = error / (1. - error);
            for stage in 0..4 {
                for (unit, found) in first_gradients(&ranks, stage, &micro_batches).iter().enumerate() {
                    let own = Partition::new(exact[unit].len(), shards).range(ranks.groups.shard.rank());
                    assert_eq!(found.len(), own.len());
                    for (&found, element) in found.iter().zip(own) {
                        let (exact, bound) = (exact[unit][element], gamma * magnitudes[unit][element]);
                        let difference = (f64::from(found) - exact).abs();
                        assert!(
                            difference <= bound,
                            "{replicas} replicas, stage {stage}, unit {unit}, element {element}: {found:e} is {difference:e} \
                             from {exact:e}, and the bound is {bound:e}"
                        );
                    }
                }
            }
        }
    });
}

#[test]
fn reducing_each_micro_batch_gives_the_same_sums() {
    ranks!(Launch::ranks(3).timeout(Duration::from_secs(200)), || {
        let ranks = Ranks::sharded(world());
        let with = |reduce_each_micro_batch, stage| {
            let options = Options { reduce_each_micro_batch, ..options(stage, ActivationCheckpointing::None) };
            train(llama(), &ranks, options, 30, 4)
        };
        let whole = with(false, 3);
        let sharded = with(true, 3);
        assert!(with(true, 2) == sharded, "stages 2 and 3 add in the same order");
        let near = |(&a, &b): (&u64, &u64)| (f64::from_bits(a) / f64::from_bits(b) - 1.).abs() < 1e-3;
        assert!(whole.0.iter().zip(&sharded.0).all(near), "the sums are the same, if not to the last bit");
        let refused = Options { reduce_each_micro_batch: true, ..options(1, ActivationCheckpointing::None) };
        let error = Trainer::new(llama(), ranks.clone(), refused, &mut init::from_seed(5)).err().unwrap();
        assert!(error.to_string().contains("use stage 2 or 3"), "{error}");
    });
}

#[test]
fn gradients_that_are_not_applied_do_not_count() {
    ranks!(1, || {
        let ranks = Ranks::sharded(world());
        for stage in 0..4 {
            let new = || trainer(llama(), &ranks, options(stage, ActivationCheckpointing::None));
            let (mut found, mut expected) = (new(), new());
            for step in 0..3 {
                let batches = [batch(step, 0), batch(step, 1)];
                found.compute_gradients(&[batch(step, 2)]).unwrap();
                let gradients = found.compute_gradients(&batches).unwrap();
                let (found, expected) = (found.apply_update(gradients).unwrap(), expected.step(&batches).unwrap());
                assert_eq!(found, expected, "stage {stage}");
            }
            assert!(parameters(&mut found) == parameters(&mut expected), "stage {stage}: other parameters");
        }
    });
}

#[test]
fn frozen_parameters_stay_and_cost_nothing() {
    ranks!(3, || {
        let ranks = Ranks::sharded(world());
        let frozen = |prefixes: &[&str]| {
            let mut model = llama();
            model.freeze(prefixes).unwrap();
            model
        };
        // Units with no, some, and only frozen parameters.
        for prefixes in [
            &["model.embed_tokens", "model.layers.0.", "model.layers.1.self_attn"][..],
            &["model.layers.1.", "lm_head"][..],
        ] {
            let bits = |stage, activation_checkpointing| {
                train(frozen(prefixes), &ranks, options(stage, activation_checkpointing), 30, 2)
            };
            let expected = bits(0, ActivationCheckpointing::None);
            assert_learns(&expected);
            for stage in 0..4 {
                for activation_checkpointing in CHECKPOINTING {
                    assert!(
                        bits(stage, activation_checkpointing) == expected,
                        "{prefixes:?} stage {stage} {activation_checkpointing:?}"
                    );
                }
            }
            let initial = parameters(&mut trainer(llama(), &ranks, options(0, ActivationCheckpointing::None)));
            let mut place = 0;
            for parameter in frozen(prefixes).units().iter().flat_map(|unit| unit.parameters()) {
                let range = place..place + parameter.elements();
                let same = expected.1[range.clone()] == initial[range];
                assert_eq!(same, !parameter.trainable, "{}", parameter.name);
                place += parameter.elements();
            }
        }
        let trained = |model: &Model| -> usize {
            let parameters = model.units().iter().flat_map(|unit| unit.parameters());
            parameters.filter(|parameter| parameter.trainable).map(|parameter| parameter.elements()).sum()
        };
        let model = frozen(&["model.embed_tokens"]);
        let (elements, all) = (trained(&model), model.elements());
        let (bytes, _) = trainer(model, &ranks, options(0, ActivationCheckpointing::None)).bytes();
        assert_eq!((bytes.parameters, bytes.optimizer), (4 * all, 8 * elements));
        let error = llama().freeze(&["model.layer.0"]).unwrap_err().to_string();
        assert!(error.contains("no parameter name starts with 'model.layer.0'"), "{error}");
        let all_frozen = Trainer::new(
            frozen(&["model.", "lm_head"]),
            ranks.clone(),
            options(3, ActivationCheckpointing::None),
            &mut init::from_seed(5),
        );
        assert!(all_frozen.err().unwrap().to_string().contains("nothing to train"));
    });
}

#[test]
fn sixteen_ranks_train_like_one() {
    ranks!(Launch::ranks(16).timeout(Duration::from_secs(300)), || {
        let ranks = Ranks::sharded(world());
        let alone = Ranks::sharded(Arc::new(shardwise_comm::single::group()));
        let mut together = trainer(llama(), &ranks, options(3, ActivationCheckpointing::None));
        let mut single = trainer(llama(), &alone, options(0, ActivationCheckpointing::None));
        for step in 0..20 {
            let own = batch(step, ranks.world.rank() as i64);
            let all: Vec<Batch> = (0..16).map(|index| batch(step, index)).collect();
            let (found, expected) = (together.step(&[own]).unwrap(), single.step(&all).unwrap());
            let near = |a: f64, b: f64| (a / b - 1.).abs() < 1e-5;
            assert!(near(found.loss, expected.loss), "step {step}: {found:?} {expected:?}");
            assert!(near(found.grad_norm, expected.grad_norm), "step {step}: {found:?} {expected:?}");
        }
    });
}

/// Initializes one element of a parameter with a bad value, like a corrupted checkpoint.
fn spoiled(
    parameter_name: &'static str,
    value: f32,
) -> impl FnMut(&shardwise_model::Parameter, std::ops::Range<usize>, FloatsMut<'_>) -> Result<(), shardwise_zero::InitError>
{
    let mut seed = init::from_seed(5);
    move |parameter, range, elements| {
        let FloatsMut::F32(elements) = elements else { panic!("the parameters are f32") };
        seed(parameter, range.clone(), FloatsMut::F32(elements))?;
        if parameter.name == parameter_name && range.contains(&7) {
            elements[7 - range.start] = value;
        }
        Ok(())
    }
}

#[test]
fn numbers_that_are_not_finite_are_named_and_follow_the_policy() {
    ranks!(3, || {
        let ranks = Ranks::sharded(world());
        let own = || batch(0, ranks.world.rank() as i64);
        for stage in 0..4 {
            let options = options(stage, ActivationCheckpointing::Full);
            let name = "model.layers.1.mlp.up_proj.weight";
            let mut trainer =
                Trainer::new(llama(), ranks.clone(), options.clone(), &mut spoiled(name, f32::NAN)).unwrap();
            // A step that fails is not counted: the next one is the first again.
            for _ in 0..2 {
                let error = trainer.step(&[own()]).unwrap_err().to_string();
                assert_eq!(
                    error,
                    format!(
                        "step 1: the output of unit block.1 on rank 0 is not finite, and neither is its parameter {name}; nothing \
                         was updated"
                    )
                );
            }
            // Finite parameters but an infinite gradient: f16 overflows in the backward pass, not in the forward pass.
            let skipping = Options {
                precision: Precision::F16,
                loss_scale: LossScale::Dynamic(DynamicScale { initial: 1e9, window: 5, ..DynamicScale::DEFAULT }),
                on_nonfinite: OnNonFinite::Skip,
                ..options
            };
            // Also with a frozen unit.
            let mut model = llama();
            model.freeze(&["model.layers.0."]).unwrap();
            let mut trainer = self::trainer(model, &ranks, skipping);
            let before = parameters(&mut trainer);
            let first = trainer.step(&[own()]).unwrap();
            let fault = first.skipped.expect("the scale is too large").to_string();
            assert!(fault.contains("is not finite") && fault.starts_with("the gradient of "), "{fault}");
            assert!(
                first.loss.is_finite() && first.skipped_so_far == 1,
                "the loss of a skipped step is still reported"
            );
            assert_eq!(parameters(&mut trainer), before, "a skipped step changes nothing");
            let reports: Vec<_> = (1..60).map(|step| trainer.step(&[batch(step, 0)]).unwrap()).collect();
            let last = reports.last().unwrap();
            assert!(last.skipped_so_far > 2 && last.skipped_so_far < 30, "{last:?}");
            assert!(last.loss < 0.8 * first.loss, "it learns after all: {} to {}", first.loss, last.loss);
            let rises = reports.windows(2).filter(|pair| pair[1].loss_scale == 2. * pair[0].loss_scale).count();
            assert!(rises > 1, "the scale grows again");
        }
    });
}

#[test]
fn a_frozen_or_tied_parameter_that_is_not_finite_is_named() {
    ranks!(3, || {
        let ranks = Ranks::sharded(world());
        let frozen = || {
            let mut model = llama();
            model.freeze(&["model.layers.1.mlp."]).unwrap();
            model
        };
        let tied = || {
            let plain = LlamaConfig::new(VOCAB_SIZE as usize, 36, 3, 6, 53);
            Model::from_config(LlamaConfig { tie_word_embeddings: true, ..plain }).unwrap()
        };
        // The bad element belongs to token 0, which the batch does not have, so the embedding's own output is finite.
        let tokens = batch(0, ranks.world.rank() as i64).inputs.remainder(VOCAB_SIZE - 1) + 1;
        let own = Batch::new(tokens.shallow_clone(), tokens);
        let cases: [(&dyn Fn() -> Model, &str, &str); 2] =
            [(&frozen, "block.1", "model.layers.1.mlp.up_proj.weight"), (&tied, "head", "model.embed_tokens.weight")];
        for (model, unit, name) in cases {
            for stage in [0, 3] {
                let options = options(stage, ActivationCheckpointing::None);
                let mut trainer = Trainer::new(model(), ranks.clone(), options, &mut spoiled(name, f32::NAN)).unwrap();
                let error = trainer.step(std::slice::from_ref(&own)).unwrap_err().to_string();
                let expected =
                    format!("the output of unit {unit} on rank 0 is not finite, and neither is its parameter {name}");
                assert!(error.contains(&expected), "stage {stage}: {error}");
            }
        }
    });
}

#[test]
fn uneven_batches_equal_one_big_batch() {
    ranks!(3, || {
        let ranks = Ranks::sharded(world());
        let alone = Ranks::sharded(Arc::new(shardwise_comm::single::group()));
        let size = ranks.world.size() as i64;
        let mut together = trainer(llama(), &ranks, options(3, ActivationCheckpointing::None));
        let mut single = trainer(llama(), &alone, options(0, ActivationCheckpointing::None));
        for step in 0..10 {
            let all: Vec<Batch> = (0..2 * size).map(|index| batch(step, index)).collect();
            let joined = |part: fn(&Batch) -> &Tensor| Tensor::cat(&all.iter().map(part).collect::<Vec<_>>(), 0);
            let big = Batch::new(joined(|batch| &batch.inputs), joined(|batch| &batch.targets));
            let own: Vec<Batch> = (0..2).map(|index| batch(step, index * size + ranks.world.rank() as i64)).collect();
            let (found, expected) = (together.step(&own).unwrap(), single.step(&[big]).unwrap());
            assert_eq!(found.tokens, expected.tokens);
            assert!((found.loss / expected.loss - 1.).abs() < 1e-5, "step {step}: {found:?} {expected:?}");
            assert!((found.grad_norm / expected.grad_norm - 1.).abs() < 1e-4, "step {step}: {found:?} {expected:?}");
        }
    });
}

#[test]
fn different_numbers_of_micro_batches_are_an_error() {
    ranks!(3, || {
        let ranks = Ranks::sharded(world());
        let rank = ranks.world.rank();
        let mut trainer = trainer(llama(), &ranks, options(3, ActivationCheckpointing::None));
        let micro = if rank == 1 { 3 } else { 2 };
        let batches: Vec<Batch> = (0..micro).map(|index| batch(0, index)).collect();
        let error = trainer.step(&batches).unwrap_err().to_string();
        let expected = match rank {
            1 => {
                "step 1: rank 0 has 2 micro-batches, but this rank has 3; every rank needs the same number, at least one"
            }
            _ => {
                "step 1: rank 1 has 3 micro-batches, but this rank has 2; every rank needs the same number, at least one"
            }
        };
        assert_eq!(error, expected);
        // The trainer is unchanged: the next step can succeed.
        trainer.step(&[batch(0, rank as i64)]).unwrap();
        let nothing = Batch::new(batch(0, 0).inputs, batch(0, 0).targets.fill_(IGNORED));
        let error = trainer.step(&[nothing]).unwrap_err().to_string();
        assert!(error.contains("step 2: every target is ignored on all ranks"), "{error}");
    });
}
