//! A check of custom layers that ranks share: one forward and backward pass of each unit, shared and whole, in f64.
//!
//! A wrong annotation of a parameter often fits by shape: a norm that is applied to split features, a bias that every rank adds, a
//! gradient that is counted once for every rank. It would show up in the loss much later, if at all. So before the first step of a
//! custom model, the ranks compare each unit with the same unit on one rank.

use shardwise_model::{Activations, Batch, Parameter, Pass, Unit, init};
use shardwise_plan::FloatsMut;
use shardwise_torch::autograd::{self, Graph};
use shardwise_torch::tch::{Kind, Tensor, no_grad};

use crate::error::{Error, Result};
use crate::step::Trainer;

/// The largest difference of outputs and gradients, relative to the largest element. A wrong annotation changes the first digit; a
/// layer that computes a part of its output in f32, the seventh.
const TOLERANCE: f64 = 1e-5;

/// The outputs and gradients of a unit.
struct Computed {
    output: Tensor,
    input_grad: Option<Tensor>,
    parameter_grads: Vec<Tensor>,
}

impl Trainer {
    /// Compares every unit as the ranks share it with the whole unit on one rank. Fails with the first unit and parameter that
    /// differ. All ranks call it together, those that share layers with the same batch.
    pub fn check_shared_layers(&self, batch: &Batch) -> Result<()> {
        let device = self.options.device;
        let batch = batch.to_device(device);
        let mut whole_input: Option<Tensor> = None;
        let mut earlier: Vec<Vec<Tensor>> = Vec::new();
        for (index, unit) in self.model.units().iter().enumerate() {
            let whole: Vec<Tensor> =
                unit.parameters().iter().map(|parameter| initial_values(parameter).to_device(device)).collect();
            let tied = unit.tied().map(|tied| earlier[tied.unit][tied.parameter].shallow_clone());
            let found = self.check_unit(index, unit, &whole, tied.as_ref(), whole_input.as_ref(), &batch)?;
            earlier.push(whole);
            whole_input = Some(found);
        }
        Ok(())
    }

    /// Compares one unit, and returns its whole output.
    fn check_unit(
        &self,
        index: usize,
        unit: &Unit,
        whole: &[Tensor],
        tied: Option<&Tensor>,
        input: Option<&Tensor>,
        batch: &Batch,
    ) -> Result<Tensor> {
        let failed = |error| Error::of_model(unit.name(), error);
        let differs = |what: &str| {
            Err(Error::Options(format!(
                "unit {}: {what} differs if {} ranks share the layer; check where its activations are whole or split, and how its \
                 parameters are placed",
                unit.name(),
                self.ranks.tensor.size(),
            )))
        };
        let (place, parallel) = (self.tensor_place(), self.parallel.with_label(unit.name()));
        let alone = Pass::new(Activations::All);
        let expected = compute(unit, whole, tied, input, batch, &alone, None).map_err(failed)?;

        let cut = |tensor: &Tensor, parameter: &Parameter| match parameter.kept_slice(place) {
            Some(slice) => {
                let part = |range: &std::ops::Range<usize>| {
                    tensor.narrow(slice.dimension as i64, range.start as i64, range.len() as i64)
                };
                Tensor::cat(&slice.ranges.iter().map(part).collect::<Vec<_>>(), slice.dimension as i64)
            }
            None => tensor.shallow_clone(),
        };
        let own: Vec<Tensor> = whole.iter().zip(unit.parameters()).map(|(tensor, p)| cut(tensor, p)).collect();
        let tied_parameter = unit.tied().map(|tied| &self.model.units()[tied.unit].parameters()[tied.parameter]);
        let own_tied = tied.zip(tied_parameter).map(|(tensor, parameter)| cut(tensor, parameter));
        let own_rows = |tensor: &Tensor| match parallel.splits_sequence() && tensor.dim() > 1 {
            true => parallel.partition(tensor),
            false => Ok(tensor.shallow_clone()),
        };
        let own_input = input.map(own_rows).transpose().map_err(failed)?;
        let shared = Pass { parallel: parallel.clone(), ..Pass::new(Activations::All) };
        let is_last = index + 1 == self.model.units().len();
        let own_output_grad =
            if is_last { None } else { Some(own_rows(&weights_like(&expected.output)).map_err(failed)?) };
        let found =
            compute(unit, &own, own_tied.as_ref(), own_input.as_ref(), batch, &shared, own_output_grad.as_ref());
        let found = found.map_err(failed)?;

        let expected_output =
            if is_last { expected.output.shallow_clone() } else { own_rows(&expected.output).map_err(failed)? };
        let mut wrong = (!is_close(&found.output, &expected_output)).then(|| "the output".to_string());
        for ((parameter, found), expected) in
            unit.parameters().iter().zip(&found.parameter_grads).zip(&expected.parameter_grads)
        {
            let is_sum = parameter.is_replicated(place) && !parameter.has_same_gradient(parallel.splits_sequence());
            let found = if is_sum { parallel.all_reduce(found).map_err(failed)? } else { found.shallow_clone() };
            if !is_close(&found, &cut(expected, parameter)) {
                wrong.get_or_insert_with(|| format!("the gradient of {} {:?}", parameter.name, parameter.shape));
            }
        }
        if let (Some(found), Some(expected)) = (&found.input_grad, &expected.input_grad)
            && !is_close(found, &own_rows(expected).map_err(failed)?)
        {
            wrong.get_or_insert_with(|| "the gradient of the input".to_string());
        }
        // All ranks agree on the first one that any of them has found.
        let names: Vec<String> = ["the output".to_string(), "the gradient of the input".to_string()]
            .into_iter()
            .chain(unit.parameters().iter().map(|p| format!("the gradient of {} {:?}", p.name, p.shape)))
            .collect();
        let own_wrong = wrong.and_then(|wrong| names.iter().position(|name| *name == wrong));
        match self.ranks.first_on_any_rank(own_wrong)? {
            Some((first, _)) => differs(&names[first]),
            None => Ok(expected.output),
        }
    }
}

/// A parameter's values in f64, the same on all ranks, and none of them zero.
fn initial_values(parameter: &Parameter) -> Tensor {
    let random = Parameter { init: shardwise_model::Init::Normal { std: 0.3 }, ..parameter.clone() };
    let mut elements = vec![0f64; parameter.elements()];
    init::fill(1, &random, 0..parameter.elements(), FloatsMut::F64(&mut elements));
    Tensor::from_slice(&elements).view(&parameter.shape[..])
}

/// A forward and a backward pass. Without a gradient of the output, that of a scalar is 1, and any other has fixed weights.
fn compute(
    unit: &Unit,
    parameters: &[Tensor],
    tied: Option<&Tensor>,
    input: Option<&Tensor>,
    batch: &Batch,
    pass: &Pass,
    output_grad: Option<&Tensor>,
) -> shardwise_model::Result<Computed> {
    let leaf = |tensor: &Tensor| tensor.detach().set_requires_grad(tensor.kind() == Kind::Double);
    let (parameters, tied): (Vec<Tensor>, _) = (parameters.iter().map(leaf).collect(), tied.map(leaf));
    let input = input.map(leaf);
    let output = unit.forward(&parameters, tied.as_ref(), input.as_ref(), batch, pass)?;
    let output_grad = output_grad.map_or_else(|| weights_like(&output), Tensor::shallow_clone);
    let inputs: Vec<&Tensor> = parameters.iter().chain(&input).collect();
    let grads = autograd::grad(&[&output], &[Some(&output_grad.view_as(&output))], &inputs, Graph::Free)?;
    let dense = |(grad, like): (Option<Tensor>, &&Tensor)| match grad {
        Some(grad) if grad.is_sparse() => grad.to_dense(None, false),
        Some(grad) => grad,
        None => like.zeros_like(),
    };
    let mut grads: Vec<Tensor> = grads.into_iter().zip(&inputs).map(dense).collect();
    let input_grad = if input.is_some() { grads.pop() } else { None };
    Ok(Computed { output: output.detach(), input_grad, parameter_grads: grads })
}

/// Weights for the elements of an output, all different.
fn weights_like(output: &Tensor) -> Tensor {
    no_grad(|| {
        let numbers = Tensor::arange(output.numel() as i64, (output.kind(), output.device())) + 1.;
        numbers.sin().view_as(output)
    })
}

fn is_close(found: &Tensor, expected: &Tensor) -> bool {
    if found.numel() != expected.numel() {
        return false;
    }
    let largest = expected.abs().max().double_value(&[]).max(f64::MIN_POSITIVE);
    found.numel() == 0
        || (found.reshape(-1) - expected.reshape(-1)).abs().max().double_value(&[]) <= TOLERANCE * largest
}
