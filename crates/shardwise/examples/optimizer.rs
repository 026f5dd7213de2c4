//! A custom optimizer: Lion, which updates by the sign of an interpolated momentum, and needs half the state of AdamW.
//!
//! It is elementwise. Sharding, master weights, clipping and checkpoints need no code, and the losses are the same at stage 0, where
//! every rank updates everything, and at stage 3, where each rank updates its shard.
//!
//! ```sh
//! cargo build --release --example optimizer
//! mpirun -n 2 target/release/examples/optimizer     # or alone, without mpirun
//! ```

use std::error::Error;

use shardwise::model::{Batch, LlamaConfig, Model};
use shardwise::tch::Tensor;
use shardwise::{
    BatchSize, Elements, Elementwise, Optimizer, Options, Ranks, Schedule, Sharding, SourceError, Trainer, init,
    optimizer,
};

/// Lion (Chen et al., 2023).
#[derive(Debug)]
struct Lion {
    beta1: f64,
    beta2: f64,
    weight_decay: f64,
}

impl Elementwise for Lion {
    fn state_names(&self) -> &[&str] {
        &["momentum"]
    }

    fn update(&self, elements: Elements) -> optimizer::Result<()> {
        let Elements { mut parameters, grads, mut state, decays, lr, .. } = elements;
        let momentum = &mut state[0];
        let direction = momentum.f_lerp(&grads, 1. - self.beta1)?.f_sign()?;
        if decays {
            let _ = parameters.f_mul_scalar_(1. - lr * self.weight_decay)?;
        }
        let _ = parameters.f_sub_(&direction.f_mul_scalar(lr)?)?;
        let _ = momentum.f_lerp_(&grads, 1. - self.beta2)?;
        Ok(())
    }
}

const VOCAB_SIZE: i64 = 61;

/// Sequences in which every token is the square of the previous one plus the sequence's index.
fn squares(numbers: &[u64]) -> Result<Batch, SourceError> {
    let row = |&number: &u64| {
        let number = number as i64 % VOCAB_SIZE;
        std::iter::successors(Some(number), move |token| Some((token * token + number) % VOCAB_SIZE)).take(17)
    };
    let rows = Tensor::f_from_slice(&numbers.iter().flat_map(row).collect::<Vec<i64>>())?.f_view([-1, 17])?;
    Ok(Batch::new(rows.f_narrow(1, 0, 16)?, rows.f_narrow(1, 1, 16)?))
}

/// The losses of 60 steps, and the bytes of optimizer state on this rank.
fn losses(ranks: &Ranks, stage: u8) -> shardwise::Result<(Vec<f64>, usize)> {
    let model = Model::from_config(LlamaConfig::new(VOCAB_SIZE as usize, 64, 2, 4, 160));
    let model = model.map_err(|error| shardwise::Error::Options(error.to_string()))?;
    let lion = Optimizer::custom(Lion { beta1: 0.9, beta2: 0.99, weight_decay: 0.1 });
    let options =
        Options { max_grad_norm: Some(1.), ..Options::new(Sharding::stage(stage)?, lion, Schedule::constant(1e-3)) };
    let mut trainer = Trainer::new(model, ranks.clone(), options, &mut init::from_seed(3))?;
    let batch_size = BatchSize { micro_batch_size: 16 / ranks.world.size(), gradient_accumulation_steps: 2 };
    let mut losses = Vec::new();
    trainer.train(&squares, batch_size, 60, &mut |report| losses.push(report.loss))?;
    Ok((losses, trainer.bytes().0.optimizer))
}

fn main() -> Result<(), Box<dyn Error>> {
    let ranks = shardwise::ranks()?;
    let ((whole, whole_bytes), (sharded, sharded_bytes)) = (losses(&ranks, 0)?, losses(&ranks, 3)?);
    if ranks.world.rank() > 0 {
        return Ok(());
    }
    println!("Lion on {} ranks", ranks.world.size());
    println!("          stage 0          stage 3");
    for step in [1, 15, 30, 45, 60] {
        println!("step {step:>2}  {:.12}  {:.12}", whole[step - 1], sharded[step - 1]);
    }
    println!("momentum  {:>11.1} kB  {:>11.1} kB", whole_bytes as f64 / 1e3, sharded_bytes as f64 / 1e3);
    let same = whole.iter().zip(&sharded).all(|(a, b)| a.to_bits() == b.to_bits());
    println!("{}", if same { "the same, to the last bit" } else { "NOT the same" });
    Ok(())
}
