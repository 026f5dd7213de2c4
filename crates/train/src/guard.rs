//! What loss and gradient norm usually are, and when a step's are far from it.
//!
//! The guard remembers the last steps that were taken, and compares a step with them before it is taken. It only judges: what
//! is done about it is [`OnOutlier`]'s, and what becomes of a run is in `outliers`. Numbers that are not finite are not its
//! business; `fault` finds those.
//!
//! # Note: the bars
//! A normal run must never trip them, or nobody will look when one is tripped. So they are about the middle of the last steps
//! and a robust spread around it (the median, and the median of the distances from it), which a few odd steps do not move, and
//! a number has to be far out by two measures: in spreads, for runs that are noisy, and in multiples of the median, for runs
//! that are not. Only what is too high is an outlier: a loss that falls fast is what one hopes for. A rising learning rate moves the
//! loss by less than that, and whatever lasts becomes the usual after half of [`REMEMBERED`] steps. Norms are compared by their
//! logarithms, because they vary by factors.

use std::collections::VecDeque;
use std::fmt;

/// What to do with a step whose loss or gradient norm is far outside what it usually is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnOutlier {
    /// Take it, and report it.
    Report,
    /// End with an error. Parameters are as they were before the step.
    Stop,
}

/// What a step was far out in, and what points to the cause.
#[derive(Clone, Debug, PartialEq)]
pub struct Outlier {
    /// What is far out: the loss, the gradient norm, or both.
    pub far: Vec<Far>,
    /// The unit whose part of the gradients has grown the most, if one's has.
    pub unit: Option<Share>,
    /// What the step has read, where it is known.
    pub samples: Option<String>,
}

/// A number that is far out.
#[derive(Clone, Debug, PartialEq)]
pub struct Far {
    /// Which.
    pub what: &'static str,
    /// The number.
    pub value: f64,
    /// The least and the most that it was in the last steps.
    pub range: [f64; 2],
    /// Its median in them.
    pub median: f64,
    /// How many steps those are.
    pub steps: usize,
}

/// A unit's part of the gradients, by squares.
#[derive(Clone, Debug, PartialEq)]
pub struct Share {
    /// The unit.
    pub unit: String,
    /// Its part in this step.
    pub now: f64,
    /// The median of its parts in the last steps.
    pub usual: f64,
}

impl fmt::Display for Far {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Far { what, value, range: [least, most], median, steps } = self;
        write!(
            f,
            "the {what} is {value:.4}, and in the last {steps} steps it was {least:.4} to {most:.4} (median {median:.4})"
        )
    }
}

impl fmt::Display for Outlier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, far) in self.far.iter().enumerate() {
            write!(f, "{}{far}", if index == 0 { "" } else { "; " })?;
        }
        match &self.unit {
            Some(Share { unit, now, usual }) => {
                let [now, usual] = [now, usual].map(|share| 100. * share);
                write!(f, "; unit {unit} has {now:.0}% of the gradients' squares, usually {usual:.0}%")?;
            }
            None => write!(f, "; no unit's part of the gradients has grown")?,
        }
        self.samples.as_ref().map_or(Ok(()), |samples| write!(f, "; the step read {samples}"))
    }
}

/// How many steps are remembered.
const REMEMBERED: usize = 64;
/// With fewer, nothing is judged.
const ENOUGH: usize = 20;
/// How many spreads above the median an outlier is, at the least.
const SPREADS: f64 = 8.;
/// How many times the median an outlier is, at the least.
const LOSS_FACTOR: f64 = 1.5;
const NORM_FACTOR: f64 = 10.;
/// What the spread is at the least: of a loss, as a part of the median, and by itself; of a norm's logarithm.
const LOSS_SPREAD_PART: f64 = 0.01;
const LOSS_SPREAD_LEAST: f64 = 0.005;
const NORM_SPREAD_LEAST: f64 = 0.05;
/// By how much a unit's part of the gradients has to grow to be named.
const SHARE_GROWN: f64 = 0.05;

/// Remembers the last steps, and judges the next.
#[derive(Clone, Debug, Default)]
pub(crate) struct Guard {
    taken: VecDeque<Taken>,
}

/// A step that was taken.
#[derive(Clone, Debug)]
struct Taken {
    step: u64,
    loss: f64,
    norm: f64,
    shares: Vec<f64>,
}

impl Guard {
    /// Whether a step with this loss and these norms of units' gradients is far out.
    pub(crate) fn judged(&self, loss: f64, unit_norms: &[f64], name: impl Fn(usize) -> String) -> Option<Outlier> {
        if self.taken.len() < ENOUGH {
            return None;
        }
        let losses: Vec<f64> = self.taken.iter().map(|taken| taken.loss).collect();
        let norms: Vec<f64> = self.taken.iter().map(|taken| taken.norm).collect();
        let norm = whole(unit_norms);
        let far = [
            is_far_loss(loss, &losses).then(|| far("loss", loss, &losses)),
            is_far_norm(norm, &norms).then(|| far("gradient norm", norm, &norms)),
        ];
        let far: Vec<Far> = far.into_iter().flatten().collect();
        (!far.is_empty()).then(|| Outlier { far, unit: self.grown(unit_norms, name), samples: None })
    }

    /// Remembers a step.
    pub(crate) fn taken(&mut self, step: u64, loss: f64, unit_norms: &[f64]) {
        if self.taken.len() == REMEMBERED {
            self.taken.pop_front();
        }
        self.taken.push_back(Taken { step, loss, norm: whole(unit_norms), shares: shares(unit_norms) });
    }

    /// Forgets what came after a step, which will come again.
    pub(crate) fn back_to(&mut self, step: u64) {
        self.taken.retain(|taken| taken.step <= step);
    }

    /// The unit whose part of the gradients has grown the most.
    fn grown(&self, unit_norms: &[f64], name: impl Fn(usize) -> String) -> Option<Share> {
        let usual = |unit: usize| median(self.taken.iter().map(|taken| taken.shares[unit]).collect());
        let shares = shares(unit_norms).into_iter().enumerate().map(|(unit, now)| (unit, now, usual(unit)));
        let (unit, now, usual) = shares.max_by(|a, b| (a.1 - a.2).total_cmp(&(b.1 - b.2)))?;
        (now - usual >= SHARE_GROWN).then(|| Share { unit: name(unit), now, usual })
    }
}

fn is_far_loss(loss: f64, losses: &[f64]) -> bool {
    let median = median(losses.to_vec());
    let spread = spread(losses, median).max(LOSS_SPREAD_PART * median).max(LOSS_SPREAD_LEAST);
    loss > median + SPREADS * spread && loss > LOSS_FACTOR * median
}

fn is_far_norm(norm: f64, norms: &[f64]) -> bool {
    let logarithms: Vec<f64> = norms.iter().filter(|norm| **norm > 0.).map(|norm| norm.ln()).collect();
    if logarithms.len() < ENOUGH || norm <= 0. {
        return false;
    }
    let median = median(logarithms.clone());
    let above = norm.ln() - median;
    above > NORM_FACTOR.ln() && above > SPREADS * spread(&logarithms, median).max(NORM_SPREAD_LEAST)
}

fn far(what: &'static str, value: f64, usual: &[f64]) -> Far {
    let least = usual.iter().copied().fold(f64::INFINITY, f64::min);
    let most = usual.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    Far { what, value, range: [least, most], median: median(usual.to_vec()), steps: usual.len() }
}

/// The norm of all units' gradients together.
fn whole(unit_norms: &[f64]) -> f64 {
    unit_norms.iter().map(|norm| norm * norm).sum::<f64>().sqrt()
}

fn shares(unit_norms: &[f64]) -> Vec<f64> {
    let all: f64 = unit_norms.iter().map(|norm| norm * norm).sum();
    unit_norms.iter().map(|norm| if all > 0. { norm * norm / all } else { 0. }).collect()
}

/// The median of the distances from the median: for normal noise, times 1.4826, the standard deviation.
fn spread(numbers: &[f64], around: f64) -> f64 {
    1.4826 * median(numbers.iter().map(|number| (number - around).abs()).collect())
}

fn median(mut numbers: Vec<f64>) -> f64 {
    assert!(!numbers.is_empty(), "a median is of something");
    numbers.sort_unstable_by(f64::total_cmp);
    let middle = numbers.len() / 2;
    if numbers.len().is_multiple_of(2) { (numbers[middle - 1] + numbers[middle]) / 2. } else { numbers[middle] }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]

    use shardwise_model::init::mixed;

    use super::*;

    /// Noise of about the normal kind, with a standard deviation of one.
    fn noise(seed: u64, place: u64) -> f64 {
        let uniform = |part: u64| mixed(mixed(seed) ^ mixed(12 * place + part)) as f64 / u64::MAX as f64;
        (0..12).map(uniform).sum::<f64>() - 6.
    }

    fn name(unit: usize) -> String {
        ["embedding", "block.0", "head"][unit].to_string()
    }

    /// Feeds a run to a guard, which must not mind any of it.
    fn calm(what: &str, steps: u64, run: impl Fn(u64) -> (f64, [f64; 3])) -> Guard {
        let mut guard = Guard::default();
        for step in 1..=steps {
            let (loss, norms) = run(step);
            let judged = guard.judged(loss, &norms, name);
            assert_eq!(judged, None, "{what}, step {step}");
            guard.taken(step, loss, &norms);
        }
        guard
    }

    /// A loss that falls from 10.8 towards 2.5, with noise, and norms that fall with it.
    fn falling(seed: u64, noisy: f64) -> impl Fn(u64) -> (f64, [f64; 3]) {
        move |step| {
            let trend = 2.5 + 8.3 * (-(step as f64) / 150.).exp();
            let norm = 0.4 + 9. * (-(step as f64) / 60.).exp();
            let part = |unit: u64| norm * (0.4 * noise(seed, 1000 * (unit + 1) + step)).exp();
            (trend + noisy * noise(seed, step), [part(1), part(2), part(3)])
        }
    }

    #[test]
    fn normal_runs_do_not_alarm() {
        for seed in 0..20 {
            calm("a falling loss", 2000, falling(seed, 0.03));
            calm("a noisy one", 2000, falling(seed, 0.2));
            // Nothing is learned at first, a lot soon after; then the rate rises by ten, and the loss by a fifth.
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
    fn a_spike_of_the_loss_is_told_with_the_usual_range_and_the_unit() {
        let guard = calm("a run", 300, falling(7, 0.03));
        let (loss, norms) = falling(7, 0.03)(301);
        assert_eq!(guard.judged(1.3 * loss, &norms, name), None, "that happens");
        let mut outlier = guard.judged(9.1372, &[norms[0], 6. * norms[1], norms[2]], name).unwrap();
        let Far { what, value, range: [least, most], median, steps } = outlier.far[0].clone();
        assert_eq!((what, value, steps, outlier.far.len()), ("loss", 9.1372, 64, 1));
        assert!(least < median && median < most && most < 4.5, "{outlier:?}");
        outlier.far[0] = Far { range: [3.5, 4.25], median: 3.75, ..outlier.far[0].clone() };
        outlier.unit = outlier.unit.map(|share| Share { now: 0.934, usual: 0.331, ..share });
        outlier.samples = Some("sequences 640 to 671 of the order with seed 0".to_string());
        assert_eq!(
            outlier.to_string(),
            "the loss is 9.1372, and in the last 64 steps it was 3.5000 to 4.2500 (median 3.7500); unit block.0 has 93% of the \
             gradients' squares, usually 33%; the step read sequences 640 to 671 of the order with seed 0"
        );
    }

    #[test]
    fn a_spike_of_the_norm_is_told() {
        let guard = calm("a run", 300, falling(7, 0.03));
        let (loss, norms) = falling(7, 0.03)(301);
        assert_eq!(guard.judged(loss, &norms.map(|norm| 5. * norm), name), None, "that happens");
        let outlier = guard.judged(loss, &norms.map(|norm| 40. * norm), name).unwrap();
        let said = outlier.to_string();
        assert!(said.starts_with("the gradient norm is ") && said.contains(" has "), "{said}");
        let even = calm("an even run", 100, |_| (loss, [1., 2., 3.])).judged(loss, &[40., 80., 120.], name).unwrap();
        assert!(even.to_string().ends_with("; no unit's part of the gradients has grown"), "{even}");
        let both = guard.judged(3. * loss, &norms.map(|norm| 40. * norm), name).unwrap().to_string();
        assert!(both.starts_with("the loss is ") && both.contains("; the gradient norm is "), "{both}");
    }

    #[test]
    fn nothing_is_judged_at_first_and_what_lasts_becomes_usual() {
        let mut guard = calm("a beginning", ENOUGH as u64 - 1, |_| (2.5, [1.; 3]));
        assert_eq!(guard.judged(100., &[1e6; 3], name), None, "it has not seen enough");
        guard.taken(20, 2.5, &[1.; 3]);
        assert!(guard.judged(100., &[1e6; 3], name).is_some());
        let steps = 21..200;
        let alarms = steps.filter(|&step| {
            let far = guard.judged(5., &[1.; 3], name).is_some();
            guard.taken(step, 5., &[1.; 3]);
            far
        });
        assert_eq!(alarms.count(), 20, "as many as it knew of the other kind");
    }

    #[test]
    fn what_came_after_a_step_is_forgotten() {
        let mut guard = calm("a run", 50, |_| (2.5, [1.; 3]));
        guard.back_to(30);
        assert_eq!(guard.taken.len(), 30);
        guard.back_to(10);
        assert_eq!(guard.judged(100., &[1.; 3], name), None);
    }
}
