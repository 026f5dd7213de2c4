//! The interface to libtorch: exact gradients, closures freed once, memory taken and put back, failures returned as errors.
//! Valgrind runs this file too (`cargo xtask show foundation/leaks`).

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use shardwise_plan::Dtype;
use shardwise_torch::tch::{Device, Kind, Tensor};
use shardwise_torch::{Block, Error, autograd, exclusive, libtorch_version, optim, storage};

fn vector(values: &[f32]) -> Tensor {
    Tensor::from_slice(values)
}

fn values(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(tensor.contiguous().view(-1)).unwrap()
}

/// Counts how often it is dropped.
struct Canary(Arc<AtomicUsize>);

impl Drop for Canary {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// x², with a canary in the closure.
fn square(x: &Tensor, drops: &Arc<AtomicUsize>) -> Tensor {
    let canary = Canary(drops.clone());
    let outputs = autograd::function(
        "square",
        &[x],
        |inputs| Ok(autograd::Forward { outputs: vec![inputs[0].square()], saved: vec![inputs[0].shallow_clone()] }),
        move |back| {
            let _ = &canary;
            Ok(vec![back.grads[0].as_ref().map(|grad| grad * 2. * &back.saved[0])])
        },
    );
    outputs.unwrap().remove(0)
}

#[test]
fn the_libtorch_version_is_the_supported_one() {
    assert_eq!(libtorch_version(), "2.13.0");
}

#[test]
fn a_closure_is_freed_once_after_a_backward_pass() {
    let drops = Arc::new(AtomicUsize::new(0));
    let x = vector(&[1., -2., 3.]).set_requires_grad(true);
    let y = square(&x, &drops);
    y.sum(Kind::Float).backward();
    assert_eq!(values(&x.grad()), [2., -4., 6.]);
    drop(y);
    assert_eq!(drops.load(Ordering::SeqCst), 1);
}

#[test]
fn a_closure_is_freed_once_without_a_backward_pass() {
    let drops = Arc::new(AtomicUsize::new(0));
    let x = vector(&[1., 2.]).set_requires_grad(true);
    let y = square(&x, &drops);
    assert_eq!(drops.load(Ordering::SeqCst), 0);
    drop(y);
    assert_eq!(drops.load(Ordering::SeqCst), 1);
}

#[test]
fn a_closure_is_freed_at_once_without_autograd() {
    let drops = Arc::new(AtomicUsize::new(0));
    let y = square(&vector(&[3.]), &drops);
    assert_eq!((values(&y), drops.load(Ordering::SeqCst)), (vec![9.], 1));
}

#[test]
fn a_thousand_closures_are_freed_a_thousand_times() {
    let drops = Arc::new(AtomicUsize::new(0));
    let x = vector(&[1.0001]).set_requires_grad(true);
    let mut y = x.shallow_clone();
    for _ in 0..1000 {
        y = square(&y, &drops).sqrt();
    }
    autograd::grad(&[&y], &[None], &[&x], autograd::Graph::Free).unwrap();
    drop(y);
    assert_eq!(drops.load(Ordering::SeqCst), 1000);
}

#[test]
fn gradients_flow_with_the_weights_that_are_given() {
    let drops = Arc::new(AtomicUsize::new(0));
    let x = vector(&[1., 2., 3.]).set_requires_grad(true);
    let unused = vector(&[1.]).set_requires_grad(true);
    let y = square(&x, &drops);
    let weights = vector(&[1., 10., 100.]);
    for graph in [autograd::Graph::Keep, autograd::Graph::Free] {
        let grads = autograd::grad(&[&y], &[Some(&weights)], &[&x, &unused], graph).unwrap();
        assert_eq!(values(grads[0].as_ref().unwrap()), [2., 40., 600.]);
        assert!(grads[1].is_none());
    }
    assert!(!x.grad().defined(), "nothing is accumulated");
    let again = autograd::grad(&[&y], &[Some(&weights)], &[&x], autograd::Graph::Free);
    assert!(again.unwrap_err().to_string().contains("second time"));
}

#[test]
fn a_function_can_have_several_inputs_and_outputs() {
    let a = vector(&[2.]).set_requires_grad(true);
    let b = vector(&[5.]).set_requires_grad(true);
    let frozen = vector(&[7.]);
    let outputs = autograd::function(
        "sum and product",
        &[&a, &b, &frozen],
        |inputs| {
            let outputs = vec![inputs[0] + inputs[1], inputs[0] * inputs[1]];
            Ok(autograd::Forward { outputs, saved: inputs.iter().map(|input| input.shallow_clone()).collect() })
        },
        |back| {
            assert!(back.grads[0].is_none(), "only the product is used");
            let grad = back.grads[1].as_ref().ok_or("no gradient")?;
            Ok(vec![Some(grad * &back.saved[1]), Some(grad * &back.saved[0]), None])
        },
    )
    .unwrap();
    let grads = autograd::grad(&[&outputs[1]], &[None], &[&a, &b], autograd::Graph::Free).unwrap();
    assert_eq!(grads.iter().map(|grad| values(grad.as_ref().unwrap())[0]).collect::<Vec<_>>(), [5., 2.]);
}

/// The message of a backward pass through a function with this backward closure.
fn message_of(
    backward: impl Fn(autograd::Backward) -> Result<Vec<Option<Tensor>>, autograd::ClosureError> + Send + 'static,
) -> String {
    let x = vector(&[1.]).set_requires_grad(true);
    let forward = |inputs: &[&Tensor]| Ok(autograd::Forward { outputs: vec![inputs[0] * 1.], saved: vec![] });
    let y = autograd::function("block.7", &[&x], forward, backward).unwrap().remove(0);
    let by_grad = autograd::grad(&[&y], &[None], &[&x], autograd::Graph::Keep).unwrap_err().to_string();
    let by_backward = y.f_backward().unwrap_err().to_string();
    assert!(by_backward.contains("the backward pass of 'block.7'"), "{by_backward}");
    by_grad
}

#[test]
fn a_panic_in_a_closure_is_an_error_that_names_it() {
    let message = message_of(|_| panic!("gather of rank {} is missing", 3));
    assert_eq!(message, "libtorch: the backward pass of 'block.7' panicked: gather of rank 3 is missing");
}

#[test]
fn an_error_in_a_closure_is_an_error_that_names_it() {
    let message = message_of(|_| Err("the link is down".into()));
    assert_eq!(message, "libtorch: the backward pass of 'block.7' failed: the link is down");
    let message = message_of(|_| Ok(vec![]));
    assert_eq!(message, "libtorch: the backward pass of 'block.7' returned 0 gradients for 1 inputs");
}

#[test]
fn an_exception_inside_libtorch_is_an_error_with_its_message() {
    let x = vector(&[1., 2.]).set_requires_grad(true);
    let error = autograd::grad(&[&x.square()], &[None], &[&x], autograd::Graph::Free).unwrap_err();
    assert!(error.to_string().contains("grad can be implicitly created only for scalar outputs"), "{error}");
    // Also inside a closure, where `tch` panics with it.
    let message = message_of(|back| Ok(vec![Some(back.grads[0].as_ref().unwrap().matmul(&vector(&[1., 2.])))]));
    assert!(message.contains("block.7") && message.contains("size"), "{message}");
}

#[test]
fn memory_is_taken_from_under_every_view_and_put_back() {
    let flat = Tensor::arange(1024, (Kind::Float, Device::Cpu));
    let view = flat.narrow(0, 256, 8).view([2, 4]);
    let block = storage::take(&flat, "block.3 is released: gather it first").unwrap();
    assert_eq!((block.len(), block.dtype(), block.device()), (1024, Dtype::F32, Device::Cpu));
    assert!(storage::is_taken(&view).unwrap());
    assert_eq!(storage::bytes(&view).unwrap(), 4096);

    let error = view.f_neg().unwrap_err().to_string();
    assert!(error.contains("block.3 is released: gather it first"), "{error}");
    assert!(storage::take(&view, "twice").unwrap_err().to_string().contains("taken already"));

    storage::put(&view, block).unwrap();
    assert_eq!(values(&view), (256..264).map(|i| i as f32).collect::<Vec<_>>());
    assert!(!storage::is_taken(&flat).unwrap());
}

#[test]
fn a_block_that_does_not_fit_is_returned() {
    let flat = Tensor::zeros([8], (Kind::Float, Device::Cpu));
    let spare = Block::from_slice(&[1f32; 8]).unwrap();
    let refused = storage::put(&flat, spare).unwrap_err();
    assert!(refused.to_string().contains("take it before"), "{refused}");

    drop(storage::take(&flat, "released").unwrap());
    let refused = storage::put(&flat, Block::from_slice(&[1f32; 7]).unwrap()).unwrap_err();
    assert!(refused.to_string().contains("needs 32 bytes, but the block has 28"), "{refused}");
    assert_eq!(refused.block.as_slice::<f32>().unwrap(), [1f32; 7]);
}

#[test]
fn gradients_are_exact_when_parameters_are_released_between_the_passes() {
    let reference = |weights: &Tensor, x: &Tensor| {
        let weights = weights.detach().set_requires_grad(true);
        x.matmul(&weights.view([16, 16])).silu().matmul(&weights.view([16, 16])).sum(Kind::Float).backward();
        weights.grad()
    };
    let contents = Tensor::randn([256], (Kind::Float, Device::Cpu));
    let x = Tensor::randn([4, 16], (Kind::Float, Device::Cpu));

    let flat = contents.copy();
    let leaf = flat.detach().set_requires_grad(true);
    let matrix = leaf.view([16, 16]);
    let loss = x.matmul(&matrix).silu().matmul(&matrix).sum(Kind::Float);
    drop(storage::take(&flat, "released after the forward pass").unwrap());
    assert!(
        autograd::grad(&[&loss], &[None], &[&leaf], autograd::Graph::Keep)
            .unwrap_err()
            .to_string()
            .contains("released after the forward pass")
    );
    storage::put(&flat, Block::from_slice(&values(&contents)).unwrap()).unwrap();
    let grads = autograd::grad(&[&loss], &[None], &[&leaf], autograd::Graph::Free).unwrap();
    assert_eq!(values(grads[0].as_ref().unwrap()), values(&reference(&contents, &x)));
}

#[test]
fn released_memory_goes_back_to_the_system() {
    let resident_kib = || -> usize {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    let flat = Tensor::ones([64 << 20], (Kind::Float, Device::Cpu));
    let full = resident_kib();
    drop(storage::take(&flat, "released").unwrap());
    let empty = resident_kib();
    assert!(full - empty > 240 << 10, "256 MiB were released, and {} KiB came back", full - empty);
}

#[test]
fn a_block_becomes_a_tensor_without_a_copy() {
    let block = Block::from_slice(&[1i64, 2, 3]).unwrap();
    let address = block.as_ptr();
    let tensor = block.into_tensor().unwrap();
    assert_eq!(Vec::<i64>::try_from(&tensor).unwrap(), [1, 2, 3]);
    assert_eq!(storage::take(&tensor, "taken").unwrap().as_ptr(), address);
    assert_eq!(Block::from_slice::<u8>(&[]).unwrap().into_tensor().unwrap().numel(), 0);
}

#[test]
fn elements_are_accessible_only_without_other_owners() {
    let mut tensor = Tensor::zeros([2, 3], (Kind::Float, Device::Cpu));
    exclusive::<f32>(&mut tensor).unwrap()[4] = 5.;
    assert_eq!(values(&tensor), [0., 0., 0., 0., 5., 0.]);

    let clone = tensor.shallow_clone();
    assert!(matches!(exclusive::<f32>(&mut tensor), Err(Error::Shared { tensors: 2, .. })));
    drop(clone);
    let view = tensor.narrow(0, 0, 1);
    assert!(matches!(exclusive::<f32>(&mut tensor), Err(Error::Shared { storages: 2, .. })));
    drop(view);
    assert!(matches!(exclusive::<i64>(&mut tensor), Err(Error::WrongDtype { .. })));
    let mut transposed = tensor.transpose(0, 1);
    drop(tensor);
    assert!(matches!(exclusive::<f32>(&mut transposed), Err(Error::NotContiguous)));
    let mut booleans = Tensor::zeros([1], (Kind::Bool, Device::Cpu));
    assert!(matches!(exclusive::<u8>(&mut booleans), Err(Error::UnsupportedKind(Kind::Bool))));
}

#[test]
fn fused_adamw_is_adamw() {
    let adamw = optim::AdamW { lr: 0.1, beta1: 0.9, beta2: 0.95, weight_decay: 0.01, eps: 1e-8 };
    let start = [0.5f32, -1.5, 2.0, 0.0, 3.25];
    let (mut parameters, mut first, mut second) = (
        vector(&start),
        Tensor::zeros([5], (Kind::Float, Device::Cpu)),
        Tensor::zeros([5], (Kind::Float, Device::Cpu)),
    );
    let mut expected: Vec<[f64; 3]> = start.iter().map(|&p| [p as f64, 0., 0.]).collect();
    for step in 1..=10 {
        let grads: Vec<f32> = (0..5).map(|i| ((i * 7 + step * 3) % 11) as f32 / 5. - 1.).collect();
        for (state, &grad) in expected.iter_mut().zip(&grads) {
            let [p, m, v] = state;
            let grad = grad as f64;
            *p -= adamw.lr * adamw.weight_decay * *p;
            *m = adamw.beta1 * *m + (1. - adamw.beta1) * grad;
            *v = adamw.beta2 * *v + (1. - adamw.beta2) * grad * grad;
            let (m_hat, v_hat) = (*m / (1. - adamw.beta1.powi(step)), *v / (1. - adamw.beta2.powi(step)));
            *p -= adamw.lr * m_hat / (v_hat.sqrt() + adamw.eps);
        }
        let tensors = optim::AdamWTensors {
            parameters: &mut parameters,
            grads: &vector(&grads),
            first_moments: &mut first,
            second_moments: &mut second,
            step: &vector(&[step as f32]),
        };
        optim::adamw_step(adamw, &mut [tensors]).unwrap();
    }
    for (found, expected) in values(&parameters).iter().zip(&expected) {
        assert!((*found as f64 - expected[0]).abs() < 1e-5, "{found} is not {}", expected[0]);
    }
}

#[test]
fn empty_storages_can_be_taken_and_put() {
    let empty = Tensor::zeros([0], (Kind::Float, Device::Cpu));
    for _ in 0..2 {
        let block = storage::take(&empty, "released").unwrap();
        assert!(block.is_empty());
        storage::put(&empty, block).unwrap();
    }
    assert!(values(&(&empty + 1.)).is_empty());
}

#[test]
fn a_block_whose_size_overflows_is_refused() {
    assert!(matches!(Block::new(Dtype::I64, (1 << 61) + 1, Device::Cpu), Err(Error::TooLarge { .. })));
    assert!(matches!(Block::new(Dtype::U8, 1, Device::Mps), Err(Error::UnsupportedDevice(Device::Mps))));
}

#[test]
fn adamw_refuses_noncontiguous_tensors() {
    let adamw = optim::AdamW { lr: 0.1, beta1: 0.9, beta2: 0.95, weight_decay: 0., eps: 1e-8 };
    // The gradient of a sum: one element expanded to all.
    let tensors = optim::AdamWTensors {
        parameters: &mut vector(&[1., 2.]),
        grads: &vector(&[1.]).expand([2], false),
        first_moments: &mut vector(&[0., 0.]),
        second_moments: &mut vector(&[0., 0.]),
        step: &vector(&[1.]),
    };
    assert!(matches!(optim::adamw_step(adamw, &mut [tensors]), Err(Error::NotContiguous)));
}

#[test]
fn adamw_refuses_tensors_of_different_lengths() {
    let adamw = optim::AdamW { lr: 0.1, beta1: 0.9, beta2: 0.95, weight_decay: 0., eps: 1e-8 };
    let tensors = optim::AdamWTensors {
        parameters: &mut vector(&[1., 2.]),
        grads: &vector(&[1.]),
        first_moments: &mut vector(&[0., 0.]),
        second_moments: &mut vector(&[0., 0.]),
        step: &vector(&[1.]),
    };
    let error = optim::adamw_step(adamw, &mut [tensors]).unwrap_err();
    assert_eq!(error.to_string(), "gradient elements: expected 2, got 1");
}
