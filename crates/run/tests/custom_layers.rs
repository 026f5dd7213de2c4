//! Custom layers may ignore their input, leave parameters unused, or fail: gradients and state stay correct.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;
use shardwise_checkpoint::Store;
use shardwise_comm::{Group, mpi, single};
use shardwise_harness::ranks;
use shardwise_model::{Batch, IGNORED, Init, Layer, Model, Parameter, Parameters, Pass, Result, Unit};
use shardwise_run::save;
use shardwise_torch::tch::{Kind, Tensor};
use shardwise_train::{Error, Options, Ranks, Schedule, Trainer, init};
use shardwise_zero::{Optimizer, Sgd, Sharding};

/// Multiplies the batch's inputs by a parameter.
struct Scale;

impl Layer for Scale {
    fn forward(&self, p: &Parameters<'_>, _: Option<&Tensor>, batch: &Batch, _: &Pass) -> Result<Tensor> {
        Ok(batch.inputs.f_to_kind(Kind::Float)?.f_mul(p.get("scale"))?)
    }
}

/// Returns its parameter, whatever its input is.
struct IgnoresInput;

impl Layer for IgnoresInput {
    fn forward(&self, p: &Parameters<'_>, input: Option<&Tensor>, _: &Batch, _: &Pass) -> Result<Tensor> {
        Ok(p.get("constant").f_expand_as(input.unwrap())?)
    }
}

/// Adds a parameter where the first input is positive, and leaves its input as it is otherwise. Never uses `unused`.
struct AddsSometimes;

impl Layer for AddsSometimes {
    fn forward(&self, p: &Parameters<'_>, input: Option<&Tensor>, batch: &Batch, _: &Pass) -> Result<Tensor> {
        let input = input.unwrap();
        match batch.inputs.int64_value(&[0, 0]) > 0 {
            true => Ok(input.f_add(p.get("bias"))?),
            false => Ok(input.f_mul_scalar(1)?),
        }
    }
}

/// Half the sum of squares.
struct Squares;

impl Layer for Squares {
    fn forward(&self, _: &Parameters<'_>, input: Option<&Tensor>, _: &Batch, _: &Pass) -> Result<Tensor> {
        Ok(input.unwrap().f_square()?.f_sum(Kind::Float)?.f_mul_scalar(0.5)?)
    }
}

/// The sum of input plus offset. Its backward pass needs no parameter's value.
struct SumWithOffset;

impl Layer for SumWithOffset {
    fn forward(&self, p: &Parameters<'_>, input: Option<&Tensor>, _: &Batch, _: &Pass) -> Result<Tensor> {
        Ok(input.unwrap().f_add(p.get("offset"))?.f_sum(Kind::Float)?)
    }

    fn backward_reads_parameters(&self) -> bool {
        false
    }
}

/// Half the sum of squares, or an error if told to fail on a negative input.
struct FailsOnNegative(Arc<AtomicBool>);

impl Layer for FailsOnNegative {
    fn forward(&self, p: &Parameters<'_>, input: Option<&Tensor>, batch: &Batch, a: &Pass) -> Result<Tensor> {
        if self.0.load(Ordering::Relaxed) && batch.inputs.int64_value(&[0, 0]) < 0 {
            let problem = "it was told to fail".to_string();
            return Err(shardwise_model::Error::Config { key: "test", problem });
        }
        Squares.forward(p, input, batch, a)
    }
}

fn ones(name: &str) -> Vec<Parameter> {
    vec![Parameter::vector(name, 3, Init::Ones)]
}

fn options(stage: u8) -> Options {
    let sgd = Sgd { lr: 0., momentum: 0., weight_decay: 0. };
    Options::new(Sharding::stage(stage).unwrap(), Optimizer::Sgd(sgd), Schedule::constant(0.01))
}

fn trainer(units: Vec<Unit>, world: Arc<Group>, stage: u8) -> Trainer {
    let ranks = Ranks::sharded(world);
    Trainer::new(Model::new(units).unwrap(), ranks, options(stage), &mut init::from_seed(1)).unwrap()
}

/// A sequence of three numbers without ignored targets.
fn batch(numbers: [i64; 3]) -> Batch {
    let inputs = Tensor::from_slice(&numbers).view([1, 3]);
    Batch::new(inputs.shallow_clone(), inputs)
}

/// All parameters, unit by unit.
fn parameters(trainer: &mut Trainer) -> Vec<Vec<f32>> {
    let of_unit = |shard: &mut shardwise_zero::ShardedUnit| {
        shard.gather().unwrap();
        let elements = |tensor: &Tensor| Vec::<f32>::try_from(tensor.detach().view(-1)).unwrap();
        let parameters: Vec<f32> = shard.parameters().iter().flat_map(elements).collect();
        shard.release().unwrap();
        parameters
    };
    trainer.shards_mut().map(of_unit).collect()
}

fn world() -> Arc<Group> {
    Arc::new(mpi::world(mpi::Options::default()).unwrap())
}

#[test]
fn a_unit_that_ignores_its_input_passes_zero_gradients_on() {
    let units = vec![
        Unit::new("scale", ones("scale"), Scale),
        Unit::new("ignores", ones("constant"), IgnoresInput),
        Unit::new("loss", vec![], Squares),
    ];
    let mut trainer = trainer(units, Arc::new(single::group()), 0);
    let report = trainer.step(&[batch([5, -7, 9])]).unwrap();
    // The loss is half the sum of the constant's squares, so its gradient is itself over three tokens.
    let expected = 1. - 0.01 / 3.;
    assert_eq!(parameters(&mut trainer), [vec![1f32; 3], vec![expected; 3], vec![]]);
    assert_eq!(report.without_gradient, Vec::<String>::new(), "a gradient of zeros is a gradient");
}

#[test]
fn a_unit_without_a_gradient_on_one_rank_contributes_zeros() {
    ranks!(2, || {
        let world = world();
        let sometimes: Vec<Parameter> = [ones("bias"), ones("unused")].concat();
        for stage in 0..4 {
            let units = vec![
                Unit::new("scale", ones("scale"), Scale),
                Unit::new("sometimes", sometimes.clone(), AddsSometimes),
                Unit::new("loss", vec![], Squares),
            ];
            let mut trainer = trainer(units, world.clone(), stage);
            let own = if world.rank() == 0 { [1, 2, 3] } else { [-1, 2, 3] };
            let report = trainer.step(&[batch(own)]).unwrap();
            assert_eq!(report.without_gradient, ["unused"], "stage {stage}");
            // Six tokens; only the first rank's outputs (2, 3 and 4) move the bias.
            let moved = [2f32, 3., 4.].map(|output| 1. - 0.01 * output / 6.);
            let found = parameters(&mut trainer);
            for (found, expected) in found[1].iter().zip(moved.into_iter().chain([1.; 3])) {
                assert!((found - expected).abs() < 1e-6, "stage {stage}: {found} instead of {expected}");
            }
            let again = trainer.step(&[batch([1, 2, 3])]).unwrap();
            assert_eq!(again.without_gradient, Vec::<String>::new(), "it is reported once");
        }
    });
}

#[test]
fn a_last_unit_that_is_not_read_backward_is_updated_at_every_stage() {
    ranks!(2, || {
        let world = world();
        let losses = |stage: u8| -> Vec<f64> {
            let units =
                vec![Unit::new("scale", ones("scale"), Scale), Unit::new("loss", ones("offset"), SumWithOffset)];
            let mut trainer = trainer(units, world.clone(), stage);
            (0..3).map(|_| trainer.step(&[batch([1, 2, 3])]).unwrap().loss).collect()
        };
        let kept_whole = losses(0);
        assert!(kept_whole[1] < kept_whole[0]);
        for stage in 1..4 {
            assert_eq!(losses(stage), kept_whole, "stage {stage}");
        }
    });
}

fn failing(fails: &Arc<AtomicBool>, stage: u8) -> Trainer {
    let units =
        vec![Unit::new("scale", ones("scale"), Scale), Unit::new("loss", vec![], FailsOnNegative(fails.clone()))];
    trainer(units, Arc::new(single::group()), stage)
}

#[test]
fn a_trainer_whose_step_failed_halfway_is_not_used_again() {
    for stage in 0..4 {
        let folder = tempfile::tempdir().unwrap();
        let store = Arc::new(Store::create(folder.path().to_str().unwrap()).unwrap());
        let fails = Arc::new(AtomicBool::new(true));
        let mut trainer = failing(&fails, stage);
        let micro_batches = || [batch([1, 2, 3]), batch([-1, 2, 3])];
        let error = trainer.step(&micro_batches()).unwrap_err();
        assert!(matches!(error, Error::Model { .. }), "{error}");
        fails.store(false, Ordering::Relaxed);
        // The gradients of the first micro-batch are already accumulated, and would count twice.
        for error in [
            trainer.step(&micro_batches()).unwrap_err(),
            trainer.evaluate(&micro_batches()).unwrap_err(),
            trainer.logits(&micro_batches()[0].inputs).unwrap_err(),
            match save(&mut trainer, &store, json!({})).unwrap_err() {
                shardwise_run::Error::Train(error) => error,
                error => panic!("{error}"),
            },
        ] {
            assert!(matches!(error, Error::Broken { .. }), "{error}");
            assert!(error.to_string().contains("it was told to fail"), "{error}");
        }
        assert!(store.steps().unwrap().is_empty(), "stage {stage}: half a step was saved");
    }
}

#[test]
fn a_trainer_whose_step_was_refused_is_as_before() {
    for stage in 0..4 {
        let mut refused = failing(&Arc::default(), stage);
        let mut fresh = failing(&Arc::default(), stage);
        let nothing = Batch::new(
            Tensor::from_slice(&[1i64, 2, 3]).view([1, 3]),
            Tensor::full([1, 3], IGNORED, (Kind::Int64, shardwise_torch::tch::Device::Cpu)),
        );
        assert!(matches!(refused.step(&[nothing]).unwrap_err(), Error::AllTargetsIgnored { step: 1 }));
        assert!(matches!(refused.step(&[]).unwrap_err(), Error::MicroBatches { step: 1, .. }));
        for _ in 0..2 {
            assert_eq!(refused.step(&[batch([1, 2, 3])]).unwrap(), fresh.step(&[batch([1, 2, 3])]).unwrap());
        }
        assert_eq!(parameters(&mut refused), parameters(&mut fresh));
    }
}
