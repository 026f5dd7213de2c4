//! Parameter initialization: from a seed, or from the weights of a Hugging Face checkpoint. Each rank initializes only the elements
//! that it keeps.

use std::ops::Range;

use shardwise_checkpoint::hugging_face::Weights;
use shardwise_model::{Parameter, init};
use shardwise_plan::{FloatsMut, Slice, SliceRun};
use shardwise_zero::InitError;

/// Writes the initial values of a range of a parameter's elements.
pub type ParameterInit<'a> = dyn FnMut(&Parameter, Range<usize>, FloatsMut<'_>) -> Result<(), InitError> + 'a;

/// Random initialization. It depends on the seed alone, not on the number of ranks.
pub fn from_seed(seed: u64) -> impl FnMut(&Parameter, Range<usize>, FloatsMut<'_>) -> Result<(), InitError> {
    move |parameter, range, elements| Ok(init::fill(seed, parameter, range, elements)?)
}

/// Initialization from a Hugging Face checkpoint.
pub fn from_weights(weights: &Weights) -> impl FnMut(&Parameter, Range<usize>, FloatsMut<'_>) -> Result<(), InitError> {
    move |parameter, range, elements| {
        let range = range.start as u64..range.end as u64;
        Ok(weights.read_floats(&parameter.name, &shape(parameter), range, elements)?)
    }
}

/// Reads a range of a parameter's elements.
type RunReader<'a> = dyn FnMut(Range<usize>, FloatsMut<'_>) -> Result<(), InitError> + 'a;

/// Calls `read` for each contiguous run of the elements `range` of a parameter's slice, with its range in the whole parameter.
pub(crate) fn for_each_run(
    parameter: &Parameter,
    slice: Option<&Slice>,
    range: Range<usize>,
    mut elements: FloatsMut<'_>,
    read: &mut RunReader<'_>,
) -> Result<(), InitError> {
    let Some(slice) = slice else { return read(range, elements) };
    for SliceRun { whole, len, .. } in slice.runs(&parameter.sizes(), range) {
        let (run, rest) = elements.split_at(len);
        read(whole..whole + len, run)?;
        elements = rest;
    }
    Ok(())
}

/// A parameter's shape, as checkpoints store it.
pub(crate) fn shape(parameter: &Parameter) -> Vec<u64> {
    parameter.shape.iter().map(|&size| size as u64).collect()
}
