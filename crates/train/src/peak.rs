//! What the ranks reach in arithmetic when they do nothing else: large products of matrices, all ranks at once, in the type in
//! which units compute.
//!
//! It is the peak that a run is measured against. It is what this machine gives with all its ranks at work, not what a data sheet
//! says; ranks that share processors share them here as well. A machine that is busy with something else gives less, so that the
//! peak is only known from below: [`Peak`] says nothing where a run has been faster.

use std::time::{Duration, Instant};

use shardwise_comm::{Group, Reduce};
use shardwise_plan::Dtype;
use shardwise_torch::kind_of;
use shardwise_torch::tch::{Device, TchError, Tensor, no_grad};

use crate::Result;

/// How often it is measured, and for how long each time. Whatever else the machine does only makes products slower, so the best
/// time is the nearest to the peak.
const ROUNDS: usize = 5;
const LASTS: Duration = Duration::from_millis(25);

/// The sides of the matrices: the largest whose product takes no longer than that.
const SIDES: [i64; 6] = [128, 256, 512, 1024, 4096, 8192];
const PRODUCT: Duration = Duration::from_millis(20);

/// Additions and multiplications that all ranks together make in a second; none where libtorch has no such product. All ranks call
/// it together.
pub(crate) fn flops_per_s(world: &Group, dtype: Dtype, device: Device) -> Result<f64> {
    let largest = if device == Device::Cpu { 1024 } else { 8192 };
    let side = no_grad(|| chosen(largest, dtype, device)).unwrap_or(0);
    world.barrier("peak").wait()?;
    let own = no_grad(|| reached(side, dtype, device)).unwrap_or_default();
    // The best round of all ranks together, not each rank's best: ranks that share processors take turns at being fast.
    let rounds = world.all_reduce("peak", Reduce::Sum, own.to_vec()).wait()?;
    Ok(rounds.into_iter().fold(0., f64::max))
}

/// The peak that a run's arithmetic is compared with, for as long as nothing has been faster.
pub(crate) struct Peak {
    flops_per_s: f64,
    /// The most that the run itself has reached.
    fastest: f64,
    /// How often it may be measured again.
    retries: u32,
}

impl Peak {
    /// A peak as it was measured; 0 where it cannot be.
    pub(crate) fn new(flops_per_s: f64) -> Self {
        Peak { flops_per_s, fastest: 0., retries: 3 }
    }

    /// The part of the peak that this is; 0 where the peak is not known.
    pub(crate) fn utilisation(&mut self, flops_per_s: f64) -> f64 {
        if !flops_per_s.is_finite() {
            return 0.;
        }
        self.fastest = self.fastest.max(flops_per_s);
        match self.flops_per_s > 0. && !self.is_too_low() {
            true => flops_per_s / self.flops_per_s,
            false => 0.,
        }
    }

    /// Whether the run was faster than what was measured, so that it is worth measuring again.
    pub(crate) fn is_worth_measuring(&self) -> bool {
        self.is_too_low() && self.retries > 0
    }

    /// Takes what was measured again, if it is more.
    pub(crate) fn raise(&mut self, flops_per_s: f64) {
        self.flops_per_s = self.flops_per_s.max(flops_per_s);
        self.retries = self.retries.saturating_sub(1);
    }

    fn is_too_low(&self) -> bool {
        self.flops_per_s > 0. && self.fastest > self.flops_per_s
    }
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

/// What this rank reaches, round by round.
fn reached(side: i64, dtype: Dtype, device: Device) -> std::result::Result<[f64; ROUNDS], TchError> {
    let mut rounds = [0.; ROUNDS];
    if side == 0 {
        return Ok(rounds);
    }
    let mut product = Product::new(side, dtype, device)?;
    product.make()?;
    for round in &mut rounds {
        let (began, mut products) = (Instant::now(), 0.);
        while began.elapsed() < LASTS {
            product.make()?;
            products += 1.;
        }
        *round = 2. * (side as f64).powi(3) * products / began.elapsed().as_secs_f64();
    }
    Ok(rounds)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_is_faster_than_the_peak_has_no_utilisation() {
        let mut peak = Peak::new(100.);
        assert_eq!(peak.utilisation(40.), 0.4);
        assert_eq!(peak.utilisation(252.), 0.);
        // What follows is compared with the same peak, which is now known to be wrong.
        assert_eq!(peak.utilisation(40.), 0.);
        assert!(peak.is_worth_measuring());
        peak.raise(200.);
        assert_eq!(peak.utilisation(40.), 0.);
        peak.raise(50.);
        assert_eq!(peak.utilisation(40.), 0.);
        peak.raise(400.);
        assert_eq!(peak.utilisation(40.), 0.1);
        assert_eq!(peak.utilisation(f64::INFINITY), 0.);
        assert_eq!(peak.utilisation(400.), 1.);
        assert_eq!(peak.utilisation(500.), 0.);
        assert!(!peak.is_worth_measuring(), "it was measured often enough");
    }

    #[test]
    fn where_there_is_no_peak_there_is_no_utilisation() {
        let mut peak = Peak::new(0.);
        assert_eq!(peak.utilisation(40.), 0.);
        assert!(!peak.is_worth_measuring());
    }
}
