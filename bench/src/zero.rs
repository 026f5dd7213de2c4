//! What the stages hold and send, beside the theory: `bench-zero` under `mpirun`.
//!
//! For each stage, and for gradients in bf16 and in f32, it trains a bf16 model for two steps and prints a line of JSON: the
//! bytes that the allocator has lent out when the update begins, less those before there was a trainer; the pool's share of
//! them; and what a step sent.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::Result;
use serde_json::json;
use shardwise_comm::{Verb, mpi};
use shardwise_model::{Batch, Llama};
use shardwise_plan::Dtype;
use shardwise_torch::allocated_bytes;
use shardwise_torch::tch::{Device, Kind, Tensor};
use shardwise_train::{Accumulation, Options, Ranks, Schedule, Trainer, start};
use shardwise_zero::{Elements, Elementwise, Optimizer, Precision, Sharding};

/// Adam's state, and an update that notes what is allocated: gradients are reduced then, and not given up yet.
#[derive(Debug)]
struct Noting {
    gradients: Dtype,
    first_bytes: Arc<AtomicUsize>,
}

impl Elementwise for Noting {
    fn state_names(&self) -> &[&str] {
        &["first_moment", "second_moment"]
    }

    fn update(&self, elements: Elements) -> shardwise_torch::Result<()> {
        // What is updated at once has gradients in f32 of its own, for as long as this takes.
        let passing = if self.gradients == Dtype::F32 { 0 } else { elements.grads.numel() * Dtype::F32.bytes() };
        // The first call of a step finds the most.
        self.first_bytes.fetch_max(allocated_bytes() - passing, Ordering::Relaxed);
        Ok(())
    }
}

/// Divides by little; the head is the embedding's, so that every unit is gathered as often as theory says.
fn llama() -> Llama {
    Llama { tied: true, ..Llama::new(8191, 384, 10, 6, 1057) }
}

fn main() -> Result<()> {
    let world = Arc::new(mpi::world(mpi::Options::default())?);
    // What libtorch keeps from its first use on is not the trainer's.
    measured(&world, 3, Dtype::F32)?;
    for gradients in [Dtype::Bf16, Dtype::F32] {
        for stage in 0..4 {
            let line = measured(&world, stage, gradients)?;
            if world.rank() == 0 {
                println!("{line}");
            }
        }
    }
    Ok(())
}

fn measured(world: &Arc<shardwise_comm::Group>, stage: u8, gradients: Dtype) -> Result<serde_json::Value> {
    let sharding = Sharding::stage(stage)?;
    let first_bytes = Arc::new(AtomicUsize::new(0));
    let optimizer = Optimizer::own(Noting { gradients, first_bytes: first_bytes.clone() });
    let options = Options {
        precision: Precision { parameters: Dtype::Bf16, gradients },
        accumulation: if sharding.gradients { Accumulation::Sharded } else { Accumulation::Whole },
        ..Options::new(sharding, optimizer, Schedule::constant(1e-4))
    };
    let model = llama().model()?;
    let elements = model.elements();
    let tokens = Tensor::randint(8191, [1, 32], (Kind::Int64, Device::Cpu));
    let targets = tokens.roll(-1, 1);
    let batch = [Batch::new(tokens, targets)];
    world.barrier("before").wait()?;
    let before = allocated_bytes();
    let mut trainer = Trainer::new(model, Ranks::sharded(world.clone()), options, &mut start::from_seed(1))?;
    trainer.step(&batch)?;
    trainer.shards_mut().iter_mut().filter(|_| stage < 3).try_for_each(|shard| shard.gather())?;
    world.meter().reset();
    first_bytes.store(0, Ordering::Relaxed);
    trainer.step(&batch)?;
    let live = first_bytes.load(Ordering::Relaxed) - before;
    // The last gathers of stages 1 and 2 are under way until the next use.
    trainer.shards_mut().iter_mut().filter(|_| stage < 3).try_for_each(|shard| shard.gather())?;
    let units = |verb: Verb| {
        world.meter().total(|tally| tally.verb == verb && !["tokens", "loss and norm"].contains(&&*tally.label))
    };
    let (gathered, reduced, both) = (units(Verb::AllGather), units(Verb::ReduceScatter), units(Verb::AllReduce));
    let (held, pool) = trainer.bytes();
    Ok(json!({
        "ranks": world.size(), "stage": stage, "gradients": gradients.to_string(), "elements": elements,
        "live_bytes": live, "pool_bytes": pool,
        "parameter_bytes": held.parameters, "optimizer_bytes": held.optimizer,
        "sent_elements": gathered.elements + reduced.elements + both.elements,
        "sent_bytes": gathered.bytes + reduced.bytes + both.bytes,
        "gathered_elements": gathered.elements, "gathered_bytes": gathered.bytes,
        "reduced_elements": reduced.elements, "reduced_bytes": reduced.bytes,
    }))
}
