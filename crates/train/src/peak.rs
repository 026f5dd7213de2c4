//! What the ranks reach in arithmetic when they do nothing else: large products of matrices, all ranks at once, in the type in
//! which units compute.
//!
//! It is the peak that a run is measured against. It is what this machine gives with all its ranks at work, not what a data sheet
//! says; ranks that share processors share them here as well.

use std::time::{Duration, Instant};

use shardwise_comm::{Group, Reduce};
use shardwise_plan::Dtype;
use shardwise_torch::kind_of;
use shardwise_torch::tch::{Device, TchError, Tensor, no_grad};

use crate::Result;

/// For how long it is measured.
const LASTS: Duration = Duration::from_millis(100);

/// The sides of the matrices: the largest whose product takes less than a fifth of that.
const SIDES: [i64; 6] = [128, 256, 512, 1024, 4096, 8192];
const PRODUCT: Duration = Duration::from_millis(20);

/// Additions and multiplications that all ranks together make in a second; none where libtorch has no such product. All ranks call
/// it together.
pub(crate) fn flops_per_s(world: &Group, dtype: Dtype, device: Device) -> Result<f64> {
    let largest = if device == Device::Cpu { 1024 } else { 8192 };
    let side = no_grad(|| chosen(largest, dtype, device)).unwrap_or(0);
    world.barrier("peak").wait()?;
    let own = no_grad(|| reached(side, dtype, device)).unwrap_or(0.);
    Ok(world.all_reduce("peak", Reduce::Sum, vec![own]).wait()?[0])
}

/// The side of the matrices. What is slow in this type is measured with small ones.
fn chosen(largest: i64, dtype: Dtype, device: Device) -> std::result::Result<i64, TchError> {
    let mut chosen = 0;
    for side in SIDES.into_iter().take_while(|side| *side <= largest) {
        let mut product = Product::new(side, dtype, device)?;
        // The first product of a size also prepares for it.
        product.make()?;
        let began = Instant::now();
        product.make()?;
        chosen = side;
        // Twice the side takes eight times as long.
        if 8 * began.elapsed() > PRODUCT {
            break;
        }
    }
    Ok(chosen)
}

fn reached(side: i64, dtype: Dtype, device: Device) -> std::result::Result<f64, TchError> {
    if side == 0 {
        return Ok(0.);
    }
    let mut product = Product::new(side, dtype, device)?;
    product.make()?;
    let (began, mut products) = (Instant::now(), 0.);
    while began.elapsed() < LASTS {
        product.make()?;
        products += 1.;
    }
    Ok(2. * (side as f64).powi(3) * products / began.elapsed().as_secs_f64())
}

struct Product {
    factors: [Tensor; 2],
    product: Tensor,
}

impl Product {
    fn new(side: i64, dtype: Dtype, device: Device) -> std::result::Result<Self, TchError> {
        let ones = || Tensor::f_ones([side, side], (kind_of(dtype), device));
        Ok(Product { factors: [ones()?, ones()?], product: ones()? })
    }

    /// Makes it, and is back when it is there: a GPU computes on while nobody asks.
    fn make(&mut self) -> std::result::Result<(), TchError> {
        let [a, b] = &self.factors;
        drop(a.f_matmul_out(&self.product, b)?);
        self.product.f_double_value(&[0, 0]).map(drop)
    }
}
