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
    Dynamic {
        /// The first scale.
        initial: f64,
        /// After how many good steps in a row it is doubled: GradScaler's `growth_interval`.
        patience: u32,
    },
}

impl LossScale {
    /// What f16 usually begins with.
    pub const DYNAMIC: LossScale = LossScale::Dynamic { initial: 65536., patience: 2000 };
}

/// A scale below which it is not the scale that is wrong.
const SMALLEST: f64 = 1. / 1024.;

/// The largest scale. Gradients are scaled in f32, in which a larger one is infinite. A scale that began as a power of two gets as
/// far as 2^127.
pub(crate) const LARGEST: f64 = f32::MAX as f64;

/// The scale in use.
#[derive(Clone, Copy)]
pub(crate) struct Scale {
    how: LossScale,
    value: f64,
    good_steps: u32,
}

impl Scale {
    pub(crate) fn new(how: LossScale) -> Self {
        let (LossScale::Fixed(value) | LossScale::Dynamic { initial: value, .. }) = how;
        Scale { how, value, good_steps: 0 }
    }

    pub(crate) fn value(&self) -> f64 {
        self.value
    }

    pub(crate) fn good_steps(&self) -> u32 {
        self.good_steps
    }

    /// The scale, where it moves.
    pub(crate) fn moving(&self) -> Option<f64> {
        matches!(self.how, LossScale::Dynamic { .. }).then_some(self.value)
    }

    /// Goes on where another run ended, if the scale moved there and moves here.
    pub(crate) fn resume(&mut self, value: Option<f64>, good_steps: u32) {
        if let (LossScale::Dynamic { .. }, Some(value)) = (self.how, value) {
            // Early versions let the scale grow without end, and saved it.
            (self.value, self.good_steps) = (value.min(LARGEST), good_steps);
        }
    }

    /// A step's gradients were finite.
    pub(crate) fn went_well(&mut self) {
        let LossScale::Dynamic { patience, .. } = self.how else { return };
        self.good_steps += 1;
        if self.good_steps >= patience {
            self.good_steps = 0;
            if self.value * 2. <= LARGEST {
                self.value *= 2.;
            }
        }
    }

    /// A step's gradients were not. Whether there is a smaller scale to try.
    pub(crate) fn went_wrong(&mut self) -> bool {
        let LossScale::Dynamic { .. } = self.how else { return true };
        (self.value, self.good_steps) = (self.value / 2., 0);
        self.value >= SMALLEST
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_falls_at_once_and_rises_with_patience() {
        let mut scale = Scale::new(LossScale::Dynamic { initial: 8., patience: 3 });
        assert!(scale.went_wrong());
        assert_eq!(scale.value(), 4.);
        (0..2).for_each(|_| scale.went_well());
        assert!(scale.went_wrong());
        (0..2).for_each(|_| scale.went_well());
        assert_eq!(scale.value(), 2.);
        scale.went_well();
        assert_eq!(scale.value(), 4.);
        while scale.went_wrong() {}
        assert!(scale.value() < SMALLEST);
    }

    #[test]
    fn the_scale_does_not_grow_past_f32() {
        let largest = 2f64.powi(127);
        // What is not a power of two stops below f32's largest number, too.
        for (initial, last) in [(largest / 2., largest), (3. * largest / 4., 1.5 * largest)] {
            let mut scale = Scale::new(LossScale::Dynamic { initial, patience: 1 });
            (0..2000).for_each(|_| scale.went_well());
            assert_eq!(scale.value(), last);
            assert!((scale.value() as f32).is_finite());
            assert!(scale.went_wrong(), "it can fall again");
            assert_eq!(scale.value(), last / 2.);
        }
        let mut resumed = Scale::new(LossScale::DYNAMIC);
        resumed.resume(Some(2f64.powi(900)), 3);
        assert!((resumed.value() as f32).is_finite());
    }
}
