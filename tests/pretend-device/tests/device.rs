//! The pretend device is as strict as a GPU, computes the CPU's bits, and counts.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use shardwise_pretend_device::{Counts, device};
use shardwise_torch::tch::{self, Device, Kind, Tensor};
use shardwise_torch::{Block, copy_bytes, exclusive};

fn numbers(shape: &[i64]) -> Tensor {
    let count = shape.iter().product::<i64>();
    (Tensor::arange(count, (Kind::Float, Device::Cpu)) * 0.7).sin().view(shape)
}

#[test]
fn a_block_of_a_transformer_has_the_bits_of_the_cpu() {
    tch::set_num_threads(1);
    let compute = |device: Device| {
        let leaf = |shape: &[i64]| numbers(shape).to_device(device).set_requires_grad(true);
        let (x, weight, gain) = (leaf(&[2, 24, 64]), leaf(&[64, 64]), leaf(&[64]));
        let normed = x.rms_norm([64], Some(&gain), 1e-5).layer_norm([64], Some(&gain), Some(&gain), 1e-5, true);
        let heads = normed.linear(&weight, None::<&Tensor>).view([2, 24, 4, 16]).transpose(1, 2);
        let attend = |mask: Option<&Tensor>| {
            Tensor::scaled_dot_product_attention(&heads, &heads, &heads, mask, 0., mask.is_none(), None::<f64>, false)
        };
        let mask = Tensor::ones([24, 24], (Kind::Bool, device)).tril(0).triu(-5);
        let attended = (attend(None) + attend(Some(&mask))).transpose(1, 2).reshape([2, 24, 64]);
        let opened = attended.linear(&weight, Some(&gain)).silu().gelu("tanh");
        let loss = (x.view([48, 64]) + opened.view([48, 64])).log_softmax(1, Kind::Float).square().sum(Kind::Double);
        let gradients = Tensor::run_backward(&[&loss], &[&x, &weight, &gain], false, false);
        let tensors = std::iter::once(loss.to_kind(Kind::Float).view(-1)).chain(gradients);
        tensors
            .flat_map(|tensor| Vec::<f32>::try_from(tensor.reshape(-1)).unwrap())
            .map(f32::to_bits)
            .collect::<Vec<_>>()
    };
    assert_eq!(compute(device()), compute(Device::Cpu));
}

#[test]
fn the_host_cannot_touch_device_memory() {
    const CHILD: &str = "SHARDWISE_TOUCHES_DEVICE_MEMORY";
    if std::env::var_os(CHILD).is_some() {
        let block = Block::new(shardwise_plan::Dtype::F32, 8, device()).unwrap();
        // SAFETY: it is not: this is what the device must turn into a crash.
        let value = unsafe { block.as_ptr().read() };
        println!("{value}");
        return;
    }
    let program = std::env::current_exe().unwrap();
    let mut command = Command::new(program);
    command.args(["--exact", "the_host_cannot_touch_device_memory", "--nocapture"]).env(CHILD, "1");
    let output = command.output().unwrap();
    assert_eq!(output.status.signal(), Some(11), "a segmentation fault: {output:?}");
}

#[test]
fn safe_accessors_refuse_device_memory() {
    let mut tensor = numbers(&[4]).to_device(device());
    assert!(exclusive::<f32>(&mut tensor).is_err());
    let block = Block::new(shardwise_plan::Dtype::F32, 8, device()).unwrap();
    assert_eq!(block.device(), device());
    assert!(block.as_slice::<f32>().is_err() && block.bytes().is_err());
}

#[test]
fn memory_is_never_zero_and_is_reused_at_once() {
    let bits = |tensor: &Tensor| Vec::<f32>::try_from(tensor).unwrap();
    let block = Block::new(shardwise_plan::Dtype::F32, 1000, device()).unwrap();
    let address = block.as_ptr();
    let tensor = block.into_tensor().unwrap();
    assert!(bits(&tensor).iter().all(|element| element.is_nan()), "fresh memory is NaN");
    let _ = tensor.shallow_clone().fill_(7.);
    drop(tensor);
    let again = Block::new(shardwise_plan::Dtype::F32, 1000, device()).unwrap();
    assert_eq!(again.as_ptr(), address, "the block that was freed last");
    assert!(bits(&again.into_tensor().unwrap()).iter().all(|element| element.is_nan()), "freed memory is overwritten");
}

#[test]
fn operators_refuse_to_mix_devices() {
    let (here, there) = (numbers(&[4, 4]), numbers(&[4, 4]).to_device(device()));
    assert!(there.f_add(&here).is_err());
    let error = there.f_mm(&here).unwrap_err().to_string();
    assert!(error.contains("on the pretend device got a tensor of shape [4, 4] on cpu"), "{error}");
    assert!(there.f_add(&Tensor::from(1.5f32)).is_ok(), "a scalar may be on the CPU");
}

#[test]
fn copies_go_through_addresses() {
    let elements = [1f32, 2., 3.];
    let mut back = [0f32; 3];
    let [a, b] = [(); 2].map(|()| Block::new(shardwise_plan::Dtype::F32, 3, device()).unwrap());
    // SAFETY: all five have 12 bytes, and nobody else uses them.
    unsafe {
        copy_bytes((Device::Cpu, elements.as_ptr().cast()), (device(), a.as_ptr()), 12).unwrap();
        copy_bytes((device(), a.as_ptr()), (device(), b.as_ptr()), 12).unwrap();
        copy_bytes((device(), b.as_ptr()), (Device::Cpu, back.as_mut_ptr().cast()), 12).unwrap();
    }
    assert_eq!(back, elements);
}

#[test]
fn everything_is_counted() {
    let host = numbers(&[6]);
    let start = Counts::now();
    let x = host.to_device(device());
    assert_eq!(
        Counts::now() - start,
        Counts { host_to_device: 1, synchronizations: 1, allocations: 1, ..Counts::default() }
    );
    let start = Counts::now();
    let y = x.to_device(device()).view([2, 3]).transpose(0, 1).narrow(0, 1, 2);
    assert_eq!(Counts::now() - start, Counts::default(), "views are free, and so is a copy to where it is");
    let start = Counts::now();
    let z = (&y + 1.).contiguous();
    assert_eq!(Counts::now() - start, Counts { launches: 2, allocations: 2, ..Counts::default() });
    let start = Counts::now();
    let _ = (z.double_value(&[0, 0]), z.to_device(Device::Cpu));
    let waits = Counts { device_to_host: 2, synchronizations: 2, ..Counts::default() };
    assert_eq!(Counts::now() - start, waits);
    let start = Counts::now();
    let _ = z.to_device_(Device::Cpu, Kind::Float, true, false);
    assert_eq!((Counts::now() - start).synchronizations, 0, "non_blocking");
    let start = Counts::now();
    let _ = z.nonzero();
    assert_eq!((Counts::now() - start).synchronizations, 1, "the shape depends on the elements");
}
