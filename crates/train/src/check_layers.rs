//! A check of custom layers that ranks share: one forward and backward pass of each unit, shared and whole, in f64.
//!
//! A wrong annotation of a parameter often fits by shape: a norm that is applied to split features, a bias that every rank adds, a
//! gradient that is counted once for every rank. It would show up in the loss much later, if at all. So before the first step of a
//! custom model, the ranks compare each unit with the same unit on one rank.

use shardwise_model::{Activations, Batch, Parameter, Pass, TensorParallel, Unit, cut, init};
use shardwise_plan::{FloatsMut, LayerPlace};
use shardwise_torch::autograd::{self, Graph};
use shardwise_torch::tch::{Kind, Tensor, no_grad};

use crate::error::{Error, Result};
use crate::step::Trainer;

/// The largest difference of outputs and gradients, relative to the largest element. A wrong annotation changes the first digit; a
/// layer that computes a part of its output in f32, the seventh.
const TOLERANCE: f64 = 1e-5;

/// What a unit computes from: all of it, or one rank's part.
struct Inputs<'a> {
    parameters: Vec<Tensor>,
    tied: Option<Tensor>,
    input: Option<Tensor>,
    batch: &'a Batch,
}

/// The outputs and gradients of a unit.
struct Computed {
    output: Tensor,
    input_grad: Option<Tensor>,
    parameter_grads: Vec<Tensor>,
}

/// A result of a unit that ranks share, and what it should be.
struct Pair {
    what: String,
    found: Tensor,
    expected: Tensor,
}

impl Trainer {
    /// Compares every unit as the ranks share it with the whole unit on one rank. Fails with the first unit and parameter that
    /// differ. All ranks call it together, those that share layers with the same batch.
    pub fn check_shared_layers(&self, batch: &Batch) -> Result<()> {
        let device = self.options.device;
        let batch = batch.to_device(device);
        let mut input: Option<Tensor> = None;
        let mut earlier: Vec<Vec<Tensor>> = Vec::new();
        for (index, unit) in self.model.units().iter().enumerate() {
            let parameters =
                unit.parameters().iter().map(|parameter| initial_values(parameter).to_device(device)).collect();
            let tied = unit.tied().map(|tied| earlier[tied.unit][tied.parameter].shallow_clone());
            let whole = Inputs { parameters, tied, input, batch: &batch };
            input = Some(self.check_unit(index, &whole)?);
            earlier.push(whole.parameters);
        }
        Ok(())
    }

    /// Compares one unit, and returns its whole output.
    fn check_unit(&self, index: usize, whole: &Inputs<'_>) -> Result<Tensor> {
        let unit = &self.model.units()[index];
        let failed = |error| Error::of_model(unit.name(), error);
        let expected = whole.compute(unit, &Pass::new(Activations::All), None).map_err(failed)?;

        // As in `expected`, without what a trainer adds to a layer with experts.
        let shared = Pass { expert_bias: None, drops_tokens: false, ..self.pass(index, Activations::All) };
        let own = self.own_inputs(unit, whole, &shared.parallel).map_err(failed)?;
        let output_grad = match self.is_last(index) {
            true => None,
            false => Some(own_rows(&weights_like(&expected.output), &shared.parallel).map_err(failed)?),
        };
        let found = own.compute(unit, &shared, output_grad.as_ref()).map_err(failed)?;

        let pairs = self.pair_up(index, found, &expected, &shared.parallel).map_err(failed)?;
        let wrong = pairs.iter().position(|pair| !is_close(&pair.found, &pair.expected));
        // All ranks agree on the first one that any of them has found.
        match self.ranks.first_on_any_rank(wrong)? {
            Some((first, _)) => Err(Error::Options(format!(
                "unit {}: {} differs if {} ranks share the layer; check where its activations are whole or split, and how its \
                 parameters are placed",
                unit.name(),
                pairs[first].what,
                self.ranks.tensor.size(),
            ))),
            None => Ok(expected.output),
        }
    }

    /// This rank's part of what a unit computes from.
    fn own_inputs<'a>(
        &self,
        unit: &Unit,
        whole: &Inputs<'a>,
        parallel: &TensorParallel,
    ) -> shardwise_model::Result<Inputs<'a>> {
        let place = self.layer_place();
        let own = |(tensor, parameter): (&Tensor, &Parameter)| own_part(tensor, parameter, place);
        let tied_parameter = unit.tied().map(|tied| &self.model.units()[tied.unit].parameters()[tied.parameter]);
        Ok(Inputs {
            parameters: whole
                .parameters
                .iter()
                .zip(unit.parameters())
                .map(own)
                .collect::<shardwise_model::Result<_>>()?,
            tied: whole.tied.as_ref().zip(tied_parameter).map(own).transpose()?,
            input: whole.input.as_ref().map(|input| own_rows(input, parallel)).transpose()?,
            batch: whole.batch,
        })
    }

    /// Pairs what the ranks have computed together with this rank's part of what one rank has computed: the output, the gradients of
    /// parameters, that of the input.
    fn pair_up(
        &self,
        index: usize,
        found: Computed,
        expected: &Computed,
        parallel: &TensorParallel,
    ) -> shardwise_model::Result<Vec<Pair>> {
        let place = self.layer_place();
        let own_output = match self.is_last(index) {
            true => expected.output.shallow_clone(),
            false => own_rows(&expected.output, parallel)?,
        };
        let mut pairs = vec![Pair { what: "the output".to_string(), found: found.output, expected: own_output }];
        let parameters = self.model.units()[index].parameters().iter();
        for ((parameter, found), expected) in parameters.zip(found.parameter_grads).zip(&expected.parameter_grads) {
            let is_sum =
                parameter.is_replicated(place.tensor) && !parameter.has_same_gradient(parallel.splits_sequence());
            pairs.push(Pair {
                what: format!("the gradient of {} {:?}", parameter.name, parameter.shape),
                found: if is_sum { parallel.all_reduce(&found)? } else { found },
                expected: own_part(expected, parameter, place)?,
            });
        }
        if let (Some(found), Some(expected)) = (found.input_grad, &expected.input_grad) {
            let expected = own_rows(expected, parallel)?;
            pairs.push(Pair { what: "the gradient of the input".to_string(), found, expected });
        }
        Ok(pairs)
    }

    /// Whether a unit is the last one, whose output is the loss, which no rank has only a part of.
    fn is_last(&self, index: usize) -> bool {
        index + 1 == self.model.units().len()
    }
}

impl Inputs<'_> {
    /// A forward and a backward pass. Without a gradient of the output, its elements have fixed weights.
    fn compute(&self, unit: &Unit, pass: &Pass, output_grad: Option<&Tensor>) -> shardwise_model::Result<Computed> {
        let leaf = |tensor: &Tensor| tensor.detach().set_requires_grad(tensor.kind() == Kind::Double);
        let parameters: Vec<Tensor> = self.parameters.iter().map(leaf).collect();
        let (tied, input) = (self.tied.as_ref().map(leaf), self.input.as_ref().map(leaf));
        let output = unit.forward(&parameters, tied.as_ref(), input.as_ref(), self.batch, pass)?;
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
}

/// The part of a parameter, or of its gradient, that a rank keeps.
fn own_part(whole: &Tensor, parameter: &Parameter, place: LayerPlace) -> shardwise_model::Result<Tensor> {
    match parameter.kept_slice(place) {
        Some(slice) => Ok(cut(whole, &slice)?.f_contiguous()?),
        None => Ok(whole.shallow_clone()),
    }
}

/// This rank's rows of activations, with sequence parallelism; otherwise all rows.
fn own_rows(whole: &Tensor, parallel: &TensorParallel) -> shardwise_model::Result<Tensor> {
    match parallel.splits_sequence() && whole.dim() > 1 {
        true => parallel.partition(whole),
        false => Ok(whole.shallow_clone()),
    }
}

/// A parameter's values in f64, the same on all ranks, and none of them zero.
fn initial_values(parameter: &Parameter) -> Tensor {
    let random = Parameter { init: shardwise_model::Init::Normal { std: 0.3 }, ..parameter.clone() };
    let mut elements = vec![0f64; parameter.elements()];
    init::fill(1, &random, 0..parameter.elements(), FloatsMut::F64(&mut elements)).expect("a distribution has a seed");
    Tensor::from_slice(&elements).view(&parameter.shape[..])
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
