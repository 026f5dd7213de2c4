//! Optimizers, which update shards of parameters.
//!
//! An optimizer works on runs: consecutive elements of one parameter within one owner's shard. AdamW and SGD update each
//! element independently, so a run is all they need. LAMB scales the update of a whole parameter by norms of that parameter:
//! it sums squares per run, and the ranks all-reduce the sums.
//!
//! A custom optimizer updates each element independently, and implements [`Elementwise`]. It is called like AdamW, so it gives
//! the same bits at every stage, and its state is sharded, saved and restored like AdamW's.

use std::fmt::Debug;
use std::sync::Arc;

use shardwise_torch::Result;
use shardwise_torch::optim::{AdamW, AdamWOnCpu, AdamWTensors, adamw_step};
use shardwise_torch::tch::{Device, Kind, TchError, Tensor, get_num_threads, no_grad};

/// An optimizer with its hyperparameters.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Optimizer {
    /// Adam with decoupled weight decay, in one pass over memory. On devices, in f64 and in f16, it is libtorch's fused kernel.
    AdamW(AdamW),
    /// Stochastic gradient descent with momentum.
    Sgd(Sgd),
    /// Adam with layer-wise trust ratios, for very large batches.
    Lamb(Lamb),
    /// A custom optimizer; see [`Optimizer::custom`].
    Custom(CustomOptimizer),
}

/// A custom optimizer that updates each element independently of its neighbors.
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
///         let Elements { mut parameters, grads, mut state, lr, .. } = elements;
///         let momentum = state[0].f_lerp_(&grads, 1. - self.beta)?;
///         parameters.f_sub_(&momentum.f_sign()?.f_mul_scalar(lr)?)?;
///         Ok(())
///     }
/// }
///
/// let optimizer = Optimizer::custom(SignDescent { beta: 0.9 });
/// assert_eq!(optimizer.states(), 1);
/// ```
pub trait Elementwise: Debug + Send + Sync {
    /// The names of the state values per element, which start at zero. Checkpoints use these names.
    fn state_names(&self) -> &[&str];

    /// Updates parameters and state in place. Called under `no_grad`, for any number of elements at a time.
    fn update(&self, elements: Elements) -> Result<()>;
}

/// Consecutive elements of one parameter to update; all tensors are one-dimensional and of the same length. They are f32, or f64 if
/// the parameters of the computation are.
#[derive(Debug)]
#[non_exhaustive]
pub struct Elements {
    /// The parameters, to update in place.
    pub parameters: Tensor,
    /// The gradients, clipped and unscaled.
    pub grads: Tensor,
    /// The optimizer state, in the order of [`Elementwise::state_names`], to update in place.
    pub state: Vec<Tensor>,
    /// Whether weight decay applies.
    pub decays: bool,
    /// The number of updates including this one.
    pub step: u32,
    /// The learning rate of this step.
    pub lr: f64,
    /// The momentum of this step, if the schedule sets it.
    pub momentum: Option<f64>,
}

/// A custom optimizer, with the learning rate and momentum of a step.
#[derive(Clone, Debug)]
pub struct CustomOptimizer {
    optimizer: Arc<dyn Elementwise>,
    lr: f64,
    momentum: Option<f64>,
}

/// SGD's hyperparameters, as in PyTorch's `torch.optim.SGD` without `dampening` and `nesterov`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    /// The learning rate.
    pub lr: f64,
    /// The momentum factor.
    pub momentum: f64,
    /// The L2 penalty: this times the parameter is added to the gradient.
    pub weight_decay: f64,
}

/// LAMB's hyperparameters. Parameters without weight decay (norms and biases) are updated as by Adam.
///
/// This is the variant in Algorithm 2 of the LAMB paper (You et al., 2020): both moments are bias-corrected, weight decay is
/// part of the update whose norm is taken, and the trust ratio is not clipped. The trust ratio is 1 if either norm is zero.
/// Tests compare with `reference/lamb.py`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lamb {
    /// The learning rate.
    pub lr: f64,
    /// The decay rate of the first moment.
    pub beta1: f64,
    /// The decay rate of the second moment.
    pub beta2: f64,
    /// Weight decay: this times the parameter is added to the direction.
    pub weight_decay: f64,
    /// Added to the square root of the second moment.
    pub eps: f64,
}

/// The number of elements of a run that are updated at once on the CPU, to keep temporaries small, and in the cache. On other devices,
/// a run is updated at once: there, every operation costs a launch.
const CHUNK: usize = 1 << 18;

/// Consecutive elements of one parameter, all tensors of the same length: parameters and state of one dtype, f32 or
/// f64, and gradients of any dtype.
pub(crate) struct Run<'a> {
    pub(crate) parameters: Tensor,
    pub(crate) grads: Tensor,
    pub(crate) state: Vec<Tensor>,
    /// Tensors above whose contents are still elsewhere: the update first copies the second tensor into the first.
    pub(crate) moved: Vec<(Tensor, Tensor)>,
    /// The step number, from 1, as an f32 tensor of one element.
    pub(crate) step: &'a Tensor,
    pub(crate) step_number: u32,
    pub(crate) decays: bool,
    /// The gradients are multiplied by this, to unscale and clip them.
    pub(crate) factor: f64,
    /// The parameters in the dtype of the computation, if `parameters` are master copies of them.
    pub(crate) rounded: Option<Tensor>,
}

/// The sums of squares of a parameter and of its update direction: f64 tensors of one element, on the device of the parameter, so that
/// nobody has to wait for them.
pub(crate) struct Squares {
    pub(crate) parameter: Tensor,
    pub(crate) direction: Tensor,
}

impl Squares {
    pub(crate) fn zeros(device: Device) -> std::result::Result<Self, TchError> {
        let no_dimensions: [i64; 0] = [];
        let zero = || Tensor::f_zeros(no_dimensions, (Kind::Double, device));
        Ok(Squares { parameter: zero()?, direction: zero()? })
    }

    pub(crate) fn plus(&self, other: &Squares) -> std::result::Result<Self, TchError> {
        let (parameter, direction) = (self.parameter.f_add(&other.parameter)?, self.direction.f_add(&other.direction)?);
        Ok(Squares { parameter, direction })
    }

    /// LAMB's trust ratio: the norm of the parameter by that of the direction, or 1 if either is zero.
    fn trust_ratio(&self) -> std::result::Result<Tensor, TchError> {
        let is_usable = self.parameter.f_gt(0)?.f_logical_and(&self.direction.f_gt(0)?)?;
        self.parameter.f_div(&self.direction)?.f_sqrt()?.f_masked_fill(&is_usable.f_logical_not()?, 1.)
    }
}

impl Optimizer {
    /// Wraps a custom optimizer. Its learning rate is zero until [`Optimizer::with_lr`] sets it, which a trainer does in every
    /// step.
    pub fn custom(optimizer: impl Elementwise + 'static) -> Self {
        Optimizer::Custom(CustomOptimizer { optimizer: Arc::new(optimizer), lr: 0., momentum: None })
    }

    /// Returns a copy with this learning rate and, if given, this momentum (AdamW and LAMB: `beta1`).
    pub fn with_lr(&self, lr: f64, momentum: Option<f64>) -> Self {
        match self.clone() {
            Optimizer::AdamW(adamw) => Optimizer::AdamW(AdamW { lr, beta1: momentum.unwrap_or(adamw.beta1), ..adamw }),
            Optimizer::Sgd(sgd) => Optimizer::Sgd(Sgd { lr, momentum: momentum.unwrap_or(sgd.momentum), ..sgd }),
            Optimizer::Lamb(lamb) => Optimizer::Lamb(Lamb { lr, beta1: momentum.unwrap_or(lamb.beta1), ..lamb }),
            Optimizer::Custom(custom) => Optimizer::Custom(CustomOptimizer { lr, momentum, ..custom }),
        }
    }

    /// The number of values that it keeps per element.
    pub fn states(&self) -> usize {
        self.state_names().len()
    }

    /// The names of the values that it keeps per element.
    pub fn state_names(&self) -> &[&str] {
        match self {
            Optimizer::AdamW(_) | Optimizer::Lamb(_) => &["first_moment", "second_moment"],
            Optimizer::Sgd(_) => &["momentum"],
            Optimizer::Custom(custom) => custom.optimizer.state_names(),
        }
    }
}

impl Run<'_> {
    /// The chunk that starts at element `start`, with its gradients in the dtype of the parameters and multiplied by `factor`. Its
    /// parameters and state must be in place.
    fn chunk(&self, start: usize) -> std::result::Result<Run<'_>, TchError> {
        let len = self.chunk_len().min(self.parameters.numel() - start) as i64;
        let part = |whole: &Tensor| whole.f_narrow(0, start as i64, len);
        let grads = part(&self.grads)?.f_to_kind(self.parameters.kind())?;
        let grads = if self.factor == 1. { grads } else { grads.f_mul_scalar(self.factor)? };
        Ok(Run {
            parameters: part(&self.parameters)?,
            grads,
            state: self.state.iter().map(part).collect::<std::result::Result<_, _>>()?,
            rounded: self.rounded.as_ref().map(part).transpose()?,
            moved: Vec::new(),
            ..*self
        })
    }

    /// The chunks of a run, for the first pass over it. Contents that have moved are copied to their new place a chunk at a time:
    /// the update reads them next, while they are in the cache.
    fn chunks(&self) -> impl Iterator<Item = std::result::Result<Run<'_>, TchError>> {
        (0..self.parameters.numel()).step_by(self.chunk_len()).map(|start| {
            self.move_chunk(start, self.chunk_len())?;
            self.chunk(start)
        })
    }

    /// Copies the contents of a chunk to their new place, if they have moved.
    fn move_chunk(&self, start: usize, chunk_len: usize) -> std::result::Result<(), TchError> {
        for (to, from) in &self.moved {
            let len = chunk_len.min(to.numel() - start) as i64;
            let from = from.f_narrow(0, start as i64, len)?;
            to.f_narrow(0, start as i64, len)?.f_copy_(&from)?;
        }
        Ok(())
    }

    /// The chunks again, for the second pass over a run.
    fn chunks_again(&self) -> impl Iterator<Item = std::result::Result<Run<'_>, TchError>> {
        (0..self.parameters.numel()).step_by(self.chunk_len()).map(|start| self.chunk(start))
    }

    fn chunk_len(&self) -> usize {
        if self.parameters.device() == Device::Cpu { CHUNK } else { self.parameters.numel().max(1) }
    }

    pub(crate) fn adamw(&self, adamw: AdamW) -> Result<()> {
        let adamw = AdamW { weight_decay: if self.decays { adamw.weight_decay } else { 0. }, ..adamw };
        let rounded = self.rounded.as_ref().map(Tensor::f_kind).transpose()?;
        if AdamWOnCpu::supports(self.grads.f_kind()?, self.parameters.f_kind()?, rounded) {
            return self.adamw_in_one_pass(adamw);
        }
        for chunk in self.chunks() {
            let Run { mut parameters, grads, state, step, rounded, .. } = chunk?;
            let [mut first_moments, mut second_moments] = pair(state);
            let tensors = AdamWTensors {
                parameters: &mut parameters,
                grads: &grads,
                first_moments: &mut first_moments,
                second_moments: &mut second_moments,
                step,
            };
            adamw_step(adamw, &mut [tensors])?;
            round(&parameters, rounded)?;
        }
        Ok(())
    }

    /// AdamW at once if nothing has moved, and otherwise a chunk at a time, which is in the cache once it has been copied.
    fn adamw_in_one_pass(&self, adamw: AdamW) -> Result<()> {
        let len = self.parameters.numel();
        // Enough for all threads.
        let threads = usize::try_from(get_num_threads()).unwrap_or(1);
        let chunk_len = if self.moved.is_empty() { len.max(1) } else { CHUNK * threads };
        for start in (0..len).step_by(chunk_len) {
            self.move_chunk(start, chunk_len)?;
            let part = |whole: &Tensor| whole.f_narrow(0, start as i64, chunk_len.min(len - start) as i64);
            let [mut first_moments, mut second_moments] =
                pair(self.state.iter().map(part).collect::<std::result::Result<_, _>>()?);
            let (mut parameters, mut rounded) = (part(&self.parameters)?, self.rounded.as_ref().map(part).transpose()?);
            let update = AdamWOnCpu {
                parameters: &mut parameters,
                grads: &part(&self.grads)?,
                grad_factor: self.factor,
                first_moments: &mut first_moments,
                second_moments: &mut second_moments,
                rounded: rounded.as_mut(),
                step: self.step_number,
            };
            update.step(adamw)?;
        }
        Ok(())
    }

    /// AdamW on the runs of a shard on a device: one launch for those with weight decay, and one for those without. The gradients must
    /// be in the dtype of the parameters.
    pub(crate) fn adamw_together(runs: &mut [Run<'_>], adamw: AdamW) -> Result<()> {
        for decays in [true, false] {
            let mut updates: Vec<AdamWTensors<'_>> = runs
                .iter_mut()
                .filter(|run| run.decays == decays)
                .map(|Run { parameters, grads, state, step, .. }| {
                    let [first_moments, second_moments] = &mut state[..] else { unreachable!("AdamW has two moments") };
                    AdamWTensors { parameters, grads, first_moments, second_moments, step }
                })
                .collect();
            if !updates.is_empty() {
                let weight_decay = if decays { adamw.weight_decay } else { 0. };
                adamw_step(AdamW { weight_decay, ..adamw }, &mut updates)?;
            }
        }
        Ok(())
    }

    pub(crate) fn sgd(&self, sgd: Sgd) -> Result<()> {
        for chunk in self.chunks() {
            let Run { mut parameters, grads, mut state, decays, rounded, .. } = chunk?;
            let grads = match decays && sgd.weight_decay != 0. {
                true => grads.f_add(&parameters.f_mul_scalar(sgd.weight_decay)?)?,
                false => grads,
            };
            let mut direction = state.remove(0);
            let direction = direction.f_mul_scalar_(sgd.momentum)?.f_add_(&grads)?;
            let _ = parameters.f_sub_(&direction.f_mul_scalar(sgd.lr)?)?;
            round(&parameters, rounded)?;
        }
        Ok(())
    }

    pub(crate) fn custom(&self, custom: &CustomOptimizer) -> Result<()> {
        let CustomOptimizer { optimizer, lr, momentum } = custom;
        for chunk in self.chunks() {
            let Run { parameters, grads, state, decays, step_number: step, rounded, .. } = chunk?;
            let updated = parameters.shallow_clone();
            let elements = Elements { parameters, grads, state, decays, step, lr: *lr, momentum: *momentum };
            no_grad(|| optimizer.update(elements))?;
            round(&updated, rounded)?;
        }
        Ok(())
    }

    /// LAMB's first half: updates the moments, and sums the squares of parameter and direction.
    pub(crate) fn lamb_moments(&self, lamb: Lamb) -> Result<Squares> {
        let mut squares = Squares::zeros(self.parameters.device())?;
        for chunk in self.chunks() {
            let mut chunk = chunk?;
            let [first, second] = &mut chunk.state[..] else { unreachable!("LAMB has two moments") };
            let _ = first.f_mul_scalar_(lamb.beta1)?.f_add_(&chunk.grads.f_mul_scalar(1. - lamb.beta1)?)?;
            let added = chunk.grads.f_square()?.f_mul_scalar(1. - lamb.beta2)?;
            let _ = second.f_mul_scalar_(lamb.beta2)?.f_add_(&added)?;
            let direction = chunk.lamb_direction(lamb)?;
            let added = Squares { parameter: squares_of(&chunk.parameters)?, direction: squares_of(&direction)? };
            squares = squares.plus(&added)?;
        }
        Ok(squares)
    }

    /// LAMB's second half: one step along the direction, scaled by the norms of the whole parameter.
    pub(crate) fn lamb_step(&self, lamb: Lamb, squares: &Squares) -> Result<()> {
        let rate = match self.decays {
            true => Some(squares.trust_ratio()?.f_mul_scalar(lamb.lr)?),
            false => None,
        };
        for chunk in self.chunks_again() {
            let mut chunk = chunk?;
            let direction = chunk.lamb_direction(lamb)?;
            let change = match &rate {
                Some(rate) => direction.f_mul(rate)?,
                None => direction.f_mul_scalar(lamb.lr)?,
            };
            let _ = chunk.parameters.f_sub_(&change)?;
            round(&chunk.parameters, chunk.rounded)?;
        }
        Ok(())
    }

    fn lamb_direction(&self, lamb: Lamb) -> std::result::Result<Tensor, TchError> {
        let corrected = |beta: f64| 1. - beta.powi(self.step_number as i32);
        let root = self.state[1].f_div_scalar(corrected(lamb.beta2))?.f_sqrt()?.f_add_scalar(lamb.eps)?;
        let direction = self.state[0].f_div_scalar(corrected(lamb.beta1))?.f_div(&root)?;
        match self.decays {
            true => direction.f_add(&self.parameters.f_mul_scalar(lamb.weight_decay)?),
            false => Ok(direction),
        }
    }
}

/// Rounds updated master parameters to the dtype of the computation, while they are in the cache.
fn round(masters: &Tensor, rounded: Option<Tensor>) -> std::result::Result<(), TchError> {
    rounded.map_or(Ok(()), |mut rounded| rounded.f_copy_(masters))
}

fn pair(state: Vec<Tensor>) -> [Tensor; 2] {
    state.try_into().expect("AdamW has two moments")
}

/// The number of elements whose squares are added at once on the CPU. 16-bit dtypes are widened, this many elements at a time.
const NORM_CHUNK: usize = 1 << 18;
/// The number of elements whose squares are added in f32, unless they are f64. The sums of such rows are added in f64.
const NORM_ROW: usize = 1 << 9;

/// The sum of the squares, without a second copy of the elements.
pub(crate) fn sum_of_squares(elements: &Tensor) -> std::result::Result<f64, TchError> {
    let sum = sum_of_squares_in(elements, sum_kind(elements))?;
    // The square of a large number can overflow f32 although the number does not.
    if sum.is_finite() { Ok(sum) } else { sum_of_squares_in(elements, Kind::Double) }
}

/// The same as an f64 tensor on the device of the elements, so that nobody has to wait for it. If it is not finite, [`sum_of_squares`]
/// may be.
pub(crate) fn sum_of_squares_on_device(elements: &Tensor) -> std::result::Result<Tensor, TchError> {
    let kind = sum_kind(elements);
    let [rows, rest] = rows(elements)?;
    let squares = squares_of_rows(&rows, kind)?;
    if rest.numel() == 0 { Ok(squares) } else { squares.f_add(&squares_of_rows(&rest, kind)?) }
}

/// The sum of the squares as an f64 tensor on the device of the elements.
fn squares_of(elements: &Tensor) -> std::result::Result<Tensor, TchError> {
    match elements.device() {
        // There, reading the sum costs nothing, and shows whether f32 was enough.
        Device::Cpu => sum_of_squares(elements).map(Tensor::from),
        _ => sum_of_squares_on_device(elements),
    }
}

fn sum_kind(elements: &Tensor) -> Kind {
    if elements.kind() == Kind::Double { Kind::Double } else { Kind::Float }
}

fn sum_of_squares_in(elements: &Tensor, kind: Kind) -> std::result::Result<f64, TchError> {
    let len = elements.numel();
    let mut total = 0.;
    for start in (0..len).step_by(NORM_CHUNK) {
        let count = NORM_CHUNK.min(len - start);
        let chunk = elements.f_narrow(0, start as i64, count as i64)?.f_to_kind(kind)?;
        for rows in rows(&chunk)? {
            total += squares_of_rows(&rows, kind)?.f_double_value(&[])?;
        }
    }
    Ok(total)
}

/// The elements as rows of [`NORM_ROW`], and what is left as one row.
fn rows(elements: &Tensor) -> std::result::Result<[Tensor; 2], TchError> {
    let (rows, rest) = (elements.numel() / NORM_ROW, elements.numel() % NORM_ROW);
    let part = |start: usize, shape: [usize; 2]| {
        let shape = shape.map(|size| size as i64);
        elements.f_narrow(0, start as i64, shape.iter().product())?.f_view(shape)
    };
    Ok([part(0, [rows, NORM_ROW])?, part(elements.numel() - rest, [1, rest])?])
}

/// The sum of the squares of rows: of each row in `kind`, and of all rows in f64.
fn squares_of_rows(rows: &Tensor, kind: Kind) -> std::result::Result<Tensor, TchError> {
    // libtorch's norm of a row makes one pass, without a copy of the squares.
    let norms = rows.f_norm_scalaropt_dim_dtype(2, 1i64, false, kind)?.f_to_kind(Kind::Double)?;
    norms.f_square()?.f_sum(Kind::Double)
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
