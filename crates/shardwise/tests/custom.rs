//! Custom units, optimizers and data are sharded, saved and resumed like the built-in ones, and their errors are reported.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::sync::Arc;

use shardwise::checkpoint::{Checkpoint, Store, json};
use shardwise::comm::single;
use shardwise::model::{Batch, Layer, Model, Parameter, Parameters, Pass, Result, Tied, Unit};
use shardwise::tch::{Kind, Reduction, Tensor};
use shardwise::{
    BatchSize, Elements, Elementwise, Optimizer, Options, Precision, Ranks, Schedule, Sharding, SourceError, Trainer,
    init, optimizer, save,
};
use shardwise_harness::{Launch, ranks};

/// A matrix from inputs to hidden states.
struct Into;

impl Layer for Into {
    fn forward(&self, p: &Parameters<'_>, _: Option<&Tensor>, batch: &Batch, _: &Pass) -> Result<Tensor> {
        Ok(batch.inputs.f_to_kind(p.get("w").kind())?.f_matmul(p.get("w"))?)
    }
}

/// A unit that has no parameters.
struct Bend;

impl Layer for Bend {
    fn forward(&self, _: &Parameters<'_>, input: Option<&Tensor>, _: &Batch, _: &Pass) -> Result<Tensor> {
        Ok(input.unwrap().f_tanh()?)
    }
}

/// Back through the same matrix, and the squared distance to the targets.
struct Back;

impl Layer for Back {
    fn forward(&self, p: &Parameters<'_>, input: Option<&Tensor>, batch: &Batch, _: &Pass) -> Result<Tensor> {
        let found = input.unwrap().f_matmul(p.get("v"))?.f_matmul(&p.tied().unwrap().f_transpose(0, 1)?)?;
        Ok(found.f_to_kind(Kind::Float)?.f_mse_loss(&batch.targets, Reduction::Sum)?)
    }
}

/// A last unit that returns its input instead of a loss.
struct NoLoss;

impl Layer for NoLoss {
    fn forward(&self, _: &Parameters<'_>, input: Option<&Tensor>, _: &Batch, _: &Pass) -> Result<Tensor> {
        Ok(input.unwrap().shallow_clone())
    }
}

fn model() -> Model {
    let matrix = |name: &str, rows, columns| vec![Parameter::matrix(name, [rows, columns], 0.3)];
    let tied = Some(Tied { unit: 0, parameter: 0 });
    let units = vec![
        Unit::new("into", matrix("into.w", 5, 7), Into),
        Unit::new("bend", vec![], Bend),
        Unit::new("back", matrix("back.v", 7, 7), Back).with_tied(tied),
    ];
    Model::new(units).unwrap()
}

/// An optimizer with two states per element, whose step size depends on the number of updates.
#[derive(Debug)]
struct Rprop(&'static [&'static str]);

impl Elementwise for Rprop {
    fn state_names(&self) -> &[&str] {
        self.0
    }

    fn update(&self, elements: Elements) -> optimizer::Result<()> {
        let Elements { mut parameters, grads, mut state, step, lr, .. } = elements;
        assert_eq!((parameters.kind(), grads.kind(), state.len()), (Kind::Float, Kind::Float, 2));
        let agrees = state[0].f_mul(&grads)?.f_sign()?;
        let _ = state[1].f_mul_scalar_(0.9)?.f_add_(&agrees)?;
        state[0].f_copy_(&grads)?;
        let size = state[1].f_exp()?.f_mul_scalar(lr * (1. + 1. / f64::from(step)))?;
        let _ = parameters.f_sub_(&grads.f_sign()?.f_mul(&size)?)?;
        Ok(())
    }
}

fn options(stage: u8, precision: Precision) -> Options {
    let optimizer = Optimizer::custom(Rprop(&["last", "trust"]));
    let schedule = Schedule::constant(2e-3);
    Options {
        precision,
        max_grad_norm: Some(0.5),
        ..Options::new(Sharding::stage(stage).unwrap(), optimizer, schedule)
    }
}

/// Inputs that are their own targets.
fn samples(indices: &[u64]) -> std::result::Result<Batch, SourceError> {
    let row = |&index: &u64| (0..5).map(move |place| ((index * 7 + place * 3) % 11) as f32 / 11. - 0.5);
    let rows = Tensor::from_slice(&indices.iter().flat_map(row).collect::<Vec<f32>>()).view([-1, 5]);
    Ok(Batch::new(rows.shallow_clone(), rows))
}

const BATCH_SIZE: BatchSize = BatchSize { micro_batch_size: 3, gradient_accumulation_steps: 2 };

/// The losses up to step `steps`, as bits.
fn train(trainer: &mut Trainer, steps: u64) -> Vec<u64> {
    let mut losses = Vec::new();
    trainer.train(&samples, BATCH_SIZE, steps, &mut |report| losses.push(report.loss.to_bits())).unwrap();
    losses
}

fn new_trainer(ranks: &Ranks, options: Options) -> Trainer {
    Trainer::new(model(), ranks.clone(), options, &mut init::from_seed(5)).unwrap()
}

#[test]
fn custom_units_and_optimizers_give_the_same_bits_at_every_stage_and_after_a_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    ranks!(Launch::ranks(3).variable("OWN_FOLDER", &folder.path().to_string_lossy()), || {
        let ranks = shardwise::ranks().unwrap();
        for (precision, name) in [(Precision::F32, "f32"), (Precision::BF16, "bf16")] {
            let expected = train(&mut new_trainer(&ranks, options(0, precision)), 30);
            let [first, last] = [expected[0], expected[29]].map(f64::from_bits);
            assert!(last < 0.5 * first, "it learns: {first} to {last}");
            for stage in 1..4 {
                assert!(
                    train(&mut new_trainer(&ranks, options(stage, precision)), 30) == expected,
                    "{name}, stage {stage}"
                );
            }
            let folder = format!("{}/{name}", std::env::var("OWN_FOLDER").unwrap());
            let store = Arc::new(Store::create(&folder).unwrap());
            let mut trainer = new_trainer(&ranks, options(3, precision));
            let mut losses = train(&mut trainer, 12);
            save(&mut trainer, &store, json!({})).unwrap();
            let checkpoint = Checkpoint::open(&store, 12).unwrap();
            let mut resumed = Trainer::resume(model(), ranks.clone(), options(1, precision), &checkpoint).unwrap();
            losses.extend(train(&mut resumed, 30));
            assert!(losses == expected, "{name}: a run resumed at another stage");
        }
    });
}

#[test]
fn errors_of_custom_parts_are_reported() {
    let ranks = Ranks::sharded(Arc::new(single::group()));
    let refused = |optimizer| {
        let options = Options { optimizer, ..options(3, Precision::F32) };
        Trainer::new(model(), ranks.clone(), options, &mut init::from_seed(5)).err().unwrap().to_string()
    };
    let error = refused(Optimizer::custom(Rprop(&["twice", "twice"])));
    assert!(error.contains("the optimizer has a state named \"twice\": names must be unique"), "{error}");
    assert!(refused(Optimizer::custom(Rprop(&["a/b", "c"]))).contains("without '/'"));

    let mut trainer = new_trainer(&ranks, options(3, Precision::F32));
    let broken = |_: &[u64]| Err("the disk is full of holes".into());
    let error = trainer.train(&broken, BATCH_SIZE, 1, &mut |_| ()).unwrap_err().to_string();
    assert_eq!(error, "step 1: cannot read its samples: the disk is full of holes");
    let error = trainer.logits(&samples(&[1]).unwrap().inputs).unwrap_err().to_string();
    assert_eq!(error, "unit back: logits: the last unit has none; implement `Layer::logits` for it");

    let units =
        vec![Unit::new("into", vec![Parameter::matrix("w", [5, 7], 0.3)], Into), Unit::new("last", vec![], NoLoss)];
    let lossless = Model::new(units).unwrap();
    let options = options(3, Precision::F32);
    let mut trainer = Trainer::new(lossless, ranks.clone(), options, &mut init::from_seed(5)).unwrap();
    let error = trainer.train(&samples, BATCH_SIZE, 1, &mut |_| ()).unwrap_err().to_string();
    assert!(
        error.starts_with("unit last: loss: the last unit returned a tensor of shape [3, 7]; it must return a scalar"),
        "{error}"
    );
}
