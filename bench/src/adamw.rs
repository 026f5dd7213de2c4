//! Measures AdamW on a rank's shard, next to a loop that reads four arrays and writes three of them: `bench-adamw ELEMENTS` under `mpirun`.
//!
//! The ranks work at the same time, on one shard each. Rank 0 prints a line of JSON: the medians of both times.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::json;
use shardwise_comm::{Group, ReduceOp, mpi, single};
use shardwise_torch::tch::{Device, Kind, Tensor};
use shardwise_zero::{
    AdamW, Groups, Layout, OffloadFiles, Optimizer, ParameterSpec, Pool, Precision, ShardedUnit, Sharding,
};

const ROUNDS: usize = 7;

fn main() -> Result<()> {
    let elements: usize = std::env::args().nth(1).context("usage: bench-adamw ELEMENTS")?.parse()?;
    let world = mpi::world(mpi::Options::default())?;
    let optimizer = Optimizer::AdamW(AdamW::default());
    let layout = Layout {
        groups: Groups::sharded(Arc::new(single::group())),
        parts: None,
        sharding: Sharding::stage(0)?,
        precision: Precision::F32,
        states: optimizer.states(),
        pool: Arc::new(Pool::new(Device::Cpu)),
        files: OffloadFiles::default(),
    };
    let parameter =
        ParameterSpec { shape: vec![elements as i64], decays: true, trainable: true, layout: 0, adds_gradient: true };
    let mut unit = ShardedUnit::new("unit", &[parameter], &[layout], &mut |_, range, elements| {
        elements.write(range.map(|index| (index % 97) as f64 / 97.));
        Ok(())
    })?;
    let gradient = Tensor::full([elements as i64], 0.01, (Kind::Float, Device::Cpu));
    let mut arrays = [0.1, 0.2, 0.3, 0.4].map(|value: f32| vec![value; elements]);

    let (mut update_s, mut loop_s) = (Vec::new(), Vec::new());
    // The first round touches the memory for the first time.
    for round in 0..=ROUNDS {
        unit.add_gradient(0, &gradient)?;
        unit.start_reduce()?;
        unit.finish_reduce()?;
        let update = slowest(&world, || Ok(unit.update(&optimizer, 1.)?))?;
        let plain = slowest(&world, || {
            read_four_and_write_three(&mut arrays);
            Ok(())
        })?;
        if round > 0 {
            update_s.push(update);
            loop_s.push(plain);
        }
    }
    if world.rank() == 0 {
        println!("{}", json!({ "update_s": median(update_s), "loop_s": median(loop_s) }));
    }
    Ok(())
}

/// The accesses of AdamW, with next to no arithmetic.
fn read_four_and_write_three(arrays: &mut [Vec<f32>; 4]) {
    let [grads, parameters, first, second] = arrays;
    let moments = first.iter_mut().zip(second.iter_mut());
    for ((grad, parameter), (first, second)) in grads.iter().zip(parameters.iter_mut()).zip(moments) {
        *first += *grad;
        *second += *grad;
        *parameter += *grad;
    }
    black_box(arrays);
}

/// How long some work takes on the slowest rank, if all begin it together.
fn slowest(world: &Group, work: impl FnOnce() -> Result<()>) -> Result<f64> {
    world.barrier("work").wait()?;
    let started = Instant::now();
    work()?;
    let own = started.elapsed().as_secs_f64();
    Ok(world.all_reduce("time", ReduceOp::Max, vec![own]).wait()?[0])
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}
