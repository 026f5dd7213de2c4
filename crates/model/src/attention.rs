//! Causal attention, over all earlier positions or a window of them.

use shardwise_torch::tch::{Device, Kind, Tensor};

use crate::Result;

/// What attention computes.
pub(crate) struct Attended {
    /// Sequences by positions by width: the heads side by side.
    pub(crate) output: Tensor,
    /// Key and value with as many heads as the query, where they were made for it.
    pub(crate) expanded: Option<[Tensor; 2]>,
}

/// Attention of `query` (sequences, heads, positions, head width) to `key` and `value`, which may have fewer heads.
pub(crate) fn causal(query: &Tensor, key: &Tensor, value: &Tensor, window: Option<usize>) -> Result<Attended> {
    let (sequences, heads, positions) = (query.size()[0], query.size()[1], query.size()[2]);
    // libtorch's fused CPU kernel wants as many key heads as query heads; its own expansion would leave the fused path.
    let expanded = match heads / key.size()[1] {
        1 => None,
        times => Some([
            key.f_repeat_interleave_self_int(times, 1, None)?,
            value.f_repeat_interleave_self_int(times, 1, None)?,
        ]),
    };
    let (key, value) = expanded.as_ref().map_or((key, value), |[key, value]| (key, value));
    let mask =
        window.filter(|&window| (window as i64) < positions).map(|window| band(positions, window, query.device()));
    let is_causal = mask.is_none();
    let seen = Tensor::f_scaled_dot_product_attention(query, key, value, mask, 0., is_causal, None, false)?;
    Ok(Attended { output: seen.f_transpose(1, 2)?.f_reshape([sequences, positions, -1])?, expanded })
}

/// Whether position i may look at position j: 0 ≤ i − j < window.
fn band(positions: i64, window: usize, device: Device) -> Tensor {
    let all = Tensor::ones([positions, positions], (Kind::Bool, device));
    all.tril(0).logical_and(&all.triu(1 - window as i64))
}
