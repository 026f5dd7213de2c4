//! Training compared with the oracle in `reference/`: 4 ranks, with uneven numbers of tokens per rank and micro-batch, and one
//! plain PyTorch process that sees the same tokens as one batch. 50 steps give the same losses and norms with AdamW, SGD and LAMB,
//! to five digits in f32 and to eleven in f64; with a dynamic loss scale the same steps are skipped, and the scale is the same in every step.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use shardwise_comm::{Group, mpi};
use shardwise_harness::{Launch, ranks, scale_timeout};
use shardwise_model::{
    Batch, Gpt2Config, IGNORED, Init, Layer, LlamaConfig, Model, MoeConfig, Parameter, Parameters, Pass, Result,
    RouterConfig, ScoringFunc, Unit,
};
use shardwise_plan::{Axis, Mesh};
use shardwise_torch::tch::{Device, Kind, Tensor};
use shardwise_torch::{exclusive, kind_of};
use shardwise_train::{
    ActivationCheckpointing, DynamicScale, LossScale, OnNonFinite, Options, Ranks, Schedule, Trainer, init,
};
use shardwise_zero::{AdamW, FloatsMut, Lamb, Optimizer, Precision, Sgd, Sharding};

const VOCAB_SIZE: i64 = 101;
const STEPS: i64 = 50;
const RANKS: i64 = 4;
const MICRO_BATCHES: i64 = 2;
const SEQUENCES: i64 = RANKS * MICRO_BATCHES * 2;
const SEED: u64 = 11;
const ADAMW: AdamW = AdamW { lr: 0., beta1: 0.9, beta2: 0.95, weight_decay: 0.1, eps: 1e-8 };

/// A training run that the oracle repeats.
struct Run {
    name: &'static str,
    /// A model family of `reference/models.py`, with its sizes.
    family: Value,
    model: fn() -> Model,
    /// The sequences of a step, for all ranks and micro-batches.
    batch: fn(i64) -> Batch,
    /// The axes of the mesh besides the one that shards.
    mesh: &'static [(Axis, usize)],
    options: Options,
    /// The relative tolerance of losses and norms.
    tolerance: f64,
}

/// The oracle's results for a step.
#[derive(Clone, Copy, Debug)]
struct Step {
    loss: f64,
    norm: f64,
    loss_scale: f64,
    skipped: bool,
}

impl Run {
    /// A run in f32 without loss scaling. The oracle agrees to five digits.
    fn new(name: &'static str, stage: u8, optimizer: Optimizer, rate: f64) -> Self {
        let options = Options {
            activation_checkpointing: ActivationCheckpointing::Full,
            max_grad_norm: Some(0.5),
            ..Options::new(Sharding::stage(stage).unwrap(), optimizer, Schedule::constant(rate))
        };
        let model = || Model::from_config(llama()).unwrap();
        Run { name, family: llama_family(), model, batch: token_batch, mesh: &[], options, tolerance: 1e-5 }
    }

    /// The same run in f64. The oracle agrees to eleven digits.
    fn in_f64(self, name: &'static str) -> Self {
        let options = Options { precision: Precision::F64, ..self.options };
        Run { name, options, tolerance: 1e-11, ..self }
    }

    /// The configuration for `reference/train.py`.
    fn config(&self) -> Value {
        let options = &self.options;
        let adaptive = |kind: &str, betas: [f64; 2], weight_decay: f64, eps: f64| {
            let [beta1, beta2] = betas;
            json!({ "kind": kind, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay, "eps": eps })
        };
        let mut optimizer = match options.optimizer {
            Optimizer::AdamW(AdamW { beta1, beta2, weight_decay, eps, .. }) => {
                adaptive("adamw", [beta1, beta2], weight_decay, eps)
            }
            Optimizer::Lamb(Lamb { beta1, beta2, weight_decay, eps, .. }) => {
                adaptive("lamb", [beta1, beta2], weight_decay, eps)
            }
            Optimizer::Sgd(Sgd { momentum, weight_decay, .. }) => {
                json!({ "kind": "sgd", "momentum": momentum, "weight_decay": weight_decay })
            }
            ref other => panic!("the oracle has no {other:?}"),
        };
        optimizer["lr"] = json!(options.schedule.lr);
        let loss_scale = match options.loss_scale {
            LossScale::Fixed(_) => Value::Null,
            LossScale::Dynamic(DynamicScale { initial, window, .. }) => {
                json!({
                    "init_scale": initial, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": window,
                })
            }
        };
        json!({
            "model": self.family,
            "optimizer": optimizer,
            "max_grad_norm": options.max_grad_norm,
            "loss_scale": loss_scale,
            "dtype": match options.precision {
                Precision::F64 => "float64",
                Precision::F16 => "float16",
                _ => "float32",
            },
        })
    }

    fn write(&self, folder: &Path) {
        std::fs::create_dir(folder).unwrap();
        std::fs::write(folder.join("config.json"), self.config().to_string()).unwrap();
        let batches: Vec<Batch> = (0..STEPS).map(self.batch).collect();
        let stack = |part: fn(&Batch) -> &Tensor| Tensor::stack(&batches.iter().map(part).collect::<Vec<_>>(), 0);
        let initial = |parameter: &Parameter| {
            let kind = kind_of(self.options.precision.state_dtype());
            let mut tensor = Tensor::zeros(&parameter.shape[..], (kind, Device::Cpu));
            let elements = match kind {
                Kind::Double => FloatsMut::F64(exclusive(&mut tensor).unwrap()),
                _ => FloatsMut::F32(exclusive(&mut tensor).unwrap()),
            };
            shardwise_model::init::fill(SEED, parameter, 0..parameter.elements(), elements).unwrap();
            (parameter.name.clone(), tensor)
        };
        let model = (self.model)();
        let mut tensors: Vec<(String, Tensor)> =
            model.units().iter().flat_map(|unit| unit.parameters().iter().map(initial)).collect();
        tensors.push(("tokens".to_string(), stack(|batch| &batch.inputs)));
        tensors.push(("targets".to_string(), stack(|batch| &batch.targets)));
        Tensor::write_safetensors(&tensors, folder.join("in.safetensors")).unwrap();
    }

    /// Trains on this rank, and compares every step with the oracle, on the rank that knows its results.
    fn compare(&self, world: &Arc<Group>, oracle: Option<&[Step]>) {
        let ranks = Ranks::on_mesh(world.clone(), Mesh::divide(world.size(), self.mesh).unwrap()).unwrap();
        let mut trainer =
            Trainer::new((self.model)(), ranks, self.options.clone(), &mut init::from_seed(SEED)).unwrap();
        let mut worst = [0f64; 2];
        for step in 0..STEPS {
            let report = trainer.step(&own_batches((self.batch)(step), trainer.ranks())).unwrap();
            let Some(oracle) = oracle else { continue };
            let (name, expected) = (self.name, oracle[step as usize]);
            assert_eq!(
                (report.loss_scale, report.skipped.is_some()),
                (expected.loss_scale, expected.skipped),
                "{name}, step {step}: {report:?} is not {expected:?}"
            );
            // The norm of a step that is skipped is not finite.
            let norms = (!expected.skipped).then_some((report.grad_norm, expected.norm));
            for (place, (found, expected)) in [(report.loss, expected.loss)].into_iter().chain(norms).enumerate() {
                let difference = (found / expected - 1.).abs();
                worst[place] = worst[place].max(difference);
                assert!(difference < self.tolerance, "{name}, step {step}: {found} is not {expected} ({difference:e})");
            }
        }
        if oracle.is_some() {
            println!("{}: losses agree to {:.1e}, norms to {:.1e}", self.name, worst[0], worst[1]);
        }
    }
}

/// Runs the oracle, for all runs in one process, because it takes seconds to start.
fn run_oracle(runs: &[Run]) -> Vec<Vec<Step>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    let scratch = tempfile::tempdir().unwrap();
    let folders: Vec<PathBuf> = (0..runs.len()).map(|run| scratch.path().join(run.to_string())).collect();
    runs.iter().zip(&folders).for_each(|(run, folder)| run.write(folder));
    let python = shardwise_harness::python().unwrap();
    let output = Command::new(python).arg(root.join("reference/train.py")).args(&folders).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let step = |line: &str| -> Step {
        let numbers: Vec<f64> = line.split(' ').map(|word| word.parse().unwrap()).collect();
        let [loss, norm, loss_scale, skipped]: [f64; 4] = numbers.try_into().unwrap();
        Step { loss, norm, loss_scale, skipped: skipped != 0. }
    };
    let steps: Vec<Step> = String::from_utf8_lossy(&output.stdout).lines().map(step).collect();
    assert_eq!(steps.len(), runs.len() * STEPS as usize);
    steps.chunks_exact(STEPS as usize).map(<[Step]>::to_vec).collect()
}

/// Compares the runs on these ranks with the oracle. Returns the oracle's results on rank 0.
fn compare_with_oracle(runs: &[Run]) -> Option<Vec<Vec<Step>>> {
    // The other ranks wait for rank 0, which runs the oracle.
    let options = mpi::Options { timeout: scale_timeout(Duration::from_secs(100)), ..mpi::Options::default() };
    let world = Arc::new(mpi::world(options).unwrap());
    assert_eq!(world.size() as i64, RANKS);
    let oracle = (world.rank() == 0).then(|| run_oracle(runs));
    for (index, run) in runs.iter().enumerate() {
        run.compare(&world, oracle.as_ref().map(|oracle| &oracle[index][..]));
    }
    oracle
}

fn own_batches(all: Batch, ranks: &Ranks) -> Vec<Batch> {
    let (rank, size) = (ranks.data_rank() as i64, ranks.data_size() as i64);
    let part = |tensor: &Tensor, index: i64| tensor.narrow(0, (index * size + rank) * 2, 2).contiguous();
    let batch = |index| {
        let whole = Batch::new(part(&all.inputs, index), part(&all.targets, index));
        ranks.context.split(whole).unwrap()
    };
    (0..MICRO_BATCHES * RANKS / size).map(batch).collect()
}

// ---- language models --------------------------------------------------------------------------------------------------

/// The tokens of a step. Later sequences have more and more ignored targets.
fn token_batch(step: i64) -> Batch {
    let numbers = Tensor::arange(SEQUENCES * 12, (Kind::Int64, Device::Cpu)).view([SEQUENCES, 12]);
    let tokens = (&numbers * &numbers + numbers * 7 + step * 31).remainder(VOCAB_SIZE);
    let targets = (&tokens * 3 + 1).remainder(VOCAB_SIZE);
    let place = Tensor::arange(12, (Kind::Int64, Device::Cpu));
    let end = Tensor::arange(SEQUENCES, (Kind::Int64, Device::Cpu)).view([SEQUENCES, 1]);
    let ignored = place.ge_tensor(&(end.neg() * 3 / 4 + 12));
    Batch::new(tokens, targets.masked_fill(&ignored, IGNORED))
}

fn llama() -> LlamaConfig {
    LlamaConfig { num_key_value_heads: 3, loss_chunk_tokens: 10, ..LlamaConfig::new(VOCAB_SIZE as usize, 36, 2, 6, 53) }
}

fn llama_family() -> Value {
    let LlamaConfig { num_hidden_layers, head_dim, rope_theta, rms_norm_eps, tie_word_embeddings, .. } = llama();
    json!({
        "family": "llama", "num_hidden_layers": num_hidden_layers, "head_dim": head_dim, "rope_theta": rope_theta,
        "rms_norm_eps": rms_norm_eps, "tie_word_embeddings": tie_word_embeddings,
    })
}

fn gpt2() -> Gpt2Config {
    Gpt2Config::new(VOCAB_SIZE as usize, 16, 36, 2, 6)
}

#[test]
fn llama_trains_like_the_oracle() {
    ranks!(Launch::ranks(4), || {
        let run = |name| Run::new(name, 3, Optimizer::AdamW(ADAMW), 3e-3);
        // Layers that two ranks share, with six query heads and three key heads, of which both ranks use the second.
        let shared = Run { mesh: &[(Axis::Tensor, 2)], ..run("llama, tensor 2 × shard 2") };
        // Sequences of 16 positions that ranks divide.
        let ring = Run { mesh: &[(Axis::Ring, 4)], ..run("llama, ring 4") };
        let ulysses = Run { mesh: &[(Axis::Ulysses, 4)], ..run("llama, Ulysses 4") };
        let both = Run { mesh: &[(Axis::Ring, 2), (Axis::Ulysses, 2)], ..run("llama, ring 2 × Ulysses 2") };
        compare_with_oracle(&[run("llama"), run("llama").in_f64("llama, f64"), shared, ring, ulysses, both]);
    });
}

/// Few tokens, because the oracle processes one at a time.
fn short_batch(step: i64) -> Batch {
    let Batch { inputs, targets, .. } = token_batch(step);
    Batch::new(inputs.narrow(1, 0, 3).contiguous(), targets.narrow(1, 0, 3).contiguous())
}

/// The same hidden layer for each expert as [`llama`] has, with a router.
fn mixture(router: RouterConfig, n_shared_experts: usize) -> LlamaConfig {
    let moe = MoeConfig { router, n_shared_experts, ..MoeConfig::new(8, 2, 20) };
    LlamaConfig { moe: Some(moe), ..llama() }
}

fn softmax() -> LlamaConfig {
    mixture(RouterConfig { router_aux_loss_coef: 0.1, router_z_loss_coef: 0.01, ..RouterConfig::default() }, 0)
}

/// As in DeepSeek-V3, with experts that a bias balances.
fn deepseek() -> LlamaConfig {
    let router = RouterConfig {
        scoring_func: ScoringFunc::Sigmoid,
        routed_scaling_factor: 2.5,
        n_group: 4,
        topk_group: 2,
        router_aux_loss_coef: 0.01,
        router_bias_update_rate: 0.01,
        ..RouterConfig::default()
    };
    mixture(router, 1)
}

/// Experts that drop tokens beyond the mean.
fn dropping() -> LlamaConfig {
    let softmax = softmax();
    LlamaConfig { moe: softmax.moe.map(|moe| MoeConfig { capacity_factor: Some(1.), ..moe }), ..softmax }
}

fn mixture_family(llama: &LlamaConfig) -> Value {
    let MoeConfig { num_experts, num_experts_per_tok, n_shared_experts, capacity_factor, router, .. } =
        llama.moe.clone().unwrap();
    let mut family = llama_family();
    family["moe"] = json!({
        "num_experts": num_experts, "num_experts_per_tok": num_experts_per_tok, "n_shared_experts": n_shared_experts,
        "scoring_func": if router.scoring_func == ScoringFunc::Softmax { "softmax" } else { "sigmoid" },
        "norm_topk_prob": router.norm_topk_prob, "routed_scaling_factor": router.routed_scaling_factor,
        "n_group": router.n_group, "topk_group": router.topk_group,
        "router_aux_loss_coef": router.router_aux_loss_coef, "router_z_loss_coef": router.router_z_loss_coef,
        "router_bias_update_rate": router.router_bias_update_rate, "capacity_factor": capacity_factor,
    });
    family
}

#[test]
fn experts_train_like_the_oracle() {
    ranks!(Launch::ranks(4), || {
        let run = |name, config: LlamaConfig, model| {
            let run = Run::new(name, 3, Optimizer::AdamW(ADAMW), 3e-3);
            Run { family: mixture_family(&config), model, batch: short_batch, ..run }
        };
        let softmax = |name| run(name, softmax(), || Model::from_config(softmax()).unwrap());
        let deepseek = |name| run(name, deepseek(), || Model::from_config(deepseek()).unwrap());
        let dropping = |name| run(name, dropping(), || Model::from_config(dropping()).unwrap());
        // Experts on different ranks.
        let divided = Run { mesh: &[(Axis::Expert, 4)], ..deepseek("deepseek, expert 4") };
        compare_with_oracle(&[
            softmax("softmax"),
            dropping("dropping").in_f64("dropping, f64"),
            divided,
            deepseek("deepseek").in_f64("deepseek, f64"),
        ]);
    });
}

#[test]
fn gpt_2_trains_like_the_oracle() {
    ranks!(Launch::ranks(4), || {
        let Gpt2Config { n_layer, n_head, layer_norm_epsilon, .. } = gpt2();
        let family = json!({
            "family": "gpt2", "n_layer": n_layer, "n_head": n_head, "layer_norm_epsilon": layer_norm_epsilon,
        });
        let run = || Run {
            family: family.clone(),
            model: || Model::from_config(gpt2()).unwrap(),
            ..Run::new("gpt-2", 3, Optimizer::AdamW(ADAMW), 3e-3)
        };
        compare_with_oracle(&[run(), run().in_f64("gpt-2, f64")]);
    });
}

// ---- optimizers and the loss scale ------------------------------------------------------------------------------------

/// The hidden layer of the oracle's `Regression`.
struct Hidden;

impl Layer for Hidden {
    fn forward(&self, p: &Parameters<'_>, _: Option<&Tensor>, batch: &Batch, _: &Pass) -> Result<Tensor> {
        let weight = p.get("weight");
        let inputs = batch.inputs.f_to_kind(weight.kind())?;
        Ok(inputs.f_linear(weight, Some(p.get("bias")))?.f_tanh()?)
    }
}

/// The output layer of `Regression`, with half the squared error.
struct HalfSquaredError;

impl Layer for HalfSquaredError {
    fn forward(&self, p: &Parameters<'_>, input: Option<&Tensor>, batch: &Batch, _: &Pass) -> Result<Tensor> {
        let output = input.unwrap().f_linear(p.get("weight"), None::<Tensor>)?.f_to_kind(Kind::Float)?;
        Ok(output.f_sub(&batch.targets)?.f_square()?.f_sum(Kind::Float)?.f_mul_scalar(0.5)?)
    }
}

fn regression() -> Model {
    let bias = Parameter::vector("first.bias", 6, Init::Normal { std: 0.5 });
    Model::new(vec![
        Unit::new("first", vec![Parameter::matrix("first.weight", [6, 4], 0.5), bias], Hidden),
        Unit::new("second", vec![Parameter::matrix("second.weight", [3, 6], 0.5)], HalfSquaredError),
    ])
    .unwrap()
}

/// Steps whose gradients overflow at every scale of the runs below: early, two and three in a row, when the scale is about to
/// double, and when it is at its maximum.
const OVERFLOWING: [i64; 8] = [2, 13, 14, 18, 31, 32, 33, 45];

/// Inputs and targets between -1 and 1. In a step that should overflow, the targets of one sequence on one rank are a million.
fn number_batch(step: i64) -> Batch {
    let numbers = |columns: i64, salt: i64, modulus: i64| {
        let numbers = Tensor::arange(SEQUENCES * columns, (Kind::Int64, Device::Cpu)).view([SEQUENCES, columns]);
        (&numbers * &numbers + numbers * salt + step * 31).remainder(modulus).to_kind(Kind::Float) / 8.
    };
    let targets = numbers(3, 5, 9);
    if OVERFLOWING.contains(&step) {
        let _ = targets.get(step % SEQUENCES).fill_(1e6);
    }
    Batch::new(numbers(4, 7, 17) - 1., targets)
}

fn scaled_run(name: &'static str, precision: Precision, initial: f64, tolerance: f64) -> Run {
    let run = Run::new(name, 3, Optimizer::AdamW(ADAMW), 3e-3);
    let options = Options {
        precision,
        max_grad_norm: Some(0.1),
        loss_scale: LossScale::Dynamic(DynamicScale { initial, window: 3, ..DynamicScale::DEFAULT }),
        on_nonfinite: OnNonFinite::Skip,
        ..run.options
    };
    Run { family: json!({ "family": "regression" }), model: regression, batch: number_batch, options, tolerance, ..run }
}

/// SGD runs on two replicas of two shards, so the sum over replicas is compared as well. LAMB runs on four shards, and needs the
/// norms of whole parameters. In f32 the loss scale grows to 2^127, the largest power of two in f32, and stays there. In f16 the
/// same steps are skipped, but the values differ: ranks round gradients to 11 bits before they sum them, and the oracle afterwards.
#[test]
fn sgd_lamb_and_loss_scaling_match_pytorch() {
    ranks!(Launch::ranks(4).timeout(Duration::from_secs(200)), || {
        let sgd = Optimizer::Sgd(Sgd { lr: 0., momentum: 0.9, weight_decay: 0.02 });
        // Elements of Adam's update are about 1, and weights about 0.02: a smaller decay would hardly affect the trust ratio.
        let lamb = Optimizer::Lamb(Lamb { lr: 0., beta1: 0.9, beta2: 0.999, weight_decay: 10., eps: 1e-6 });
        let largest = 2f64.powi(127);
        let oracle = compare_with_oracle(&[
            Run { mesh: &[(Axis::Replicate, 2)], ..Run::new("SGD", 2, sgd.clone(), 0.03) },
            Run { mesh: &[(Axis::Replicate, 2)], ..Run::new("SGD", 2, sgd, 0.03) }.in_f64("SGD, f64"),
            Run::new("LAMB", 3, lamb.clone(), 0.01),
            Run::new("LAMB", 3, lamb, 0.01).in_f64("LAMB, f64"),
            scaled_run("loss scale, f32", Precision::F32, largest / 4., 1e-5),
            scaled_run("loss scale, f16", Precision::F16, 256., 2e-2),
        ]);
        let Some([_, _, _, _, f32_steps, f16_steps]) = oracle.as_deref() else { return };
        for steps in [f32_steps, f16_steps] {
            let skipped: Vec<i64> = (0..STEPS).filter(|&step| steps[step as usize].skipped).collect();
            assert_eq!(skipped, OVERFLOWING, "the oracle overflows where it should");
        }
        let at_largest = f32_steps.iter().filter(|step| step.loss_scale == largest).count();
        assert!(at_largest > 3, "the scale stays at its maximum instead of growing: {at_largest} steps");
    });
}
