//! Inputs of units that are offloaded until the units are recomputed.

use std::collections::HashMap;

use shardwise_torch::tch::Tensor;
use shardwise_zero::Offloaded;

/// Where the inputs of units are, by unit and micro-batch.
#[derive(Default)]
pub(crate) struct OffloadedInputs(pub(crate) HashMap<(usize, usize), Offloaded>);

impl OffloadedInputs {
    /// The output of a unit, which is the input of the next one: from where it is offloaded to, if it is.
    pub(crate) fn read_output(
        &self,
        unit: usize,
        micro_batch: usize,
        output: &Tensor,
    ) -> shardwise_torch::Result<Tensor> {
        match self.0.get(&(unit + 1, micro_batch)) {
            Some(offloaded) => offloaded.read(0, output),
            None => Ok(output.shallow_clone()),
        }
    }
}
