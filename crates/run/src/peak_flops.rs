//! The peak FLOP/s that MFU is relative to, measured with large matrix products on all ranks at once, in the type in which units compute.
//!
//! The peak is measured and not taken from a data sheet; ranks that share processors share them during the measurement, too. A
//! busy machine reaches less, so the result is a lower bound: [`PeakFlops`] reports no MFU once a run has been faster.

use std::time::{Duration, Instant};

use shardwise_comm::{Group, ReduceOp};
use shardwise_plan::Dtype;
use shardwise_torch::kind_of;
use shardwise_torch::tch::{Device, TchError, Tensor, no_grad};

use crate::error::Result;

/// The number of rounds, and the time of each. Other work on the machine only makes products slower, so the best round is nearest
/// to the peak.
const ROUNDS: usize = 5;
const ROUND: Duration = Duration::from_millis(25);

/// The sizes of the square matrices to try, from small to large, and the time beyond which no larger one is tried.
const SIZES: [i64; 6] = [128, 256, 512, 1024, 4096, 8192];
const MATMUL_MAX: Duration = Duration::from_millis(20);

/// Measures the FLOP/s of all ranks together; 0 if libtorch cannot multiply matrices of this type. All ranks call it together.
pub(crate) fn measure_peak_flops(world: &Group, dtype: Dtype, device: Device) -> Result<f64> {
    let largest = if device == Device::Cpu { 1024 } else { 8192 };
    let size = no_grad(|| choose_size(largest, dtype, device)).unwrap_or(0);
    world.barrier("peak").wait()?;
    let own = no_grad(|| measure_rounds(size, dtype, device)).unwrap_or_default();
    // Take the best round of the sum, not the sum of each rank's best: ranks that share processors take turns being fast.
    let rounds = world.all_reduce("peak", ReduceOp::Sum, own.to_vec()).wait()?;
    Ok(rounds.into_iter().fold(0., f64::max))
}

/// The peak that MFU is relative to. It is valid only while the run has not been faster.
pub(crate) struct PeakFlops {
    flops_per_s: f64,
    /// The highest FLOP/s of the run itself.
    fastest: f64,
    /// How many more times the peak may be measured.
    retries: u32,
}

impl PeakFlops {
    /// A measured peak; 0 if it is unknown.
    pub(crate) fn new(flops_per_s: f64) -> Self {
        PeakFlops { flops_per_s, fastest: 0., retries: 3 }
    }

    /// The model FLOPs utilization at this many FLOP/s; 0 if the peak is unknown.
    pub(crate) fn mfu(&mut self, flops_per_s: f64) -> f64 {
        if !flops_per_s.is_finite() {
            return 0.;
        }
        self.fastest = self.fastest.max(flops_per_s);
        match self.flops_per_s > 0. && !self.is_too_low() {
            true => flops_per_s / self.flops_per_s,
            false => 0.,
        }
    }

    /// Whether the run was faster than the peak, so that the peak is worth measuring again.
    pub(crate) fn is_worth_measuring(&self) -> bool {
        self.is_too_low() && self.retries > 0
    }

    /// Raises the peak to a new measurement, if that is higher.
    pub(crate) fn raise(&mut self, flops_per_s: f64) {
        self.flops_per_s = self.flops_per_s.max(flops_per_s);
        self.retries = self.retries.saturating_sub(1);
    }

    fn is_too_low(&self) -> bool {
        self.flops_per_s > 0. && self.fastest > self.flops_per_s
    }
}

/// Chooses the size of the matrices: a small one for types in which products are slow.
fn choose_size(largest: i64, dtype: Dtype, device: Device) -> std::result::Result<i64, TchError> {
    let mut chosen = 0;
    for size in SIZES.into_iter().take_while(|size| *size <= largest) {
        let mut matmul = Matmul::new(size, dtype, device)?;
        // The first product of a size includes one-time setup.
        matmul.run()?;
        let began = Instant::now();
        matmul.run()?;
        chosen = size;
        // Doubling the size takes eight times as long.
        if 8 * began.elapsed() > MATMUL_MAX {
            break;
        }
    }
    Ok(chosen)
}

/// This rank's FLOP/s in each round.
fn measure_rounds(size: i64, dtype: Dtype, device: Device) -> std::result::Result<[f64; ROUNDS], TchError> {
    let mut rounds = [0.; ROUNDS];
    if size == 0 {
        return Ok(rounds);
    }
    let mut matmul = Matmul::new(size, dtype, device)?;
    matmul.run()?;
    for round in &mut rounds {
        let (began, mut matmuls) = (Instant::now(), 0.);
        while began.elapsed() < ROUND {
            matmul.run()?;
            matmuls += 1.;
        }
        *round = 2. * (size as f64).powi(3) * matmuls / began.elapsed().as_secs_f64();
    }
    Ok(rounds)
}

struct Matmul {
    factors: [Tensor; 2],
    product: Tensor,
}

impl Matmul {
    fn new(size: i64, dtype: Dtype, device: Device) -> std::result::Result<Self, TchError> {
        let ones = || Tensor::f_ones([size, size], (kind_of(dtype), device));
        Ok(Matmul { factors: [ones()?, ones()?], product: ones()? })
    }

    /// Computes the product and waits for it, because a GPU computes asynchronously.
    fn run(&mut self) -> std::result::Result<(), TchError> {
        let [a, b] = &self.factors;
        drop(a.f_matmul_out(&self.product, b)?);
        self.product.f_double_value(&[0, 0]).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_is_faster_than_the_peak_has_no_mfu() {
        let mut peak = PeakFlops::new(100.);
        assert_eq!(peak.mfu(40.), 0.4);
        assert_eq!(peak.mfu(252.), 0.);
        // The peak is now known to be wrong.
        assert_eq!(peak.mfu(40.), 0.);
        assert!(peak.is_worth_measuring());
        peak.raise(200.);
        assert_eq!(peak.mfu(40.), 0.);
        peak.raise(50.);
        assert_eq!(peak.mfu(40.), 0.);
        peak.raise(400.);
        assert_eq!(peak.mfu(40.), 0.1);
        assert_eq!(peak.mfu(f64::INFINITY), 0.);
        assert_eq!(peak.mfu(400.), 1.);
        assert_eq!(peak.mfu(500.), 0.);
        assert!(!peak.is_worth_measuring(), "it was measured often enough");
    }

    #[test]
    fn where_there_is_no_peak_there_is_no_mfu() {
        let mut peak = PeakFlops::new(0.);
        assert_eq!(peak.mfu(40.), 0.);
        assert!(!peak.is_worth_measuring());
    }
}
