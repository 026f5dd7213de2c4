//! How the learning rate, and with it the momentum, moves over the steps of a run.

use std::f64::consts::PI;

/// A schedule: the rate of each step, which are counted from one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// The rate that the kinds below refer to: the highest, but for a range test.
    pub rate: f64,
    /// Steps over which it rises from zero to that; the first step has one part of that many. Not with `OneCycle` and
    /// `RangeTest`, which rise in their own way.
    pub warmup_steps: u64,
    /// How many steps the run has.
    pub steps: u64,
    /// What comes after the warm-up.
    pub kind: Kind,
}

/// What a rate does after its warm-up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// It stays.
    Constant,
    /// It falls along a line, to this part of the rate at the last step.
    Linear {
        /// The part.
        end: f64,
    },
    /// It falls along half a cosine, to this part of the rate at the last step.
    Cosine {
        /// The part.
        end: f64,
    },
    /// It stays, and falls along a line over the last steps, to this part of the rate at the last.
    StableDecay {
        /// Over how many steps it falls.
        decay_steps: u64,
        /// The part.
        end: f64,
    },
    /// It rises from a part of the rate along half a cosine, and falls along another to a smaller part, while the momentum falls
    /// and rises.
    OneCycle {
        /// The part of all steps over which it rises.
        rising: f64,
        /// The part of the rate with which it begins.
        start: f64,
        /// The part of the rate with which it ends.
        end: f64,
        /// The momentum at the lowest and at the highest rate.
        momentum: [f64; 2],
    },
    /// It rises geometrically from this to the rate, to find out which rates a model can bear.
    RangeTest {
        /// The first rate.
        from: f64,
    },
}

/// The rate of a step and, where the schedule moves it, the momentum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// The learning rate.
    pub rate: f64,
    /// The momentum, or AdamW's and LAMB's first beta.
    pub momentum: Option<f64>,
}

impl Schedule {
    /// One rate for all steps.
    pub fn constant(rate: f64) -> Self {
        Schedule { rate, warmup_steps: 0, steps: 1, kind: Kind::Constant }
    }

    /// The pace of a step, from one. After the last step, the last step's.
    pub fn at(&self, step: u64) -> Pace {
        let step = step.clamp(1, self.steps.max(1));
        let own_rise = matches!(self.kind, Kind::OneCycle { .. } | Kind::RangeTest { .. });
        if step <= self.warmup_steps && !own_rise {
            return Pace { rate: self.rate * step as f64 / self.warmup_steps as f64, momentum: None };
        }
        let steady = |factor: f64| Pace { rate: self.rate * factor, momentum: None };
        match self.kind {
            Kind::Constant => steady(1.),
            Kind::Linear { end } => steady(line(1., end, self.after(step, self.warmup_steps))),
            Kind::Cosine { end } => steady(half_cosine(1., end, self.after(step, self.warmup_steps))),
            Kind::StableDecay { decay_steps, end } => {
                let stable = self.steps.saturating_sub(decay_steps).max(self.warmup_steps);
                steady(line(1., end, self.after(step, stable)))
            }
            Kind::OneCycle { rising, start, end, momentum: [at_lowest, at_highest] } => {
                let passed = self.after(step, 1);
                let (rate, momentum) = if passed < rising {
                    let part = passed / rising;
                    (half_cosine(start, 1., part), half_cosine(at_lowest, at_highest, part))
                } else {
                    let part = (passed - rising) / (1. - rising).max(f64::MIN_POSITIVE);
                    (half_cosine(1., end, part), half_cosine(at_highest, at_lowest, part))
                };
                Pace { rate: self.rate * rate, momentum: Some(momentum) }
            }
            Kind::RangeTest { from } => {
                Pace { rate: from * (self.rate / from).powf(self.after(step, 1)), momentum: None }
            }
        }
    }

    /// Which part of the steps after `before` has passed: 0 there, 1 at the last.
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
        let schedule = Schedule { rate: 2., warmup_steps, steps: 10, kind };
        (1..=11).map(|step| (schedule.at(step).rate * 1e6).round() / 1e6).collect()
    }

    #[test]
    fn rates_are_those_of_the_formulas() {
        assert_eq!(rates(0, Kind::Constant), [2.; 11]);
        assert_eq!(rates(4, Kind::Constant)[..5], [0.5, 1., 1.5, 2., 2.]);
        assert_eq!(rates(2, Kind::Linear { end: 0. }), [1., 2., 1.75, 1.5, 1.25, 1., 0.75, 0.5, 0.25, 0., 0.]);
        let cosine = rates(2, Kind::Cosine { end: 0.1 });
        assert_eq!((cosine[1], cosine[5], cosine[9]), (2., 1.1, 0.2));
        assert_eq!(
            rates(1, Kind::StableDecay { decay_steps: 4, end: 0.5 }),
            [2., 2., 2., 2., 2., 2., 1.75, 1.5, 1.25, 1., 1.]
        );
        let range = rates(0, Kind::RangeTest { from: 2e-3 });
        assert_eq!((range[0], range[3], range[9]), (2e-3, 0.02, 2.));
    }

    #[test]
    fn one_cycle_moves_rate_and_momentum_against_each_other() {
        let kind = Kind::OneCycle { rising: 0.5, start: 0.1, end: 0.01, momentum: [0.95, 0.85] };
        let schedule = Schedule { rate: 1., warmup_steps: 0, steps: 101, kind };
        let at = |step| {
            let Pace { rate, momentum } = schedule.at(step);
            (rate, momentum.expect("1-cycle moves the momentum"))
        };
        let near = |(a, b): (f64, f64), (c, d): (f64, f64)| (a - c).abs() < 1e-9 && (b - d).abs() < 1e-9;
        assert!(near(at(1), (0.1, 0.95)), "{:?}", at(1));
        assert!(near(at(51), (1., 0.85)), "{:?}", at(51));
        assert!(near(at(101), (0.01, 0.95)), "{:?}", at(101));
        assert!(near(at(26), (0.55, 0.9)), "{:?}", at(26));
    }
}
