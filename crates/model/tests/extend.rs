//! Positions that are added to a cache, in any pieces: the same as all positions at once.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use shardwise_model::{Activations, Batch, Cache, LlamaConfig, Model, Pass, TensorParallel};
use shardwise_torch::tch::{Device, Kind, Tensor, manual_seed, no_grad};
use support::{parameters, variants};

const VOCABULARY: i64 = 101;

/// What the model says of every position of all sequences, all positions at once.
fn at_once(model: &Model, parameters: &[Vec<Tensor>], tokens: &Tensor) -> Tensor {
    let batch = Batch::new(tokens.shallow_clone(), tokens.shallow_clone());
    let (mut x, mut logits) = (None, None);
    for (index, unit) in model.units().iter().enumerate() {
        let tied = unit.tied().map(|tied| &parameters[tied.unit][tied.parameter]);
        logits = x
            .as_ref()
            .and_then(|x| no_grad(|| unit.logits(&parameters[index], tied, x, &TensorParallel::none()).unwrap()));
        x = Some(unit.forward(&parameters[index], tied, x.as_ref(), &batch, &Pass::new(Activations::All)).unwrap());
    }
    logits.unwrap()
}

/// What it says after the last of new positions.
fn extend(model: &Model, parameters: &[Vec<Tensor>], tokens: &Tensor, caches: &mut [Cache]) -> Tensor {
    let mut x: Option<Tensor> = None;
    for (index, unit) in model.units().iter().enumerate() {
        let tied = unit.tied().map(|tied| &parameters[tied.unit][tied.parameter]);
        x = Some(
            unit.extend(&parameters[index], tied, x.as_ref(), tokens, &mut caches[index], &Pass::new(Activations::All))
                .unwrap(),
        );
    }
    x.unwrap()
}

fn caches(model: &Model) -> Vec<Cache> {
    model.units().iter().map(|_| Cache::new()).collect()
}

#[test]
fn pieces_give_the_same_as_all_at_once() {
    const POSITIONS: i64 = 50;
    for (name, model) in variants(VOCABULARY as usize, POSITIONS as usize) {
        manual_seed(29);
        let parameters = parameters(&model);
        let tokens = Tensor::randint(VOCABULARY, [3, POSITIONS], (Kind::Int64, Device::Cpu));
        let expected = at_once(&model, &parameters, &tokens);
        for pieces in [vec![50], vec![1; 50], vec![9, 1, 1, 7, 1, 20, 3, 8]] {
            let mut caches = caches(&model);
            let mut seen = 0;
            for piece in &pieces {
                let found = extend(&model, &parameters, &tokens.narrow(1, seen, *piece), &mut caches);
                seen += piece;
                let difference = (found - expected.select(1, seen - 1)).abs().max().double_value(&[]);
                assert!(difference < 1e-5, "{name}, {pieces:?}: after {seen} positions {difference:e}");
            }
            assert!(caches.iter().all(|cache| cache.positions() == POSITIONS as usize));
        }
    }
}

#[test]
fn a_window_bounds_the_cache() {
    let model = LlamaConfig {
        num_key_value_heads: 3,
        sliding_window: Some(8),
        ..LlamaConfig::new(VOCABULARY as usize, 36, 1, 6, 52)
    };
    let model = Model::from_config(model).unwrap();
    let (parameters, mut caches) = (parameters(&model), caches(&model));
    let token = Tensor::zeros([1, 1], (Kind::Int64, Device::Cpu));
    for _ in 0..100 {
        let _ = extend(&model, &parameters, &token, &mut caches);
    }
    // Keys and values of 16 positions, in 3 heads of 6 elements.
    assert_eq!(caches[1].bytes(), 2 * 16 * 3 * 6 * 4);
    assert_eq!(caches[1].positions(), 100);
    assert_eq!(caches[0].bytes(), 0);
}

#[test]
fn positions_that_the_model_lacks_are_an_error() {
    let (_, model) = variants(VOCABULARY as usize, 8).pop().unwrap();
    assert_eq!(model.max_positions(), Some(8));
    let tokens = Tensor::zeros([1, 5], (Kind::Int64, Device::Cpu));
    let (parameters, mut caches) = (parameters(&model), caches(&model));
    let _ = extend(&model, &parameters, &tokens, &mut caches);
    let error = model.units()[0]
        .extend(&parameters[0], None, None, &tokens, &mut caches[0], &Pass::new(Activations::All))
        .unwrap_err();
    assert_eq!(error.to_string(), "n_positions: sequences have 10 positions, and the model has 8");
}
