//! Documents that are packed into one sequence: every position says what it says in a sequence of its document's own.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use shardwise_model::{Activations, Batch, Gpt2Config, IGNORED, LlamaConfig, Model, Pass, TensorParallel};
use shardwise_torch::autograd::{self, Graph};
use shardwise_torch::tch::{Device, Kind, Tensor, manual_seed, no_grad};
use support::{parameters, variants};

const VOCABULARY: i64 = 101;

/// The documents of each sequence by their positions.
const LENGTHS: [&[i64]; 2] = [&[11, 6, 1], &[5, 13]];

/// The gradient of an embedding is sparse.
fn dense(grad: Tensor) -> Tensor {
    if grad.is_sparse() { grad.to_dense(None, false) } else { grad }
}

/// What a run of the model gives.
struct Ran {
    /// Positions, of all sequences one after the other, by vocabulary.
    logits: Tensor,
    loss: f64,
    grads: Vec<Tensor>,
}

fn run(model: &Model, parameters: &[Vec<Tensor>], batch: &Batch, activations: Activations) -> Ran {
    let leaf = |tensor: &Tensor| tensor.detach().copy().set_requires_grad(true);
    let leaves: Vec<Vec<Tensor>> = parameters.iter().map(|unit| unit.iter().map(leaf).collect()).collect();
    let (mut x, mut logits) = (None, None);
    for (index, unit) in model.units().iter().enumerate() {
        let tied = unit.tied().map(|tied| &leaves[tied.unit][tied.parameter]);
        if let Some(x) = &x {
            logits = no_grad(|| unit.logits(&leaves[index], tied, x, &TensorParallel::none()).unwrap());
        }
        x = Some(unit.forward(&leaves[index], tied, x.as_ref(), batch, &Pass::new(activations)).unwrap());
    }
    let inputs: Vec<&Tensor> = leaves.iter().flatten().collect();
    let loss = x.unwrap();
    let grads = autograd::grad(&[&loss], &[None], &inputs, Graph::Free).unwrap();
    Ran {
        logits: logits.unwrap().view([-1, VOCABULARY]),
        loss: loss.double_value(&[]),
        grads: grads.into_iter().map(|grad| dense(grad.unwrap())).collect(),
    }
}

/// The packed batch, and the documents by themselves.
fn batches() -> (Batch, Vec<Batch>) {
    let random = || Tensor::randint(VOCABULARY, [2, 18], (Kind::Int64, Device::Cpu));
    let (tokens, targets) = (random(), random());
    let _ = targets.narrow(0, 1, 1).narrow(1, 3, 4).fill_(IGNORED);
    let mut alone = Vec::new();
    let mut numbers = Vec::new();
    for (sequence, lengths) in LENGTHS.iter().enumerate() {
        let mut first = 0;
        for (number, &length) in lengths.iter().enumerate() {
            let part = |all: &Tensor| all.narrow(0, sequence as i64, 1).narrow(1, first, length).contiguous();
            alone.push(Batch::new(part(&tokens), part(&targets)));
            numbers.extend(vec![number as i64; length as usize]);
            first += length;
        }
    }
    let numbers = Tensor::from_slice(&numbers).view([2, 18]);
    (Batch::packed(tokens, targets, &numbers).unwrap(), alone)
}

fn assert_close(what: &str, found: &Tensor, expected: &Tensor) {
    let (difference, norm) = ((found - expected).norm().double_value(&[]), expected.norm().double_value(&[]));
    assert!(difference <= 1e-5 * norm, "{what} differs by {difference:e} of {norm:e}");
}

#[test]
fn packed_documents_are_as_if_alone() {
    for (name, model) in variants(VOCABULARY as usize, 18) {
        manual_seed(23);
        let parameters = parameters(&model);
        let (packed, alone) = batches();
        let expected: Vec<Ran> = alone.iter().map(|b| run(&model, &parameters, b, Activations::All)).collect();
        for activations in [Activations::All, Activations::Selective] {
            let found = run(&model, &parameters, &packed, activations);
            let logits = Tensor::cat(&expected.iter().map(|ran| &ran.logits).collect::<Vec<_>>(), 0);
            let difference = (&found.logits - &logits).abs().max().double_value(&[]);
            assert!(difference < 1e-5, "{name}: logits differ by {difference:e}");
            let loss: f64 = expected.iter().map(|ran| ran.loss).sum();
            assert!((found.loss - loss).abs() < 1e-5 * loss, "{name}: {} is not {loss}", found.loss);
            for (place, grad) in found.grads.iter().enumerate() {
                let sum = expected.iter().map(|ran| ran.grads[place].shallow_clone()).reduce(|a, b| a + b).unwrap();
                assert!(sum.norm().double_value(&[]) > 0.);
                assert_close(&format!("{name}: gradient {place}, {activations:?}"), grad, &sum);
            }
        }
        // And they would not be, if they saw each other.
        let joined = Batch { documents: None, ..packed };
        let found = run(&model, &parameters, &joined, Activations::All);
        let logits = Tensor::cat(&expected.iter().map(|ran| &ran.logits).collect::<Vec<_>>(), 0);
        assert!((found.logits - logits).abs().max().double_value(&[]) > 1e-3, "{name}");
    }
}

#[test]
fn sequences_of_one_document_give_the_same_bits() {
    let config = LlamaConfig { sliding_window: Some(7), ..LlamaConfig::new(VOCABULARY as usize, 36, 2, 6, 52) };
    let model = Model::from_config(config).unwrap();
    manual_seed(23);
    let (parameters, (batch, _)) = (parameters(&model), batches());
    let numbers = batch.inputs.full_like(3);
    let one = Batch::packed(batch.inputs.copy(), batch.targets.copy(), &numbers).unwrap();
    let found = run(&model, &parameters, &one, Activations::Selective);
    let expected = run(&model, &parameters, &Batch { documents: None, ..batch }, Activations::Selective);
    assert!(found.logits == expected.logits && found.grads == expected.grads && found.loss == expected.loss);
}

#[test]
fn positions_are_counted_by_document() {
    // Sequences of 18 positions, documents of 13 at the most.
    let embed = |positions: usize| {
        let model = Model::from_config(Gpt2Config::new(VOCABULARY as usize, positions, 36, 1, 6)).unwrap();
        let output =
            model.units()[0].forward(&parameters(&model)[0], None, None, &batches().0, &Pass::new(Activations::All));
        output.map(|_| ())
    };
    embed(13).unwrap();
    assert_eq!(embed(12).unwrap_err().to_string(), "n_positions: documents have 13 positions, and the model has 12");
}

#[test]
fn documents_of_other_tokens_are_refused() {
    let tokens = Tensor::zeros([2, 3], (Kind::Int64, Device::Cpu));
    let error = Batch::packed(tokens.copy(), tokens.copy(), &tokens.narrow(1, 0, 1)).err().unwrap();
    assert_eq!(error.to_string(), "documents: their numbers have shape [2, 1], but the tokens have shape [2, 3]");
}
