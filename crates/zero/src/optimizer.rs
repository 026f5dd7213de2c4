//! Optimizers on slices.
//!
//! An optimizer sees a run: consecutive elements of one parameter, inside one owner's slice. AdamW and SGD treat each element
//! by itself, so a run is all they need. LAMB scales the update of a whole parameter by norms of that parameter; it sums
//! squares per run, and the ranks add those up.
//!
//! An optimizer of one's own treats each element by itself, and is an [`Elementwise`]. It is called here as AdamW is, so it gives
//! the same bits at every stage, and its numbers are sliced, saved and resumed like AdamW's.

use std::fmt::Debug;
use std::sync::Arc;

use shardwise_torch::Result;
use shardwise_torch::optim::{AdamW, AdamWSlice, adamw_step};
use shardwise_torch::tch::{Kind, TchError, Tensor, no_grad};

/// An optimizer with its numbers.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Optimizer {
    /// Adam with decoupled weight decay, by libtorch's fused kernel.
    AdamW(AdamW),
    /// Stochastic gradient descent with momentum.
    Sgd(Sgd),
    /// Adam's direction, scaled per parameter to the parameter's own norm: for very large batches.
    Lamb(Lamb),
    /// One's own; [`Optimizer::own`] makes it.
    Own(Own),
}

/// An optimizer that treats each element by itself, whatever its neighbours are.
///
/// Sign descent with momentum, as an example:
///
/// ```
/// use shardwise_torch::Result;
/// use shardwise_zero::{Elements, Elementwise, Optimizer};
///
/// #[derive(Debug)]
/// struct SignDescent { beta: f64 }
///
/// impl Elementwise for SignDescent {
///     fn state_names(&self) -> &[&str] {
///         &["momentum"]
///     }
///
///     fn update(&self, elements: Elements) -> Result<()> {
///         let Elements { mut parameters, grads, mut state, rate, .. } = elements;
///         let momentum = state[0].f_lerp_(&grads, 1. - self.beta)?;
///         parameters.f_sub_(&momentum.f_sign()?.f_mul_scalar(rate)?)?;
///         Ok(())
///     }
/// }
///
/// let optimizer = Optimizer::own(SignDescent { beta: 0.9 });
/// assert_eq!(optimizer.states(), 1);
/// ```
pub trait Elementwise: Debug + Send + Sync {
    /// What the numbers are called that it keeps for each element: all f32, and zero at first. Checkpoints have them by these names.
    fn state_names(&self) -> &[&str];

    /// Updates parameters and state in place. It is called for as many elements at a time as is convenient, without a graph.
    fn update(&self, elements: Elements) -> Result<()>;
}

/// Some consecutive elements of one parameter, to be updated; all tensors have one dimension and one length.
#[derive(Debug)]
#[non_exhaustive]
pub struct Elements {
    /// f32, to be changed in place.
    pub parameters: Tensor,
    /// f32, clipped and unscaled.
    pub grads: Tensor,
    /// What the optimizer keeps, in the order of its [`Elementwise::state_names`]; f32, to be changed in place.
    pub state: Vec<Tensor>,
    /// Whether weight decay applies.
    pub decays: bool,
    /// How many updates there have been, this one included.
    pub step: u32,
    /// The learning rate of this step.
    pub rate: f64,
    /// The momentum of this step, where the schedule moves it.
    pub momentum: Option<f64>,
}

/// An optimizer of one's own, at the pace of a step.
#[derive(Clone, Debug)]
pub struct Own {
    optimizer: Arc<dyn Elementwise>,
    rate: f64,
    momentum: Option<f64>,
}

/// SGD's numbers. The same as PyTorch's `torch.optim.SGD` without `dampening` and `nesterov`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    /// The learning rate.
    pub rate: f64,
    /// How much of the last step's direction is kept.
    pub momentum: f64,
    /// Added to the gradient, in proportion to the parameter.
    pub weight_decay: f64,
}

/// LAMB's numbers. Parameters without weight decay (norms and biases) are updated as Adam would.
///
/// Of the variants of LAMB this is Algorithm 2 of its paper (You et al., 2020): both moments are corrected for their bias, weight
/// decay is part of the update whose norm is taken, and the trust ratio is not clipped. It is 1 where either norm is zero. The
/// oracle is `reference/lamb.py`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lamb {
    /// The learning rate.
    pub rate: f64,
    /// The decay of the first moment.
    pub beta1: f64,
    /// The decay of the second moment.
    pub beta2: f64,
    /// Added to the direction, in proportion to the parameter.
    pub weight_decay: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
}

/// A part of a run that is worked on at once, so that what is made on the way is small.
const CHUNK: usize = 1 << 18;

/// Consecutive elements of one parameter, all of one length: f32 parameters, f32 state, gradients of any type.
pub(crate) struct Run<'a> {
    pub(crate) parameters: Tensor,
    pub(crate) grads: Tensor,
    pub(crate) state: Vec<Tensor>,
    /// The step, counted from one: an f32 tensor of one element.
    pub(crate) step: &'a Tensor,
    pub(crate) step_number: u32,
    pub(crate) decays: bool,
    /// What gradients are multiplied by on the way.
    pub(crate) factor: f64,
}

/// Sums of squares of a parameter and of its direction.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Squares {
    pub(crate) parameter: f64,
    pub(crate) direction: f64,
}

impl Optimizer {
    /// One's own. It has no rate until [`Optimizer::at`], by which a trainer's schedule gives it one.
    pub fn own(optimizer: impl Elementwise + 'static) -> Self {
        Optimizer::Own(Own { optimizer: Arc::new(optimizer), rate: 0., momentum: None })
    }

    /// The same with another rate and, where the schedule moves it, another momentum (AdamW's and LAMB's `beta1`).
    pub fn at(&self, rate: f64, momentum: Option<f64>) -> Self {
        match self.clone() {
            Optimizer::AdamW(adamw) => {
                Optimizer::AdamW(AdamW { rate, beta1: momentum.unwrap_or(adamw.beta1), ..adamw })
            }
            Optimizer::Sgd(sgd) => Optimizer::Sgd(Sgd { rate, momentum: momentum.unwrap_or(sgd.momentum), ..sgd }),
            Optimizer::Lamb(lamb) => Optimizer::Lamb(Lamb { rate, beta1: momentum.unwrap_or(lamb.beta1), ..lamb }),
            Optimizer::Own(own) => Optimizer::Own(Own { rate, momentum, ..own }),
        }
    }

    /// How many f32 numbers it keeps for each element.
    pub fn states(&self) -> usize {
        self.state_names().len()
    }

    /// What they are called.
    pub fn state_names(&self) -> &[&str] {
        match self {
            Optimizer::AdamW(_) | Optimizer::Lamb(_) => &["first_moment", "second_moment"],
            Optimizer::Sgd(_) => &["momentum"],
            Optimizer::Own(own) => own.optimizer.state_names(),
        }
    }
}

impl Run<'_> {
    /// Elements from `start` on, as many as are worked on at once.
    fn chunk(&self, start: usize) -> std::result::Result<Run<'_>, TchError> {
        let len = CHUNK.min(self.parameters.numel() - start) as i64;
        let part = |whole: &Tensor| whole.f_narrow(0, start as i64, len);
        let grads = part(&self.grads)?.f_to_kind(Kind::Float)?;
        let grads = if self.factor == 1. { grads } else { grads.f_mul_scalar(self.factor)? };
        Ok(Run {
            parameters: part(&self.parameters)?,
            grads,
            state: self.state.iter().map(part).collect::<std::result::Result<_, _>>()?,
            ..*self
        })
    }

    fn chunks(&self) -> impl Iterator<Item = std::result::Result<Run<'_>, TchError>> {
        (0..self.parameters.numel()).step_by(CHUNK).map(|start| self.chunk(start))
    }

    pub(crate) fn adamw(&self, adamw: AdamW) -> Result<()> {
        let weight_decay = if self.decays { adamw.weight_decay } else { 0. };
        for chunk in self.chunks() {
            let Run { mut parameters, grads, state, step, .. } = chunk?;
            let [mut first_moments, mut second_moments] = pair(state);
            let slice = AdamWSlice {
                parameters: &mut parameters,
                grads: &grads,
                first_moments: &mut first_moments,
                second_moments: &mut second_moments,
                step,
            };
            adamw_step(AdamW { weight_decay, ..adamw }, &mut [slice])?;
        }
        Ok(())
    }

    pub(crate) fn sgd(&self, sgd: Sgd) -> Result<()> {
        for chunk in self.chunks() {
            let Run { mut parameters, grads, mut state, decays, .. } = chunk?;
            let grads = match decays && sgd.weight_decay != 0. {
                true => grads.f_add(&parameters.f_mul_scalar(sgd.weight_decay)?)?,
                false => grads,
            };
            let mut direction = state.remove(0);
            let direction = direction.f_mul_scalar_(sgd.momentum)?.f_add_(&grads)?;
            let _ = parameters.f_sub_(&direction.f_mul_scalar(sgd.rate)?)?;
        }
        Ok(())
    }

    pub(crate) fn own(&self, own: &Own) -> Result<()> {
        let Own { optimizer, rate, momentum } = own;
        for chunk in self.chunks() {
            let Run { parameters, grads, state, decays, step_number: step, .. } = chunk?;
            let elements = Elements { parameters, grads, state, decays, step, rate: *rate, momentum: *momentum };
            no_grad(|| optimizer.update(elements))?;
        }
        Ok(())
    }

    /// LAMB's first half: updates the moments, and sums the squares of parameter and direction.
    pub(crate) fn lamb_moments(&self, lamb: Lamb) -> Result<Squares> {
        let mut squares = Squares::default();
        for chunk in self.chunks() {
            let mut chunk = chunk?;
            let [first, second] = &mut chunk.state[..] else { unreachable!("LAMB has two moments") };
            let _ = first.f_mul_scalar_(lamb.beta1)?.f_add_(&chunk.grads.f_mul_scalar(1. - lamb.beta1)?)?;
            let added = chunk.grads.f_square()?.f_mul_scalar(1. - lamb.beta2)?;
            let _ = second.f_mul_scalar_(lamb.beta2)?.f_add_(&added)?;
            squares.parameter += sum_of_squares(&chunk.parameters)?;
            squares.direction += sum_of_squares(&chunk.lamb_direction(lamb)?)?;
        }
        Ok(squares)
    }

    /// LAMB's second half: one step along the direction, scaled by the norms of the whole parameter.
    pub(crate) fn lamb_step(&self, lamb: Lamb, squares: Squares) -> Result<()> {
        let Squares { parameter, direction } = squares;
        let trust = match self.decays && parameter > 0. && direction > 0. {
            true => (parameter / direction).sqrt(),
            false => 1.,
        };
        for chunk in self.chunks() {
            let mut chunk = chunk?;
            let change = chunk.lamb_direction(lamb)?.f_mul_scalar(lamb.rate * trust)?;
            let _ = chunk.parameters.f_sub_(&change)?;
        }
        Ok(())
    }

    fn lamb_direction(&self, lamb: Lamb) -> std::result::Result<Tensor, TchError> {
        let corrected = |beta: f64| 1. - beta.powi(self.step_number as i32);
        let root = self.state[1].f_div_scalar(corrected(lamb.beta2))?.f_sqrt()?.f_add_scalar(lamb.epsilon)?;
        let direction = self.state[0].f_div_scalar(corrected(lamb.beta1))?.f_div(&root)?;
        match self.decays {
            true => direction.f_add(&self.parameters.f_mul_scalar(lamb.weight_decay)?),
            false => Ok(direction),
        }
    }
}

fn pair(state: Vec<Tensor>) -> [Tensor; 2] {
    state.try_into().expect("AdamW has two moments")
}

/// Elements whose squares are added at once, in f32 but in pairs of pairs, so that nothing is lost.
const NORM_CHUNK: usize = 1 << 16;

/// The sum of the squares, without a second copy of the elements.
pub(crate) fn sum_of_squares(elements: &Tensor) -> std::result::Result<f64, TchError> {
    let sum = sum_of_squares_in(elements, Kind::Float)?;
    // The square of a large number can be beyond f32 where the number is not.
    if sum.is_finite() { Ok(sum) } else { sum_of_squares_in(elements, Kind::Double) }
}

fn sum_of_squares_in(elements: &Tensor, kind: Kind) -> std::result::Result<f64, TchError> {
    let len = elements.numel();
    let chunk = |start: usize| {
        let chunk = elements.f_narrow(0, start as i64, NORM_CHUNK.min(len - start) as i64)?.f_to_kind(kind)?;
        chunk.f_square()?.f_sum(kind)
    };
    let sums = (0..len).step_by(NORM_CHUNK).map(chunk).collect::<std::result::Result<Vec<_>, _>>()?;
    if sums.is_empty() {
        return Ok(0.);
    }
    Tensor::f_stack(&sums, 0)?.f_sum(Kind::Double)?.f_double_value(&[])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn squares_beyond_f32_are_summed_in_f64() {
        let large = Tensor::from_slice(&[3e25f32, 4e25]);
        let sum = sum_of_squares(&large).expect("a sum");
        assert!((sum / 2.5e51 - 1.).abs() < 1e-6, "{sum}");
        let many = Tensor::full([100_000], 0.1, (Kind::Float, shardwise_torch::tch::Device::Cpu));
        let sum = sum_of_squares(&many).expect("a sum");
        assert!((sum / 1000. - 1.).abs() < 1e-6, "{sum}");
        let infinite = Tensor::from_slice(&[1., f32::INFINITY]);
        assert!(!sum_of_squares(&infinite).expect("a sum").is_finite());
    }
}
