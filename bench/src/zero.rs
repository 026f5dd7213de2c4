//! Measures the memory and traffic of each ZeRO stage: `bench-zero` under `mpirun`.
//!
//! For each stage, and for gradients in bf16 and in f32, it trains a bf16 model for two steps and prints a line of JSON: the
//! bytes allocated when the update starts, minus those before the trainer was created; the pool's share of them; and the
//! traffic of a step.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::Result;
use serde_json::json;
use shardwise_comm::{Verb, mpi};
use shardwise_model::{Batch, LlamaConfig, Model};
use shardwise_plan::Dtype;
use shardwise_torch::allocated_bytes;
use shardwise_torch::tch::{Device, Kind, Tensor};
use shardwise_train::{Options, Ranks, Schedule, Trainer, init};
use shardwise_zero::{Elements, Elementwise, Optimizer, Precision, Sharding};

/// An optimizer with Adam's state, whose update only measures the allocated memory: by then gradients are reduced, but not freed yet.
#[derive(Debug)]
struct MemoryProbe {
    gradients: Dtype,
    first_bytes: Arc<AtomicUsize>,
}

impl Elementwise for MemoryProbe {
    fn state_names(&self) -> &[&str] {
        &["first_moment", "second_moment"]
    }

    fn update(&self, elements: Elements) -> shardwise_torch::Result<()> {
        // The chunk being updated has a temporary f32 copy of its gradients.
        let temporary = if self.gradients == Dtype::F32 { 0 } else { elements.grads.numel() * Dtype::F32.bytes() };
        // The first call of a step measures the most.
        self.first_bytes.fetch_max(allocated_bytes() - temporary, Ordering::Relaxed);
        Ok(())
    }
}

/// A model whose sizes have few divisors. Its head is tied to its embedding, so that every unit is gathered equally often.
fn llama() -> LlamaConfig {
    LlamaConfig { tie_word_embeddings: true, ..LlamaConfig::new(8191, 384, 10, 6, 1057) }
}

fn main() -> Result<()> {
    let world = Arc::new(mpi::world(mpi::Options::default())?);
    // Discard a first run: on its first use, libtorch allocates memory that does not belong to the trainer, and keeps it.
    measure(&world, 3, Dtype::F32)?;
    for gradients in [Dtype::Bf16, Dtype::F32] {
        for stage in 0..4 {
            let line = measure(&world, stage, gradients)?;
            if world.rank() == 0 {
                println!("{line}");
            }
        }
    }
    Ok(())
}

fn measure(world: &Arc<shardwise_comm::Group>, stage: u8, gradients: Dtype) -> Result<serde_json::Value> {
    let sharding = Sharding::stage(stage)?;
    let first_bytes = Arc::new(AtomicUsize::new(0));
    let optimizer = Optimizer::custom(MemoryProbe { gradients, first_bytes: first_bytes.clone() });
    let options = Options {
        precision: Precision { param_dtype: Dtype::Bf16, reduce_dtype: gradients },
        reduce_each_micro_batch: sharding.gradients,
        ..Options::new(sharding, optimizer, Schedule::constant(1e-4))
    };
    let model = Model::from_config(llama())?;
    let elements = model.elements();
    let embedding: usize = model.units()[0].parameters().iter().map(|parameter| parameter.elements()).sum();
    let tokens = Tensor::randint(8191, [1, 32], (Kind::Int64, Device::Cpu));
    let targets = tokens.roll(-1, 1);
    let batch = [Batch::new(tokens, targets)];
    world.barrier("before").wait()?;
    let before = allocated_bytes();
    let mut trainer = Trainer::new(model, Ranks::sharded(world.clone()), options, &mut init::from_seed(1))?;
    trainer.step(&batch)?;
    trainer.shards_mut().filter(|_| stage < 3).try_for_each(|shard| shard.gather())?;
    world.meter().reset();
    first_bytes.store(0, Ordering::Relaxed);
    trainer.step(&batch)?;
    let live = first_bytes.load(Ordering::Relaxed) - before;
    // Wait for the all-gathers of stages 1 and 2, which run until the next use.
    trainer.shards_mut().filter(|_| stage < 3).try_for_each(|shard| shard.gather())?;
    let units =
        |verb: Verb| world.meter().total(|key| key.verb == verb && !["tokens", "loss and norm"].contains(&&*key.label));
    let (gathered, reduced, both) = (units(Verb::AllGather), units(Verb::ReduceScatter), units(Verb::AllReduce));
    let (held, pool) = trainer.bytes();
    Ok(json!({
        "ranks": world.size(), "stage": stage, "gradients": gradients.to_string(), "elements": elements,
        "embedding_elements": embedding,
        "live_bytes": live, "pool_bytes": pool,
        "parameter_bytes": held.parameters, "optimizer_bytes": held.optimizer,
        "sent_elements": gathered.elements + reduced.elements + both.elements,
        "sent_bytes": gathered.bytes + reduced.bytes + both.bytes,
        "gathered_elements": gathered.elements, "gathered_bytes": gathered.bytes,
        "reduced_elements": reduced.elements, "reduced_bytes": reduced.bytes,
    }))
}
