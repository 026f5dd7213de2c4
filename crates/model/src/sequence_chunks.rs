//! A block in chunks of tokens, for sequences so long that the activations of a single block do not fit.
//!
//! Everything in a block but attention treats each token by itself: norms, projections and the MLP. So it is computed for one chunk of
//! tokens after the other, and nothing of a chunk is kept but its inputs and outputs. The backward pass computes each chunk again, right
//! before the chunk's gradients (FPDT; DeepSpeed: tiled compute). What a block holds for all tokens is then its input, and the query, key,
//! value and output of attention, however wide the MLP is.

use shardwise_plan::check_chunks_not_shared;
use shardwise_torch::autograd::{self, Backward, ClosureError, Forward, Graph};
use shardwise_torch::tch::{Kind, TchError, Tensor, no_grad, with_grad};

use crate::context_costs::ContextMemory;
use crate::tensor_parallel::{as_rows, rows_of};
use crate::{Activations, Batch, Footprint, Parameter, Parameters, PassShape, Result};

/// The number of rows of a chunk, if blocks are to be computed in chunks and the micro-batch has more rows than one.
pub(crate) fn chunk_rows(block_chunk_tokens: Option<usize>, batch: &Batch) -> Option<usize> {
    block_chunk_tokens.filter(|&chunk| chunk < batch.inputs.numel())
}

/// Checks that this many ranks can share a block that may be computed in chunks.
pub(crate) fn check_not_shared(block_chunk_tokens: Option<usize>, ranks: usize) -> Result<()> {
    Ok(check_chunks_not_shared(block_chunk_tokens, ranks)?)
}

/// What becomes of the results of a function.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Results {
    /// They are read.
    Read,
    /// Only their gradients are needed, so they are not computed. There is one, of the first input's shape.
    Unread,
}

/// Computes functions of rows, a chunk of rows at a time. All `inputs` have the same number of rows. `compute` gets a chunk of each, and
/// the parameters, and returns as many rows. The results have the leading dimensions of the first input.
pub(crate) fn compute_in_chunks<const N: usize>(
    chunk_rows: usize,
    inputs: &[&Tensor],
    (declared, parameters): (Vec<Parameter>, Vec<&Tensor>),
    results: Results,
    compute: impl Fn(&[Tensor], &Parameters<'_>) -> Result<[Tensor; N]> + Send + 'static,
) -> Result<[Tensor; N]> {
    let chunked = Chunked { chunk_rows, inputs: inputs.len(), declared, compute };
    let arguments: Vec<&Tensor> = inputs.iter().copied().chain(parameters).collect();
    let has_grad: Vec<bool> = arguments.iter().map(|argument| argument.requires_grad()).collect();
    let outputs: Vec<Tensor> = match results {
        Results::Read => no_grad(|| chunked.forward(&arguments))?.into(),
        Results::Unread => vec![no_grad(|| inputs[0].f_empty_like())?],
    };
    let outputs = autograd::function(
        "chunks of a sequence",
        &arguments,
        |arguments| {
            let saved = arguments.iter().map(|argument| argument.shallow_clone()).collect();
            Ok(Forward { outputs, saved })
        },
        move |back| chunked.backward(&back, &has_grad),
    )?;
    Ok(outputs.try_into().expect("every result is an output"))
}

/// A function whose arguments are inputs, of which it takes a chunk of rows, and then parameters, which it takes whole.
struct Chunked<F> {
    chunk_rows: usize,
    /// The number of inputs.
    inputs: usize,
    declared: Vec<Parameter>,
    compute: F,
}

impl<const N: usize, F: Fn(&[Tensor], &Parameters<'_>) -> Result<[Tensor; N]>> Chunked<F> {
    fn forward(&self, arguments: &[&Tensor]) -> Result<[Tensor; N]> {
        let (inputs, parameters) = arguments.split_at(self.inputs);
        let inputs = inputs.iter().map(|input| as_rows(input)).collect::<std::result::Result<Vec<_>, _>>()?;
        let parameters: Vec<Tensor> = parameters.iter().map(|parameter| parameter.shallow_clone()).collect();
        let mut outputs: [Option<Tensor>; N] = [const { None }; N];
        for chunk in self.chunks(&inputs) {
            let parts = inputs.iter().map(|input| chunk.of(input)).collect::<std::result::Result<Vec<_>, _>>()?;
            let computed = (self.compute)(&parts, &Parameters::whole(&self.declared, &parameters))?;
            for (output, part) in outputs.iter_mut().zip(computed) {
                chunk.write(output, &part)?;
            }
        }
        let leading = &arguments[0].size()[..arguments[0].dim() - 1];
        let in_shape = |rows: Option<Tensor>| -> Result<Tensor> {
            let rows = rows.expect("there is a chunk");
            Ok(rows.f_view([leading, &rows.size()[1..]].concat().as_slice())?)
        };
        let outputs = outputs.into_iter().map(in_shape).collect::<Result<Vec<_>>>()?;
        Ok(outputs.try_into().expect("every result is an output"))
    }

    /// The gradients of the arguments.
    fn backward(&self, back: &Backward, has_grad: &[bool]) -> std::result::Result<Vec<Option<Tensor>>, ClosureError> {
        let (inputs, parameters) = back.saved.split_at(self.inputs);
        let (input_has_grad, parameter_has_grad) = has_grad.split_at(self.inputs);
        let leaf = |tensor: &Tensor, has_grad: bool| Ok(tensor.f_detach()?.set_requires_grad(has_grad));
        let parameters: Vec<Tensor> = parameters
            .iter()
            .zip(parameter_has_grad)
            .map(|(parameter, &has_grad)| leaf(parameter, has_grad))
            .collect::<std::result::Result<_, TchError>>()?;
        let inputs = inputs.iter().map(as_rows).collect::<std::result::Result<Vec<_>, _>>()?;
        let output_grads: Vec<Option<Tensor>> = back
            .grads
            .iter()
            .map(|grad| grad.as_ref().map(as_rows).transpose())
            .collect::<std::result::Result<_, _>>()?;
        let mut grads: Vec<Option<Tensor>> = has_grad.iter().map(|_| None).collect();
        for chunk in self.chunks(&inputs) {
            let parts: Vec<Tensor> = inputs
                .iter()
                .zip(input_has_grad)
                .map(|(input, &has_grad)| leaf(&chunk.of(input)?, has_grad))
                .collect::<std::result::Result<_, TchError>>()?;
            let outputs = with_grad(|| (self.compute)(&parts, &Parameters::whole(&self.declared, &parameters)))?;
            let mut reached = Vec::new();
            for (output, grad) in outputs.iter().zip(&output_grads) {
                if let Some(grad) = grad.as_ref().filter(|_| output.requires_grad()) {
                    reached.push((output, chunk.of(grad)?));
                }
            }
            let (reached, weights): (Vec<&Tensor>, Vec<Option<&Tensor>>) =
                reached.iter().map(|(output, grad)| (*output, Some(grad))).unzip();
            let wanted = || parts.iter().chain(&parameters).enumerate().filter(|(index, _)| has_grad[*index]);
            let arguments: Vec<&Tensor> = wanted().map(|(_, argument)| argument).collect();
            let computed = match reached.is_empty() {
                true => arguments.iter().map(|_| None).collect(),
                false => autograd::grad(&reached, &weights, &arguments, Graph::Free)?,
            };
            for ((index, argument), computed) in wanted().zip(computed) {
                match computed {
                    Some(part) if index < self.inputs => chunk.write(&mut grads[index], &part)?,
                    None if index < self.inputs => chunk.write(&mut grads[index], &argument.f_zeros_like()?)?,
                    Some(part) => add(&mut grads[index], part)?,
                    None => {}
                }
            }
        }
        let as_argument = |(grad, argument): (Option<Tensor>, &Tensor)| {
            grad.map(|grad| grad.f_view(argument.size().as_slice())?.f_to_kind(argument.kind())).transpose()
        };
        Ok(grads.into_iter().zip(&back.saved).map(as_argument).collect::<std::result::Result<_, TchError>>()?)
    }

    fn chunks(&self, inputs: &[Tensor]) -> impl Iterator<Item = Chunk> {
        let (all, len) = (rows_of(&inputs[0]), self.chunk_rows);
        (0..all).step_by(len).map(move |start| Chunk { start, len: len.min(all - start), all })
    }
}

/// Some of `all` rows.
struct Chunk {
    start: usize,
    len: usize,
    all: usize,
}

impl Chunk {
    /// These rows of all rows.
    fn of(&self, rows: &Tensor) -> std::result::Result<Tensor, TchError> {
        rows.f_narrow(0, self.start as i64, self.len as i64)
    }

    /// Writes these rows of `all`, which the first chunk allocates.
    fn write(&self, all: &mut Option<Tensor>, rows: &Tensor) -> std::result::Result<(), TchError> {
        let all = match all {
            Some(all) => all,
            None => all.insert(Tensor::f_empty([self.all as i64, rows.size()[1]], (rows.kind(), rows.device()))?),
        };
        self.of(all)?.f_copy_(&rows.f_detach()?)
    }
}

/// Adds to the gradient of a parameter. A sum of several chunks is at least in f32.
fn add(sum: &mut Option<Tensor>, part: Tensor) -> std::result::Result<(), TchError> {
    let kind = if part.kind() == Kind::Double { Kind::Double } else { Kind::Float };
    match sum {
        Some(sum) => sum.f_add_(&part).map(drop),
        None => {
            *sum = Some(part.f_to_kind(kind)?);
            Ok(())
        }
    }
}

/// The sizes of a block that is computed in chunks, for one position, in elements.
pub(crate) struct ChunkedBlock {
    /// The hidden state.
    pub(crate) hidden: usize,
    /// The query, and the output of attention.
    pub(crate) query: usize,
    /// The key, and the value.
    pub(crate) key: usize,
    /// The same as attention keeps them, which may repeat them for several query heads.
    pub(crate) kept_key: usize,
    /// The parameters before attention, and after it.
    pub(crate) parameters: [usize; 2],
}

impl ChunkedBlock {
    /// Estimates the memory of the block. `chunk` is the footprint of a chunk, and `mask` the size of the mask that attention needs.
    pub(crate) fn footprint(
        &self,
        shape: &PassShape,
        chunk: &Footprint,
        context: &ContextMemory,
        mask: usize,
    ) -> Footprint {
        let &ChunkedBlock { hidden, query, key, kept_key, parameters: [before, after] } = self;
        let element = |count: usize| shape.tokens * count * shape.element_bytes;
        let wide = shape.element_bytes.max(4);
        let is_divided = shape.context.size() > 1;
        // The sums of the gradients of parameters, and those of a chunk.
        let gradients = |parameters: usize| parameters * (wide + shape.element_bytes);
        let in_chunk = chunk.kept_bytes + chunk.temporary_bytes;
        // Gradients of the block's input and of the output of attention; then of what attention gets.
        let around_attention = element(hidden + query);
        let of_attention = element(query + 2 * kept_key);
        let backward = [
            around_attention + gradients(after) + in_chunk,
            around_attention + after * wide + if is_divided { context.backward } else { of_attention + mask },
            // What attention has kept is free by now.
            (around_attention + of_attention).saturating_sub(element(2 * query + 2 * kept_key))
                + after * wide
                + gradients(before)
                + in_chunk,
        ];
        // Projections, the same rotated, keys that are repeated, and the output.
        let repeated = if kept_key > key { element(2 * kept_key) } else { 0 };
        let attending = element(3 * query + 3 * key) + repeated + context.forward;
        // What attention keeps, or computes again from the projections.
        let (core, projected) = (element(2 * query + 2 * kept_key), element(query + 2 * key));
        let frees_core = shape.activations == Activations::Selective && !is_divided;
        let (kept, again) = if frees_core { (projected, core) } else { (core, 0) };
        Footprint {
            kept_bytes: element(hidden) + kept + context.kept + mask,
            output_bytes: element(hidden),
            forward_temporary_bytes: again
                + chunk.no_grad_temporary_bytes.max(context.forward.saturating_sub(element(hidden))),
            no_grad_temporary_bytes: attending.max(element(query) + chunk.no_grad_temporary_bytes),
            temporary_bytes: again + backward.into_iter().max().unwrap_or(0),
            sparse_gradient_bytes: 0,
        }
    }
}
