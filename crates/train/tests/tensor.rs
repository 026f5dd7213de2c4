//! Tensor and sequence parallelism: the same losses, gradients and parameters as on one rank, in f64.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::sync::Arc;
use std::time::Duration;

use shardwise_comm::{Group, mpi, single};
use shardwise_harness::ranks;
use shardwise_model::{
    Batch, Gpt2Config, IGNORED, LlamaConfig, Model, ModelConfig, MoeConfig, QkNorm, RouterConfig, ScoringFunc, cut,
};
use shardwise_plan::LayerPlace;
use shardwise_plan::program::Place;
use shardwise_torch::tch::{Device, Kind, Tensor, no_grad};
use shardwise_train::{ActivationCheckpointing, Options, Ranks, Schedule, Trainer, init};
use shardwise_zero::{AdamW, Lamb, Optimizer, Precision, Sgd, Sharding};

/// An odd vocabulary, so that no number of ranks divides it.
const VOCAB_SIZE: i64 = 101;
/// Odd sequences: 21 rows are not divided by 2 or 4, and rows of one rank end within a sequence.
const SEQUENCES: i64 = 3;
const POSITIONS: i64 = 7;
/// Sequences with enough rows for a layer to multiply them in pieces, on up to 4 ranks. Neither 519 rows nor a rank's part of them are
/// divided by the number of pieces.
const MANY_POSITIONS: i64 = 173;

const STEPS: i64 = 20;

/// The largest difference between losses, norms and gradients, relative to the largest element.
const TOLERANCE: f64 = 1e-12;
/// That between parameters after several steps. Adam divides by the root of the second moment, which magnifies rounding errors of
/// small gradients.
const TOLERANCE_AFTER_STEPS: f64 = 1e-10;

/// Twelve query heads, which 2, 3 and 4 ranks can share. The sizes of MLP and vocabulary do not divide evenly.
fn llama() -> LlamaConfig {
    LlamaConfig { head_dim: 4, loss_chunk_tokens: 10, ..LlamaConfig::new(VOCAB_SIZE as usize, 20, 2, 12, 53) }
}

/// The families, with key heads that are fewer than the ranks, and that neither divide their number nor are divided by it.
fn models() -> Vec<(&'static str, ModelConfig)> {
    vec![
        ("Llama", llama().into()),
        (
            "Llama, 2 key heads, tied",
            LlamaConfig { num_key_value_heads: 2, tie_word_embeddings: true, ..llama() }.into(),
        ),
        ("Mistral, 4 key heads", LlamaConfig { num_key_value_heads: 4, sliding_window: Some(3), ..llama() }.into()),
        ("Qwen 2, 6 key heads", LlamaConfig { num_key_value_heads: 6, qkv_bias: true, ..llama() }.into()),
        (
            "Qwen 3, 1 key head",
            LlamaConfig { num_key_value_heads: 1, qk_norm: Some(QkNorm::PerHead), ..llama() }.into(),
        ),
        ("Mixtral", LlamaConfig { moe: Some(MoeConfig::new(5, 2, 13)), ..llama() }.into()),
        (
            "Experts as in DeepSeek-V3",
            LlamaConfig { qk_norm: Some(QkNorm::PerHead), moe: Some(deepseek_experts()), ..llama() }.into(),
        ),
        ("GPT-2", Gpt2Config { loss_chunk_tokens: 10, ..Gpt2Config::new(VOCAB_SIZE as usize, 8, 36, 2, 12) }.into()),
    ]
}

/// Groups, sigmoids, shared experts, and balance losses.
fn deepseek_experts() -> MoeConfig {
    let router = RouterConfig {
        scoring_func: ScoringFunc::Sigmoid,
        routed_scaling_factor: 2.5,
        n_group: 4,
        topk_group: 2,
        router_aux_loss_coef: 0.1,
        router_z_loss_coef: 0.01,
        ..RouterConfig::default()
    };
    MoeConfig { n_shared_experts: 1, router, ..MoeConfig::new(8, 3, 9) }
}

/// The same for [`MANY_POSITIONS`].
fn models_for_many_positions() -> Vec<(&'static str, ModelConfig)> {
    let lengthen = |config| match config {
        ModelConfig::Gpt2(config) => {
            Gpt2Config { n_positions: MANY_POSITIONS as usize, loss_chunk_tokens: 200, ..config }.into()
        }
        ModelConfig::Llama(config) => LlamaConfig { loss_chunk_tokens: 200, ..config }.into(),
        other => other,
    };
    models().into_iter().map(|(name, config)| (name, lengthen(config))).collect()
}

/// A micro-batch by its global index. Some targets are ignored, and sequences may be packed.
fn batch(positions: i64, step: i64, micro: i64, is_packed: bool) -> Batch {
    let numbers = Tensor::arange(SEQUENCES * positions, (Kind::Int64, Device::Cpu)).view([SEQUENCES, positions]);
    let tokens = (numbers.shallow_clone() * 7 + step * 31 + micro * 57).remainder(VOCAB_SIZE);
    let targets = (&tokens * 3 + 1).remainder(VOCAB_SIZE);
    let ignored = (&tokens + micro).remainder(4).eq(0);
    let targets = targets.masked_fill(&ignored, IGNORED);
    match is_packed {
        true => Batch::packed(tokens, targets, &(numbers + step).floor_divide_scalar(4)).unwrap(),
        false => Batch::new(tokens, targets),
    }
}

fn adamw() -> Optimizer {
    // A large epsilon, because Adam's direction at a gradient of almost zero is rounding error.
    Optimizer::AdamW(AdamW { lr: 0., beta1: 0.9, beta2: 0.95, weight_decay: 0.1, eps: 1e-4 })
}

fn options(stage: u8, optimizer: Optimizer) -> Options {
    Options {
        precision: Precision::F64,
        max_grad_norm: Some(1.),
        ..Options::new(Sharding::stage(stage).unwrap(), optimizer, Schedule::constant(1e-2))
    }
}

fn world() -> Arc<Group> {
    Arc::new(mpi::world(mpi::Options { timeout: Duration::from_secs(60), ..mpi::Options::default() }).unwrap())
}

fn trainer(config: &ModelConfig, ranks: Ranks, options: Options) -> Trainer {
    let model = Model::from_config(config.clone()).unwrap();
    Trainer::new(model, ranks, options, &mut init::from_seed(5)).unwrap()
}

/// Losses and gradient norms of all steps, and the parameters after them.
struct Trained {
    numbers: Vec<f64>,
    parameters: Vec<Vec<Tensor>>,
}

/// Trains on `micro` micro-batches per step in total, which the ranks that read data divide.
fn train(trainer: &mut Trainer, steps: i64, micro: i64, is_packed: bool) -> Trained {
    train_on(POSITIONS, trainer, steps, micro, is_packed)
}

fn train_on(positions: i64, trainer: &mut Trainer, steps: i64, micro: i64, is_packed: bool) -> Trained {
    let (rank, size) = (trainer.ranks().data_rank() as i64, trainer.ranks().data_size() as i64);
    let mut numbers = Vec::new();
    for step in 0..steps {
        let own = (0..micro / size).map(|index| batch(positions, step, index * size + rank, is_packed));
        let report = trainer.step(&own.collect::<Vec<_>>()).unwrap();
        numbers.extend([report.loss, report.grad_norm]);
    }
    Trained { numbers, parameters: parameters(trainer) }
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
fn assert_same(model: &Model, place: Place, found: &Trained, expected: &Trained, what: &str) {
    let is_one_step = found.numbers.len() == 2;
    let tolerance = if is_one_step { TOLERANCE } else { TOLERANCE_AFTER_STEPS };
    for (index, (found, expected)) in found.numbers.iter().zip(&expected.numbers).enumerate() {
        let error = (found - expected).abs() / expected.abs();
        assert!(error < TOLERANCE, "{what}: number {index} is {found} instead of {expected} ({error:.1e})");
    }
    for (unit, (found, expected)) in model.units().iter().zip(found.parameters.iter().zip(&expected.parameters)) {
        for (parameter, (found, whole)) in unit.parameters().iter().zip(found.iter().zip(expected)) {
            let expected = match parameter.kept_slice(LayerPlace { tensor: place, ..LayerPlace::default() }) {
                Some(slice) => cut(whole, &slice).unwrap(),
                None => whole.shallow_clone(),
            };
            assert_eq!(found.size(), expected.size(), "{what}: {}", parameter.name);
            let largest = whole.abs().max().double_value(&[]);
            let error = (found - expected).abs().max().double_value(&[]) / largest;
            assert!(error < tolerance, "{what}: {} differs by {error:.1e}", parameter.name);
        }
    }
}

const CHECKPOINTING: [ActivationCheckpointing; 3] =
    [ActivationCheckpointing::None, ActivationCheckpointing::Selective, ActivationCheckpointing::Full];

/// Whether to train for all steps in every setting, and not only in the first and the last.
fn is_thorough() -> bool {
    std::env::var("SHARDWISE_THOROUGH").is_ok()
}

/// Compares the gradients of all models on `shards` × `tensor` ranks and on one, and the losses of some steps.
fn compare(tensor: usize, shards: usize, stages: &[u8], steps: i64) {
    let world = world();
    assert_eq!(world.size(), tensor * shards);
    let ranks = Ranks::parallel(world.clone(), 1, tensor).unwrap();
    let place = Place { size: tensor, index: ranks.tensor.rank() };
    for (name, config) in models() {
        for is_packed in [false, true] {
            let alone = || Ranks::sharded(Arc::new(single::group()));
            let micro = shards as i64;
            let expected = train(&mut trainer(&config, alone(), options(0, adamw())), steps, micro, is_packed);
            // A step of plain gradient descent changes each parameter by its gradient.
            let sgd = || Optimizer::Sgd(Sgd { lr: 0., momentum: 0., weight_decay: 0. });
            let unclipped =
                |stage| Options { max_grad_norm: None, schedule: Schedule::constant(1.), ..options(stage, sgd()) };
            let expected_step = train(&mut trainer(&config, alone(), unclipped(0)), 1, micro, is_packed);
            for &stage in stages {
                for sequence_parallel in [false, true] {
                    for activation_checkpointing in CHECKPOINTING {
                        let what = format!(
                            "{name}, packed {is_packed}, tensor {tensor} × shard {shards}, stage {stage}, sequence \
                             {sequence_parallel}, {activation_checkpointing:?}"
                        );
                        let with = |options| Options { sequence_parallel, activation_checkpointing, ..options };
                        let mut stepped = trainer(&config, ranks.clone(), with(unclipped(stage)));
                        let found = train(&mut stepped, 1, micro, is_packed);
                        assert_same(stepped.model(), place, &found, &expected_step, &format!("{what}: gradients"));
                        let is_first = stage == stages[0] && !sequence_parallel;
                        let is_last = stage == stages[stages.len() - 1] && sequence_parallel;
                        let is_extreme = match activation_checkpointing {
                            ActivationCheckpointing::None => is_first,
                            ActivationCheckpointing::Selective => false,
                            ActivationCheckpointing::Full => is_last,
                        };
                        if !is_extreme && !is_thorough() {
                            continue;
                        }
                        let mut trained = trainer(&config, ranks.clone(), with(options(stage, adamw())));
                        let found = train(&mut trained, steps, micro, is_packed);
                        assert_same(trained.model(), place, &found, &expected, &what);
                    }
                }
            }
        }
    }
}

#[test]
fn layers_on_2_ranks_compute_the_same_as_on_one() {
    ranks!(2, || compare(2, 1, &[0, 3], STEPS));
}

#[test]
fn layers_on_3_ranks_compute_the_same_as_on_one() {
    ranks!(3, || compare(3, 1, &[0, 3], STEPS));
}

#[test]
fn layers_on_4_ranks_compute_the_same_as_on_one() {
    ranks!(4, || compare(4, 1, &[0, 3], STEPS));
}

#[test]
fn sharded_layers_compute_the_same_as_on_one_rank() {
    ranks!(4, || compare(2, 2, &[1, 2, 3], 5));
}

/// Compares the gradients of layers that multiply and communicate in pieces with those on one rank.
fn compare_pieces() {
    let world = world();
    let ranks = Ranks::parallel(world.clone(), 1, world.size()).unwrap();
    let place = Place { size: world.size(), index: ranks.tensor.rank() };
    let sgd = Optimizer::Sgd(Sgd { lr: 0., momentum: 0., weight_decay: 0. });
    let options = Options { max_grad_norm: None, schedule: Schedule::constant(1.), ..options(0, sgd) };
    for ((name, config), is_packed) in models_for_many_positions().into_iter().zip([false, true].repeat(3)) {
        let mut alone = trainer(&config, Ranks::sharded(Arc::new(single::group())), options.clone());
        let expected = train_on(MANY_POSITIONS, &mut alone, 1, 1, is_packed);
        for sequence_parallel in [false, true] {
            for activation_checkpointing in CHECKPOINTING {
                let options = Options { sequence_parallel, activation_checkpointing, ..options.clone() };
                let mut shared = trainer(&config, ranks.clone(), options);
                let found = train_on(MANY_POSITIONS, &mut shared, 1, 1, is_packed);
                let what = format!("{name}, sequence {sequence_parallel}, {activation_checkpointing:?}");
                assert_same(shared.model(), place, &found, &expected, &what);
            }
        }
    }
}

#[test]
fn layers_in_pieces_compute_the_same_as_on_one_rank() {
    ranks!(2, compare_pieces);
    ranks!(3, compare_pieces);
    ranks!(4, compare_pieces);
}

/// Trains on 4 ranks, of which 2 share each layer, with async tensor parallelism and without. Expects the same bits.
fn compare_async(models: Vec<(&'static str, ModelConfig)>, positions: i64) {
    let ranks = Ranks::parallel(world(), 1, 2).unwrap();
    for ((name, config), precision) in models.into_iter().zip([Precision::F32, Precision::BF16].repeat(9)) {
        for (stage, sequence_parallel) in [(0, true), (3, true), (2, false)] {
            for activation_checkpointing in CHECKPOINTING {
                let [apart, overlapped] = [false, true].map(|async_tensor_parallel| {
                    let options = Options {
                        precision,
                        sequence_parallel,
                        activation_checkpointing,
                        async_tensor_parallel,
                        ..options(stage, adamw())
                    };
                    train_on(positions, &mut trainer(&config, ranks.clone(), options), 3, 2, false)
                });
                let what = format!(
                    "{name}, {precision:?}, stage {stage}, sequence {sequence_parallel}, {activation_checkpointing:?}"
                );
                assert_eq!(overlapped.numbers, apart.numbers, "{what}");
                let pairs = overlapped.parameters.iter().flatten().zip(apart.parameters.iter().flatten());
                pairs.for_each(|(one, other)| assert!(one.equal(other), "{what}: other parameters"));
            }
        }
    }
}

/// Next to collectives or after them, gradients are the same products.
#[test]
fn async_tensor_parallelism_changes_no_bit() {
    ranks!(4, || compare_async(models(), POSITIONS));
}

/// Next to collectives or after them, a layer multiplies the same pieces.
#[test]
fn async_pieces_change_no_bit() {
    ranks!(4, || compare_async(models_for_many_positions(), MANY_POSITIONS));
}

#[test]
fn lamb_uses_the_norms_of_whole_parameters() {
    ranks!(4, || {
        let ranks = Ranks::parallel(world(), 1, 2).unwrap();
        let place = Place { size: 2, index: ranks.tensor.rank() };
        let lamb = || Optimizer::Lamb(Lamb { lr: 0., beta1: 0.9, beta2: 0.99, weight_decay: 0.1, eps: 1e-4 });
        for (name, config) in models() {
            let alone = Ranks::sharded(Arc::new(single::group()));
            let expected = train(&mut trainer(&config, alone, options(0, lamb())), 5, 2, false);
            for stage in [0, 2] {
                let mut trained = trainer(&config, ranks.clone(), options(stage, lamb()));
                let found = train(&mut trained, 5, 2, false);
                assert_same(trained.model(), place, &found, &expected, &format!("{name}, stage {stage}"));
            }
        }
    });
}

/// The bits of the parameters that all tensor-parallel ranks have.
fn replicated_bits(trainer: &mut Trainer, place: Place) -> Vec<i64> {
    let is_replicated: Vec<Vec<bool>> = trainer
        .model()
        .units()
        .iter()
        .map(|unit| unit.parameters().iter().map(|parameter| parameter.is_replicated(place)).collect())
        .collect();
    let mut bits = Vec::new();
    for (all, is_replicated) in parameters(trainer).iter().zip(is_replicated) {
        for (tensor, _) in all.iter().zip(is_replicated).filter(|(_, is_replicated)| *is_replicated) {
            let elements = Vec::<f64>::try_from(tensor.to_kind(Kind::Double).contiguous().view(-1)).unwrap();
            bits.extend(elements.iter().map(|x| x.to_bits() as i64));
        }
    }
    bits
}

/// What all tensor-parallel ranks have stays the same, because one of them updates each element. Moments exist once.
#[test]
fn replicated_parameters_have_the_same_bits_on_all_ranks() {
    ranks!(4, || {
        let ranks = Ranks::parallel(world(), 1, 2).unwrap();
        let place = Place { size: 2, index: ranks.tensor.rank() };
        for (precision, stage, sequence_parallel, steps) in [
            (Precision::BF16, 3, true, 200),
            (Precision::BF16, 0, false, 20),
            (Precision::F32, 1, false, 20),
            (Precision::F32, 0, true, 20),
        ] {
            for (name, config) in models().into_iter().skip(4) {
                let what = format!("{name}, {precision:?}, stage {stage}, sequence {sequence_parallel}");
                let options = Options { precision, sequence_parallel, ..options(stage, adamw()) };
                let mut trainer = trainer(&config, ranks.clone(), options);
                let trained = train(&mut trainer, steps, 2, false);
                assert!(trained.numbers.iter().all(|number| number.is_finite()), "{what}");
                let own = replicated_bits(&mut trainer, place);
                assert!(own.len() > 100, "{what}: {}", own.len());
                let all = vec![0i64; 2 * own.len()];
                let (own, all) = ranks.tensor.all_gather("bits", own, all).wait().unwrap();
                assert!(all.chunks_exact(own.len()).all(|other| other == own), "{what}: other bits");
            }
        }
    });
}
