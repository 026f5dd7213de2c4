//! Flash attention, where the device has it.

use tch::{Device, Tensor};

use crate::error::check;
use crate::{Result, ffi};

/// Documents of different lengths, one after the other.
#[derive(Clone, Copy, Debug)]
pub struct Boundaries<'a> {
    /// The first token of each document, and the end of the last, as 32-bit integers on the device (flash-attn: `cu_seqlens`).
    pub tokens: &'a Tensor,
    /// The length of the longest document.
    pub longest: i64,
}

/// Whether libtorch has flash attention for these tensors (sequences, heads, positions, head dim). Key and value may have fewer heads.
/// The CPU's kernel of that name does not count: it knows neither fewer heads nor documents.
pub fn has_flash_attention(query: &Tensor, key: &Tensor, value: &Tensor) -> Result<bool> {
    /// libtorch's numbers of its own kernel and of cuDNN's, which it prefers on some devices that have both.
    const FLASH: [i64; 2] = [1, 3];
    let head_dim = query.size()[3];
    // On some devices, sizes in this range have it without gradients only; a recomputation must choose as the first pass did.
    if query.device() == Device::Cpu || head_dim % 8 != 0 || (193..=224).contains(&head_dim) {
        return Ok(false);
    }
    let choice = Tensor::f_internal_fused_sdp_choice(query, key, value, None::<&Tensor>, 0., true, None, true)?;
    Ok(FLASH.contains(&choice))
}

/// Causal attention without a mask. Query, key and value have shape (sequences, positions, heads, head dim) or, if there are documents,
/// (tokens, heads, head dim). A token attends to itself and the `window` − 1 tokens before it (or all of them), in its own document.
pub fn flash_attention(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    documents: Option<Boundaries<'_>>,
    window: Option<i64>,
) -> Result<Tensor> {
    let longest = documents.as_ref().map_or(query.size()[1], |documents| documents.longest);
    let tokens = documents.map_or(std::ptr::null(), |documents| documents.tokens.as_ptr());
    let mut output = std::ptr::null_mut();
    // SAFETY: live tensors; `output` is written if the call succeeds, and then owned here.
    unsafe {
        check(ffi::sw_flash_attention(
            query.as_ptr(),
            key.as_ptr(),
            value.as_ptr(),
            tokens,
            longest,
            window.unwrap_or(-1),
            &mut output,
        ))?;
        Ok(Tensor::from_ptr(output))
    }
}
