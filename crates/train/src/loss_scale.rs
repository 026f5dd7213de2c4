//! Loss scaling: small gradients underflow in f16, so the loss is scaled up for the backward pass.
//!
//! A dynamic scale behaves like `torch.amp.GradScaler` with a `growth_factor` of 2 and a `backoff_factor` of 0.5. Like `GradScaler`, it
//! stops growing at the largest f32. Unlike there, a scale that becomes tiny is an error: the gradients would not be finite at any scale.

use shardwise_plan::DynamicScale;

/// The factor by which the loss is multiplied for the backward pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LossScale {
    /// A constant. Use 1 for f32 and bf16.
    Fixed(f64),
    /// Halved when a step's gradients are not finite, doubled after many steps without such an overflow.
    Dynamic(DynamicScale),
}

impl LossScale {
    /// The usual setting for f16.
    pub const DYNAMIC: LossScale = LossScale::Dynamic(DynamicScale::DEFAULT);
}

/// The largest scale. Gradients are scaled in f32, where a larger one would be infinite. The largest power of two below it is 2^127.
pub(crate) const LARGEST: f64 = f32::MAX as f64;

/// The state of the loss scale, like PyTorch's `GradScaler`.
#[derive(Clone, Copy)]
pub(crate) struct LossScaler {
    how: LossScale,
    value: f64,
    good_steps: u32,
    /// The number of overflows until the scale is halved.
    hysteresis_left: u32,
}

impl LossScaler {
    pub(crate) fn new(how: LossScale) -> Self {
        let (value, hysteresis_left) = match how {
            LossScale::Fixed(value) => (value, 1),
            LossScale::Dynamic(how) => (how.initial, how.hysteresis),
        };
        LossScaler { how, value, good_steps: 0, hysteresis_left }
    }

    pub(crate) fn value(&self) -> f64 {
        self.value
    }

    pub(crate) fn good_steps(&self) -> u32 {
        self.good_steps
    }

    /// The number of overflows until the scale is halved, if the hysteresis is more than 1.
    pub(crate) fn hysteresis_left(&self) -> Option<u32> {
        match self.how {
            LossScale::Dynamic(how) if how.hysteresis > 1 => Some(self.hysteresis_left),
            _ => None,
        }
    }

    /// The scale, if it is dynamic.
    pub(crate) fn dynamic_value(&self) -> Option<f64> {
        matches!(self.how, LossScale::Dynamic(_)).then_some(self.value)
    }

    /// Restores the state from a checkpoint, if the scale was dynamic there and is dynamic here.
    pub(crate) fn resume(&mut self, value: Option<f64>, good_steps: u32, hysteresis_left: Option<u32>) {
        if let (LossScale::Dynamic(how), Some(value)) = (self.how, value) {
            // Early versions saved scales that had grown past the limit.
            (self.value, self.good_steps) = (value.min(LARGEST), good_steps);
            // The checkpoint's run may have had another hysteresis.
            self.hysteresis_left = hysteresis_left.map_or(how.hysteresis, |left| left.min(how.hysteresis));
        }
    }

    /// Records a step whose gradients were finite. Doubles the scale after enough such steps in a row.
    pub(crate) fn record_finite_step(&mut self) {
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

    /// Records a step whose gradients were not finite, and halves the scale once the hysteresis is used up. Returns false if the
    /// scale was already the smallest.
    pub(crate) fn record_overflow(&mut self) -> bool {
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
    fn the_scale_is_halved_at_once_and_doubled_after_the_window() {
        let mut scaler = LossScaler::new(LossScale::Dynamic(PLAIN));
        assert!(scaler.record_overflow());
        assert_eq!(scaler.value(), 4.);
        (0..2).for_each(|_| scaler.record_finite_step());
        assert!(scaler.record_overflow());
        (0..2).for_each(|_| scaler.record_finite_step());
        assert_eq!(scaler.value(), 2.);
        scaler.record_finite_step();
        assert_eq!(scaler.value(), 4.);
        while scaler.record_overflow() {}
        assert!(scaler.value() < PLAIN.min);
    }

    /// The scale after each step (`x` is a step with an overflow, `.` one without), and whether the last overflow left a scale to try.
    fn scales(how: DynamicScale, steps: &str) -> (Vec<f64>, bool) {
        let mut scaler = LossScaler::new(LossScale::Dynamic(how));
        let mut goes_on = true;
        let values = steps.chars().map(|step| {
            match step {
                'x' => goes_on = scaler.record_overflow(),
                _ => scaler.record_finite_step(),
            }
            scaler.value()
        });
        (values.collect(), goes_on)
    }

    #[test]
    fn each_setting_decides_when_the_scale_changes() {
        let twice = DynamicScale { hysteresis: 2, ..PLAIN };
        let in_a_row = DynamicScale { consecutive_hysteresis: true, ..twice };
        let floor = DynamicScale { min: 3., ..PLAIN };
        for (how, steps, expected, goes_on) in [
            (PLAIN, "x.x", vec![4., 4., 2.], true),
            (twice, "x.x", vec![8., 8., 4.], true),
            // After the first halving, every overflow halves the scale until it is doubled.
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
    fn a_resumed_run_keeps_its_hysteresis() {
        let how = LossScale::Dynamic(DynamicScale { hysteresis: 3, ..PLAIN });
        let mut scaler = LossScaler::new(how);
        assert!(scaler.record_overflow() && scaler.record_overflow());
        let mut resumed = LossScaler::new(how);
        resumed.resume(scaler.dynamic_value(), scaler.good_steps(), scaler.hysteresis_left());
        assert!(resumed.record_overflow());
        assert_eq!(resumed.value(), 4.);
    }

    #[test]
    fn the_scale_does_not_grow_past_f32() {
        let largest = 2f64.powi(127);
        // The limit also holds for scales that are not powers of two.
        for (initial, last) in [(largest / 2., largest), (3. * largest / 4., 1.5 * largest)] {
            let mut scaler =
                LossScaler::new(LossScale::Dynamic(DynamicScale { initial, window: 1, ..DynamicScale::DEFAULT }));
            (0..2000).for_each(|_| scaler.record_finite_step());
            assert_eq!(scaler.value(), last);
            assert!((scaler.value() as f32).is_finite());
            assert!(scaler.record_overflow(), "it can fall again");
            assert_eq!(scaler.value(), last / 2.);
        }
        let mut resumed = LossScaler::new(LossScale::DYNAMIC);
        resumed.resume(Some(2f64.powi(900)), 3, None);
        assert!((resumed.value() as f32).is_finite());
    }
}
