//! What of a unit is sliced.

use crate::{Error, Result};

/// What a rank keeps only its slice of, between uses. ZeRO's stages are settings of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sharding {
    /// The optimizer's state. Costs nothing: who updates a slice needs no other's state.
    pub optimizer: bool,
    /// The gradients, once they are reduced.
    pub gradients: bool,
    /// The parameters. Costs a gather before each use.
    pub parameters: bool,
}

impl Sharding {
    /// ZeRO's stage 0 (nothing sliced), 1 (optimizer state), 2 (and gradients) or 3 (and parameters).
    pub fn stage(stage: u8) -> Result<Self> {
        match stage {
            0..=3 => Ok(Sharding { optimizer: stage >= 1, gradients: stage >= 2, parameters: stage >= 3 }),
            _ => Err(Error::Stage(stage)),
        }
    }
}
