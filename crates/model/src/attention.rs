//! Causal attention, over all earlier positions or a window of them.

use shardwise_torch::tch::{Device, Kind, Tensor};

use crate::Result;

/// Attention of `query` (sequences, heads, positions, head width) to `key` and `value`, which may have fewer heads.
pub(crate) fn causal(query: &Tensor, key: &Tensor, value: &Tensor, window: Option<usize>) -> Result<Tensor> {
    let (heads, kv_heads, positions) = (query.size()[1], key.size()[1], query.size()[2]);
    // libtorch's fused CPU kernel wants as many key heads as query heads; its own expansion would leave the fused path.
    let expanded = |heads_of: &Tensor| match heads / kv_heads {
        1 => Ok(heads_of.shallow_clone()),
        times => heads_of.f_repeat_interleave_self_int(times, 1, None),
    };
    let (key, value) = (expanded(key)?, expanded(value)?);
    let mask =
        window.filter(|&window| (window as i64) < positions).map(|window| band(positions, window, query.device()));
    let is_causal = mask.is_none();
    Ok(Tensor::f_scaled_dot_product_attention(query, &key, &value, mask, 0., is_causal, None, false)?)
}

/// Whether position i may look at position j: 0 ≤ i − j < window.
fn band(positions: i64, window: usize, device: Device) -> Tensor {
    let all = Tensor::ones([positions, positions], (Kind::Bool, device));
    all.tril(0).logical_and(&all.triu(1 - window as i64))
}
