//! Any PyTorch model: trains a compiled package that classifies images, here of stripes.
//!
//! ```sh
//! shardwise compile python/examples/vision_transformer.py --out packages/vit --weights
//! cargo build --release --example compiled
//! mpirun -n 2 target/release/examples/compiled packages/vit
//! ```

use shardwise::checkpoint::Weights;
use shardwise::model::{Batch, Model, splitmix64};
use shardwise::tch::Tensor;
use shardwise::{AdamW, BatchSize, Optimizer, Options, Report, Schedule, Sharding, SourceError, Trainer, init};

const CLASSES: u64 = 10;
const STEPS: u64 = 20;

/// An image and its class: the rows that are brighter than others.
fn image(number: u64, shape: &[i64]) -> (Vec<f32>, i64) {
    let (columns, rows) = (shape[3] as u64, shape[2] as u64);
    let class = splitmix64(number) % CLASSES;
    let pixel = |place: u64| {
        let noise = (splitmix64(number << 32 | place) >> 40) as f32 / (1 << 24) as f32;
        let is_bright = place / columns % rows % CLASSES == class;
        noise + f32::from(u8::from(is_bright))
    };
    let pixels = shape[1..].iter().product::<i64>() as u64;
    ((0..pixels).map(pixel).collect(), class as i64)
}

fn main() -> Result<(), SourceError> {
    let folder = std::env::args().nth(1).ok_or("name the folder of a package")?;
    let model = Model::from_package(&folder)?;
    let package = model.package().expect("the model has one");
    let shape: Vec<i64> = package.manifest().inputs.shape.iter().map(|&size| size as i64).collect();
    let images = |numbers: &[u64]| {
        let (pixels, classes): (Vec<_>, Vec<_>) = numbers.iter().map(|&number| image(number, &shape)).unzip();
        Ok(Batch::new(Tensor::f_from_slice(&pixels.concat())?.f_view(&shape[..])?, Tensor::f_from_slice(&classes)?))
    };
    let ranks = shardwise::ranks()?;
    let is_first = ranks.world.rank() == 0;
    if is_first {
        println!("{} parameters at stage 3 on {} ranks", model.elements(), ranks.data_size());
    }
    let optimizer = Optimizer::AdamW(AdamW::default());
    let options = Options::new(Sharding::stage(3)?, optimizer, Schedule::constant(1e-3));
    let weights = Weights::open(&format!("{folder}/weights.safetensors"))?;
    let mut trainer = Trainer::new(model, ranks, options, &mut init::from_weights(&weights))?;
    // The package was compiled for this many images at a time.
    let batch_size = BatchSize { micro_batch_size: shape[0] as usize, gradient_accumulation_steps: 2 };
    trainer.train(&images, batch_size, STEPS, &mut |report: &Report| {
        if is_first {
            println!("step {:>2}  loss {:.6}", report.step, report.loss);
        }
    })?;
    Ok(())
}
