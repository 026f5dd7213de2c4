//! The loss scale: f16 has no room for small gradients, so the loss is made larger for the backward pass.
//!
//! A dynamic scale moves as `torch.amp.GradScaler`'s does with a `growth_factor` of 2 and a `backoff_factor` of 0.5, and stops
//! growing where f32 ends, as that does. Unlike there, a run whose scale has become tiny is an error: its gradients would not be
//! finite with any scale.

/// How the loss is scaled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LossScale {
    /// By this, always; 1 for f32 and bf16.
    Fixed(f64),
    /// By as much as gradients allow: halved when a step's gradients are not finite, doubled when that has not happened for a
    /// while.
    Dynamic(DynamicScale),
}

impl LossScale {
    /// What f16 usually begins with.
    pub const DYNAMIC: LossScale = LossScale::Dynamic(DynamicScale::DEFAULT);
}

/// How a loss scale moves. The fields are those of DeepSpeed's `fp16` section and of PyTorch's `GradScaler`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DynamicScale {
    /// The first scale.
    pub initial: f64,
    /// Double the scale after this many steps in a row without an overflow.
    pub window: u32,
    /// Halve the scale at this overflow, and at every further one until it is doubled again. With 1 the first halves it.
    pub hysteresis: u32,
    /// Count overflows for `hysteresis` anew after every step without one, instead of after every doubling.
    pub consecutive_hysteresis: bool,
    /// The smallest scale. An overflow at this scale is an error, because a smaller one would not help.
    pub min: f64,
}

impl DynamicScale {
    /// The defaults of PyTorch's `GradScaler`, with a scale below which it is not the scale that is wrong.
    pub const DEFAULT: DynamicScale =
        DynamicScale { initial: 65536., window: 2000, hysteresis: 1, consecutive_hysteresis: false, min: 1. / 1024. };
}

/// The largest scale. Gradients are scaled in f32, in which a larger one is infinite. A scale that began as a power of two gets as
/// far as 2^127.
pub(crate) const LARGEST: f64 = f32::MAX as f64;

/// The scale in use.
#[derive(Clone, Copy)]
pub(crate) struct Scale {
    how: LossScale,
    value: f64,
    good_steps: u32,
    /// How many more overflows it takes for the scale to be halved.
    hysteresis_left: u32,
}

impl Scale {
    pub(crate) fn new(how: LossScale) -> Self {
        let (value, hysteresis_left) = match how {
            LossScale::Fixed(value) => (value, 1),
            LossScale::Dynamic(how) => (how.initial, how.hysteresis),
        };
        Scale { how, value, good_steps: 0, hysteresis_left }
    }

    pub(crate) fn value(&self) -> f64 {
        self.value
    }

    pub(crate) fn good_steps(&self) -> u32 {
        self.good_steps
    }

    /// How many more overflows it takes for the scale to be halved, where that is not one.
    pub(crate) fn hysteresis_left(&self) -> Option<u32> {
        match self.how {
            LossScale::Dynamic(how) if how.hysteresis > 1 => Some(self.hysteresis_left),
            _ => None,
        }
    }

    /// The scale, where it moves.
    pub(crate) fn moving(&self) -> Option<f64> {
        matches!(self.how, LossScale::Dynamic(_)).then_some(self.value)
    }

    /// Goes on where another run ended, if the scale moved there and moves here.
    pub(crate) fn resume(&mut self, value: Option<f64>, good_steps: u32, hysteresis_left: Option<u32>) {
        if let (LossScale::Dynamic(how), Some(value)) = (self.how, value) {
            // Early versions let the scale grow without end, and saved it.
            (self.value, self.good_steps) = (value.min(LARGEST), good_steps);
            // The other run may have had another hysteresis.
            self.hysteresis_left = hysteresis_left.map_or(how.hysteresis, |left| left.min(how.hysteresis));
        }
    }

    /// A step's gradients were finite.
    pub(crate) fn went_well(&mut self) {
        let LossScale::Dynamic(how) = self.how else { return };
        self.good_steps += 1;
        let doubles = self.good_steps >= how.window;
        if doubles {
            self.good_steps = 0;
            if self.value * 2. <= LARGEST {
                self.value *= 2.;
            }
        }
        if doubles || how.consecutive_hysteresis {
            self.hysteresis_left = how.hysteresis;
        }
    }

    /// A step's gradients were not. Whether there is a scale to try next.
    pub(crate) fn went_wrong(&mut self) -> bool {
        let LossScale::Dynamic(how) = self.how else { return true };
        self.good_steps = 0;
        if self.hysteresis_left > 1 {
            self.hysteresis_left -= 1;
            return true;
        }
        let is_smallest = self.value <= how.min;
        self.value /= 2.;
        if !is_smallest {
            self.value = self.value.max(how.min);
        }
        !is_smallest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: DynamicScale = DynamicScale { initial: 8., window: 3, ..DynamicScale::DEFAULT };

    #[test]
    fn the_scale_falls_at_once_and_rises_with_patience() {
        let mut scale = Scale::new(LossScale::Dynamic(PLAIN));
        assert!(scale.went_wrong());
        assert_eq!(scale.value(), 4.);
        (0..2).for_each(|_| scale.went_well());
        assert!(scale.went_wrong());
        (0..2).for_each(|_| scale.went_well());
        assert_eq!(scale.value(), 2.);
        scale.went_well();
        assert_eq!(scale.value(), 4.);
        while scale.went_wrong() {}
        assert!(scale.value() < PLAIN.min);
    }

    /// Scales after each step, where `x` is an overflow and `.` is none, and whether the last overflow left a scale to try.
    fn scales(how: DynamicScale, steps: &str) -> (Vec<f64>, bool) {
        let mut scale = Scale::new(LossScale::Dynamic(how));
        let mut goes_on = true;
        let values = steps.chars().map(|step| {
            match step {
                'x' => goes_on = scale.went_wrong(),
                _ => scale.went_well(),
            }
            scale.value()
        });
        (values.collect(), goes_on)
    }

    #[test]
    fn each_setting_decides_when_the_scale_moves() {
        let twice = DynamicScale { hysteresis: 2, ..PLAIN };
        let in_a_row = DynamicScale { consecutive_hysteresis: true, ..twice };
        let floor = DynamicScale { min: 3., ..PLAIN };
        for (how, steps, expected, goes_on) in [
            (PLAIN, "x.x", vec![4., 4., 2.], true),
            (twice, "x.x", vec![8., 8., 4.], true),
            // Once it has begun to fall it falls at every overflow, until it is doubled.
            (twice, "xxx...x", vec![8., 4., 2., 2., 2., 4., 4.], true),
            (in_a_row, "x.x", vec![8., 8., 8.], true),
            (in_a_row, "xx.xx", vec![8., 4., 4., 4., 2.], true),
            (floor, "xx", vec![4., 3.], true),
            (floor, "xxx", vec![4., 3., 1.5], false),
        ] {
            assert_eq!(scales(how, steps), (expected, goes_on), "{how:?} {steps}");
        }
    }

    #[test]
    fn a_run_goes_on_with_the_hysteresis_it_had() {
        let how = LossScale::Dynamic(DynamicScale { hysteresis: 3, ..PLAIN });
        let mut scale = Scale::new(how);
        assert!(scale.went_wrong() && scale.went_wrong());
        let mut resumed = Scale::new(how);
        resumed.resume(scale.moving(), scale.good_steps(), scale.hysteresis_left());
        assert!(resumed.went_wrong());
        assert_eq!(resumed.value(), 4.);
    }

    #[test]
    fn the_scale_does_not_grow_past_f32() {
        let largest = 2f64.powi(127);
        // What is not a power of two stops below f32's largest number, too.
        for (initial, last) in [(largest / 2., largest), (3. * largest / 4., 1.5 * largest)] {
            let mut scale =
                Scale::new(LossScale::Dynamic(DynamicScale { initial, window: 1, ..DynamicScale::DEFAULT }));
            (0..2000).for_each(|_| scale.went_well());
            assert_eq!(scale.value(), last);
            assert!((scale.value() as f32).is_finite());
            assert!(scale.went_wrong(), "it can fall again");
            assert_eq!(scale.value(), last / 2.);
        }
        let mut resumed = Scale::new(LossScale::DYNAMIC);
        resumed.resume(Some(2f64.powi(900)), 3, None);
        assert!((resumed.value() as f32).is_finite());
    }
}
