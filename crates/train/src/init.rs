//! Parameter initialization: from a seed, or from the weights of a Hugging Face checkpoint. Each rank initializes only the elements
//! that it keeps.

use std::ops::Range;

use shardwise_checkpoint::hugging_face::Weights;
use shardwise_model::{Parameter, init};
use shardwise_plan::FloatsMut;
use shardwise_zero::InitError;

/// Writes the initial values of a range of a parameter's elements.
pub type ParameterInit<'a> = dyn FnMut(&Parameter, Range<usize>, FloatsMut<'_>) -> Result<(), InitError> + 'a;

/// Random initialization. It depends on the seed alone, not on the number of ranks.
pub fn from_seed(seed: u64) -> impl FnMut(&Parameter, Range<usize>, FloatsMut<'_>) -> Result<(), InitError> {
    move |parameter, range, elements| {
        init::fill(seed, parameter, range, elements);
        Ok(())
    }
}

/// Initialization from a Hugging Face checkpoint.
pub fn from_weights(weights: &Weights) -> impl FnMut(&Parameter, Range<usize>, FloatsMut<'_>) -> Result<(), InitError> {
    move |parameter, range, elements| {
        let range = range.start as u64..range.end as u64;
        Ok(weights.read_floats(&parameter.name, &shape(parameter), range, elements)?)
    }
}

/// A parameter's shape, as checkpoints store it.
pub(crate) fn shape(parameter: &Parameter) -> Vec<u64> {
    parameter.shape.iter().map(|&size| size as u64).collect()
}
