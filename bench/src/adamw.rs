//! Measures AdamW on a rank's shard, next to a loop that reads four arrays and writes three of them: `bench-adamw ELEMENTS` under `mpirun`.
//!
//! The ranks work at the same time, on one shard each. Rank 0 prints a line of JSON: the medians of both times.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::json;
use shardwise_comm::{Group, ReduceOp, mpi, single};
use shardwise_plan::Dtype;
use shardwise_torch::Block;
use shardwise_torch::tch::{Device, Kind, Tensor};
use shardwise_zero::{
    AdamW, Groups, Layout, OffloadTargets, Optimizer, ParameterSpec, Pool, Precision, ShardedUnit, Sharding,
};

const ROUNDS: usize = 7;

fn main() -> Result<()> {
    let elements: usize = std::env::args().nth(1).context("usage: bench-adamw ELEMENTS")?.parse()?;
    let world = mpi::world(mpi::Options::default())?;
    // As a rank of a run does.
    shardwise_torch::enable_caching_allocator();
    let optimizer = Optimizer::AdamW(AdamW::default());
    let layout = Layout {
        groups: Groups::sharded(Arc::new(single::group())),
        parts: None,
        sharding: Sharding::stage(0)?,
        precision: Precision::F32,
        states: optimizer.states(),
        pool: Arc::new(Pool::new(Device::Cpu)),
        offload: OffloadTargets::default(),
    };
    let parameter =
        ParameterSpec { shape: vec![elements as i64], decays: true, trainable: true, layout: 0, adds_gradient: true };
    let mut unit = ShardedUnit::new("unit", &[parameter], &[layout], &mut |_, range, elements| {
        elements.write(range.map(|index| (index % 97) as f64 / 97.));
        Ok(())
    })?;
    let gradient = Tensor::full([elements as i64], 0.01, (Kind::Float, Device::Cpu));
    let array = |value: f32| -> Result<Block> {
        let mut block = Block::new(Dtype::F32, elements, Device::Cpu)?;
        block.as_mut_slice::<f32>()?.fill(value);
        Ok(block)
    };
    let mut arrays = [array(0.1)?, array(0.2)?, array(0.3)?, array(0.4)?];

    let (mut update_s, mut loop_s) = (Vec::new(), Vec::new());
    // The first round touches the memory for the first time.
    for round in 0..=ROUNDS {
        unit.add_gradient(0, &gradient)?;
        unit.start_reduce()?;
        unit.finish_reduce()?;
        let update = slowest(&world, || Ok(unit.update(&optimizer, 1.)?))?;
        let plain = slowest(&world, || {
            let [grads, parameters, first, second] = &mut arrays;
            let written = [parameters.as_mut_slice()?, first.as_mut_slice()?, second.as_mut_slice()?];
            read_four_and_write_three(grads.as_slice()?, written);
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

/// The accesses of AdamW, with next to no arithmetic, by the widest instructions of the processor.
fn read_four_and_write_three(grads: &[f32], written: [&mut [f32]; 3]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the processor has these instructions.
        return unsafe { add_with_avx512(grads, written) };
    }
    add(grads, written);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn add_with_avx512(grads: &[f32], written: [&mut [f32]; 3]) {
    add(grads, written);
}

#[inline(always)]
fn add(grads: &[f32], mut written: [&mut [f32]; 3]) {
    // The fastest of the sizes that were tried: blocks of four cache lines, fetched eight blocks ahead.
    const BLOCK: usize = 64;
    for start in (0..grads.len()).step_by(BLOCK) {
        let (block, ahead) = (start..grads.len().min(start + BLOCK), start + 8 * BLOCK);
        fetch_into_cache(grads, ahead, BLOCK);
        written.iter().for_each(|array| fetch_into_cache(array, ahead, BLOCK));
        let grads = &grads[block.clone()];
        for array in &mut written {
            array[block.clone()].iter_mut().zip(grads).for_each(|(element, grad)| *element += *grad);
        }
    }
    black_box(written);
}

#[inline(always)]
fn fetch_into_cache(array: &[f32], start: usize, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if let Some(block) = array.get(start..start + len) {
        for line in block.chunks(16) {
            // SAFETY: the address is that of an element, and a prefetch changes nothing.
            unsafe {
                use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
                _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast());
            }
        }
    }
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
