//! libtorch's fused AdamW kernel.

use tch::Tensor;

use crate::error::check;
use crate::{Error, Result, dtype_of, ffi};

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

/// Takes one AdamW step on all tensors, in one pass over their memory.
///
/// The kernel does not check sizes, dtypes, devices or contiguity, so this function does.
pub fn adamw_step(adamw: AdamW, updates: &mut [AdamWTensors<'_>]) -> Result<()> {
    for tensors in updates.iter() {
        let expected = tensors.parameters.numel();
        for (what, tensor) in [
            ("parameters", &*tensors.parameters),
            ("gradient elements", tensors.grads),
            ("first moments", &*tensors.first_moments),
            ("second moments", &*tensors.second_moments),
        ] {
            if tensor.numel() != expected {
                return Err(Error::Count { what, expected, found: tensor.numel() });
            }
            if !tensor.is_contiguous() {
                return Err(Error::NotContiguous);
            }
            let (dtype, found) = (dtype_of(tensors.parameters.f_kind()?)?, dtype_of(tensor.f_kind()?)?);
            if dtype != found {
                return Err(Error::WrongDtype { expected: dtype, found });
            }
            if tensor.device() != tensors.parameters.device() {
                return Err(Error::WrongDevice { expected: tensors.parameters.device(), found: tensor.device() });
            }
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
