//! Training on a device that is not the CPU, with the CPU's kernels: the bits are the CPU's.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use std::num::NonZeroU64;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use shardwise_comm::{CallFault, CallFaultKind, Group, Verb, mpi, nccl, single};
use shardwise_harness::{Launch, ranks, scale_timeout};
use shardwise_model::{Batch, IGNORED, LlamaConfig, Model, MoeConfig, Parameter, RouterConfig};
use shardwise_plan::program::Buffer;
use shardwise_plan::{Axis, Mesh};
use shardwise_pretend_device::{device, set_seed};
use shardwise_torch::tch::{self, Device, Kind, Tensor};
use shardwise_train::{
    ActivationCheckpointing, DynamicScale, LossScale, OffloadPlace, Offloading, OnNonFinite, Options, Ranks, Sampling,
    Schedule, Trainer, generate, init,
};
use shardwise_zero::{AdamW, FloatsMut, Lamb, Optimizer, Precision, Sgd, Sharding};
use support::{VOCAB_SIZE, gpt2, llama};

fn options(stage: u8, device: Device) -> Options {
    let sharding = Sharding::stage(stage).unwrap();
    Options {
        max_grad_norm: Some(0.5),
        device,
        ..Options::new(sharding, Optimizer::AdamW(AdamW::default()), Schedule::constant(1e-2))
    }
}

/// One rank whose tensors are on a device.
fn alone(device: Device) -> Ranks {
    let mesh = Mesh::new(&[(Axis::Shard, 1)]).unwrap();
    Ranks::on_device(Arc::new(single::group()), mesh, |_| Ok(single::group_on(device))).unwrap()
}

/// A micro-batch of a step by its global index. Some targets are ignored.
fn batch(step: i64, micro: i64) -> Batch {
    let numbers = Tensor::arange(3 * 12, (Kind::Int64, Device::Cpu)).view([3, 12]);
    let tokens = (numbers * 7 + step * 31 + micro * 57).remainder(VOCAB_SIZE);
    let targets = (&tokens * 3 + 1).remainder(VOCAB_SIZE);
    let ignored = (&tokens + micro).remainder(4).eq(0);
    Batch::new(tokens, targets.masked_fill(&ignored, IGNORED))
}

/// The losses and norms of three steps, and the final parameters, as bits.
fn train(model: Model, ranks: &Ranks, options: Options) -> (Vec<u64>, Vec<u64>) {
    // Sums over threads depend on their number, and the backward pass on a device has threads of its own.
    tch::set_num_threads(1);
    let mut trainer = Trainer::new(model, ranks.clone(), options, &mut init::from_seed(5)).unwrap();
    let mut numbers = Vec::new();
    for step in 0..3 {
        let batches: Vec<Batch> =
            (0..2).map(|index| batch(step, index * ranks.data_size() as i64 + ranks.data_rank() as i64)).collect();
        let report = trainer.step(&batches).unwrap();
        numbers.extend([report.loss.to_bits(), report.grad_norm.to_bits()]);
    }
    numbers.push(trainer.evaluate(&[batch(7, 0)]).unwrap().loss_sum.to_bits());
    let go_on = &mut |_| ControlFlow::Continue(());
    let generated = generate(&mut trainer, &[3, 1, 4], 5, &[], &Sampling::GREEDY, go_on).unwrap();
    numbers.extend(generated.into_iter().map(i64::cast_unsigned));
    let mut parameters = Vec::new();
    for shard in trainer.shards_mut() {
        shard.start_fetch(Buffer::Parameters).unwrap();
        shard.finish_fetch(Buffer::Parameters).unwrap();
        shard.gather().unwrap();
        for tensor in shard.parameters() {
            let elements = Vec::<f64>::try_from(tensor.to_kind(Kind::Double).reshape(-1)).unwrap();
            parameters.extend(elements.into_iter().map(f64::to_bits));
        }
        shard.release().unwrap();
        shard.evict(Buffer::Parameters).unwrap();
    }
    (numbers, parameters)
}

#[test]
fn every_stage_on_a_device_has_the_bits_of_the_cpu() {
    for model in [llama, gpt2] {
        for stage in 0..=3 {
            let [expected, found] =
                [Device::Cpu, device()].map(|device| train(model(), &alone(device), options(stage, device)));
            assert_eq!(found.0, expected.0, "losses and norms at stage {stage}");
            assert!(found.1 == expected.1, "parameters at stage {stage}");
        }
    }
}

#[test]
fn updates_in_the_backward_pass_on_a_device_have_the_bits_of_the_cpu() {
    for stage in 0..=3 {
        let [expected, found] = [(Device::Cpu, false), (device(), true)].map(|(device, update_in_backward)| {
            let options = Options { max_grad_norm: None, update_in_backward, ..options(stage, device) };
            train(gpt2(), &alone(device), options)
        });
        assert_eq!(found.0, expected.0, "losses and norms at stage {stage}");
        assert!(found.1 == expected.1, "parameters at stage {stage}");
    }
}

/// Everything that a stage can keep in the host's memory.
fn on_host(options: Options) -> Options {
    let host = || Some(OffloadPlace::Host);
    let is_full = options.activation_checkpointing == ActivationCheckpointing::Full;
    let offload = Offloading {
        optimizer: host(),
        parameters: host().filter(|_| options.sharding.parameters),
        gradients: host().filter(|_| !options.update_in_backward),
        activations: host().filter(|_| is_full),
    };
    Options { offload, ..options }
}

#[test]
fn host_memory_changes_no_bit() {
    // libtorch looks for devices at the first backward pass.
    let device = device();
    for stage in 0..=3 {
        for precision in [Precision::F32, Precision::BF16] {
            let full = ActivationCheckpointing::Full;
            let options = |device| Options { precision, activation_checkpointing: full, ..options(stage, device) };
            let expected = train(gpt2(), &alone(Device::Cpu), options(Device::Cpu));
            let all = on_host(options(device));
            let host = || Some(OffloadPlace::Host);
            for offload in [
                Offloading { optimizer: host(), ..Offloading::default() },
                Offloading { parameters: host().filter(|_| stage == 3), ..Offloading::default() },
                Offloading { gradients: host(), ..Offloading::default() },
                Offloading { activations: host(), ..Offloading::default() },
                all.offload.clone(),
            ] {
                let found = train(gpt2(), &alone(device), Options { offload: offload.clone(), ..all.clone() });
                assert_eq!(found.0, expected.0, "losses and norms at stage {stage}, {precision:?}, {offload:?}");
                assert!(found.1 == expected.1, "parameters at stage {stage}, {precision:?}, {offload:?}");
            }
            let in_backward = |options| Options { max_grad_norm: None, update_in_backward: true, ..options };
            let expected = train(gpt2(), &alone(Device::Cpu), in_backward(options(Device::Cpu)));
            let found = train(gpt2(), &alone(device), on_host(in_backward(options(device))));
            assert!(found == expected, "in the backward pass at stage {stage}, {precision:?}");
        }
    }
}

/// The first steps overflow, and are skipped.
#[test]
fn gradients_on_the_host_that_are_not_finite_are_found() {
    let device = device();
    let loss_scale = LossScale::Dynamic(DynamicScale { initial: 2f64.powi(22), ..DynamicScale::DEFAULT });
    let f16 = |options| Options {
        precision: Precision::F16,
        loss_scale,
        on_nonfinite: OnNonFinite::Skip,
        activation_checkpointing: ActivationCheckpointing::Full,
        ..options
    };
    for stage in [2, 3] {
        let in_memory = train(llama(), &alone(device), f16(options(stage, device)));
        let on_host = train(llama(), &alone(device), on_host(f16(options(stage, device))));
        assert!(on_host == in_memory, "stage {stage}");
        assert!(in_memory.0.iter().any(|number| !f64::from_bits(*number).is_finite()), "no step overflows");
    }
}

#[test]
fn every_optimizer_and_precision_on_a_device_has_the_bits_of_the_cpu() {
    let lamb = Lamb { lr: 0., beta1: 0.9, beta2: 0.99, weight_decay: 0.1, eps: 1e-8 };
    let sgd = Sgd { lr: 0., momentum: 0.9, weight_decay: 0.1 };
    let base = |device| options(3, device);
    let cases: [(&str, &dyn Fn(Device) -> Options); 5] = [
        ("SGD", &|device| Options { optimizer: Optimizer::Sgd(sgd), ..base(device) }),
        ("LAMB", &|device| Options { optimizer: Optimizer::Lamb(lamb), ..base(device) }),
        ("bf16", &|device| Options { precision: Precision::BF16, ..base(device) }),
        ("f64", &|device| Options { precision: Precision::F64, ..base(device) }),
        ("checkpointing", &|device| Options {
            activation_checkpointing: ActivationCheckpointing::Full,
            reduce_each_micro_batch: true,
            ..base(device)
        }),
    ];
    for (what, options) in cases {
        let [expected, found] = [Device::Cpu, device()].map(|device| train(llama(), &alone(device), options(device)));
        assert_eq!(found.0, expected.0, "{what}");
        assert!(found.1 == expected.1, "{what}");
    }
}

/// A device computes all documents of a batch, windows and shared key heads in one call (flash attention); the CPU does not.
#[test]
fn attention_in_one_call_has_the_bits_of_the_cpu() {
    let packed = |batch: Batch| {
        let numbers = Tensor::arange(3 * 12, (Kind::Int64, Device::Cpu)).view([3, 12]).floor_divide_scalar(5);
        Batch::packed(batch.inputs, batch.targets, &numbers).unwrap()
    };
    let losses = |config: LlamaConfig, is_packed: bool, options: Options| -> Vec<u64> {
        tch::set_num_threads(1);
        let model = Model::from_config(config).unwrap();
        let mut trainer = Trainer::new(model, alone(options.device), options, &mut init::from_seed(5)).unwrap();
        let mut step = |step: i64| {
            let batches = [0, 1].map(|index| batch(step, index));
            let report = trainer.step(&if is_packed { batches.map(packed) } else { batches }).unwrap();
            [report.loss.to_bits(), report.grad_norm.to_bits()]
        };
        (0..3).flat_map(&mut step).collect()
    };
    for (key_heads, window, is_packed) in
        [(2, None, false), (8, Some(4), false), (8, None, true), (2, Some(3), true), (1, Some(4), false)]
    {
        for checkpointing in [ActivationCheckpointing::None, ActivationCheckpointing::Selective] {
            let config = LlamaConfig::new(VOCAB_SIZE as usize, 64, 2, 8, 48);
            let config = LlamaConfig { num_key_value_heads: key_heads, sliding_window: window, ..config };
            let [expected, found] = [Device::Cpu, device()].map(|device| {
                let precision = Precision::BF16;
                let options = Options { precision, activation_checkpointing: checkpointing, ..options(3, device) };
                losses(config.clone(), is_packed, options)
            });
            assert_eq!(found, expected, "{key_heads} key heads, {window:?}, {is_packed}, {checkpointing:?}");
        }
    }
}

#[test]
fn experts_have_the_bits_of_the_cpu() {
    let router = RouterConfig { router_aux_loss_coef: 0.1, router_z_loss_coef: 0.01, ..RouterConfig::default() };
    let moe = MoeConfig { router, n_shared_experts: 1, ..MoeConfig::new(8, 2, 24) };
    let config = LlamaConfig { moe: Some(moe), ..LlamaConfig::new(VOCAB_SIZE as usize, 64, 2, 8, 48) };
    for activation_checkpointing in [ActivationCheckpointing::None, ActivationCheckpointing::Full] {
        let [expected, found] = [Device::Cpu, device()].map(|device| {
            let options = Options { activation_checkpointing, ..options(3, device) };
            train(Model::from_config(config.clone()).unwrap(), &alone(device), options)
        });
        assert_eq!(found.0, expected.0, "{activation_checkpointing:?}");
        assert!(found.1 == expected.1, "{activation_checkpointing:?}");
    }
}

#[test]
fn two_ranks_on_devices_have_the_bits_of_the_cpu() {
    ranks!(2, || {
        // libtorch looks for devices at the first backward pass.
        let device = device();
        let world = mpi::world(mpi::Options { timeout: Duration::from_secs(60), ..mpi::Options::default() }).unwrap();
        let world = Arc::new(world);
        for axis in [Axis::Shard, Axis::Tensor, Axis::Pipeline] {
            let mesh = Mesh::new(&[(axis, 2)]).unwrap();
            for stage in if axis == Axis::Shard { vec![1, 3] } else { vec![0] } {
                let expected =
                    train(llama(), &Ranks::on_mesh(world.clone(), mesh).unwrap(), options(stage, Device::Cpu));
                let ranks = Ranks::on_gpu(world.clone(), mesh, device).unwrap();
                for options in [options(stage, device), on_host(options(stage, device))] {
                    let found = train(llama(), &ranks, options.clone());
                    assert_eq!(found.0, expected.0, "{axis} at stage {stage}, {:?}", options.offload);
                    assert!(found.1 == expected.1, "{axis} at stage {stage}, {:?}", options.offload);
                }
            }
        }
    });
}

/// As many seeds as a claim asks for; a few otherwise.
fn seeds() -> impl Iterator<Item = NonZeroU64> {
    let count = std::env::var("SHARDWISE_SEEDS").map_or(5, |count| count.parse().unwrap());
    (1..=count).filter_map(NonZeroU64::new)
}

/// Streams that pause at random, and nothing else, differ between these runs.
#[test]
fn two_ranks_on_devices_have_the_same_bits_for_every_seed() {
    let launch = Launch::ranks(2).timeout(Duration::from_secs(3000));
    ranks!(launch, || {
        let device = device();
        let world = mpi::world(mpi::Options { timeout: Duration::from_secs(60), ..mpi::Options::default() }).unwrap();
        let world = Arc::new(world);
        let full = |options| Options { activation_checkpointing: ActivationCheckpointing::Full, ..options };
        let settings = [
            (Axis::Shard, options(3, device)),
            (Axis::Shard, options(2, device)),
            (Axis::Tensor, options(0, device)),
            (Axis::Pipeline, options(0, device)),
            (Axis::Shard, on_host(full(options(3, device)))),
        ];
        let settings = settings.map(|(axis, options)| {
            let ranks = Ranks::on_gpu(world.clone(), Mesh::new(&[(axis, 2)]).unwrap(), device).unwrap();
            let expected = train(llama(), &ranks, Options { offload: Offloading::default(), ..options.clone() });
            (axis, options, ranks, expected)
        });
        for seed in seeds() {
            set_seed(Some(seed));
            // The seeds take turns with the layouts.
            let (axis, options, ranks, expected) = &settings[seed.get() as usize % settings.len()];
            let found = train(llama(), ranks, options.clone());
            let what = || format!("{axis}, {:?}, {:?}, seed {seed}", options.sharding, options.offload);
            assert_eq!(found.0, expected.0, "{}", what());
            assert!(found.1 == expected.1, "{}", what());
        }
    });
}

#[test]
fn a_collective_that_fails_on_a_device_fails_the_step() {
    let launch = Launch::ranks(2).timeout(Duration::from_secs(120));
    ranks!(launch, || {
        let device = device();
        let is_first = std::env::var("OMPI_COMM_WORLD_RANK").or(std::env::var("PMI_RANK")).unwrap() == "0";
        // The last collective of the step, whose result is read on the device only.
        let skipped =
            CallFault { verb: Some(Verb::AllReduce), label: "embedding".into(), nth: 1, kind: CallFaultKind::Skip };
        let fault = Some(skipped).filter(|_| !is_first);
        // Over MPI, the ranks wait for each other while the collective times out.
        let limits = mpi::Options { timeout: Duration::from_secs(100), fault, ..mpi::Options::default() };
        let (world, mesh) = (Arc::new(mpi::world(limits).unwrap()), Mesh::new(&[(Axis::Shard, 2)]).unwrap());
        let timeout = scale_timeout(Duration::from_secs(2));
        let connect = |control: Group| nccl::connect_with_timeout(control, device, timeout);
        let ranks = Ranks::on_device(world.clone(), mesh, connect).unwrap();
        let mut trainer = Trainer::new(llama(), ranks, options(0, device), &mut init::from_seed(5)).unwrap();
        let result = trainer.step(&[batch(0, world.rank() as i64)]);
        if is_first {
            let error = result.unwrap_err().to_string();
            assert!(error.contains("of 'embedding'") && error.contains("made no progress for "), "{error}");
        }
    });
}

#[test]
fn an_output_that_is_not_finite_is_found_after_the_step() {
    let error = |device: Device, update_in_backward: bool| {
        let mut init = init::from_seed(5);
        let mut broken = |parameter: &Parameter, range: std::ops::Range<usize>, elements: FloatsMut<'_>| {
            let FloatsMut::F32(elements) = elements else { panic!("f32") };
            init(parameter, range, FloatsMut::F32(&mut *elements))?;
            if parameter.name == "model.layers.1.mlp.up_proj.weight" {
                elements.fill(f32::INFINITY);
            }
            Ok(())
        };
        let max_grad_norm = (!update_in_backward).then_some(0.5);
        let options = Options { max_grad_norm, update_in_backward, ..options(3, device) };
        let mut trainer = Trainer::new(llama(), alone(device), options, &mut broken).unwrap();
        trainer.step(&[batch(0, 0), batch(0, 1)]).unwrap_err().to_string()
    };
    // libtorch looks for devices at the first backward pass.
    let device = device();
    let expected = error(Device::Cpu, false);
    assert!(expected.contains("its parameter model.layers.1.mlp.up_proj.weight"), "{expected}");
    assert_eq!(error(device, false), expected);
    // What is not finite has been used to update parameters, so the passes cannot be repeated to find it.
    let updated = error(device, true);
    assert!(updated.contains("is not finite, and parameters were updated with it"), "{updated}");
}

#[test]
fn a_trainer_refuses_groups_of_another_device() {
    let ranks = Ranks::sharded(Arc::new(single::group()));
    let error = Trainer::new(llama(), ranks, options(3, device()), &mut init::from_seed(5)).err().unwrap();
    assert!(error.to_string().contains("the ranks' groups communicate Cpu memory"), "{error}");
}
