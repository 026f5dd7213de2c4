//! The fused optimizer kernels of libtorch, on slices.

use tch::Tensor;

use crate::error::check;
use crate::{Error, Result, dtype_of, ffi};

/// AdamW's numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// The learning rate.
    pub rate: f64,
    /// The decay of the first moment.
    pub beta1: f64,
    /// The decay of the second moment.
    pub beta2: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
}

impl Default for AdamW {
    /// What transformers are usually trained with. A trainer takes the rate from its schedule.
    fn default() -> Self {
        AdamW { rate: 1e-3, beta1: 0.9, beta2: 0.95, weight_decay: 0.1, epsilon: 1e-8 }
    }
}

/// One slice of parameters with its gradient and state, all of one length.
pub struct AdamWSlice<'a> {
    /// Updated in place.
    pub parameters: &'a mut Tensor,
    /// Read.
    pub grads: &'a Tensor,
    /// Updated in place.
    pub first_moments: &'a mut Tensor,
    /// Updated in place.
    pub second_moments: &'a mut Tensor,
    /// How many steps were taken, this one included: an f32 tensor of one element.
    pub step: &'a Tensor,
}

/// One AdamW step on every slice, in one pass over their memory.
///
/// The kernel takes sizes, types and order of elements on trust, so this checks them.
pub fn adamw_step(adamw: AdamW, slices: &mut [AdamWSlice<'_>]) -> Result<()> {
    for slice in slices.iter() {
        let expected = slice.parameters.numel();
        for (what, tensor) in [
            ("parameters", &*slice.parameters),
            ("gradient elements", slice.grads),
            ("first moments", &*slice.first_moments),
            ("second moments", &*slice.second_moments),
        ] {
            if tensor.numel() != expected {
                return Err(Error::Count { what, expected, found: tensor.numel() });
            }
            if !tensor.is_contiguous() {
                return Err(Error::NotContiguous);
            }
            let (dtype, found) = (dtype_of(slice.parameters.f_kind()?)?, dtype_of(tensor.f_kind()?)?);
            if dtype != found {
                return Err(Error::WrongDtype { expected: dtype, found });
            }
            if tensor.device() != slice.parameters.device() {
                return Err(Error::WrongDevice { expected: slice.parameters.device(), found: tensor.device() });
            }
        }
        if slice.step.numel() != 1 {
            return Err(Error::Count { what: "step counts", expected: 1, found: slice.step.numel() });
        }
    }
    let mut parameters = ffi::pointers(slices.iter().map(|slice| &*slice.parameters));
    let mut grads = ffi::pointers(slices.iter().map(|slice| slice.grads));
    let mut first = ffi::pointers(slices.iter().map(|slice| &*slice.first_moments));
    let mut second = ffi::pointers(slices.iter().map(|slice| &*slice.second_moments));
    let mut steps = ffi::pointers(slices.iter().map(|slice| slice.step));
    // SAFETY: five lists of live tensors of one length; what is written is mutably borrowed.
    check(unsafe {
        ffi::sw_fused_adamw(
            parameters.as_mut_ptr(),
            grads.as_mut_ptr(),
            first.as_mut_ptr(),
            second.as_mut_ptr(),
            steps.as_mut_ptr(),
            slices.len(),
            adamw.rate,
            adamw.beta1,
            adamw.beta2,
            adamw.weight_decay,
            adamw.epsilon,
        )
    })
}
