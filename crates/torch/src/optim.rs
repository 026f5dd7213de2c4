//! AdamW: libtorch's fused kernel, and one for the CPU that does more in one pass.

use std::ops::Range;
use std::ptr::NonNull;

use half::bf16;
use tch::{Device, Kind, Tensor};

use crate::adamw::{Coefficients, Elements, Gradient, Rounded};
use crate::error::check;
use crate::{Error, Result, dtype_of, ffi, storage};

/// AdamW's hyperparameters (PyTorch: `torch.optim.AdamW`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// The learning rate.
    pub lr: f64,
    /// The decay rate of the first moment.
    pub beta1: f64,
    /// The decay rate of the second moment.
    pub beta2: f64,
    /// The decoupled weight decay coefficient.
    pub weight_decay: f64,
    /// Added to the square root of the second moment.
    pub eps: f64,
}

impl Default for AdamW {
    /// The usual settings for transformers. A trainer overrides `lr` with its schedule.
    fn default() -> Self {
        AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.95, weight_decay: 0.1, eps: 1e-8 }
    }
}

impl AdamW {
    /// What a step on the CPU computes with. Steps are counted from 1, and gradients are multiplied by `grad_factor`.
    fn coefficients(&self, step: u32, grad_factor: f64) -> Coefficients {
        let AdamW { lr, beta1, beta2, weight_decay, eps } = *self;
        let correction = |beta: f64| 1. - beta.powf(f64::from(step));
        let first_rate = (1. - beta1) as f32;
        let starts_from_grad = first_rate >= 0.5;
        Coefficients {
            grad_factor: grad_factor as f32,
            decay: (1. - lr * weight_decay) as f32,
            first_rate: if starts_from_grad { first_rate - 1. } else { first_rate },
            starts_from_grad,
            second_decay: beta2 as f32,
            second_rate: (1. - beta2) as f32,
            step_size: (lr / correction(beta1)) as f32,
            root_correction: correction(beta2).sqrt() as f32,
            eps: eps as f32,
        }
    }
}

/// Parameters with their gradients and optimizer state, all of the same length.
pub struct AdamWTensors<'a> {
    /// The parameters, updated in place.
    pub parameters: &'a mut Tensor,
    /// The gradients.
    pub grads: &'a Tensor,
    /// The first moments (PyTorch: `exp_avg`), updated in place.
    pub first_moments: &'a mut Tensor,
    /// The second moments (PyTorch: `exp_avg_sq`), updated in place.
    pub second_moments: &'a mut Tensor,
    /// The number of steps including this one: an f32 tensor of one element.
    pub step: &'a Tensor,
}

/// Takes one AdamW step on all tensors with libtorch's fused kernel, in one pass over their memory.
///
/// The kernel does not check sizes, dtypes, devices or contiguity, so this function does.
pub fn adamw_step(adamw: AdamW, updates: &mut [AdamWTensors<'_>]) -> Result<()> {
    for tensors in updates.iter() {
        let parameters = &*tensors.parameters;
        let kind = parameters.f_kind()?;
        for (what, tensor) in [
            ("parameters", parameters),
            ("gradient elements", tensors.grads),
            ("first moments", &*tensors.first_moments),
            ("second moments", &*tensors.second_moments),
        ] {
            check_like(parameters, what, tensor, &[kind])?;
        }
        if tensors.step.numel() != 1 {
            return Err(Error::Count { what: "step counts", expected: 1, found: tensors.step.numel() });
        }
    }
    let mut parameters = ffi::pointers(updates.iter().map(|tensors| &*tensors.parameters));
    let mut grads = ffi::pointers(updates.iter().map(|tensors| tensors.grads));
    let mut first = ffi::pointers(updates.iter().map(|tensors| &*tensors.first_moments));
    let mut second = ffi::pointers(updates.iter().map(|tensors| &*tensors.second_moments));
    let mut steps = ffi::pointers(updates.iter().map(|tensors| tensors.step));
    // SAFETY: five lists of live tensors of one length; what is written is mutably borrowed.
    check(unsafe {
        ffi::sw_fused_adamw(
            parameters.as_mut_ptr(),
            grads.as_mut_ptr(),
            first.as_mut_ptr(),
            second.as_mut_ptr(),
            steps.as_mut_ptr(),
            updates.len(),
            adamw.lr,
            adamw.beta1,
            adamw.beta2,
            adamw.weight_decay,
            adamw.eps,
        )
    })
}

/// Parameters in f32 on the CPU with their gradients and optimizer state, all of the same length.
pub struct AdamWOnCpu<'a> {
    /// The parameters, updated in place.
    pub parameters: &'a mut Tensor,
    /// The gradients, in f32 or bf16.
    pub grads: &'a Tensor,
    /// What the gradients are multiplied by.
    pub grad_factor: f64,
    /// The first moments (PyTorch: `exp_avg`), updated in place.
    pub first_moments: &'a mut Tensor,
    /// The second moments (PyTorch: `exp_avg_sq`), updated in place.
    pub second_moments: &'a mut Tensor,
    /// Where the updated parameters go rounded to bf16, if anywhere.
    pub rounded: Option<&'a mut Tensor>,
    /// The number of steps including this one.
    pub step: u32,
}

impl AdamWOnCpu<'_> {
    /// Whether gradients, parameters and rounded parameters can have these kinds.
    pub fn supports(grads: Kind, parameters: Kind, rounded: Option<Kind>) -> bool {
        let is_narrow = |kind: Kind| kind == Kind::BFloat16;
        parameters == Kind::Float && (grads == Kind::Float || is_narrow(grads)) && rounded.is_none_or(is_narrow)
    }

    /// Takes one AdamW step, on all threads of libtorch.
    pub fn step(self, adamw: AdamW) -> Result<()> {
        let narrow = self.grads.f_kind()? == Kind::BFloat16;
        for (what, tensor, kinds) in [
            ("parameters", Some(&*self.parameters), &[Kind::Float][..]),
            ("gradient elements", Some(self.grads), &[Kind::Float, Kind::BFloat16]),
            ("first moments", Some(&*self.first_moments), &[Kind::Float]),
            ("second moments", Some(&*self.second_moments), &[Kind::Float]),
            ("rounded parameters", self.rounded.as_deref(), &[Kind::BFloat16]),
        ] {
            tensor.map_or(Ok(()), |tensor| check_like(self.parameters, what, tensor, kinds))?;
        }
        let written =
            [Some(&*self.parameters), Some(&*self.first_moments), Some(&*self.second_moments), self.rounded.as_deref()];
        let mut memory: Vec<Range<usize>> =
            written.into_iter().flatten().chain([self.grads]).map(addresses).collect::<Result<_>>()?;
        memory.sort_by_key(|range| range.start);
        if memory.windows(2).any(|pair| pair[1].start < pair[0].end) {
            return Err(Error::Overlap);
        }
        if self.parameters.device() != Device::Cpu {
            return Err(Error::WrongDevice { expected: Device::Cpu, found: self.parameters.device() });
        }
        match narrow {
            true => self.step_with_gradients::<bf16>(adamw),
            false => self.step_with_gradients::<f32>(adamw),
        }
    }

    fn step_with_gradients<G: Gradient>(mut self, adamw: AdamW) -> Result<()> {
        match self.rounded.take() {
            Some(rounded) => {
                // SAFETY: the tensor has elements of this type, and its memory overlaps with that of no other.
                let rounded = unsafe { elements_mut::<bf16>(rounded)? };
                self.step_into::<G, bf16>(adamw, rounded)
            }
            None => {
                let mut nothing = vec![(); self.parameters.numel()];
                self.step_into::<G, ()>(adamw, &mut nothing)
            }
        }
    }

    fn step_into<G: Gradient, R: Rounded>(self, adamw: AdamW, rounded: &mut [R]) -> Result<()> {
        let coefficients = adamw.coefficients(self.step, self.grad_factor);
        // SAFETY: the tensors have elements of these types, and their memory does not overlap.
        let elements = unsafe {
            Elements {
                parameters: elements_mut(self.parameters)?,
                grads: elements::<G>(self.grads)?,
                first_moments: elements_mut(self.first_moments)?,
                second_moments: elements_mut(self.second_moments)?,
                rounded,
            }
        };
        elements.update(&coefficients, usize::try_from(tch::get_num_threads()).unwrap_or(1));
        Ok(())
    }
}

/// The addresses of a contiguous tensor's elements.
fn addresses(tensor: &Tensor) -> Result<Range<usize>> {
    let start = first_element::<u8>(tensor)?.addr();
    Ok(start..start + tensor.numel() * tensor.f_kind()?.elt_size_in_bytes())
}

/// The elements of a contiguous tensor on the CPU, to read.
///
/// # Safety
/// They are of type `T`, and nobody writes them while the slice exists.
unsafe fn elements<T>(tensor: &Tensor) -> Result<&[T]> {
    // SAFETY: the tensor has that many elements there, and the caller has promised their type.
    Ok(unsafe { std::slice::from_raw_parts(first_element(tensor)?, tensor.numel()) })
}

/// The elements of a contiguous tensor on the CPU, to write.
///
/// # Safety
/// They are of type `T`, and nobody else uses them while the slice exists.
unsafe fn elements_mut<T>(tensor: &mut Tensor) -> Result<&mut [T]> {
    // SAFETY: as above.
    Ok(unsafe { std::slice::from_raw_parts_mut(first_element(tensor)?, tensor.numel()) })
}

/// The address of a tensor's first element. A tensor without memory is an error.
fn first_element<T>(tensor: &Tensor) -> Result<*mut T> {
    if storage::is_taken(tensor)? {
        // The error has the reason.
        tensor.f_view(-1)?.f_double_value(&[0])?;
    }
    // An empty tensor may have no address.
    let is_empty = tensor.numel() == 0;
    Ok(if is_empty { NonNull::dangling().as_ptr() } else { tensor.data_ptr().cast() })
}

/// Fails unless a tensor has as many elements as the parameters, one of these kinds, and the device of the parameters, in one piece.
fn check_like(parameters: &Tensor, what: &'static str, tensor: &Tensor, kinds: &[Kind]) -> Result<()> {
    let (expected, found) = (parameters.numel(), tensor.numel());
    if expected != found {
        return Err(Error::Count { what, expected, found });
    }
    if !tensor.is_contiguous() {
        return Err(Error::NotContiguous);
    }
    let kind = tensor.f_kind()?;
    if !kinds.contains(&kind) {
        return Err(Error::WrongDtype { expected: dtype_of(kinds[0])?, found: dtype_of(kind)? });
    }
    if tensor.device() != parameters.device() {
        return Err(Error::WrongDevice { expected: parameters.device(), found: tensor.device() });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use super::*;

    /// A length with whole vectors, whole blocks, or neither.
    const LENS: [i64; 5] = [0, 64, 5 * 64 + 24, 1 << 18, (1 << 18) + 8];

    fn random(len: i64, scale: f64, seed: i64) -> Tensor {
        tch::manual_seed(seed);
        Tensor::randn([len], (Kind::Float, Device::Cpu)) * scale
    }

    #[test]
    fn one_pass_has_the_bits_of_libtorchs_passes() {
        let kinds = [(Kind::Float, 1.), (Kind::BFloat16, 0.37)];
        let cases = LENS.into_iter().flat_map(|len| kinds.map(|(kind, factor)| (len, kind, factor, 0.9)));
        // Where the first moment follows the gradient closely, it is computed from the other end.
        let betas = [0., 0.3, 0.5, 0.6].map(|beta1| (LENS[2], Kind::Float, 1., beta1));
        for (len, kind, grad_factor, beta1) in cases.chain(betas) {
            let adamw = AdamW { lr: 3e-3, beta1, beta2: 0.95, weight_decay: 0.1, eps: 1e-8 };
            let new = || [random(len, 1., 1), random(len, 1e-2, 2), random(len, 1e-4, 3).abs()];
            let ([mut expected, mut first, mut second], [mut found, mut own_first, mut own_second]) = (new(), new());
            let mut rounded = found.to_kind(Kind::BFloat16);
            for step in 1..=3 {
                let grads = random(len, 1e-2, i64::from(step)).to_kind(kind);
                let scaled = grads.to_kind(Kind::Float) * grad_factor;
                let tensors = AdamWTensors {
                    parameters: &mut expected,
                    grads: &scaled,
                    first_moments: &mut first,
                    second_moments: &mut second,
                    step: &Tensor::from(step as f32),
                };
                adamw_step(adamw, &mut [tensors]).unwrap();
                let own = AdamWOnCpu {
                    parameters: &mut found,
                    grads: &grads,
                    grad_factor,
                    first_moments: &mut own_first,
                    second_moments: &mut own_second,
                    rounded: (kind == Kind::BFloat16).then_some(&mut rounded),
                    step,
                };
                own.step(adamw).unwrap();
                assert!(
                    found.equal(&expected) && own_first.equal(&first) && own_second.equal(&second),
                    "{len}, {step}"
                );
            }
            assert!(kind == Kind::Float || rounded.equal(&expected.to_kind(Kind::BFloat16)), "{len}");
        }
    }

    #[test]
    fn tensors_that_share_memory_are_refused() {
        let parameters = random(64, 1., 1);
        let (mut first, mut second) = (random(64, 1., 2), random(64, 1., 3));
        let step = |parameters: &Tensor, grads: &Tensor, first: &mut Tensor, second: &mut Tensor| {
            let parameters = &mut parameters.shallow_clone();
            let (first_moments, second_moments) = (first, second);
            let update = AdamWOnCpu {
                parameters,
                grads,
                grad_factor: 1.,
                first_moments,
                second_moments,
                rounded: None,
                step: 1,
            };
            update.step(AdamW::default())
        };
        let shares = |result: Result<()>| matches!(result, Err(Error::Overlap));
        assert!(shares(step(&parameters, &parameters, &mut first, &mut second)));
        assert!(shares(step(&parameters, &first.copy(), &mut parameters.shallow_clone(), &mut second)));
        assert!(step(&parameters, &random(64, 1., 4), &mut first, &mut second).is_ok());
    }

    #[test]
    fn rounding_is_that_of_libtorch() {
        // Halfway cases, the largest and the smallest numbers, infinities, and values that are not numbers.
        let numbers = [
            1. + 1. / 256_f32,
            1. + 3. / 256.,
            -1. - 1. / 256.,
            f32::MAX,
            f32::MIN_POSITIVE,
            1e-45,
            f32::INFINITY,
            f32::NAN,
            0.,
        ];
        for number in numbers {
            let expected = Tensor::from(number).to_kind(Kind::BFloat16).view_dtype(Kind::Int16).int64_value(&[]);
            assert_eq!(<bf16 as Rounded>::round(number).to_bits() as i16, expected as i16, "{number}");
        }
    }

    #[test]
    fn every_way_to_compute_gives_the_same_bits() {
        let coefficients = AdamW::default().coefficients(3, 0.5);
        let len = (1 << 18) + 41;
        let [start, first, second, grads] =
            [1., 1e-2, 1e-3, 1e-2].map(|scale| Vec::<f32>::try_from(random(len, scale, 7).abs()).unwrap());
        let updated = |update: &dyn Fn(Elements<'_, f32, bf16>)| {
            let (mut parameters, mut first_moments, mut second_moments) =
                (start.clone(), first.clone(), second.clone());
            let mut rounded = vec![bf16::ZERO; start.len()];
            update(Elements {
                parameters: &mut parameters,
                grads: &grads,
                first_moments: &mut first_moments,
                second_moments: &mut second_moments,
                rounded: &mut rounded,
            });
            (parameters, first_moments, second_moments, rounded)
        };
        let expected = updated(&|elements| crate::adamw::update_blocks(elements, &coefficients));
        for threads in [1, 2, 3] {
            assert!(updated(&|elements| elements.update(&coefficients, threads)) == expected, "{threads} threads");
        }
    }
}
