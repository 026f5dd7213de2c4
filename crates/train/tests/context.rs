//! Context parallelism: the same losses, gradients and parameters as on one rank, in f64.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::sync::Arc;
use std::time::Duration;

use shardwise_comm::{Group, mpi, single};
use shardwise_harness::ranks;
use shardwise_model::{Batch, Gpt2Config, IGNORED, LlamaConfig, Model, ModelConfig, MoeConfig, QkNorm, cut};
use shardwise_plan::program::Place;
use shardwise_plan::{Axis, LayerPlace, Mesh};
use shardwise_torch::tch::{Device, Kind, Tensor, no_grad};
use shardwise_train::{ActivationCheckpointing, Options, Ranks, Schedule, Trainer, init};
use shardwise_zero::{AdamW, Optimizer, Precision, Sgd, Sharding};

const VOCAB_SIZE: i64 = 101;
const SEQUENCES: i64 = 2;
/// No number of ranks divides them.
const POSITIONS: i64 = 61;
/// The largest difference, relative to the largest element.
const TOLERANCE: f64 = 1e-12;
/// That between parameters after several steps; see `tensor.rs`.
const TOLERANCE_AFTER_STEPS: f64 = 1e-10;
const STEPS: i64 = 5;

fn llama() -> LlamaConfig {
    LlamaConfig { head_dim: 4, loss_chunk_tokens: 10, ..LlamaConfig::new(VOCAB_SIZE as usize, 20, 2, 12, 53) }
}

/// With key heads that are fewer than the ranks, that neither divide their number nor are divided by it, with windows shorter and longer
/// than a rank's part, and with learned positions.
fn models() -> Vec<(&'static str, ModelConfig)> {
    let positions = POSITIONS as usize;
    vec![
        (
            "Llama, 2 key heads, tied",
            LlamaConfig { num_key_value_heads: 2, tie_word_embeddings: true, ..llama() }.into(),
        ),
        ("Mistral, 4 key heads", LlamaConfig { num_key_value_heads: 4, sliding_window: Some(5), ..llama() }.into()),
        ("Mistral, 12 heads", LlamaConfig { sliding_window: Some(37), ..llama() }.into()),
        (
            "Qwen 3, 1 key head",
            LlamaConfig { num_key_value_heads: 1, qk_norm: Some(QkNorm::PerHead), ..llama() }.into(),
        ),
        ("Mixtral", LlamaConfig { moe: Some(MoeConfig::new(5, 2, 13)), ..llama() }.into()),
        (
            "GPT-2",
            Gpt2Config { loss_chunk_tokens: 10, ..Gpt2Config::new(VOCAB_SIZE as usize, positions, 36, 2, 12) }.into(),
        ),
    ]
}

/// A micro-batch by its global index. Some targets are ignored. Packed sequences have one long document and several short ones.
fn batch(positions: i64, step: i64, micro: i64, is_packed: bool) -> Batch {
    let numbers = Tensor::arange(SEQUENCES * positions, (Kind::Int64, Device::Cpu)).view([SEQUENCES, positions]);
    let tokens = (numbers.shallow_clone() * 7 + step * 31 + micro * 57).remainder(VOCAB_SIZE);
    let targets = (&tokens * 3 + 1).remainder(VOCAB_SIZE);
    let targets = targets.masked_fill(&(&tokens + micro).remainder(4).eq(0), IGNORED);
    match is_packed {
        true => {
            let sequence = numbers.floor_divide_scalar(positions);
            let documents = (numbers.remainder(positions) + step + sequence * 9).clamp_min(33).floor_divide_scalar(6);
            Batch::packed(tokens, targets, &documents).unwrap()
        }
        false => Batch::new(tokens, targets),
    }
}

fn options(stage: u8, optimizer: Optimizer, lr: f64) -> Options {
    Options {
        precision: Precision::F64,
        ..Options::new(Sharding::stage(stage).unwrap(), optimizer, Schedule::constant(lr))
    }
}

fn sgd() -> Optimizer {
    Optimizer::Sgd(Sgd { lr: 0., momentum: 0., weight_decay: 0. })
}

fn world() -> Arc<Group> {
    Arc::new(mpi::world(mpi::Options { timeout: Duration::from_secs(60), ..mpi::Options::default() }).unwrap())
}

/// Losses and gradient norms of all steps, and the parameters after them.
struct Trained {
    numbers: Vec<f64>,
    parameters: Vec<Vec<Tensor>>,
    model: Model,
}

/// Trains on `micro` micro-batches per step in total, which the ranks that read data divide.
fn train(config: &ModelConfig, ranks: Ranks, options: Options, steps: i64, micro: i64, is_packed: bool) -> Trained {
    train_on(POSITIONS, config, ranks, options, steps, micro, is_packed)
}

fn train_on(
    positions: i64,
    config: &ModelConfig,
    ranks: Ranks,
    options: Options,
    steps: i64,
    micro: i64,
    is_packed: bool,
) -> Trained {
    let model = || Model::from_config(config.clone()).unwrap();
    let mut trainer = Trainer::new(model(), ranks.clone(), options, &mut init::from_seed(5)).unwrap();
    let (rank, size) = (ranks.data_rank() as i64, ranks.data_size() as i64);
    let mut numbers = Vec::new();
    for step in 0..steps {
        let own = (0..micro / size).map(|index| batch(positions, step, index * size + rank, is_packed));
        let own = own.map(|batch| ranks.context.split(batch).unwrap()).collect::<Vec<_>>();
        let report = trainer.step(&own).unwrap();
        numbers.extend([report.loss, report.grad_norm]);
    }
    let own = (0..micro / size)
        .map(|index| ranks.context.split(batch(positions, steps, index * size + rank, is_packed)).unwrap());
    let evaluation = trainer.evaluate(&own.collect::<Vec<_>>()).unwrap();
    numbers.extend([evaluation.loss_sum, evaluation.tokens as f64]);
    let mut parameters = Vec::new();
    for shard in trainer.shards_mut() {
        shard.gather().unwrap();
        parameters.push(shard.parameters().iter().map(|tensor| no_grad(|| tensor.detach().copy())).collect());
        shard.release().unwrap();
    }
    Trained { numbers, parameters, model: model() }
}

fn assert_same(found: &Trained, expected: &Trained, place: Place, tolerance: f64, what: &str) {
    for (index, (found, expected)) in found.numbers.iter().zip(&expected.numbers).enumerate() {
        let error = (found - expected).abs() / expected.abs();
        assert!(error < TOLERANCE, "{what}: number {index} is {found} instead of {expected} ({error:.1e})");
    }
    for (unit, (found, expected)) in found.model.units().iter().zip(found.parameters.iter().zip(&expected.parameters)) {
        for (parameter, (found, whole)) in unit.parameters().iter().zip(found.iter().zip(expected)) {
            let expected = match parameter.kept_slice(LayerPlace { tensor: place, ..LayerPlace::default() }) {
                Some(slice) => cut(whole, &slice).unwrap(),
                None => whole.shallow_clone(),
            };
            let largest = whole.abs().max().double_value(&[]);
            let error = (found - expected).abs().max().double_value(&[]) / largest;
            assert!(error < tolerance, "{what}: {}.{} differs by {error:.1e}", unit.name(), parameter.name);
        }
    }
}

/// Compares all models with sequences divided among `context` ranks, of which `ulysses` exchange heads, and layers among `tensor` ranks,
/// with one rank.
fn compare(context: usize, ulysses: usize, tensor: usize) {
    let world = world();
    let sizes = [(Axis::Ring, context / ulysses), (Axis::Ulysses, ulysses), (Axis::Tensor, tensor)];
    let ranks = Ranks::on_mesh(world.clone(), Mesh::divide(world.size(), &sizes).unwrap()).unwrap();
    let place = Place { size: tensor, index: ranks.tensor.rank() };
    let micro = (world.size() / context / tensor) as i64;
    let checkpointing =
        [ActivationCheckpointing::None, ActivationCheckpointing::Selective, ActivationCheckpointing::Full];
    for (index, (name, config)) in models().into_iter().enumerate() {
        for is_packed in [false, true] {
            let what = format!("{name}, packed {is_packed}, context {context}, Ulysses {ulysses}, tensor {tensor}");
            let alone = || Ranks::sharded(Arc::new(single::group()));
            let expected = train(&config, alone(), options(0, sgd(), 1.), 1, micro, is_packed);
            for (stage, activation_checkpointing) in [0, 2, 3].into_iter().zip(checkpointing) {
                let options = Options { activation_checkpointing, ..options(stage, sgd(), 1.) };
                let found = train(&config, ranks.clone(), options, 1, micro, is_packed);
                assert_same(&found, &expected, place, TOLERANCE, &format!("{what}, stage {stage}: gradients"));
            }
            if index == 0 {
                let adamw =
                    || Optimizer::AdamW(AdamW { lr: 0., beta1: 0.9, beta2: 0.95, weight_decay: 0.1, eps: 1e-4 });
                let expected = train(&config, alone(), options(0, adamw(), 1e-2), STEPS, micro, is_packed);
                let found = train(&config, ranks.clone(), options(3, adamw(), 1e-2), STEPS, micro, is_packed);
                assert_same(&found, &expected, place, TOLERANCE_AFTER_STEPS, &what);
            }
        }
    }
}

#[test]
fn sequences_on_2_ranks_compute_the_same_as_on_one() {
    ranks!(2, || compare(2, 1, 1));
    ranks!(2, || compare(2, 2, 1));
}

#[test]
fn sequences_on_3_ranks_compute_the_same_as_on_one() {
    ranks!(3, || compare(3, 1, 1));
    ranks!(3, || compare(3, 3, 1));
}

#[test]
fn sequences_on_4_ranks_compute_the_same_as_on_one() {
    ranks!(4, || compare(4, 1, 1));
    ranks!(4, || compare(4, 2, 1));
    ranks!(4, || compare(4, 4, 1));
}

#[test]
fn a_whole_micro_batch_is_refused_by_ranks_that_divide_sequences() {
    ranks!(2, || {
        let mesh = Mesh::divide(2, &[(Axis::Ring, 2)]).unwrap();
        let ranks = Ranks::on_mesh(world(), mesh).unwrap();
        let model = Model::from_config(llama()).unwrap();
        let mut trainer = Trainer::new(model, ranks, options(0, sgd(), 1.), &mut init::from_seed(5)).unwrap();
        let error = trainer.step(&[batch(POSITIONS, 0, 0, false)]).err().unwrap().to_string();
        assert!(error.contains("divided among 2 ranks, but rank 0 has a whole micro-batch"), "{error}");
        // Each rank has the part of another micro-batch.
        let own =
            trainer.ranks().context.split(batch(POSITIONS, 0, trainer.ranks().world.rank() as i64, false)).unwrap();
        let error = trainer.step(&[own]).err().unwrap().to_string();
        assert!(
            error.contains("ranks 0 and 1 share their layers or sequences, but have different micro-batches"),
            "{error}"
        );
    });
}

#[test]
fn divided_sequences_and_shards_compute_the_same_as_on_one_rank() {
    ranks!(4, || compare(2, 1, 1));
    ranks!(4, || compare(2, 2, 1));
}

/// Sequences that are long enough for queries to be cut into pieces, and for a kernel to take keys in blocks.
#[test]
fn long_sequences_with_windows_compute_the_same_as_on_one_rank() {
    ranks!(3, || {
        let ranks = Ranks::on_mesh(world(), Mesh::divide(3, &[(Axis::Ring, 3)]).unwrap()).unwrap();
        let alone = || Ranks::sharded(Arc::new(single::group()));
        for window in [3, 200, 700] {
            let llama = LlamaConfig { num_key_value_heads: 4, sliding_window: Some(window), ..llama() };
            let config = LlamaConfig { loss_chunk_tokens: 500, num_hidden_layers: 1, ..llama }.into();
            for is_packed in [false, true] {
                let [expected, found] = [alone(), ranks.clone()]
                    .map(|ranks| train_on(1301, &config, ranks, options(0, sgd(), 1.), 1, 1, is_packed));
                let what = format!("window {window}, packed {is_packed}");
                assert_same(&found, &expected, Place::ALONE, TOLERANCE, &what);
            }
        }
    });
}

/// In 16 bits, sums of parts are kept in f32: the gradients are as near to those in f64 as on one rank.
#[test]
fn sums_over_ranks_are_not_kept_in_16_bits() {
    ranks!(4, || {
        let config = LlamaConfig { num_key_value_heads: 1, ..llama() }.into();
        let train = |ranks: Ranks, precision: Precision| {
            train(&config, ranks, Options { precision, ..options(0, sgd(), 1.) }, 1, 1, true)
        };
        let distance = |found: &Trained, exact: &Trained| -> f64 {
            let pairs = found.parameters.iter().flatten().zip(exact.parameters.iter().flatten());
            let squares = pairs.map(|(found, exact)| {
                (found.to_kind(Kind::Double) - exact).square().sum(Kind::Double).double_value(&[])
            });
            squares.sum::<f64>().sqrt()
        };
        let alone = || Ranks::sharded(Arc::new(single::group()));
        let exact = train(alone(), Precision::F64);
        let on_one = distance(&train(alone(), Precision::BF16), &exact);
        let world = world();
        for ulysses in [1, 2, 4] {
            let mesh = Mesh::divide(4, &[(Axis::Ring, 4 / ulysses), (Axis::Ulysses, ulysses)]).unwrap();
            let ranks = Ranks::on_mesh(world.clone(), mesh).unwrap();
            let divided = distance(&train(ranks, Precision::BF16), &exact);
            assert!(divided < 1.1 * on_one, "Ulysses {ulysses}: {divided} instead of {on_one}");
        }
    });
}

/// Two stages of a pipeline, each of which divides the sequences.
#[test]
fn divided_sequences_and_stages_compute_the_same_as_on_one_rank() {
    ranks!(4, || {
        let mesh = Mesh::divide(4, &[(Axis::Pipeline, 2), (Axis::Ring, 2)]).unwrap();
        let ranks = Ranks::on_mesh(world(), mesh).unwrap();
        for is_packed in [false, true] {
            let config: ModelConfig = LlamaConfig { num_key_value_heads: 2, ..llama() }.into();
            let alone = Ranks::sharded(Arc::new(single::group()));
            let expected = train(&config, alone, options(0, sgd(), 1.), 1, 4, is_packed);
            let found = train(&config, ranks.clone(), options(0, sgd(), 1.), 1, 4, is_packed);
            for (found, expected) in found.numbers.iter().zip(&expected.numbers) {
                assert!((found - expected).abs() < TOLERANCE * expected.abs(), "{found} instead of {expected}");
            }
        }
    });
}

#[test]
fn divided_sequences_and_layers_compute_the_same_as_on_one_rank() {
    ranks!(4, || compare(2, 1, 2));
    ranks!(4, || compare(2, 2, 2));
}

/// Blocks that compute everything but attention in chunks of tokens, on ranks that have whole sequences and on ranks that divide them.
#[test]
fn blocks_in_chunks_compute_the_same_as_at_once() {
    let in_chunks = |config: ModelConfig, chunk: usize| -> ModelConfig {
        let block_chunk_tokens = Some(chunk);
        match config {
            ModelConfig::Llama(llama) => LlamaConfig { block_chunk_tokens, ..llama }.into(),
            ModelConfig::Gpt2(gpt2) => Gpt2Config { block_chunk_tokens, ..gpt2 }.into(),
            compiled @ ModelConfig::Compiled(_) => compiled,
        }
    };
    ranks!(2, || {
        let world = world();
        let divided = Ranks::on_mesh(world.clone(), Mesh::divide(2, &[(Axis::Ring, 2)]).unwrap()).unwrap();
        let alone = || Ranks::sharded(Arc::new(single::group()));
        let checkpointing =
            [ActivationCheckpointing::None, ActivationCheckpointing::Selective, ActivationCheckpointing::Full];
        // Mixtures of experts route all tokens at once.
        for (name, config) in models().into_iter().filter(|(_, config)| config.moe().is_none()) {
            for (is_packed, chunk) in [(false, 7), (true, 30)] {
                let expected = train(&config, alone(), options(0, sgd(), 1.), 1, 1, is_packed);
                let config = in_chunks(config.clone(), chunk);
                for (stage, activation_checkpointing) in [0, 2, 3].into_iter().zip(checkpointing) {
                    for ranks in [alone(), divided.clone()] {
                        let what = format!("{name}, packed {is_packed}, stage {stage}, {} ranks", ranks.context.size());
                        let options = Options { activation_checkpointing, ..options(stage, sgd(), 1.) };
                        let found = train(&config, ranks, options, 1, 1, is_packed);
                        assert_same(&found, &expected, Place::ALONE, TOLERANCE, &what);
                    }
                }
            }
        }
        let error = chunks_of_shared_layers(world, in_chunks(llama().into(), 7));
        assert!(error.contains("block_chunk_tokens: blocks that are computed in chunks cannot be split"), "{error}");
    });
}

/// Two ranks that share layers, of which they would have to compute chunks.
fn chunks_of_shared_layers(world: Arc<Group>, config: ModelConfig) -> String {
    let ranks = Ranks::on_mesh(world, Mesh::divide(2, &[(Axis::Tensor, 2)]).unwrap()).unwrap();
    let model = Model::from_config(config).unwrap();
    Trainer::new(model, ranks, options(0, sgd(), 1.), &mut init::from_seed(5)).err().unwrap().to_string()
}

/// In 16 bits, the gradients of chunks are summed in f32; frozen parameters before, after and around attention get none.
#[test]
fn chunks_are_summed_in_f32_and_leave_frozen_parameters_alone() {
    let [whole, chunked] = [None, Some(1)].map(|block_chunk_tokens| {
        ModelConfig::from(LlamaConfig { qk_norm: Some(QkNorm::PerHead), block_chunk_tokens, ..llama() })
    });
    // After a step of this size, parameters are their gradients, and differ as gradients do.
    let lr = 1e6;
    let gradients = |config: &ModelConfig, frozen: &[&str], precision: Precision| -> Vec<Tensor> {
        let mut model = Model::from_config(config.clone()).unwrap();
        model.freeze(frozen).unwrap();
        let options = Options { precision, ..options(0, sgd(), lr) };
        let alone = Ranks::sharded(Arc::new(single::group()));
        let mut trainer = Trainer::new(model, alone, options, &mut init::from_seed(5)).unwrap();
        trainer.step(&[batch(POSITIONS, 0, 0, true)]).unwrap();
        let values = |shard: &mut shardwise_zero::ShardedUnit| -> Vec<Tensor> {
            shard.parameters().iter().map(|tensor| tensor.detach().to_kind(Kind::Double) / lr).collect()
        };
        trainer.shards_mut().flat_map(values).collect()
    };
    let norm = |tensors: &mut dyn Iterator<Item = Tensor>| -> f64 {
        tensors.map(|tensor| tensor.square().sum(Kind::Double).double_value(&[])).sum::<f64>().sqrt()
    };
    let distance = |found: &[Tensor], exact: &[Tensor]| -> f64 {
        norm(&mut found.iter().zip(exact).map(|(a, b)| a - b)) / norm(&mut exact.iter().map(Tensor::shallow_clone))
    };
    let frozen: [&[&str]; 4] = [
        &[],
        &["model.embed_tokens", "model.layers.0.input", "model.layers.0.self_attn"],
        &["model.layers.1.mlp", "model.layers.1.post", "model.layers.1.self_attn.o_proj"],
        &["model.layers"],
    ];
    for frozen in frozen {
        let exact = gradients(&whole, frozen, Precision::F64);
        let error = distance(&gradients(&chunked, frozen, Precision::F64), &exact);
        assert!(error < TOLERANCE, "frozen {frozen:?}: {error}");
        let [whole, chunked] =
            [&whole, &chunked].map(|config| distance(&gradients(config, frozen, Precision::BF16), &exact));
        assert!(chunked < 1.05 * whole, "frozen {frozen:?}: {chunked} instead of {whole}");
    }
}
