//! The experts of a mixture, each of which multiplies the rows of the tokens that chose it.
//!
//! Rows are sorted by expert, so that each expert multiplies consecutive rows (PyTorch: `torch._grouped_mm`). The sort is stable, and the
//! outputs of a token's experts are added in the order of its choice, so the results are the same bit for bit whenever they are computed
//! again.
//!
//! Experts are one autograd function. It keeps what the two first matrices of an expert return, and not the outputs: the gradient of a
//! weight follows from the gradient before the last matrix, so no output is needed. Nor does it keep the sorted inputs, unless they have come
//! from other ranks (expert parallelism, [`crate::expert_parallel`]).

use std::sync::{Arc, Mutex, PoisonError};

use shardwise_torch::autograd::{self, Backward, ClosureError, Forward};
use shardwise_torch::tch::{Kind, TchError, Tensor, no_grad};

use crate::expert_parallel::{ExpertParallel, RowRoutes};
use crate::{DeferredGradients, Error, PendingTensor, Result};

/// Counts the tokens that choose each expert. Clones share the counts.
#[derive(Clone, Default)]
pub struct ExpertTokens(Arc<Mutex<Counts>>);

#[derive(Default)]
struct Counts {
    chosen: Vec<u64>,
    dropped: u64,
}

impl ExpertTokens {
    /// The number of tokens by expert; empty if no layer with experts has counted.
    pub fn counts(&self) -> Vec<u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).chosen.clone()
    }

    /// How many of them the experts had no capacity for.
    pub fn dropped(&self) -> u64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).dropped
    }

    /// Adds the tokens that have chosen each expert, and those that it has processed.
    pub fn add(&self, chosen: &[i64], processed: &[i64]) {
        let mut sums = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sums.chosen.resize(chosen.len(), 0);
        sums.chosen.iter_mut().zip(chosen).for_each(|(sum, &count)| *sum += count as u64);
        sums.dropped += (chosen.iter().sum::<i64>() - processed.iter().sum::<i64>()) as u64;
    }
}

type Tch<T> = std::result::Result<T, TchError>;

/// Which row goes to which expert. A token has a row for each of its experts, unless it was dropped there.
pub(crate) struct Dispatch {
    /// By sorted row: the row's index before sorting.
    order: Tensor,
    /// By sorted row: its token.
    tokens: Tensor,
    /// By row: its index after sorting. For a dropped one, the index after the last.
    inverse: Tensor,
    /// Whether rows were dropped.
    drops_rows: bool,
    /// Which ranks have the experts.
    routes: RowRoutes,
    experts_per_token: i64,
}

impl Dispatch {
    /// Sorts rows by expert; `experts` has those of each token (tokens, experts per token), or `num_experts` where it was dropped.
    pub(crate) fn new(experts: &Tensor, num_experts: usize, parallel: &ExpertParallel) -> Result<Dispatch> {
        let experts_per_token = experts.size()[1];
        let flat = experts.f_reshape([-1])?;
        let mut order = flat.f_sort_stable(true, 0, false)?.1;
        let mut inverse = order.f_empty_like()?;
        let _ =
            inverse.f_scatter_(0, &order, &Tensor::f_arange(flat.numel() as i64, (Kind::Int64, order.device()))?)?;
        let num_experts = num_experts as i64;
        let counts = flat.f_bincount(None::<&Tensor>, num_experts)?.f_narrow(0, 0, num_experts)?;
        let routes = parallel.route_rows(&counts)?;
        // Rows that were dropped come last.
        let kept = routes.own().iter().sum::<i64>();
        let drops_rows = kept < flat.numel() as i64;
        if drops_rows {
            order = order.f_narrow(0, 0, kept)?;
            inverse = inverse.f_clamp_max(kept)?;
        }
        let tokens = order.f_floor_divide_scalar(experts_per_token)?;
        Ok(Dispatch { order, tokens, inverse, drops_rows, routes, experts_per_token })
    }

    /// By expert: the number of rows of this rank's tokens, without those that were dropped.
    pub(crate) fn counts(&self) -> &[i64] {
        self.routes.own()
    }

    /// The rows of each expert, one after the other.
    fn sort(&self, tokens: &Tensor) -> Tch<Tensor> {
        tokens.f_index_select(0, &self.tokens)
    }

    /// What belongs to rows, sorted by expert.
    fn sort_rows(&self, rows: &Tensor) -> Tch<Tensor> {
        rows.f_reshape([-1])?.f_index_select(0, &self.order)?.f_unsqueeze(1)
    }

    /// Sorted rows by token (tokens, experts per token, features). Those that were dropped are 0.
    fn by_token(&self, rows: &Tensor) -> Tch<Tensor> {
        let (tokens, features) = (self.inverse.numel() as i64 / self.experts_per_token, rows.size()[1]);
        let of_tokens = match self.drops_rows {
            true => Tensor::f_cat(&[rows, &rows.f_new_zeros([1, features], (rows.kind(), rows.device()))?], 0)?
                .f_index_select(0, &self.inverse)?,
            false => rows.f_index_select(0, &self.inverse)?,
        };
        of_tokens.f_view([tokens, self.experts_per_token, features])
    }

    /// The experts of this rank that have rows, with the range of their rows.
    fn ranges(&self) -> impl Iterator<Item = (i64, i64, i64)> {
        let mut start = 0;
        self.routes.here().iter().enumerate().filter_map(move |(expert, &count)| {
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
        let counts = self.routes.here();
        let shape = [counts.len() as i64, output_grads.size()[1], inputs.size()[1]];
        let gradient = Tensor::f_empty(shape, (inputs.kind(), inputs.device()))?;
        for (expert, _) in counts.iter().enumerate().filter(|(_, count)| **count == 0) {
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
            drops_rows: self.drops_rows,
            routes: self.routes.shallow_clone(),
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
    /// its experts, in the same dtype. While rows travel to other ranks, computes `meanwhile`, and returns its result, too.
    pub(crate) fn apply<T>(
        &self,
        x: &Tensor,
        weights: &Tensor,
        dispatch: &Dispatch,
        meanwhile: impl FnOnce() -> Result<T>,
    ) -> Result<(Tensor, T)> {
        let ExpertWeights { gate_proj, up_proj, down_proj } = self;
        let (inputs, routes) = ([x, weights, gate_proj.0, up_proj.0, down_proj.0], &dispatch.routes);
        let sent = no_grad(|| routes.start_send(dispatch.sort(x)?)).map_err(failed)?;
        let other = meanwhile()?;
        let compute = || {
            let rows = sent()?;
            let gate = dispatch.multiply(&rows, &gate_proj.0.f_transpose(1, 2)?)?;
            let up = dispatch.multiply(&rows, &up_proj.0.f_transpose(1, 2)?)?;
            // What has come from other ranks cannot be sorted again.
            let rows = Some(rows).filter(|_| routes.is_shared());
            let gated = gate.f_silu()?.f_mul_(&up)?;
            let outputs = dispatch.multiply(&gated, &down_proj.0.f_transpose(1, 2)?)?;
            drop(gated);
            let outputs = routes.start_return(outputs)?()?;
            let outputs = dispatch.by_token(&outputs)?;
            let output = weights.f_unsqueeze(1)?.f_bmm(&outputs)?.f_squeeze_dim(1)?;
            Ok((output, Kept { rows, gate, up }))
        };
        let (output, kept) = no_grad(compute).map_err(failed)?;
        if !inputs.iter().any(|input| input.requires_grad()) {
            return Ok((output, other));
        }
        let function = Experts {
            dispatch: dispatch.shallow_clone(),
            has_grad: inputs.map(Tensor::requires_grad),
            deferred: [gate_proj, up_proj, down_proj].map(|(_, deferred)| deferred.clone()),
        };
        // Dropped once they have been used, so that the backward pass frees them as it proceeds.
        let kept = Mutex::new(Some(kept));
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
        Ok((outputs.remove(0), other))
    }
}

/// An error of the computation, or of the communication in between.
fn failed(error: ClosureError) -> Error {
    match error.downcast::<TchError>() {
        Ok(error) => (*error).into(),
        Err(error) => Error::Communication(error),
    }
}

/// What experts keep for their backward pass.
struct Kept {
    /// Their inputs, if they have come from other ranks.
    rows: Option<Tensor>,
    gate: Tensor,
    up: Tensor,
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
    fn backward(&self, mut back: Backward, kept: Kept) -> std::result::Result<Vec<Option<Tensor>>, ClosureError> {
        let Some(grad) = back.grads.remove(0) else { return Ok((0..5).map(|_| None).collect()) };
        let (dispatch, Kept { rows, gate, up }) = (&self.dispatch, kept);
        let [x_has_grad, weights_have_grad, gate_has_grad, up_has_grad, down_has_grad] = self.has_grad;
        let [x, weights, gate_proj, up_proj, down_proj] = [0, 1, 2, 3, 4].map(|index| &back.saved[index]);
        let (output_grads, row_weights) = self.output_grads(grad, weights)?;
        // Without the weights of outputs, which come next.
        let mut gated_grads = dispatch.multiply(&output_grads.sorted(dispatch)?, down_proj)?;
        let opened = gate.f_silu()?;
        let gated = opened.f_mul(&up)?;
        let weights_grad = match weights_have_grad {
            true => Some(gated_grads.f_mul(&gated)?.f_sum_dim_intlist([1i64].as_slice(), true, gated.kind())?),
            false => None,
        };
        let down_grad = self.matrix_gradient(2, down_has_grad, {
            let row_weights = row_weights.shallow_clone();
            move |dispatch| dispatch.gradient(&output_grads.sorted(dispatch)?.f_mul_(&row_weights)?, &gated)
        })?;
        let _ = gated_grads.f_mul_(&row_weights)?;
        let up_rows = gated_grads.f_mul(&opened)?;
        drop(opened);
        let gate_rows = gate.f_silu_backward(&gated_grads.f_mul_(&up)?)?;
        drop((gated_grads, gate, up));
        let row_grads = match x_has_grad {
            true => {
                let rows = dispatch.multiply(&gate_rows, gate_proj)?;
                dispatch.add_product(&rows, &up_rows, up_proj)?;
                Some(rows)
            }
            false => None,
        };
        let returning = ReturningGrads::start([row_grads, weights_grad], dispatch)?;
        let inputs = match rows {
            Some(rows) => Rows::Received(rows),
            None => Rows::OfTokens(x.f_detach()?),
        };
        let same_inputs = inputs.shallow_clone();
        let up_grad = self
            .matrix_gradient(1, up_has_grad, move |dispatch| dispatch.gradient(&up_rows, &inputs.sorted(dispatch)?))?;
        let gate_grad = self.matrix_gradient(0, gate_has_grad, move |dispatch| {
            dispatch.gradient(&gate_rows, &same_inputs.sorted(dispatch)?)
        })?;
        let [x_grad, weights_grad] = returning.wait(dispatch)?;
        Ok(vec![x_grad, weights_grad, gate_grad, up_grad, down_grad])
    }

    /// The gradients of the outputs of this rank's experts, and the weights that the outputs have, from the gradient of the output.
    fn output_grads(&self, grad: Tensor, weights: &Tensor) -> std::result::Result<(Rows, Tensor), ClosureError> {
        let row_weights = self.dispatch.sort_rows(weights)?;
        if !self.dispatch.routes.is_shared() {
            return Ok((Rows::OfTokens(grad), row_weights));
        }
        let features = grad.size()[1];
        let both = Tensor::f_cat(&[self.dispatch.sort(&grad)?, row_weights], 1)?;
        let received = self.dispatch.routes.start_send(both)?()?;
        let row_weights = received.f_narrow(1, features, 1)?.f_contiguous()?;
        Ok((Rows::Received(received.f_narrow(1, 0, features)?), row_weights))
    }

    /// The gradient of one of the matrices, unless it is put aside. What `compute` holds until then has rows of tokens rather than sorted
    /// ones, of which there are several times as many, unless they have come from other ranks.
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

/// Rows of this rank's experts.
enum Rows {
    /// Those of tokens, which are sorted when they are needed: there are several times as many rows as tokens.
    OfTokens(Tensor),
    /// Sorted ones that have come from other ranks.
    Received(Tensor),
}

impl Rows {
    fn sorted(&self, dispatch: &Dispatch) -> Tch<Tensor> {
        match self {
            Rows::OfTokens(tokens) => dispatch.sort(tokens),
            Rows::Received(rows) => Ok(rows.shallow_clone()),
        }
    }

    fn shallow_clone(&self) -> Rows {
        match self {
            Rows::OfTokens(tokens) => Rows::OfTokens(tokens.shallow_clone()),
            Rows::Received(rows) => Rows::Received(rows.shallow_clone()),
        }
    }
}

/// The gradients of rows and those of their weights, if they are needed, on their way to the tokens.
enum ReturningGrads {
    /// They have arrived: the gradients of tokens, and of the weights of their experts.
    Arrived([Option<Tensor>; 2]),
    /// They come from the ranks that have the experts, as columns of one tensor.
    Travelling {
        pending: PendingTensor,
        /// How many columns each has.
        columns: [Option<i64>; 2],
    },
}

impl ReturningGrads {
    fn start(grads: [Option<Tensor>; 2], dispatch: &Dispatch) -> std::result::Result<Self, ClosureError> {
        let columns = [0, 1].map(|index| Some(grads[index].as_ref()?.size()[1]));
        if columns == [None, None] || !dispatch.routes.is_shared() {
            return Ok(ReturningGrads::Arrived(sum_by_token(grads, dispatch)?));
        }
        let joined = Tensor::f_cat(&grads.iter().flatten().collect::<Vec<_>>(), 1)?;
        drop(grads);
        let pending = dispatch.routes.start_return(joined)?;
        Ok(ReturningGrads::Travelling { pending, columns })
    }

    fn wait(self, dispatch: &Dispatch) -> std::result::Result<[Option<Tensor>; 2], ClosureError> {
        match self {
            ReturningGrads::Arrived(grads) => Ok(grads),
            ReturningGrads::Travelling { pending, columns } => {
                let (received, mut first) = (pending()?, 0);
                let mut grads = [None, None];
                for (grad, columns) in grads.iter_mut().zip(columns) {
                    let Some(columns) = columns else { continue };
                    *grad = Some(received.f_narrow(1, first, columns)?);
                    first += columns;
                }
                Ok(sum_by_token(grads, dispatch)?)
            }
        }
    }
}

/// The gradients of tokens, from those of their sorted rows, and those of the weights of their experts.
fn sum_by_token([rows, weights]: [Option<Tensor>; 2], dispatch: &Dispatch) -> Tch<[Option<Tensor>; 2]> {
    let sum = |rows: Tensor| dispatch.by_token(&rows)?.f_sum_dim_intlist([1i64].as_slice(), false, rows.kind());
    let of_weights = |weights: Tensor| dispatch.by_token(&weights)?.f_squeeze_dim(2);
    Ok([rows.map(sum).transpose()?, weights.map(of_weights).transpose()?])
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
            let chosen = experts[token].iter().enumerate().filter(|(_, expert)| **expert < 4);
            let outputs = chosen.map(|(choice, &expert)| {
                let gated = gate.get(expert).mv(&row).silu() * up.get(expert).mv(&row);
                down.get(expert).mv(&gated) * weights.get(token as i64).get(choice as i64)
            });
            outputs.fold(row.zeros_like(), |sum, output| sum + output)
        };
        Tensor::stack(&(0..experts.len()).map(of_token).collect::<Vec<_>>(), 0)
    }

    #[test]
    fn experts_multiply_the_rows_of_their_tokens() {
        manual_seed(5);
        let random = |shape: &[i64]| Tensor::randn(shape, (Kind::Double, Device::Cpu)).set_requires_grad(true);
        // One expert gets no tokens, in the second case another one gets all, and in the third tokens are dropped.
        for experts in [
            vec![[0, 3], [3, 1], [1, 0], [0, 1], [3, 0]],
            vec![[2, 1]; 5],
            vec![[0, 3], [4, 4], [1, 4], [0, 1], [4, 3]],
        ] {
            let [x, weights] = [random(&[5, 6]), random(&[5, 2])];
            let [gate, up, down] = [random(&[4, 7, 6]), random(&[4, 7, 6]), random(&[4, 6, 7])];
            let expected = slow(&x, &weights, &experts, [&gate, &up, &down]);
            let routed = Tensor::from_slice(&experts.concat()).view([5, 2]);
            let dispatch = Dispatch::new(&routed, 4, &ExpertParallel::none()).unwrap();
            assert_eq!(
                dispatch.counts().iter().sum::<i64>(),
                experts.concat().iter().filter(|expert| **expert < 4).count() as i64
            );
            let matrices = ExpertWeights { gate_proj: (&gate, None), up_proj: (&up, None), down_proj: (&down, None) };
            let (output, ()) = matrices.apply(&x, &weights, &dispatch, || Ok(())).unwrap();
            assert!((&output - &expected).abs().max().double_value(&[]) < 1e-13);
            let output_grad = Tensor::randn([5, 6], (Kind::Double, Device::Cpu));
            let inputs = [&x, &weights, &gate, &up, &down];
            let grads = |of: &Tensor| autograd::grad(&[of], &[Some(&output_grad)], &inputs, Graph::Free).unwrap();
            for (ours, theirs) in grads(&output).into_iter().zip(grads(&expected)) {
                let theirs = theirs.unwrap_or_else(|| ours.as_ref().unwrap().zeros_like());
                assert!((ours.unwrap() - theirs).abs().max().double_value(&[]) < 1e-12);
            }
        }
    }
}
