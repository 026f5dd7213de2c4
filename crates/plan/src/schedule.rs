//! The learning rate schedule of a run, which may also set the momentum.

use std::f64::consts::PI;

/// A learning rate schedule. Steps are counted from one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// The peak learning rate.
    pub lr: f64,
    /// The number of steps over which the learning rate rises linearly from zero to its peak. Ignored by `OneCycle` and
    /// `LrRangeTest`, which have their own warm-up.
    pub warmup_steps: u64,
    /// The number of steps of the run.
    pub steps: u64,
    /// The shape of the schedule after the warm-up.
    pub kind: Kind,
}

/// The shape of a schedule after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// Stay at the peak.
    Constant,
    /// Fall linearly.
    Linear {
        /// The last learning rate divided by the peak.
        min_lr_ratio: f64,
    },
    /// Fall along half a cosine.
    Cosine {
        /// The last learning rate divided by the peak.
        min_lr_ratio: f64,
    },
    /// Warmup-stable-decay: stay at the peak, then fall linearly over the last steps.
    Wsd {
        /// The number of steps over which the learning rate falls.
        decay_steps: u64,
        /// The last learning rate divided by the peak.
        min_lr_ratio: f64,
    },
    /// Rise to the peak along half a cosine and fall along another, while the momentum falls and rises.
    OneCycle {
        /// The fraction of all steps over which the learning rate rises.
        pct_start: f64,
        /// The first learning rate divided by the peak.
        start_lr_ratio: f64,
        /// The last learning rate divided by the peak.
        min_lr_ratio: f64,
        /// The momentum at the lowest and at the highest learning rate.
        momentum: [f64; 2],
    },
    /// Rise exponentially to the peak, to find out at which learning rate training diverges.
    LrRangeTest {
        /// The first learning rate.
        start_lr: f64,
    },
}

/// The learning rate of a step and, where the schedule sets it, the momentum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LrAndMomentum {
    /// The learning rate.
    pub lr: f64,
    /// The momentum, or AdamW's and LAMB's first beta.
    pub momentum: Option<f64>,
}

impl Schedule {
    /// A constant learning rate.
    pub fn constant(lr: f64) -> Self {
        Schedule { lr, warmup_steps: 0, steps: 1, kind: Kind::Constant }
    }

    /// The learning rate and momentum of a step, counted from one. Steps after the last one get those of the last.
    pub fn at(&self, step: u64) -> LrAndMomentum {
        let step = step.clamp(1, self.steps.max(1));
        let own_rise = matches!(self.kind, Kind::OneCycle { .. } | Kind::LrRangeTest { .. });
        if step <= self.warmup_steps && !own_rise {
            return LrAndMomentum { lr: self.lr * step as f64 / self.warmup_steps as f64, momentum: None };
        }
        let steady = |factor: f64| LrAndMomentum { lr: self.lr * factor, momentum: None };
        match self.kind {
            Kind::Constant => steady(1.),
            Kind::Linear { min_lr_ratio } => steady(line(1., min_lr_ratio, self.after(step, self.warmup_steps))),
            Kind::Cosine { min_lr_ratio } => steady(half_cosine(1., min_lr_ratio, self.after(step, self.warmup_steps))),
            Kind::Wsd { decay_steps, min_lr_ratio } => {
                let stable = self.steps.saturating_sub(decay_steps).max(self.warmup_steps);
                steady(line(1., min_lr_ratio, self.after(step, stable)))
            }
            Kind::OneCycle { pct_start, start_lr_ratio, min_lr_ratio, momentum: [at_lowest, at_highest] } => {
                let passed = self.after(step, 1);
                let (factor, momentum) = if passed < pct_start {
                    let part = passed / pct_start;
                    (half_cosine(start_lr_ratio, 1., part), half_cosine(at_lowest, at_highest, part))
                } else {
                    let part = (passed - pct_start) / (1. - pct_start).max(f64::MIN_POSITIVE);
                    (half_cosine(1., min_lr_ratio, part), half_cosine(at_highest, at_lowest, part))
                };
                LrAndMomentum { lr: self.lr * factor, momentum: Some(momentum) }
            }
            Kind::LrRangeTest { start_lr } => {
                LrAndMomentum { lr: start_lr * (self.lr / start_lr).powf(self.after(step, 1)), momentum: None }
            }
        }
    }

    /// The fraction of the steps after `before` that has passed: 0 at `before`, 1 at the last step.
    fn after(&self, step: u64, before: u64) -> f64 {
        let all = self.steps.saturating_sub(before);
        if all == 0 { 0. } else { step.saturating_sub(before) as f64 / all as f64 }
    }
}

fn line(from: f64, to: f64, part: f64) -> f64 {
    from + (to - from) * part
}

fn half_cosine(from: f64, to: f64, part: f64) -> f64 {
    to + (from - to) * (1. + (PI * part).cos()) / 2.
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(warmup_steps: u64, kind: Kind) -> Vec<f64> {
        let schedule = Schedule { lr: 2., warmup_steps, steps: 10, kind };
        (1..=11).map(|step| (schedule.at(step).lr * 1e6).round() / 1e6).collect()
    }

    #[test]
    fn learning_rates_are_those_of_the_formulas() {
        assert_eq!(rates(0, Kind::Constant), [2.; 11]);
        assert_eq!(rates(4, Kind::Constant)[..5], [0.5, 1., 1.5, 2., 2.]);
        assert_eq!(rates(2, Kind::Linear { min_lr_ratio: 0. }), [1., 2., 1.75, 1.5, 1.25, 1., 0.75, 0.5, 0.25, 0., 0.]);
        let cosine = rates(2, Kind::Cosine { min_lr_ratio: 0.1 });
        assert_eq!((cosine[1], cosine[5], cosine[9]), (2., 1.1, 0.2));
        assert_eq!(
            rates(1, Kind::Wsd { decay_steps: 4, min_lr_ratio: 0.5 }),
            [2., 2., 2., 2., 2., 2., 1.75, 1.5, 1.25, 1., 1.]
        );
        let range = rates(0, Kind::LrRangeTest { start_lr: 2e-3 });
        assert_eq!((range[0], range[3], range[9]), (2e-3, 0.02, 2.));
    }

    #[test]
    fn one_cycle_moves_lr_and_momentum_against_each_other() {
        let kind = Kind::OneCycle { pct_start: 0.5, start_lr_ratio: 0.1, min_lr_ratio: 0.01, momentum: [0.95, 0.85] };
        let schedule = Schedule { lr: 1., warmup_steps: 0, steps: 101, kind };
        let at = |step| {
            let LrAndMomentum { lr, momentum } = schedule.at(step);
            (lr, momentum.expect("one-cycle sets the momentum"))
        };
        let near = |(a, b): (f64, f64), (c, d): (f64, f64)| (a - c).abs() < 1e-9 && (b - d).abs() < 1e-9;
        assert!(near(at(1), (0.1, 0.95)), "{:?}", at(1));
        assert!(near(at(51), (1., 0.85)), "{:?}", at(51));
        assert!(near(at(101), (0.01, 0.95)), "{:?}", at(101));
        assert!(near(at(26), (0.55, 0.9)), "{:?}", at(26));
    }
}
