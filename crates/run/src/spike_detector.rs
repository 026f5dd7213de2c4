//! Detects loss spikes and gradient norm spikes.
//!
//! The detector compares each step with the last few, before the update. It only detects: [`OnSpike`] says what to do, and
//! `rollback` does it. Values that are not finite are handled in `nonfinite`.
//!
//! # Note: the thresholds
//! A normal run must never exceed them, or nobody will pay attention to real spikes. They are therefore relative to the median of
//! the last steps and to a robust spread, the median absolute deviation, neither of which a few odd steps can move. A value is a
//! spike only if it exceeds two thresholds: one in spreads, for noisy runs, and one in multiples of the median, for quiet runs.
//! Only high values are spikes: a loss that falls fast is good news. A rising learning rate moves the loss by less than the
//! thresholds. A lasting change becomes normal once it fills half of the [`WINDOW`]. Norms are compared by their logarithms,
//! because they vary by factors.

use std::collections::VecDeque;

use shardwise_train::{Gradients, Trainer};

use crate::error::{Error, Result};
use crate::spike::{GradientShare, OnSpike, Spike, SpikedMetric};

/// The number of past steps compared with.
const WINDOW: usize = 64;
/// With fewer past steps than this, nothing is a spike.
const MIN_STEPS: usize = 20;
/// A spike is at least this many spreads above the median ...
const SPREADS_MIN: f64 = 8.;
/// ... and at least this many times the median.
const LOSS_FACTOR: f64 = 1.5;
const NORM_FACTOR: f64 = 10.;
/// Lower bounds of the spread: of the loss (relative to the median, and absolute), and of the norm's logarithm.
const LOSS_SPREAD_PART: f64 = 0.01;
const LOSS_SPREAD_MIN: f64 = 0.005;
const NORM_SPREAD_MIN: f64 = 0.05;
/// A unit is named if its share of the gradients grew by at least this much.
const SHARE_GROWTH_MIN: f64 = 0.05;

/// Remembers the last steps and compares the next one with them.
#[derive(Clone, Debug, Default)]
pub struct SpikeDetector {
    history: VecDeque<PastStep>,
}

#[derive(Clone, Debug)]
struct PastStep {
    step: u64,
    loss: f64,
    norm: f64,
    shares: Vec<f64>,
}

impl SpikeDetector {
    /// Compares the first half of a step with the last steps. If it spikes, either returns the spike or, with [`OnSpike::Stop`],
    /// discards the gradients and fails. A step that is not finite is not compared.
    pub fn check(&mut self, trainer: &mut Trainer, gradients: &Gradients, on_spike: OnSpike) -> Result<Option<Spike>> {
        let Gradients { step, loss, unit_norms, .. } = gradients;
        if !gradients.are_finite() {
            return Ok(None);
        }
        let name = |unit: usize| trainer.model().units()[unit].name().to_string();
        match self.detect(*loss, unit_norms, name) {
            Some(spike) if on_spike == OnSpike::Stop => {
                trainer.discard_gradients();
                Err(Error::Spike { step: *step, spike: Box::new(spike) })
            }
            spike => {
                self.record(*step, *loss, unit_norms);
                Ok(spike)
            }
        }
    }

    /// Compares a step's loss and its per-unit gradient norms with the last steps.
    pub(crate) fn detect(&self, loss: f64, unit_norms: &[f64], name: impl Fn(usize) -> String) -> Option<Spike> {
        if self.history.len() < MIN_STEPS {
            return None;
        }
        let losses: Vec<f64> = self.history.iter().map(|step| step.loss).collect();
        let norms: Vec<f64> = self.history.iter().map(|step| step.norm).collect();
        let norm = total_norm(unit_norms);
        let metrics = [
            is_loss_spike(loss, &losses).then(|| spiked_metric("loss", loss, &losses)),
            is_norm_spike(norm, &norms).then(|| spiked_metric("gradient norm", norm, &norms)),
        ];
        let metrics: Vec<SpikedMetric> = metrics.into_iter().flatten().collect();
        (!metrics.is_empty()).then(|| Spike { metrics, unit: self.grown_share(unit_norms, name), samples: None })
    }

    /// Adds a step to the history.
    pub(crate) fn record(&mut self, step: u64, loss: f64, unit_norms: &[f64]) {
        if self.history.len() == WINDOW {
            self.history.pop_front();
        }
        self.history.push_back(PastStep { step, loss, norm: total_norm(unit_norms), shares: shares(unit_norms) });
    }

    /// Forgets all steps after this one.
    pub(crate) fn roll_back_to(&mut self, step: u64) {
        self.history.retain(|past| past.step <= step);
    }

    /// The unit whose share of the gradients grew the most.
    fn grown_share(&self, unit_norms: &[f64], name: impl Fn(usize) -> String) -> Option<GradientShare> {
        let usual = |unit: usize| median(self.history.iter().map(|step| step.shares[unit]).collect());
        let shares = shares(unit_norms).into_iter().enumerate().map(|(unit, now)| (unit, now, usual(unit)));
        let (unit, now, usual) = shares.max_by(|a, b| (a.1 - a.2).total_cmp(&(b.1 - b.2)))?;
        (now - usual >= SHARE_GROWTH_MIN).then(|| GradientShare { unit: name(unit), now, usual })
    }
}

fn is_loss_spike(loss: f64, losses: &[f64]) -> bool {
    let median = median(losses.to_vec());
    let spread = spread(losses, median).max(LOSS_SPREAD_PART * median).max(LOSS_SPREAD_MIN);
    loss > median + SPREADS_MIN * spread && loss > LOSS_FACTOR * median
}

fn is_norm_spike(norm: f64, norms: &[f64]) -> bool {
    let logarithms: Vec<f64> = norms.iter().filter(|norm| **norm > 0.).map(|norm| norm.ln()).collect();
    if logarithms.len() < MIN_STEPS || norm <= 0. {
        return false;
    }
    let median = median(logarithms.clone());
    let above = norm.ln() - median;
    above > NORM_FACTOR.ln() && above > SPREADS_MIN * spread(&logarithms, median).max(NORM_SPREAD_MIN)
}

fn spiked_metric(what: &'static str, value: f64, usual: &[f64]) -> SpikedMetric {
    let least = usual.iter().copied().fold(f64::INFINITY, f64::min);
    let most = usual.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    SpikedMetric { what, value, range: [least, most], median: median(usual.to_vec()), steps: usual.len() }
}

/// The norm of all units' gradients.
fn total_norm(unit_norms: &[f64]) -> f64 {
    unit_norms.iter().map(|norm| norm * norm).sum::<f64>().sqrt()
}

fn shares(unit_norms: &[f64]) -> Vec<f64> {
    let all: f64 = unit_norms.iter().map(|norm| norm * norm).sum();
    unit_norms.iter().map(|norm| if all > 0. { norm * norm / all } else { 0. }).collect()
}

/// The median absolute deviation, times 1.4826: for normal noise, the standard deviation.
fn spread(numbers: &[f64], around: f64) -> f64 {
    1.4826 * median(numbers.iter().map(|number| (number - around).abs()).collect())
}

fn median(mut numbers: Vec<f64>) -> f64 {
    assert!(!numbers.is_empty(), "the median of an empty list");
    numbers.sort_unstable_by(f64::total_cmp);
    let middle = numbers.len() / 2;
    if numbers.len().is_multiple_of(2) { (numbers[middle - 1] + numbers[middle]) / 2. } else { numbers[middle] }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]

    use shardwise_model::init::splitmix64;

    use super::*;

    /// Approximately normal noise with a standard deviation of 1.
    fn noise(seed: u64, place: u64) -> f64 {
        let uniform = |part: u64| splitmix64(splitmix64(seed) ^ splitmix64(12 * place + part)) as f64 / u64::MAX as f64;
        (0..12).map(uniform).sum::<f64>() - 6.
    }

    fn name(unit: usize) -> String {
        ["embedding", "block.0", "head"][unit].to_string()
    }

    /// Feeds a run to a detector, which must not find a spike.
    fn calm(what: &str, steps: u64, run: impl Fn(u64) -> (f64, [f64; 3])) -> SpikeDetector {
        let mut detector = SpikeDetector::default();
        for step in 1..=steps {
            let (loss, norms) = run(step);
            let spike = detector.detect(loss, &norms, name);
            assert_eq!(spike, None, "{what}, step {step}");
            detector.record(step, loss, &norms);
        }
        detector
    }

    /// A noisy loss that falls from 10.8 towards 2.5, and norms that fall with it.
    fn falling(seed: u64, noisy: f64) -> impl Fn(u64) -> (f64, [f64; 3]) {
        move |step| {
            let trend = 2.5 + 8.3 * (-(step as f64) / 150.).exp();
            let norm = 0.4 + 9. * (-(step as f64) / 60.).exp();
            let part = |unit: u64| norm * (0.4 * noise(seed, 1000 * (unit + 1) + step)).exp();
            (trend + noisy * noise(seed, step), [part(1), part(2), part(3)])
        }
    }

    #[test]
    fn normal_runs_have_no_spikes() {
        for seed in 0..20 {
            calm("a falling loss", 2000, falling(seed, 0.03));
            calm("a noisy one", 2000, falling(seed, 0.2));
            // The model learns nothing at first and a lot soon after, while the norms grow.
            calm("warm-up", 500, |step| {
                let trend = 2.5 + 8.3 / (1. + ((step as f64 - 80.) / 20.).exp());
                (trend + 0.05 * noise(seed, step), [0.3, 2., 1.].map(|norm| norm * (1. + step as f64 / 100.)))
            });
            calm("another learning rate", 600, |step| {
                let (loss, norms) = falling(seed, 0.05)(step + 500);
                if step < 300 { (loss, norms) } else { (1.2 * loss, norms.map(|norm| 3. * norm)) }
            });
        }
        calm("a constant loss", 200, |_| (2.5, [1., 1., 1.]));
        calm("numbers in the last digit", 200, |step| (2.5 + 1e-9 * noise(1, step), [1. + 1e-12 * step as f64; 3]));
        calm("a loss of nothing", 300, |step| (0.001 * (1. + noise(1, step).abs()), [0.; 3]));
        calm("fine-tuning on single conversations", 2000, |step| {
            ((0.5 * noise(2, step)).exp(), [1., 2., 3.].map(|norm| norm * (0.6 * noise(3, step)).exp()))
        });
    }

    #[test]
    fn a_loss_spike_is_reported_with_the_usual_range_and_the_unit() {
        let detector = calm("a run", 300, falling(7, 0.03));
        let (loss, norms) = falling(7, 0.03)(301);
        assert_eq!(detector.detect(1.3 * loss, &norms, name), None, "that happens");
        let mut spike = detector.detect(9.1372, &[norms[0], 6. * norms[1], norms[2]], name).unwrap();
        let SpikedMetric { what, value, range: [least, most], median, steps } = spike.metrics[0].clone();
        assert_eq!((what, value, steps, spike.metrics.len()), ("loss", 9.1372, 64, 1));
        assert!(least < median && median < most && most < 4.5, "{spike:?}");
        spike.metrics[0] = SpikedMetric { range: [3.5, 4.25], median: 3.75, ..spike.metrics[0].clone() };
        spike.unit = spike.unit.map(|share| GradientShare { now: 0.934, usual: 0.331, ..share });
        spike.samples = Some("sequences 640 to 671 of the order with seed 0".to_string());
        assert_eq!(
            spike.to_string(),
            "the loss is 9.1372; over the last 64 steps it was 3.5000 to 4.2500 (median 3.7500); unit block.0 has 93% of the \
             squared gradient norm, usually 33%; the step read sequences 640 to 671 of the order with seed 0"
        );
    }

    #[test]
    fn a_norm_spike_is_reported() {
        let detector = calm("a run", 300, falling(7, 0.03));
        let (loss, norms) = falling(7, 0.03)(301);
        assert_eq!(detector.detect(loss, &norms.map(|norm| 5. * norm), name), None, "that happens");
        let spike = detector.detect(loss, &norms.map(|norm| 40. * norm), name).unwrap();
        let said = spike.to_string();
        assert!(said.starts_with("the gradient norm is ") && said.contains(" has "), "{said}");
        let even = calm("an even run", 100, |_| (loss, [1., 2., 3.])).detect(loss, &[40., 80., 120.], name).unwrap();
        assert!(even.to_string().ends_with("; no unit's share of the gradients has grown"), "{even}");
        let both = detector.detect(3. * loss, &norms.map(|norm| 40. * norm), name).unwrap().to_string();
        assert!(both.starts_with("the loss is ") && both.contains("; the gradient norm is "), "{both}");
    }

    #[test]
    fn nothing_is_a_spike_at_first_and_what_lasts_becomes_usual() {
        let mut detector = calm("a beginning", MIN_STEPS as u64 - 1, |_| (2.5, [1.; 3]));
        assert_eq!(detector.detect(100., &[1e6; 3], name), None, "it has not seen enough");
        detector.record(20, 2.5, &[1.; 3]);
        assert!(detector.detect(100., &[1e6; 3], name).is_some());
        let steps = 21..200;
        let spikes = steps.filter(|&step| {
            let is_spike = detector.detect(5., &[1.; 3], name).is_some();
            detector.record(step, 5., &[1.; 3]);
            is_spike
        });
        assert_eq!(spikes.count(), 20, "until half of the history has the new loss");
    }

    #[test]
    fn steps_after_the_one_rolled_back_to_are_forgotten() {
        let mut detector = calm("a run", 50, |_| (2.5, [1.; 3]));
        detector.roll_back_to(30);
        assert_eq!(detector.history.len(), 30);
        detector.roll_back_to(10);
        assert_eq!(detector.detect(100., &[1.; 3], name), None);
    }
}
