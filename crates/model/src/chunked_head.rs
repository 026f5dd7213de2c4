//! A compiled head that takes a chunk of rows at a time, and computes the gradients along with the loss.
//!
//! Like the eager head (`loss.rs`), it never has the logits of all tokens in memory. So its forward pass computes the gradients for an
//! output gradient of one, sums those of parameters in f32, and its backward pass only scales them.

use std::sync::{Arc, Mutex, PoisonError};

use shardwise_torch::autograd;
use shardwise_torch::tch::{Kind, Tensor, no_grad};

use crate::unit_functions::UnitFunctions;
use crate::{Batch, Footprint, IGNORED, Layer, Parameters, Pass, PassShape, Result, TensorParallel};

/// The kind in which the gradients of parameters are summed over chunks.
const SUM_KIND: Kind = Kind::Float;

/// A compiled head with its loss.
pub(crate) struct ChunkedHead {
    pub(crate) functions: Arc<UnitFunctions>,
    pub(crate) chunk_rows: usize,
    /// The number of parameters that the unit owns.
    pub(crate) own: usize,
}

impl Layer for ChunkedHead {
    fn forward(&self, parameters: &Parameters<'_>, input: Option<&Tensor>, batch: &Batch, _: &Pass) -> Result<Tensor> {
        self.functions.check_batch(batch)?;
        let input = input.expect("a head has an input");
        let parameters = parameters.in_order();
        let differentiable: Vec<&Tensor> = parameters.iter().copied().chain([input]).collect();
        // Ask views, not the tensors themselves: under `no_grad`, a view requires no gradient.
        let is_wanted = |tensor: &&Tensor| Ok(tensor.f_view_as(tensor)?.requires_grad());
        let wanted = differentiable.iter().map(is_wanted).collect::<Result<Vec<bool>>>()?;
        let (loss, gradients) = no_grad(|| self.chunked(&parameters, input, &batch.targets, &wanted))?;

        let kinds: Vec<Kind> = differentiable.iter().map(|tensor| tensor.kind()).collect();
        let kept = Mutex::new(Some(gradients));
        let mut outputs = autograd::function(
            "compiled head",
            &differentiable,
            |_| Ok(autograd::Forward { outputs: vec![loss], saved: vec![] }),
            move |back| {
                let kept = kept.lock().unwrap_or_else(PoisonError::into_inner).take();
                let gradients = kept.ok_or("the head's gradients have been used; its graph can be walked only once")?;
                let Some(factor) = &back.grads[0] else { return Ok(kinds.iter().map(|_| None).collect()) };
                let scale = |(gradient, kind): (Option<Tensor>, &Kind)| {
                    gradient.map(|mut gradient| gradient.f_mul_(factor)?.f_to_kind(*kind)).transpose()
                };
                Ok(gradients.into_iter().zip(&kinds).map(scale).collect::<std::result::Result<_, _>>()?)
            },
        )?;
        Ok(outputs.remove(0))
    }

    fn load(&self) -> Result<()> {
        self.functions.load()
    }

    fn output_shape(&self, _: &Batch, _: &TensorParallel) -> Option<Vec<i64>> {
        Some(vec![])
    }

    fn gradients_are_dense(&self) -> bool {
        true
    }

    fn forward_computes_gradients(&self) -> bool {
        true
    }

    fn footprint(&self, shape: &PassShape) -> Footprint {
        let function = &self.functions.function;
        let parameters = function.parameter_gradient_elements();
        let features = function.input_shape.iter().flatten().last().copied().unwrap_or(1);
        let input = self.functions.package.manifest().targets.elements() * features;
        let (sums, input_bytes) = (parameters * SUM_KIND.elt_size_in_bytes(), input * shape.element_bytes);
        let chunk = function.forward_temporary_bytes + sums;
        Footprint {
            kept_bytes: sums + input_bytes,
            output_bytes: 0,
            // While the gradients of a chunk are added to the sums, there are both.
            forward_temporary_bytes: chunk,
            no_grad_temporary_bytes: chunk,
            // The gradients are converted at the end.
            temporary_bytes: if shape.element_bytes == SUM_KIND.elt_size_in_bytes() {
                0
            } else {
                parameters * shape.element_bytes
            },
            sparse_gradient_bytes: 0,
        }
    }

    fn attention_flops(&self, _: usize) -> f64 {
        let function = &self.functions.function;
        let chunks = self.functions.package.manifest().targets.elements().div_ceil(self.chunk_rows) as f64;
        // The gradients are computed in the same call, and are about two thirds of it.
        self.functions.attention_flops(function.forward_flops * chunks / 3., &function.parameters[self.own..])
    }

    fn backward_reads_parameters(&self) -> bool {
        false
    }
}

impl ChunkedHead {
    /// Returns the loss, and the wanted gradients of the parameters (in f32) and of the input.
    fn chunked(
        &self,
        parameters: &[&Tensor],
        input: &Tensor,
        targets: &Tensor,
        wanted: &[bool],
    ) -> Result<(Tensor, Vec<Option<Tensor>>)> {
        let forward = self.functions.forward.get()?;
        let places = &self.functions.function.gradients;
        let features = input.size().last().copied().unwrap_or(1);
        let rows = input.f_contiguous()?.f_view([-1, features])?;
        let targets = targets.f_reshape(-1)?;
        let (count, chunk_rows) = (rows.size()[0], self.chunk_rows as i64);
        let is_input = |index: usize| index == parameters.len();

        let mut loss = Tensor::f_zeros([], (Kind::Double, input.device()))?;
        let mut gradients: Vec<Option<Tensor>> = wanted.iter().map(|_| None).collect();
        if let Some((true, Some(_))) = wanted.last().copied().zip(places.last().copied()) {
            gradients[parameters.len()] = Some(rows.f_empty_like()?);
        }
        for start in (0..count).step_by(self.chunk_rows) {
            let len = chunk_rows.min(count - start);
            let part = pad(&rows.f_narrow(0, start, len)?, chunk_rows, 0)?;
            let target = pad(&targets.f_narrow(0, start, len)?, chunk_rows, IGNORED)?;
            let arguments = parameters.iter().map(|tensor| tensor.shallow_clone()).chain([part, target]).collect();
            let mut results: Vec<Option<Tensor>> = forward.run(arguments)?.into_iter().map(Some).collect();
            let own = results[0].take().expect("a head returns the loss");
            loss = loss.f_add(&own.f_to_kind(Kind::Double)?)?;
            for (index, sum) in gradients.iter_mut().enumerate().filter(|(index, _)| wanted[*index]) {
                let Some(gradient) = places[index].and_then(|place| results[1 + place].take()) else { continue };
                match sum {
                    Some(sum) if is_input(index) => {
                        sum.f_narrow(0, start, len)?.f_copy_(&gradient.f_narrow(0, 0, len)?)?;
                    }
                    Some(sum) => drop(sum.f_add_(&gradient)?),
                    None => *sum = Some(gradient),
                }
            }
        }
        let shape = input.size();
        if let Some(of_input) = &mut gradients[parameters.len()] {
            *of_input = of_input.f_view(&shape[..])?;
        }
        Ok((loss.f_to_kind(Kind::Float)?, gradients))
    }
}

/// Appends elements to the first dimension until it has `len`.
fn pad(tensor: &Tensor, len: i64, value: i64) -> Result<Tensor> {
    let mut shape = tensor.size();
    if shape[0] == len {
        return Ok(tensor.f_contiguous()?);
    }
    shape[0] = len - shape[0];
    let padding = Tensor::f_full(&shape[..], value, (tensor.kind(), tensor.device()))?;
    Ok(Tensor::f_cat(&[tensor, &padding], 0)?)
}
