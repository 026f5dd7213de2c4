//! Causal attention over all earlier positions, a sliding window of them, or those of the same document.

use shardwise_plan::Dtype;
use shardwise_torch::attention::{flash_attention, has_flash_attention};
use shardwise_torch::tch::{Device, Kind, Tensor};

use crate::Result;
use crate::documents::Documents;

/// The output of attention, and intermediate tensors that can be recomputed.
pub(crate) struct AttentionOutput {
    /// The concatenated heads (sequences, positions, heads × head dim).
    pub(crate) output: Tensor,
    /// Key and value, if they were expanded to as many heads as the query.
    pub(crate) expanded: Option<[Tensor; 2]>,
    /// The output of each document, if they were computed one by one.
    pub(crate) parts: Vec<Tensor>,
}

/// Attention of `query` (sequences, heads, positions, head dim) to `key` and `value`, which may have fewer heads (grouped-query
/// attention).
pub(crate) fn causal(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    window: Option<usize>,
    documents: Option<&Documents>,
) -> Result<AttentionOutput> {
    let is_square = query.size()[2] == key.size()[2];
    let knows_documents = documents.is_none_or(|documents| documents.boundaries().is_some());
    if is_square && knows_documents && has_flash_attention(query, key, value)? {
        let output = attend_by_flash(query, key, value, window, documents)?;
        return Ok(AttentionOutput { output, expanded: None, parts: vec![] });
    }
    // Other fused kernels, the CPU's among them, need as many key heads as query heads; letting libtorch expand them would leave
    // the fused path.
    let expanded = match query.size()[1] / key.size()[1] {
        1 => None,
        times => Some([
            key.f_repeat_interleave_self_int(times, 1, None)?,
            value.f_repeat_interleave_self_int(times, 1, None)?,
        ]),
    };
    let (key, value) = expanded.as_ref().map_or((key, value), |[key, value]| (key, value));
    let Some(documents) = documents else {
        return Ok(AttentionOutput { output: attend(query, key, value, window)?, expanded, parts: vec![] });
    };
    let (queries, keys, values) = (documents.split(query)?, documents.split(key)?, documents.split(value)?);
    let each = queries.iter().zip(keys.iter().zip(&values));
    let parts = each.map(|(query, (key, value))| attend(query, key, value, window)).collect::<Result<Vec<Tensor>>>()?;
    Ok(AttentionOutput { output: documents.join(&parts)?, expanded, parts })
}

/// Whether attention in this type is one call of flash attention on a device, if it is recent enough to have it.
pub fn may_use_flash_attention(device: Device, dtype: Dtype) -> bool {
    device != Device::Cpu && dtype.bytes() == 2
}

/// Attention by a kernel that reads a key head for several query heads, skips what is outside a window, and takes all documents at once.
fn attend_by_flash(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    window: Option<usize>,
    documents: Option<&Documents>,
) -> Result<Tensor> {
    let size = query.size();
    let window = window.map(|window| window as i64).filter(|window| *window < size[2]);
    let documents = documents.and_then(Documents::boundaries);
    let seen = match documents.is_some() || window.is_some() {
        true => {
            let arrange = |tensor: &Tensor| match documents.is_some() {
                true => tensor.f_transpose(1, 2)?.f_flatten(0, 1),
                false => tensor.f_transpose(1, 2),
            };
            flash_attention(&arrange(query)?, &arrange(key)?, &arrange(value)?, documents, window)?
        }
        // libtorch may have one that is faster still.
        false => {
            let shares_heads = key.size()[1] < size[1];
            Tensor::f_scaled_dot_product_attention(query, key, value, None::<&Tensor>, 0., true, None, shares_heads)?
                .f_transpose(1, 2)?
        }
    };
    Ok(seen.f_reshape([size[0], size[2], -1])?)
}

/// Attention of new positions to themselves and all earlier ones, for generation. The extra positions of `key` and `value` come
/// before those of `query`.
pub(crate) fn extend(query: &Tensor, key: &Tensor, value: &Tensor, window: Option<usize>) -> Result<Tensor> {
    let (size, positions) = (query.size(), key.size()[2]);
    // Drop the positions before the window of the first new position.
    let seen = window.map_or(positions, |window| positions.min(size[2] + window as i64 - 1));
    let last = |tensor: &Tensor| tensor.f_narrow(2, positions - seen, seen);
    let (key, value) = (last(key)?, last(value)?);
    if size[2] > 1 {
        return Ok(causal(query, &key, &value, window, None)?.output);
    }
    // A single position attends to everything that is left, so query heads that share a key head can be passed as positions,
    // and no key is copied.
    let sharing = query.f_reshape([size[0], key.size()[1], -1, size[3]])?;
    let seen = Tensor::f_scaled_dot_product_attention(&sharing, &key, &value, None::<&Tensor>, 0., false, None, false)?;
    Ok(seen.f_reshape([size[0], 1, -1])?)
}

/// Attention with equally many query, key and value heads. The query's positions are the last ones of the key.
fn attend(query: &Tensor, key: &Tensor, value: &Tensor, window: Option<usize>) -> Result<Tensor> {
    let (sequences, queries, keys) = (query.size()[0], query.size()[2], key.size()[2]);
    let window = window.map_or(keys, |window| keys.min(window as i64));
    let mask = (window < keys || queries < keys).then(|| band(queries, keys, window, query.device()));
    let is_causal = mask.is_none();
    let seen = Tensor::f_scaled_dot_product_attention(query, key, value, mask, 0., is_causal, None, false)?;
    Ok(seen.f_transpose(1, 2)?.f_reshape([sequences, queries, -1])?)
}

/// The mask: a query at position i attends to a key at position j if 0 ≤ i − j < window. Queries are at the last positions.
fn band(queries: i64, keys: i64, window: i64, device: Device) -> Tensor {
    let all = Tensor::ones([queries, keys], (Kind::Bool, device));
    let first = keys - queries;
    all.tril(first).logical_and(&all.triu(first + 1 - window))
}

/// The FLOPs of one position, averaged over a sequence: one product with the keys that it attends to, and one with their values.
/// `query_size` is the size of a query, all heads together.
pub(crate) fn flops(query_size: usize, positions: usize, window: Option<usize>) -> f64 {
    let window = window.map_or(positions, |window| window.min(positions)) as f64;
    // The first positions attend to fewer.
    let seen = window - window * (window - 1.) / 2. / positions.max(1) as f64;
    4. * query_size as f64 * seen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_position_attends_to_itself_and_earlier_ones() {
        for (positions, window) in [(1usize, None), (7, None), (7, Some(3)), (7, Some(1)), (7, Some(9))] {
            let sees = |position: usize| (position + 1).min(window.unwrap_or(positions));
            let seen: usize = (0..positions).map(sees).sum();
            assert_eq!(flops(5, positions, window), 20. * seen as f64 / positions as f64, "{positions} {window:?}");
        }
    }
}
