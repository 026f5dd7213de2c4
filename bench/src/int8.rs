//! Measures the quantization of parameters on one core, next to a copy of the same elements: `bench-int8 ELEMENTS`.
//!
//! Prints a line of JSON: the medians of each, in f32 and in bf16.

use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use shardwise_plan::{Dtype, int8_bytes};
use shardwise_torch::tch::Device;
use shardwise_torch::{Block, decode_int8, encode_int8};

const ROUNDS: usize = 9;

fn main() -> Result<()> {
    let elements: usize = std::env::args().nth(1).context("usage: bench-int8 ELEMENTS")?.parse()?;
    println!("{}", json!({ "f32": measure(Dtype::F32, elements)?, "bf16": measure(Dtype::Bf16, elements)? }));
    Ok(())
}

/// Encodes, decodes and copies by turns.
fn measure(dtype: Dtype, elements: usize) -> Result<Value> {
    let block = |dtype, len| Block::new(dtype, len, Device::Cpu);
    let (mut from, mut to) = (block(dtype, elements)?, block(dtype, elements)?);
    let mut encoded = block(Dtype::U8, int8_bytes(elements))?;
    // The magnitudes of a model's parameters. With arbitrary bytes some would be subnormal, which processors handle slowly.
    let byte_at = |index: usize| if index.is_multiple_of(dtype.bytes()) { 0x3C } else { (index * 31 % 63) as u8 };
    from.bytes_mut()?.iter_mut().rev().enumerate().for_each(|(index, byte)| *byte = byte_at(index));
    let (mut encode_s, mut decode_s, mut copy_s) = (Vec::new(), Vec::new(), Vec::new());
    // The first round touches the memory for the first time.
    for round in 0..=ROUNDS {
        let seconds = [
            time(|| Ok(encode_int8(&from, &mut encoded, 1)?))?,
            time(|| Ok(decode_int8(encoded.as_slice()?, &mut to, 0..elements, 1)?))?,
            time(|| {
                to.bytes_mut()?.copy_from_slice(from.bytes()?);
                Ok(())
            })?,
        ];
        if round > 0 {
            for (all, seconds) in [&mut encode_s, &mut decode_s, &mut copy_s].into_iter().zip(seconds) {
                all.push(seconds);
            }
        }
    }
    Ok(json!({ "encode_s": median(encode_s), "decode_s": median(decode_s), "copy_s": median(copy_s) }))
}

fn time(work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let began = Instant::now();
    work()?;
    Ok(began.elapsed().as_secs_f64())
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}
