//! Quantized gathers: the same bits whatever the order of a step, close to exact training, and as much memory as simulated.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use std::ops::ControlFlow;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use shardwise_harness::{Launch, ranks};
use shardwise_plan::program::{Codec, MemoryKind, ModelParallel, memory_use};
use shardwise_plan::{Axis, Dtype, Mesh, int8_bytes};
use shardwise_torch::tch::Device;
use shardwise_torch::{Block, encode_int8};
use shardwise_train::{
    ActivationCheckpointing, OffloadPlace, Offloading, Options, Ranks, Sampling, StepShape, Trainer, generate, init,
    memory_costs, unit_specs,
};
use shardwise_zero::Precision;
use support::bits::{batch, micro_batches, options, train, trainer, world};
use support::{gpt2, llama};

fn quantized(precision: Precision) -> Options {
    Options { gather_codec: Codec::Int8, ..options(3, precision) }
}

fn losses(numbers: &[u64]) -> Vec<f64> {
    numbers.chunks(3).map(|step| f64::from_bits(step[0])).collect()
}

#[test]
fn no_order_of_a_step_changes_a_bit() {
    ranks!(Launch::ranks(2).timeout(Duration::from_secs(300)), || {
        let (world, folder) = (world(), tempfile::tempdir().unwrap());
        let on_disk = || Some(OffloadPlace::Disk(folder.path().to_path_buf()));
        let hybrid = Ranks::hybrid(world.clone(), 2).unwrap();
        let pipeline = Ranks::on_mesh(world.clone(), Mesh::new(&[(Axis::Pipeline, 2)]).unwrap()).unwrap();
        for ranks in [Ranks::sharded(world), hybrid, pipeline] {
            for precision in [Precision::F32, Precision::BF16] {
                let base = Options { max_grad_norm: None, ..quantized(precision) };
                let expected = train(trainer(&ranks, base.clone()), 8, 2);
                for changed in [
                    Options { prefetch: 0, ..base.clone() },
                    Options { prefetch: 3, ..base.clone() },
                    Options { activation_checkpointing: ActivationCheckpointing::Full, ..base.clone() },
                    Options { update_in_backward: true, ..base.clone() },
                    Options {
                        offload: Offloading { parameters: on_disk(), optimizer: on_disk(), ..Offloading::default() },
                        ..base.clone()
                    },
                ] {
                    let what = format!("{:?}, {precision:?}, {changed:?}", ranks.mesh());
                    assert!(train(trainer(&ranks, changed), 8, 2) == expected, "{what}");
                }
                let exact = train(trainer(&ranks, Options { gather_codec: Codec::None, ..base }), 8, 2);
                assert!(exact.0 != expected.0, "passes compute with other numbers");
            }
        }
    });
}

#[test]
fn training_stays_close_to_the_exact_one() {
    ranks!(Launch::ranks(3).timeout(Duration::from_secs(300)), || {
        let ranks = Ranks::sharded(world());
        for precision in [Precision::F32, Precision::BF16] {
            let exact = losses(&train(trainer(&ranks, options(3, precision)), 100, 1).0);
            let found = losses(&train(trainer(&ranks, quantized(precision)), 100, 1).0);
            assert!(exact[99] < 0.5 * exact[0], "it learns");
            for (step, (found, exact)) in found.iter().zip(&exact).enumerate() {
                // At first, only the passes differ.
                let tolerance = if step < 4 { 0.005 } else { 0.1 };
                let is_close = (found - exact).abs() < tolerance * exact;
                assert!(is_close, "{precision:?}, step {step}: {found}, exactly {exact}");
            }
        }
    });
}

/// The numbers of an evaluation are those of the parameters that a checkpoint has.
#[test]
fn evaluation_and_generation_are_exact() {
    ranks!(2, || {
        let ranks = Ranks::sharded(world());
        let outputs = |gather_codec| {
            let mut trainer = trainer(&ranks, Options { gather_codec, ..options(3, Precision::F32) });
            let loss = trainer.evaluate(&[batch(1, ranks.world.rank())]).unwrap().loss_sum;
            let go_on = &mut |_| ControlFlow::Continue(());
            (loss.to_bits(), generate(&mut trainer, &[1, 2, 3], 5, &[], &Sampling::GREEDY, go_on).unwrap())
        };
        assert_eq!(outputs(Codec::Int8), outputs(Codec::None));
    });
}

#[test]
fn a_step_takes_the_memory_that_is_simulated() {
    ranks!(Launch::ranks(3).timeout(Duration::from_secs(120)), || {
        let ranks = Ranks::sharded(world());
        for (precision, prefetch) in [(Precision::F32, 1), (Precision::BF16, 0), (Precision::BF16, 2)] {
            for is_tied in [false, true] {
                let options = Options { prefetch, ..quantized(precision) };
                let model = if is_tied { gpt2() } else { llama() };
                let place = ModelParallel::of_rank(&ranks.mesh(), ranks.world.rank());
                let shape = StepShape { sequences: 3, positions: 12, micro_batches: 2 };
                let units = unit_specs(&model, &options, &place, shape);
                let costs = memory_costs(&model, &options, &place, shape);
                let (policy, layout) = (options.policy(2), ranks.layout(precision));
                let mut trainer = Trainer::new(model, ranks.clone(), options, &mut init::from_seed(5)).unwrap();
                let memory = memory_use(&trainer.program(2).unwrap(), &units, &policy, &layout, &costs);
                let last = memory.during.last().unwrap();
                let simulated = last.bytes(MemoryKind::Unsharded) + last.bytes(MemoryKind::FreeInPool);
                for step in 0..2 {
                    trainer.step(&micro_batches(step, ranks.world.rank(), 2)).unwrap();
                }
                assert_eq!(trainer.bytes().1, simulated, "{precision:?}, prefetch {prefetch}, tied {is_tied}");
            }
        }
    });
}

#[test]
fn what_cannot_be_quantized_is_refused() {
    let sharded = quantized(Precision::F32);
    for (options, reason) in [
        (Options { gather_codec: Codec::Int8, ..options(2, Precision::F32) }, "use stage 3"),
        (quantized(Precision::F64), "only parameters in f32 or bf16"),
        (Options { gather_codec: Codec::Bf16, ..sharded.clone() }, "as int8 only"),
        (Options { device: Device::Cuda(0), ..sharded }, "only ranks that compute on CPUs can quantize"),
    ] {
        let error = options.check().unwrap_err().to_string();
        assert!(error.contains("gather_codec: ") && error.contains(reason), "{error}");
    }
}

#[test]
fn the_bytes_are_those_of_the_reference() {
    let mut numbers: Vec<f32> = Vec::new();
    let mut state = 1u32;
    for index in 0..5000 {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let magnitude = f32::powi(10., (index / 300 % 40) - 33);
        numbers.push((f32::from((state >> 16) as u16) / 32768. - 1.) * magnitude);
    }
    let folder = tempfile::tempdir().unwrap();
    let [input, output] = ["numbers", "encoded"].map(|name| folder.path().join(name));
    std::fs::write(&input, numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>()).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().join("reference/int8.py");
    let python = shardwise_harness::python().unwrap();
    let said = Command::new(python).arg(script).args([&input, &output]).output().unwrap();
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    let mut encoded = Block::new(Dtype::U8, int8_bytes(numbers.len()), Device::Cpu).unwrap();
    encode_int8(&Block::from_slice(&numbers).unwrap(), &mut encoded, 1).unwrap();
    assert!(encoded.as_slice::<u8>().unwrap() == std::fs::read(output).unwrap());
}
