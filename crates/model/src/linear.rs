//! Linear layers whose weight gradients can be computed later than the gradients of their inputs.
//!
//! A zero-bubble pipeline splits a unit's backward pass: the stage before waits for the gradient of the input only, so the gradients
//! of the weights can fill a bubble (Qi et al., "Zero Bubble Pipeline Parallelism"). A matrix product is the only operation for
//! which this pays. So a linear layer in such a pass puts aside what its weight gradient needs, and everything else is computed in
//! the first half. The product that is computed later is the one that autograd would compute, so its bits are the same.
//!
//! Layers that ranks share use the same to hide communication: while the gradient of an activation travels, the backward pass
//! computes gradients of weights (Megatron-LM: `async_tensor_model_parallel_allreduce`).

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use shardwise_torch::autograd::{self, ClosureError, Forward};
use shardwise_torch::tch::{TchError, Tensor, no_grad};

use crate::Result;

/// Collects the gradients that a unit's backward pass puts aside. Clones share them.
#[derive(Clone, Default)]
pub struct DeferredGradients(Arc<Mutex<Shared>>);

#[derive(Default)]
struct Shared {
    /// In the order of the backward pass.
    waiting: VecDeque<Deferred>,
    computed: Vec<(usize, Tensor)>,
}

/// The index of a parameter, and what computes its gradient.
type Deferred = (usize, Box<dyn FnOnce() -> Result<Tensor> + Send>);

impl DeferredGradients {
    /// Computes the gradient of a parameter, by its index in the unit, in the second half of the backward pass. Call this in a
    /// backward pass, which then returns no gradient for the parameter.
    pub fn defer(&self, parameter: usize, compute: impl FnOnce() -> Result<Tensor> + Send + 'static) {
        self.lock().waiting.push_back((parameter, Box::new(compute)));
    }

    /// Computes what was put aside since the last call: the indices of parameters, and their gradients, in the order of the backward
    /// pass.
    pub fn compute(&self) -> Result<Vec<(usize, Tensor)>> {
        self.compute_all_but(0)?;
        Ok(std::mem::take(&mut self.lock().computed))
    }

    /// Computes what was put aside, except for the last `left`, and keeps it until [`DeferredGradients::compute`] returns it.
    pub(crate) fn compute_all_but(&self, left: usize) -> Result<()> {
        loop {
            let next = {
                let mut shared = self.lock();
                if shared.waiting.len() > left { shared.waiting.pop_front() } else { None }
            };
            let Some((parameter, compute)) = next else { return Ok(()) };
            let gradient = no_grad(compute)?;
            self.lock().computed.push((parameter, gradient));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The order of a weight's dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Orientation {
    /// As in `torch.nn.Linear`.
    OutputByInput,
    /// As in the `Conv1D` of Hugging Face's GPT-2.
    InputByOutput,
}

impl Orientation {
    /// The weight as `torch.nn.Linear` has it.
    fn output_by_input(self, weight: &Tensor) -> std::result::Result<Tensor, TchError> {
        match self {
            Orientation::OutputByInput => Ok(weight.shallow_clone()),
            Orientation::InputByOutput => weight.f_transpose(0, 1),
        }
    }

    /// The gradient of a weight: the product that autograd would compute.
    fn weight_gradient(self, x: &Tensor, output_grad: &Tensor) -> std::result::Result<Tensor, TchError> {
        match self {
            Orientation::OutputByInput => output_grad.f_transpose(0, 1)?.f_mm(x),
            Orientation::InputByOutput => x.f_transpose(0, 1)?.f_mm(output_grad),
        }
    }
}

/// A linear layer of a unit (PyTorch: `torch.nn.Linear`); see [`Parameters::layer`](crate::Parameters::layer).
pub struct Linear<'a> {
    pub(crate) weight: &'a Tensor,
    pub(crate) bias: Option<&'a Tensor>,
    pub(crate) orientation: Orientation,
    /// Where the backward pass puts the gradient of the weight aside, as that of the given parameter.
    pub(crate) deferred: Option<(usize, DeferredGradients)>,
}

impl Linear<'_> {
    /// The product of `x` and the weight, plus the bias.
    pub fn apply(&self, x: &Tensor) -> Result<Tensor> {
        let compute = || x.f_linear(&self.orientation.output_by_input(self.weight)?, self.bias);
        match self.deferred.is_some() && self.weight.requires_grad() {
            true => self.attach(x, no_grad(compute)?, Ok),
            false => Ok(compute()?),
        }
    }

    /// The number of features of the output.
    pub(crate) fn output_features(&self) -> i64 {
        match self.orientation {
            Orientation::OutputByInput => self.weight.size()[0],
            Orientation::InputByOutput => self.weight.size()[1],
        }
    }

    /// Writes the product of some rows to rows of `output`, without autograd.
    pub(crate) fn write(&self, rows: &Tensor, output: &Tensor) -> Result<()> {
        let weight = self.orientation.output_by_input(self.weight)?;
        no_grad(|| rows.f_linear_out(output, &weight, self.bias)).map(drop)?;
        Ok(())
    }

    /// Gives `output`, which was computed from `x`, the backward pass of the layer. `product_grad` turns the gradient of `output` into
    /// that of the product, if they are not the same.
    pub(crate) fn attach(
        &self,
        x: &Tensor,
        output: Tensor,
        product_grad: impl Fn(Tensor) -> std::result::Result<Tensor, ClosureError> + Send + 'static,
    ) -> Result<Tensor> {
        let inputs: Vec<&Tensor> = [x, self.weight].into_iter().chain(self.bias).collect();
        let [x_has_grad, weight_has_grad] = [x, self.weight].map(Tensor::requires_grad);
        let (has_bias, bias_has_grad) = (self.bias.is_some(), self.bias.is_some_and(Tensor::requires_grad));
        let (orientation, deferred) = (self.orientation, self.deferred.clone());
        let mut outputs = autograd::function(
            "linear",
            &inputs,
            |inputs| {
                Ok(Forward { outputs: vec![output], saved: vec![inputs[0].shallow_clone(), inputs[1].shallow_clone()] })
            },
            move |mut back| {
                let Some(grad) = back.grads.remove(0) else {
                    return Ok((0..2 + usize::from(has_bias)).map(|_| None).collect());
                };
                let grad = product_grad(grad)?;
                let [x, weight] = [&back.saved[0], &back.saved[1]];
                let features = |tensor: &Tensor| tensor.size().last().copied().unwrap_or(1);
                let output_grad = grad.f_reshape([-1, features(&grad)])?;
                let x_grad = match x_has_grad {
                    true => Some(output_grad.f_mm(&orientation.output_by_input(weight)?)?.f_view(&x.size()[..])?),
                    false => None,
                };
                let bias_grad = match bias_has_grad {
                    true => Some(output_grad.f_sum_dim_intlist([0i64].as_slice(), false, output_grad.kind())?),
                    false => None,
                };
                let x = x.f_detach()?.f_reshape([-1, features(x)])?;
                let weight_grad = match &deferred {
                    _ if !weight_has_grad => None,
                    Some((parameter, deferred)) => {
                        deferred.defer(*parameter, move || Ok(orientation.weight_gradient(&x, &output_grad)?));
                        None
                    }
                    None => Some(orientation.weight_gradient(&x, &output_grad)?),
                };
                Ok([x_grad, weight_grad].into_iter().chain(has_bias.then_some(bias_grad)).collect())
            },
        )?;
        Ok(outputs.remove(0))
    }
}
