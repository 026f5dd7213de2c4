//! What parameters begin with: a seed, or weights of a Hugging Face checkpoint. Each rank makes or reads the elements that it
//! keeps, and no others.

use std::ops::Range;

use shardwise_checkpoint::hugging_face::Weights;
use shardwise_model::{Parameter, init};
use shardwise_zero::StartError;

use crate::state::shape;

/// Writes the beginning of some elements of a parameter.
pub type Start<'a> = dyn FnMut(&Parameter, Range<usize>, &mut [f32]) -> Result<(), StartError> + 'a;

/// Parameters as a seed begins them: the same whoever makes them.
pub fn from_seed(seed: u64) -> impl FnMut(&Parameter, Range<usize>, &mut [f32]) -> Result<(), StartError> {
    move |parameter, range, elements| {
        init::begin(seed, parameter, range, elements);
        Ok(())
    }
}

/// Parameters as they stand in files.
pub fn from_weights(weights: &Weights) -> impl FnMut(&Parameter, Range<usize>, &mut [f32]) -> Result<(), StartError> {
    move |parameter, range, elements| {
        let range = range.start as u64..range.end as u64;
        Ok(weights.read_f32(&parameter.name, &shape(parameter), range, elements)?)
    }
}
