//! The loss scale: f16 has no room for small gradients, so the loss is made larger for the backward pass.

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
        /// After how many good steps it is doubled.
        patience: u32,
    },
}

impl LossScale {
    /// What f16 usually begins with.
    pub const DYNAMIC: LossScale = LossScale::Dynamic { initial: 65536., patience: 2000 };
}

/// A scale below which it is not the scale that is wrong.
const SMALLEST: f64 = 1. / 1024.;

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
            (self.value, self.good_steps) = (value, good_steps);
        }
    }

    /// A step's gradients were finite.
    pub(crate) fn went_well(&mut self) {
        let LossScale::Dynamic { patience, .. } = self.how else { return };
        self.good_steps += 1;
        if self.good_steps >= patience {
            (self.value, self.good_steps) = (self.value * 2., 0);
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
}
