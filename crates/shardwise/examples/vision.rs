//! A custom model: a small vision transformer that classifies discs, squares, rings and crosses. Several ranks can share its layers.
//!
//! ```sh
//! cargo build --release --example vision
//! mpirun -n 2 target/release/examples/vision     # or alone, without mpirun
//! mpirun -n 2 target/release/examples/vision 2   # two ranks share each layer
//! ```

use shardwise::model::TensorPlacement::{self, ReplicatedWhole};
use shardwise::model::{
    Batch, Init, Layer, Model, Parameter, Parameters, Pass, Result, TensorParallel, Unit, splitmix64,
};
use shardwise::schedule::Kind;
use shardwise::tch::{self, Reduction, Tensor};
use shardwise::{AdamW, BatchSize, Optimizer, Options, Schedule, Sharding, SourceError, Trainer, init};

const CLASSES: [&str; 4] = ["disc", "square", "ring", "cross"];
const SIDE: i64 = 16; // of an image, in pixels
const PATCH: i64 = 4; // the side of a patch
const PATCHES: i64 = (SIDE / PATCH) * (SIDE / PATCH);
const HIDDEN_SIZE: usize = 48;
const HEADS: usize = 4;
const HEAD_DIM: i64 = (HIDDEN_SIZE / HEADS) as i64;

/// The first unit: embeds the patches of an image and their positions.
struct Patches;

impl Layer for Patches {
    fn forward(&self, p: &Parameters<'_>, _: Option<&Tensor>, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        let (images, rows) = (batch.inputs.size()[0], SIDE / PATCH);
        let patches = batch.inputs.f_view([images, rows, PATCH, rows, PATCH])?.f_permute([0, 1, 3, 2, 4])?;
        let patches = patches.f_reshape([images, PATCHES, PATCH * PATCH])?.f_to_kind(p.get("patch").kind())?;
        pass.parallel.scatter(&patches.f_linear(p.get("patch"), None::<&Tensor>)?.f_add(p.get("place"))?)
    }
}

/// Attention between all patches, and an MLP.
struct Block;

impl Layer for Block {
    fn forward(&self, p: &Parameters<'_>, input: Option<&Tensor>, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        let (x, images) = (input.expect("a block has an input"), batch.inputs.size()[0]);
        let entered = pass.parallel.enter(&norm(x)?, (images * PATCHES) as usize)?;
        let heads = entered.f_linear(p.get("qkv"), None::<&Tensor>)?.f_view([images, PATCHES, 3, -1, HEAD_DIM])?;
        let [query, key, value] = [0, 1, 2].map(|part| heads.select(2, part).transpose(1, 2));
        let seen =
            Tensor::f_scaled_dot_product_attention(&query, &key, &value, None::<&Tensor>, 0., false, None, false)?;
        let seen = seen.f_transpose(1, 2)?.f_reshape([images, PATCHES, -1])?;
        let x = x.f_add(&pass.parallel.leave(&seen.f_linear(p.get("out"), None::<&Tensor>)?)?)?;
        let entered = pass.parallel.enter(&norm(&x)?, (images * PATCHES) as usize)?;
        let wide = entered.f_linear(p.get("up"), Some(p.get("up_bias")))?.f_gelu("none")?;
        Ok(x.f_add(&pass.parallel.leave(&wide.f_linear(p.get("down"), None::<&Tensor>)?)?)?)
    }
}

/// The last unit: the mean of all patches, the logits of the classes, and the loss summed over images.
struct Head;

impl Layer for Head {
    fn forward(&self, p: &Parameters<'_>, input: Option<&Tensor>, batch: &Batch, pass: &Pass) -> Result<Tensor> {
        let x = input.expect("the head has an input");
        let x = &pass.parallel.gather(x, (batch.inputs.size()[0] * PATCHES) as usize)?;
        let scores = self.logits(p, x, &pass.parallel)?.expect("the head has logits");
        Ok(scores.f_cross_entropy_loss(&batch.targets, None::<&Tensor>, Reduction::Sum, -100, 0.)?)
    }

    fn logits(&self, p: &Parameters<'_>, input: &Tensor, _: &TensorParallel) -> Result<Option<Tensor>> {
        let mean = norm(&input.f_view([-1, PATCHES, HIDDEN_SIZE as i64])?.f_mean_dim(1, false, input.kind())?)?;
        Ok(Some(mean.f_linear(p.get("classes"), None::<&Tensor>)?.f_to_kind(tch::Kind::Float)?))
    }
}

fn norm(x: &Tensor) -> Result<Tensor> {
    Ok(x.f_layer_norm([HIDDEN_SIZE as i64], None::<&Tensor>, None::<&Tensor>, 1e-5, false)?)
}

fn vision_transformer(blocks: usize) -> Result<Model> {
    let matrix = |name: String, out: usize, into: usize| Parameter::matrix(name, [out, into], (into as f64).powf(-0.5));
    let patch = matrix("patch".to_string(), HIDDEN_SIZE, (PATCH * PATCH) as usize).placed(ReplicatedWhole);
    let place = Parameter::matrix("place", [PATCHES as usize, HIDDEN_SIZE], 0.02).placed(ReplicatedWhole);
    let mut units = vec![Unit::new("patches", vec![patch, place], Patches)];
    for index in 0..blocks {
        let name = |ending: &str| format!("block.{index}.{ending}");
        let parameters = vec![
            matrix(name("qkv"), 3 * HIDDEN_SIZE, HIDDEN_SIZE).placed(TensorPlacement::by_outputs(HEADS).fused(3)),
            matrix(name("out"), HIDDEN_SIZE, HIDDEN_SIZE).placed(TensorPlacement::by_inputs(HEADS)),
            matrix(name("up"), 4 * HIDDEN_SIZE, HIDDEN_SIZE).placed(TensorPlacement::by_outputs(4 * HIDDEN_SIZE)),
            Parameter::vector(name("up_bias"), 4 * HIDDEN_SIZE, Init::Zeros)
                .placed(TensorPlacement::by_outputs(4 * HIDDEN_SIZE)),
            matrix(name("down"), HIDDEN_SIZE, 4 * HIDDEN_SIZE).placed(TensorPlacement::by_inputs(4 * HIDDEN_SIZE)),
        ];
        units.push(Unit::new(format!("block.{index}"), parameters, Block));
    }
    let classes = matrix("classes".to_string(), CLASSES.len(), HIDDEN_SIZE).placed(ReplicatedWhole);
    units.push(Unit::new("head", vec![classes], Head));
    Model::new(units)
}

/// Image `number`: its pixels, and its class.
fn image(number: u64) -> (Vec<f32>, i64) {
    // A pseudorandom number between 0 and 1, for each image and each use.
    let chance = |of: u64| (splitmix64(number ^ splitmix64(of)) >> 40) as f32 / (1 << 24) as f32;
    let class = (4. * chance(0)) as i64;
    let (x, y, radius) = (5. + 5. * chance(1), 5. + 5. * chance(2), 3.5 + 2. * chance(3));
    let pixel = |place: i64| {
        let (dx, dy) = ((place % SIDE) as f32 - x, (place / SIDE) as f32 - y);
        let (round, square) = (dx.hypot(dy), dx.abs().max(dy.abs()));
        let inside = match class {
            0 => round < radius,
            1 => square < 0.85 * radius,
            2 => round < radius && round > 0.6 * radius,
            _ => square < radius && dx.abs().min(dy.abs()) < 0.3 * radius,
        };
        f32::from(inside) + 0.6 * (chance(4 + place as u64) - 0.5)
    };
    ((0..SIDE * SIDE).map(pixel).collect(), class)
}

fn images(numbers: &[u64]) -> std::result::Result<Batch, SourceError> {
    let (pixels, classes): (Vec<Vec<f32>>, Vec<i64>) = numbers.iter().map(|&number| image(number)).unzip();
    Ok(Batch::new(Tensor::f_from_slice(&pixels.concat())?.f_view([-1, SIDE, SIDE])?, Tensor::f_from_slice(&classes)?))
}

fn main() -> std::result::Result<(), SourceError> {
    let tensor = std::env::args().nth(1).map_or(Ok(1), |ranks| ranks.parse())?;
    let ranks = shardwise::parallel_ranks(1, tensor)?;
    let (readers, is_first) = (ranks.data_size(), ranks.world.rank() == 0);
    let model = vision_transformer(2)?;
    if is_first {
        let (elements, size) = (model.elements(), ranks.world.size());
        println!("{elements} parameters at stage 3 on {size} ranks; chance is 25.0%");
    }
    let schedule = Schedule { lr: 3e-3, warmup_steps: 20, steps: 300, kind: Kind::Cosine { min_lr_ratio: 0.1 } };
    let options = Options::new(Sharding::stage(3)?, Optimizer::AdamW(AdamW::default()), schedule);
    let mut trainer = Trainer::new(model, ranks, options, &mut init::from_seed(7))?;
    let batch_size = BatchSize { micro_batch_size: 64 / readers, gradient_accumulation_steps: 1 };
    let unseen = images(&(1 << 40..(1 << 40) + 256).collect::<Vec<u64>>())?;
    for steps in (0..=300).step_by(60) {
        trainer.train(&images, batch_size, steps, &mut |_report| ())?;
        let evaluation = trainer.evaluate(std::slice::from_ref(&unseen))?;
        let guesses = trainer.logits(&unseen.inputs)?.argmax(1, false);
        let right = guesses.eq_tensor(&unseen.targets).sum(tch::Kind::Double).double_value(&[]) / 2.56;
        if is_first {
            let loss = evaluation.loss_sum / evaluation.tokens as f64;
            println!("step {steps:>3}  loss {loss:.3}  {right:5.1}% of unseen images are right");
        }
    }
    Ok(())
}
