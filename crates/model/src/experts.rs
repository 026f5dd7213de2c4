//! The experts of a mixture, each of which multiplies the rows of the tokens that chose it.
//!
//! Rows are sorted by expert, so that each expert multiplies consecutive rows (PyTorch: `torch._grouped_mm`). The sort is stable, and the
//! outputs of a token's experts are added in the order of its choice, so the results are the same bit for bit whenever they are computed
//! again.
//!
//! Experts are one autograd function. It keeps what the two first matrices of an expert return, and neither the sorted inputs nor the
//! outputs: the gradient of a weight follows from the gradient before the last matrix, so no output is needed.

use std::sync::{Arc, Mutex, PoisonError};

use shardwise_torch::autograd::{self, Backward, ClosureError, Forward};
use shardwise_torch::tch::{Kind, TchError, Tensor, no_grad};

use crate::{DeferredGradients, Result};

/// Counts the tokens of each expert. Clones share the counts.
#[derive(Clone, Default)]
pub struct ExpertTokens(Arc<Mutex<Vec<u64>>>);

impl ExpertTokens {
    /// The number of tokens by expert; empty if no layer with experts has counted.
    pub fn counts(&self) -> Vec<u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Adds the tokens of each expert.
    pub(crate) fn add(&self, counts: &[i64]) {
        let mut sums = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sums.resize(counts.len(), 0);
        sums.iter_mut().zip(counts).for_each(|(sum, &count)| *sum += count as u64);
    }
}

type Tch<T> = std::result::Result<T, TchError>;

/// Which row goes to which expert. A token has a row for each of its experts.
pub(crate) struct Dispatch {
    /// By sorted row: the row's index before sorting.
    order: Tensor,
    /// By sorted row: its token.
    tokens: Tensor,
    /// By row: its index after sorting.
    inverse: Tensor,
    /// By expert: the number of its rows.
    counts: Vec<i64>,
    experts_per_token: i64,
}

impl Dispatch {
    /// Sorts rows by expert; `experts` has those of each token (tokens, experts per token).
    pub(crate) fn new(experts: &Tensor, num_experts: usize) -> Result<Dispatch> {
        let experts_per_token = experts.size()[1];
        let flat = experts.f_reshape([-1])?;
        let order = flat.f_sort_stable(true, 0, false)?.1;
        let mut inverse = order.f_empty_like()?;
        let _ =
            inverse.f_scatter_(0, &order, &Tensor::f_arange(flat.numel() as i64, (Kind::Int64, order.device()))?)?;
        let tokens = order.f_floor_divide_scalar(experts_per_token)?;
        // On a device, this is the only time that the host waits.
        let counts = Vec::<i64>::try_from(&flat.f_bincount(None::<&Tensor>, num_experts as i64)?)?;
        Ok(Dispatch { order, tokens, inverse, counts, experts_per_token })
    }

    /// By expert: the number of its rows.
    pub(crate) fn counts(&self) -> &[i64] {
        &self.counts
    }

    /// The rows of each expert, one after the other.
    fn sort(&self, tokens: &Tensor) -> Tch<Tensor> {
        tokens.f_index_select(0, &self.tokens)
    }

    /// Sorted rows by token (tokens, experts per token, features).
    fn by_token(&self, rows: &Tensor) -> Tch<Tensor> {
        rows.f_index_select(0, &self.inverse)?.f_view([-1, self.experts_per_token, rows.size()[1]])
    }

    /// The experts that have rows, with the range of their rows.
    fn ranges(&self) -> impl Iterator<Item = (i64, i64, i64)> {
        let mut start = 0;
        self.counts.iter().enumerate().filter_map(move |(expert, &count)| {
            let first = start;
            start += count;
            (count > 0).then_some((expert as i64, first, count))
        })
    }

    /// The products of sorted rows with their expert's matrix, of shape (input, output).
    fn multiply(&self, rows: &Tensor, matrices: &Tensor) -> Tch<Tensor> {
        let product = Tensor::f_empty([rows.size()[0], matrices.size()[2]], (rows.kind(), rows.device()))?;
        for (expert, first, count) in self.ranges() {
            let _ = rows
                .f_narrow(0, first, count)?
                .f_mm_out(&product.f_narrow(0, first, count)?, &matrices.f_select(0, expert)?)?;
        }
        Ok(product)
    }

    /// Adds such products to `sum`.
    fn add_product(&self, sum: &Tensor, rows: &Tensor, matrices: &Tensor) -> Tch<()> {
        for (expert, first, count) in self.ranges() {
            let (part, rows) = (sum.f_narrow(0, first, count)?, rows.f_narrow(0, first, count)?);
            let _ = part.f_addmm_out(&part, &rows, &matrices.f_select(0, expert)?)?;
        }
        Ok(())
    }

    /// The gradient of the experts' matrices of shape (output, input), from those of their outputs, and their inputs.
    fn gradient(&self, output_grads: &Tensor, inputs: &Tensor) -> Tch<Tensor> {
        let shape = [self.counts.len() as i64, output_grads.size()[1], inputs.size()[1]];
        let gradient = Tensor::f_empty(shape, (inputs.kind(), inputs.device()))?;
        for (expert, _) in self.counts.iter().enumerate().filter(|(_, count)| **count == 0) {
            let _ = gradient.f_select(0, expert as i64)?.f_zero_()?;
        }
        for (expert, first, count) in self.ranges() {
            let (output_grads, inputs) = (output_grads.f_narrow(0, first, count)?, inputs.f_narrow(0, first, count)?);
            let _ = output_grads.f_transpose(0, 1)?.f_mm_out(&gradient.f_select(0, expert)?, &inputs)?;
        }
        Ok(gradient)
    }

    fn shallow_clone(&self) -> Dispatch {
        Dispatch {
            order: self.order.shallow_clone(),
            tokens: self.tokens.shallow_clone(),
            inverse: self.inverse.shallow_clone(),
            counts: self.counts.clone(),
            experts_per_token: self.experts_per_token,
        }
    }
}

/// The matrices of all experts: an expert, outputs, inputs. Each with where the backward pass puts its gradient aside.
pub(crate) struct ExpertWeights<'a> {
    pub(crate) gate_proj: ExpertWeight<'a>,
    pub(crate) up_proj: ExpertWeight<'a>,
    pub(crate) down_proj: ExpertWeight<'a>,
}

pub(crate) type ExpertWeight<'a> = (&'a Tensor, Option<(usize, DeferredGradients)>);

impl ExpertWeights<'_> {
    /// The outputs of each token's experts, weighted and added. `x` has a row for each token, and `weights` one with a column for each of
    /// its experts, in the same dtype.
    pub(crate) fn apply(&self, x: &Tensor, weights: &Tensor, dispatch: &Dispatch) -> Result<Tensor> {
        let ExpertWeights { gate_proj, up_proj, down_proj } = self;
        let inputs = [x, weights, gate_proj.0, up_proj.0, down_proj.0];
        let (output, gate, up) = no_grad(|| {
            let rows = dispatch.sort(x)?;
            let gate = dispatch.multiply(&rows, &gate_proj.0.f_transpose(1, 2)?)?;
            let up = dispatch.multiply(&rows, &up_proj.0.f_transpose(1, 2)?)?;
            drop(rows);
            let gated = gate.f_silu()?.f_mul_(&up)?;
            let outputs = dispatch.multiply(&gated, &down_proj.0.f_transpose(1, 2)?)?;
            drop(gated);
            let outputs = dispatch.by_token(&outputs)?;
            let output = weights.f_unsqueeze(1)?.f_bmm(&outputs)?.f_squeeze_dim(1)?;
            Ok::<_, TchError>((output, gate, up))
        })?;
        if !inputs.iter().any(|input| input.requires_grad()) {
            return Ok(output);
        }
        let function = Experts {
            dispatch: dispatch.shallow_clone(),
            has_grad: inputs.map(Tensor::requires_grad),
            deferred: [gate_proj, up_proj, down_proj].map(|(_, deferred)| deferred.clone()),
        };
        // Dropped once they have been used, so that the backward pass frees them as it proceeds.
        let kept = Mutex::new(Some([gate, up]));
        let mut outputs = autograd::function(
            "experts",
            &inputs,
            |inputs| {
                let saved = inputs.iter().map(|input| input.shallow_clone()).collect();
                Ok(Forward { outputs: vec![output], saved })
            },
            move |back| {
                let kept = kept.lock().unwrap_or_else(PoisonError::into_inner).take();
                function.backward(back, kept.ok_or("their graph can be walked only once")?)
            },
        )?;
        Ok(outputs.remove(0))
    }
}

/// What the backward pass of experts needs besides tensors.
struct Experts {
    dispatch: Dispatch,
    /// Of the inputs: tokens, their weights, and the three matrices.
    has_grad: [bool; 5],
    /// Where the gradients of the matrices are put aside.
    deferred: [Option<(usize, DeferredGradients)>; 3],
}

impl Experts {
    fn backward(
        &self,
        mut back: Backward,
        [gate, up]: [Tensor; 2],
    ) -> std::result::Result<Vec<Option<Tensor>>, ClosureError> {
        let Some(grad) = back.grads.remove(0) else { return Ok((0..5).map(|_| None).collect()) };
        let dispatch = &self.dispatch;
        let [x_has_grad, weights_have_grad, gate_has_grad, up_has_grad, down_has_grad] = self.has_grad;
        let [x, weights, gate_proj, up_proj, down_proj] = [0, 1, 2, 3, 4].map(|index| &back.saved[index]);
        // Without the weights of outputs, which come next.
        let mut gated_grads = dispatch.multiply(&dispatch.sort(&grad)?, down_proj)?;
        let opened = gate.f_silu()?;
        let gated = opened.f_mul(&up)?;
        let weights_grad = match weights_have_grad {
            true => {
                let sums = gated_grads.f_mul(&gated)?.f_sum_dim_intlist([1i64].as_slice(), false, gated.kind())?;
                Some(sums.f_index_select(0, &dispatch.inverse)?.f_view_as(weights)?)
            }
            false => None,
        };
        let row_weights = weights.f_reshape([-1])?.f_index_select(0, &dispatch.order)?.f_unsqueeze(1)?;
        let down_grad = self.matrix_gradient(2, down_has_grad, {
            let row_weights = row_weights.shallow_clone();
            move |dispatch| dispatch.gradient(&dispatch.sort(&grad)?.f_mul_(&row_weights)?, &gated)
        })?;
        let _ = gated_grads.f_mul_(&row_weights)?;
        let up_rows = gated_grads.f_mul(&opened)?;
        drop(opened);
        let gate_rows = gate.f_silu_backward(&gated_grads.f_mul_(&up)?)?;
        drop((gated_grads, gate, up));
        let x_grad = match x_has_grad {
            true => {
                let rows = dispatch.multiply(&gate_rows, gate_proj)?;
                dispatch.add_product(&rows, &up_rows, up_proj)?;
                Some(dispatch.by_token(&rows)?.f_sum_dim_intlist([1i64].as_slice(), false, rows.kind())?)
            }
            false => None,
        };
        let [x, same_x] = [x.f_detach()?, x.f_detach()?];
        let up_grad =
            self.matrix_gradient(1, up_has_grad, move |dispatch| dispatch.gradient(&up_rows, &dispatch.sort(&x)?))?;
        let gate_grad = self.matrix_gradient(0, gate_has_grad, move |dispatch| {
            dispatch.gradient(&gate_rows, &dispatch.sort(&same_x)?)
        })?;
        Ok(vec![x_grad, weights_grad, gate_grad, up_grad, down_grad])
    }

    /// The gradient of one of the matrices, unless it is put aside. What `compute` holds until then has rows of tokens rather than sorted
    /// ones, of which there are several times as many.
    fn matrix_gradient(
        &self,
        matrix: usize,
        has_grad: bool,
        compute: impl FnOnce(&Dispatch) -> Tch<Tensor> + Send + 'static,
    ) -> Tch<Option<Tensor>> {
        if !has_grad {
            return Ok(None);
        }
        match &self.deferred[matrix] {
            Some((parameter, deferred)) => {
                let dispatch = self.dispatch.shallow_clone();
                deferred.defer(*parameter, move || Ok(compute(&dispatch)?));
                Ok(None)
            }
            None => compute(&self.dispatch).map(Some),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use shardwise_torch::autograd::Graph;
    use shardwise_torch::tch::{Device, manual_seed};

    use super::*;

    /// The same, token by token, with plain autograd.
    fn slow(x: &Tensor, weights: &Tensor, experts: &[[i64; 2]], [gate, up, down]: [&Tensor; 3]) -> Tensor {
        let of_token = |token: usize| {
            let row = x.get(token as i64);
            let outputs = experts[token].iter().enumerate().map(|(choice, &expert)| {
                let gated = gate.get(expert).mv(&row).silu() * up.get(expert).mv(&row);
                down.get(expert).mv(&gated) * weights.get(token as i64).get(choice as i64)
            });
            outputs.reduce(|sum, output| sum + output).unwrap()
        };
        Tensor::stack(&(0..experts.len()).map(of_token).collect::<Vec<_>>(), 0)
    }

    #[test]
    fn experts_multiply_the_rows_of_their_tokens() {
        manual_seed(5);
        let random = |shape: &[i64]| Tensor::randn(shape, (Kind::Double, Device::Cpu)).set_requires_grad(true);
        // One expert gets no tokens, and in the second case another one gets all.
        for experts in [vec![[0, 3], [3, 1], [1, 0], [0, 1], [3, 0]], vec![[2, 1]; 5]] {
            let [x, weights] = [random(&[5, 6]), random(&[5, 2])];
            let [gate, up, down] = [random(&[4, 7, 6]), random(&[4, 7, 6]), random(&[4, 6, 7])];
            let expected = slow(&x, &weights, &experts, [&gate, &up, &down]);
            let dispatch = Dispatch::new(&Tensor::from_slice(&experts.concat()).view([5, 2]), 4).unwrap();
            assert_eq!(dispatch.counts().iter().sum::<i64>(), 10);
            let matrices = ExpertWeights { gate_proj: (&gate, None), up_proj: (&up, None), down_proj: (&down, None) };
            let output = matrices.apply(&x, &weights, &dispatch).unwrap();
            assert!((&output - &expected).abs().max().double_value(&[]) < 1e-13);
            let output_grad = Tensor::randn([5, 6], (Kind::Double, Device::Cpu));
            let inputs = [&x, &weights, &gate, &up, &down];
            let grads = |of: &Tensor| autograd::grad(&[of], &[Some(&output_grad)], &inputs, Graph::Free).unwrap();
            for (ours, theirs) in grads(&output).into_iter().zip(grads(&expected)) {
                assert!((ours.unwrap() - theirs.unwrap()).abs().max().double_value(&[]) < 1e-12);
            }
        }
    }
}
