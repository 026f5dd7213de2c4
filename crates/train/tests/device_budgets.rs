//! What a step asks of a device: how often the host waits, what it copies, and how many kernels it launches.
//!
//! The counts do not depend on how fast a device is, so they are asserted here, on a device that computes on the CPU.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use shardwise_comm::single;
use shardwise_model::{Batch, LlamaConfig, Model, Parameter};
use shardwise_plan::{Axis, Mesh};
use shardwise_pretend_device::{Counts, device, set_shapes_only};
use shardwise_torch::autograd::{self, Graph};
use shardwise_torch::tch::{Device, Kind, Tensor};
use shardwise_train::{Options, Probe, Ranks, Schedule, StepPhase, Trainer, init};
use shardwise_zero::{AdamW, FloatsMut, Lamb, Optimizer, Precision, Sharding};

const POSITIONS: i64 = 32;

/// Adds up what happens in each phase of each unit.
#[derive(Default)]
struct Tally(Mutex<TallyState>);

#[derive(Default)]
struct TallyState {
    current: Option<(&'static str, usize)>,
    since: Counts,
    counts: BTreeMap<(&'static str, usize), Counts>,
}

impl Tally {
    fn switch(&self, to: Option<(&'static str, usize)>) {
        let mut state = self.0.lock().unwrap();
        let now = Counts::now();
        let spent = now - state.since;
        if let Some(current) = state.current {
            let sum = state.counts.entry(current).or_default();
            *sum = *sum + spent;
        }
        (state.current, state.since) = (to, now);
    }

    fn of(&self, phase: &'static str, unit: usize) -> Counts {
        self.0.lock().unwrap().counts.get(&(phase, unit)).copied().unwrap_or_default()
    }
}

impl Probe for Tally {
    fn enter(&self, phase: StepPhase, unit: usize) {
        let name = match phase {
            StepPhase::Gather => "gather",
            StepPhase::Forward => "forward",
            StepPhase::Recompute => "recompute",
            StepPhase::Backward => "backward",
            StepPhase::Reduce => "reduce",
            StepPhase::Fetch => "fetch",
            StepPhase::Optimizer => "update",
            StepPhase::Store => "store",
        };
        self.switch(Some((name, unit)));
    }
}

/// The counts of a step.
struct Step {
    whole: Counts,
    units: Arc<Tally>,
}

/// The second step, when everything that is kept from step to step exists.
fn count_step(model: LlamaConfig, options: Options, micro_batches: usize) -> Step {
    count_step_on(model, options, (0..micro_batches).map(|_| batch()).collect(), true)
}

fn batch() -> Batch {
    let tokens = Tensor::arange(POSITIONS + 1, (Kind::Int64, Device::Cpu)).view([1, -1]);
    Batch::new(tokens.narrow(1, 0, POSITIONS).copy(), tokens.narrow(1, 1, POSITIONS).copy())
}

/// If nothing is computed, parameters need no values.
fn count_step_on(model: LlamaConfig, options: Options, batches: Vec<Batch>, is_computed: bool) -> Step {
    let mesh = Mesh::new(&[(Axis::Shard, 1)]).unwrap();
    let ranks = Ranks::on_device(Arc::new(single::group()), mesh, |_| Ok(single::group_on(device()))).unwrap();
    let model = Model::from_config(model).unwrap();
    let mut from_seed = init::from_seed(5);
    let mut init = |parameter: &Parameter, range: Range<usize>, elements: FloatsMut<'_>| match is_computed {
        true => from_seed(parameter, range, elements),
        false => Ok(()),
    };
    let mut trainer = Trainer::new(model, ranks, options, &mut init).unwrap();
    trainer.step(&batches).unwrap();
    let units = Arc::new(Tally::default());
    trainer.set_probe(units.clone());
    let before = Counts::now();
    trainer.step(&batches).unwrap();
    units.switch(None);
    Step { whole: Counts::now() - before, units }
}

fn options(optimizer: Optimizer) -> Options {
    let sharding = Sharding::stage(3).unwrap();
    Options { max_grad_norm: Some(1.), device: device(), ..Options::new(sharding, optimizer, Schedule::constant(1e-3)) }
}

fn adamw() -> Options {
    options(Optimizer::AdamW(AdamW::default()))
}

/// A model of 42 million parameters.
fn llama_42m() -> LlamaConfig {
    LlamaConfig { tie_word_embeddings: true, ..LlamaConfig::new(32_000, 512, 8, 8, 1408) }
}

/// A model whose units are all small. As in the large one, every unit has a multiple of 512 elements, so that the last row
/// of a norm is whole.
fn small(blocks: usize) -> LlamaConfig {
    LlamaConfig { tie_word_embeddings: true, ..LlamaConfig::new(64, 512, blocks, 8, 64) }
}

/// Forward and backward pass of a Llama block in plain PyTorch, with rotary tables that exist already (Hugging Face: `LlamaDecoderLayer`).
fn count_plain_block(config: &LlamaConfig, kind: Kind) -> [Counts; 2] {
    let (hidden, heads, inner) =
        (config.hidden_size as i64, config.num_attention_heads as i64, config.intermediate_size as i64);
    let head_dim = hidden / heads;
    let leaf = |shape: &[i64]| Tensor::ones(shape, (kind, device())).set_requires_grad(true);
    let square = || leaf(&[hidden, hidden]);
    let (q, k, v, o) = (square(), square(), square(), square());
    let (gate, up, down) = (leaf(&[inner, hidden]), leaf(&[inner, hidden]), leaf(&[hidden, inner]));
    let (norm_1, norm_2, x) = (leaf(&[hidden]), leaf(&[hidden]), leaf(&[1, POSITIONS, hidden]));
    let [cosines, sines] = [(); 2].map(|()| Tensor::ones([POSITIONS, head_dim], (kind, device())));
    let grad = Tensor::ones([1, POSITIONS, hidden], (kind, device()));

    let start = Counts::now();
    let linear = |x: &Tensor, weight: &Tensor| x.linear(weight, None::<&Tensor>);
    let rms_norm = |x: &Tensor, weight: &Tensor| x.rms_norm([hidden], Some(weight), 1e-5);
    let split = |x: Tensor| x.view([1, POSITIONS, heads, head_dim]).transpose(1, 2);
    let rotate = |x: Tensor| {
        let half = head_dim / 2;
        let rotated = Tensor::cat(&[-x.narrow(3, half, half), x.narrow(3, 0, half)], -1);
        &x * &cosines + rotated * &sines
    };
    let normed = rms_norm(&x, &norm_1);
    let (query, key) = (rotate(split(linear(&normed, &q))), rotate(split(linear(&normed, &k))));
    let value = split(linear(&normed, &v));
    let attended =
        Tensor::scaled_dot_product_attention(&query, &key, &value, None::<&Tensor>, 0., true, None::<f64>, false);
    let x_1 = &x + linear(&attended.transpose(1, 2).reshape([1, POSITIONS, hidden]), &o);
    let normed = rms_norm(&x_1, &norm_2);
    let output = &x_1 + linear(&(linear(&normed, &gate).silu() * linear(&normed, &up)), &down);
    let middle = Counts::now();
    let inputs = [&q, &k, &v, &o, &gate, &up, &down, &norm_1, &norm_2, &x];
    drop(autograd::grad(&[&output], &[Some(&grad)], &inputs, Graph::Free).unwrap());
    [middle - start, Counts::now() - middle]
}

#[test]
fn the_host_waits_once_per_step_and_copies_only_the_batch() {
    for (what, options) in [("f32", adamw()), ("bf16", Options { precision: Precision::BF16, ..adamw() })] {
        for micro_batches in [1, 2] {
            let Step { whole, .. } = count_step(small(2), options.clone(), micro_batches);
            assert_eq!(whole.synchronizations, 1, "{what}: {whole:?}");
            assert_eq!(whole.device_to_host, 1, "{what}: {whole:?}");
            // Inputs and targets.
            assert_eq!(whole.host_to_device, 2 * micro_batches as u64, "{what}: {whole:?}");
        }
    }
}

#[test]
fn a_step_of_42_million_parameters_stays_within_its_budgets() {
    for (kind, precision, update_launches_max) in
        [(Kind::Float, Precision::F32, 4), (Kind::BFloat16, Precision::BF16, 5)]
    {
        let options = Options { precision, ..adamw() };
        let [small, large] = [small(8), llama_42m()].map(|model| count_step(model, options.clone(), 1));
        println!("{kind:?}: {:?}", large.whole);
        assert_passes_launch_like_plain_pytorch(&large.units, &llama_42m(), kind);
        assert_sizes_do_not_matter(&small, &large, 10, update_launches_max);
    }
}

#[test]
fn a_step_of_7_billion_parameters_stays_within_its_budgets() {
    set_shapes_only();
    let llama_7b = LlamaConfig::new(32_000, 4096, 32, 32, 11_008);
    let options = Options { precision: Precision::BF16, ..adamw() };
    let small = LlamaConfig { tie_word_embeddings: false, ..small(32) };
    let [small, large] =
        [small, llama_7b.clone()].map(|model| count_step_on(model, options.clone(), vec![batch()], false));
    println!("{:?}", large.whole);
    assert_eq!((large.whole.synchronizations, large.whole.host_to_device), (1, 2), "{:?}", large.whole);
    assert_passes_launch_like_plain_pytorch(&large.units, &llama_7b, Kind::BFloat16);
    assert_sizes_do_not_matter(&small, &large, 34, 5);
}

/// With flash attention, neither documents nor shared key heads nor windows cost launches.
#[test]
fn documents_cost_one_copy_and_no_launches() {
    let options = Options { precision: Precision::BF16, ..adamw() };
    let plain = count_step(small(2), options.clone(), 1);
    let shared = LlamaConfig { num_key_value_heads: 2, sliding_window: Some(8), ..small(2) };
    let [few, many] = [16, 4].map(|length| {
        let pack = |batch: Batch| {
            let numbers = Tensor::arange(POSITIONS, (Kind::Int64, Device::Cpu)).floor_divide_scalar(length);
            Batch::packed(batch.inputs, batch.targets, &numbers.view([1, -1])).unwrap()
        };
        count_step_on(shared.clone(), options.clone(), vec![pack(batch())], true)
    });
    assert_eq!((many.whole.synchronizations, many.whole.host_to_device), (1, 3), "{:?}", many.whole);
    for phase in ["forward", "backward"] {
        let [plain, few, many] = [&plain, &few, &many].map(|step| step.units.of(phase, 1).launches);
        assert_eq!(few, many, "{phase}");
        // The documents are joined and split again.
        assert!(many <= plain + 6, "{phase}: {many} launches, {plain} without documents");
    }
}

#[test]
fn lamb_waits_for_no_norm() {
    let lamb = || options(Optimizer::Lamb(Lamb { lr: 0., beta1: 0.9, beta2: 0.99, weight_decay: 0.1, eps: 1e-8 }));
    let large = LlamaConfig { num_hidden_layers: 1, vocab_size: 8192, ..llama_42m() };
    let [small, large] = [small(1), large].map(|model| count_step(model, lamb(), 1));
    assert_eq!(large.whole.synchronizations, 1, "{:?}", large.whole);
    // 50 for each of a block's parameters.
    assert_sizes_do_not_matter(&small, &large, 3, 9 * 50);
}

/// The passes of a block launch at most 1.3 times as many kernels as plain PyTorch's.
fn assert_passes_launch_like_plain_pytorch(units: &Tally, config: &LlamaConfig, kind: Kind) {
    let plain = count_plain_block(config, kind);
    for unit in 1..=config.num_hidden_layers {
        for (phase, plain) in [("forward", plain[0].launches), ("backward", plain[1].launches)] {
            let found = units.of(phase, unit).launches;
            println!("unit {unit}: {phase} launches {found}, in plain PyTorch {plain}");
            assert!(10 * found <= 13 * plain, "unit {unit}: {phase} launches {found}, in plain PyTorch {plain}");
        }
    }
}

/// Outside the passes, the units of a small and of a large model launch the same number of kernels.
fn assert_sizes_do_not_matter(small: &Step, large: &Step, units: usize, update_launches_max: u64) {
    for unit in 0..units {
        let [gather, reduce, update] = ["gather", "reduce", "update"].map(|phase| {
            let [small, large] = [small, large].map(|step| step.units.of(phase, unit).launches);
            assert_eq!(small, large, "{phase} of unit {unit}");
            large
        });
        println!("unit {unit}: {gather} launches to gather, {reduce} to reduce, {update} to update");
        // The last unit's reduction is followed by the sums over all units.
        assert!(gather <= 3 && reduce <= 7 && update <= update_launches_max, "unit {unit}: too many launches");
    }
}
