//! The settings of dynamic loss scaling. The scale itself changes from step to step, in `shardwise-train`.

/// The settings of a dynamic loss scale. They correspond to DeepSpeed's `fp16` section and to PyTorch's `GradScaler`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DynamicScale {
    /// The initial scale.
    pub initial: f64,
    /// Double the scale after this many steps in a row without an overflow.
    pub window: u32,
    /// Halve the scale once this many overflows have occurred, and at each further one until it is doubled again. With 1, every
    /// overflow halves it.
    pub hysteresis: u32,
    /// Restart the count of `hysteresis` after every step without an overflow, instead of after every doubling.
    pub consecutive_hysteresis: bool,
    /// The smallest scale. An overflow at this scale is an error, because a smaller one would not help.
    pub min: f64,
}

impl DynamicScale {
    /// The defaults of PyTorch's `GradScaler`, plus a minimum.
    pub const DEFAULT: DynamicScale =
        DynamicScale { initial: 65536., window: 2000, hysteresis: 1, consecutive_hysteresis: false, min: 1. / 1024. };
}
