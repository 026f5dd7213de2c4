//! Custom layers that ranks share: correct annotations train like one rank, and wrong ones are refused before the first step.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::sync::Arc;
use std::time::Duration;

use shardwise_comm::{mpi, single};
use shardwise_harness::ranks;
use shardwise_model::{Batch, Init, Layer, Model, Parameter, Parameters, Pass, Result, Unit};
use shardwise_plan::TensorPlacement::{self, Replicated, ReplicatedInside, ReplicatedWhole};
use shardwise_torch::tch::{Device, Kind, Tensor};
use shardwise_train::{Options, Ranks, Schedule, Trainer, init};
use shardwise_zero::{Optimizer, Precision, Sgd, Sharding};

const WIDTH: usize = 6;
const HIDDEN: usize = 10;
const ROWS: i64 = 5;

/// What is wrong with a model.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mistake {
    None,
    /// Every rank adds the bias before the sum.
    BiasInside,
    /// The gradient of a norm's weight is taken for a part of a sum.
    WeightInside,
    /// The gradient of what scales a rank's own features is taken for the same on all ranks.
    ScaleOutside,
    /// The second matrix is split along the wrong dimension.
    WrongDimension,
    /// The matrix has no such parts.
    WrongParts,
    /// The head is split, and its layer does not know.
    HeadInside,
}

/// Reads numbers, and leaves each rank its own rows.
struct Read;

impl Layer for Read {
    fn forward(&self, p: &Parameters<'_>, _: Option<&Tensor>, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        let read = batch.inputs.f_to_kind(p.get("read").kind())?.f_matmul(p.get("read"))?;
        pass.parallel.scatter(&read)
    }
}

/// A weight for each feature, a column-parallel and a row-parallel matrix, and a bias.
struct Wide(Mistake);

impl Layer for Wide {
    fn forward(&self, p: &Parameters<'_>, input: Option<&Tensor>, _: &Batch, pass: &Pass) -> Result<Tensor> {
        let x = input.unwrap();
        let entered = pass.parallel.enter(&x.f_mul(p.get("weight"))?, ROWS as usize)?;
        let wide = entered.f_linear(p.get("up"), None::<&Tensor>)?.f_tanh()?.f_mul(p.get("scale"))?;
        let partial = wide.f_linear(p.get("down"), None::<&Tensor>)?;
        match self.0 {
            Mistake::BiasInside => Ok(x.f_add(&pass.parallel.leave(&partial.f_add(p.get("bias"))?)?)?),
            _ => Ok(x.f_add(&pass.parallel.leave(&partial)?)?.f_add(p.get("bias"))?),
        }
    }
}

/// The sum of squares of what all ranks have.
struct Loss;

impl Layer for Loss {
    fn forward(&self, p: &Parameters<'_>, input: Option<&Tensor>, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        let x = pass.parallel.gather(input.unwrap(), ROWS as usize)?;
        let missed = x.f_matmul(p.get("out"))?.f_sub(&batch.targets)?;
        Ok(missed.f_square()?.f_sum(x.kind())?)
    }
}

fn model(mistake: Mistake) -> Model {
    let matrix = |name: &str, shape: [usize; 2], placement: TensorPlacement| {
        Parameter::matrix(name, shape, 0.4).placed(placement)
    };
    let weight = if mistake == Mistake::WeightInside { ReplicatedInside } else { Replicated };
    let scale = if mistake == Mistake::ScaleOutside { Replicated } else { ReplicatedInside };
    let down = match mistake {
        Mistake::WrongDimension => TensorPlacement::by_outputs(WIDTH),
        Mistake::WrongParts => TensorPlacement::by_inputs(HIDDEN - 1),
        _ => TensorPlacement::by_inputs(HIDDEN),
    };
    let out = if mistake == Mistake::HeadInside { TensorPlacement::by_outputs(WIDTH) } else { ReplicatedWhole };
    Model::new(vec![
        Unit::new("read", vec![matrix("read", [3, WIDTH], ReplicatedWhole)], Read),
        Unit::new(
            "wide",
            vec![
                Parameter::vector("weight", WIDTH, Init::Ones).placed(weight),
                matrix("up", [HIDDEN, WIDTH], TensorPlacement::by_outputs(HIDDEN)),
                Parameter::new("scale", &[1], Init::Ones).placed(scale),
                matrix("down", [WIDTH, HIDDEN], down),
                Parameter::vector("bias", WIDTH, Init::Zeros),
            ],
            Wide(mistake),
        ),
        Unit::new("loss", vec![matrix("out", [WIDTH, 2], out)], Loss),
    ])
    .unwrap()
}

fn trainer(mistake: Mistake, ranks: &Ranks, sequence_parallel: bool) -> shardwise_train::Result<Trainer> {
    let sgd = Optimizer::Sgd(Sgd { lr: 0., momentum: 0., weight_decay: 0. });
    let options = Options {
        precision: Precision::F64,
        sequence_parallel,
        ..Options::new(Sharding::stage(2).unwrap(), sgd, Schedule::constant(1e-2))
    };
    Trainer::new(model(mistake), ranks.clone(), options, &mut init::from_seed(3))
}

fn losses(mut trainer: Trainer) -> shardwise_train::Result<Vec<f64>> {
    let numbers = |columns: i64| (Tensor::arange(ROWS * columns, (Kind::Double, Device::Cpu)) * 0.7).sin();
    let batch = || Batch::new(numbers(3).view([ROWS, 3]), numbers(2).view([ROWS, 2]));
    (0..10).map(|_| Ok(trainer.step(&[batch()])?.loss)).collect()
}

#[test]
fn wrong_annotations_are_refused_and_right_ones_train() {
    ranks!(2, || {
        let world =
            Arc::new(mpi::world(mpi::Options { timeout: Duration::from_secs(60), ..mpi::Options::default() }).unwrap());
        let shared = Ranks::parallel(world, 1, 2).unwrap();
        let alone = Ranks::sharded(Arc::new(single::group()));
        let expected = losses(trainer(Mistake::None, &alone, true).unwrap()).unwrap();
        assert!(expected[9] < 0.9 * expected[0], "it learns: {expected:?}");
        for sequence_parallel in [false, true] {
            let found = losses(trainer(Mistake::None, &shared, sequence_parallel).unwrap()).unwrap();
            for (found, expected) in found.iter().zip(&expected) {
                assert!((found / expected - 1.).abs() < 1e-12, "sequence {sequence_parallel}: {found} {expected}");
            }
        }
        for (mistake, sequence_parallel, expected) in [
            (Mistake::BiasInside, true, "unit wide: the output differs if 2 ranks share the layer"),
            (Mistake::WeightInside, false, "unit wide: the gradient of weight [6] differs"),
            (Mistake::ScaleOutside, false, "unit wide: the gradient of scale [1] differs"),
            (Mistake::WrongDimension, true, "unit wide: "),
            (
                Mistake::WrongParts,
                true,
                "down of unit wide: 10, dimension 1 of its shape [6, 10], is not made of 9 equal parts",
            ),
            (Mistake::HeadInside, false, "unit loss: "),
        ] {
            let refused = trainer(mistake, &shared, sequence_parallel).and_then(losses);
            let said = refused.err().map(|error| error.to_string()).unwrap_or_default();
            assert!(said.contains(expected), "{mistake:?}: {said}");
        }
    });
}
