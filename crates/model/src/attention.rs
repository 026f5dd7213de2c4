//! Causal attention, over all earlier positions, a window of them, or those of the same document.

use shardwise_torch::tch::{Device, Kind, Tensor};

use crate::Result;
use crate::documents::Documents;

/// What attention computes.
pub(crate) struct Attended {
    /// Sequences by positions by width: the heads side by side.
    pub(crate) output: Tensor,
    /// Key and value with as many heads as the query, where they were made for it.
    pub(crate) expanded: Option<[Tensor; 2]>,
    /// What the output was joined of, where sequences have several documents.
    pub(crate) parts: Vec<Tensor>,
}

/// Attention of `query` (sequences, heads, positions, head width) to `key` and `value`, which may have fewer heads.
pub(crate) fn causal(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    window: Option<usize>,
    documents: Option<&Documents>,
) -> Result<Attended> {
    // libtorch's fused CPU kernel wants as many key heads as query heads; its own expansion would leave the fused path.
    let expanded = match query.size()[1] / key.size()[1] {
        1 => None,
        times => Some([
            key.f_repeat_interleave_self_int(times, 1, None)?,
            value.f_repeat_interleave_self_int(times, 1, None)?,
        ]),
    };
    let (key, value) = expanded.as_ref().map_or((key, value), |[key, value]| (key, value));
    let Some(documents) = documents else {
        return Ok(Attended { output: attend(query, key, value, window)?, expanded, parts: vec![] });
    };
    let (queries, keys, values) = (documents.split(query)?, documents.split(key)?, documents.split(value)?);
    let each = queries.iter().zip(keys.iter().zip(&values));
    let parts = each.map(|(query, (key, value))| attend(query, key, value, window)).collect::<Result<Vec<Tensor>>>()?;
    Ok(Attended { output: documents.join(&parts)?, expanded, parts })
}

/// Attention of new positions to themselves and those before them: `key` and `value` begin with as many earlier positions
/// as they have more than `query`. Without a graph.
pub(crate) fn extend(query: &Tensor, key: &Tensor, value: &Tensor, window: Option<usize>) -> Result<Tensor> {
    let (size, positions) = (query.size(), key.size()[2]);
    // The rest has left the window of the first new position.
    let seen = window.map_or(positions, |window| positions.min(size[2] + window as i64 - 1));
    let last = |tensor: &Tensor| tensor.f_narrow(2, positions - seen, seen);
    let (key, value) = (last(key)?, last(value)?);
    if size[2] > 1 {
        return Ok(causal(query, &key, &value, window, None)?.output);
    }
    // One position sees all that is left, so those heads that share a key may pass for positions: no key is copied.
    let sharing = query.f_reshape([size[0], key.size()[1], -1, size[3]])?;
    let seen = Tensor::f_scaled_dot_product_attention(&sharing, &key, &value, None::<&Tensor>, 0., false, None, false)?;
    Ok(seen.f_reshape([size[0], 1, -1])?)
}

/// With as many heads everywhere; the query's positions are the last of the key's.
fn attend(query: &Tensor, key: &Tensor, value: &Tensor, window: Option<usize>) -> Result<Tensor> {
    let (sequences, queries, keys) = (query.size()[0], query.size()[2], key.size()[2]);
    let window = window.map_or(keys, |window| keys.min(window as i64));
    let mask = (window < keys || queries < keys).then(|| band(queries, keys, window, query.device()));
    let is_causal = mask.is_none();
    let seen = Tensor::f_scaled_dot_product_attention(query, key, value, mask, 0., is_causal, None, false)?;
    Ok(seen.f_transpose(1, 2)?.f_reshape([sequences, queries, -1])?)
}

/// Whether a query at position i may look at a key at position j: 0 ≤ i − j < window. Queries are at the last positions.
fn band(queries: i64, keys: i64, window: i64, device: Device) -> Tensor {
    let all = Tensor::ones([queries, keys], (Kind::Bool, device));
    let first = keys - queries;
    all.tril(first).logical_and(&all.triu(first + 1 - window))
}

/// Additions and multiplications for a position's query of so many numbers, all heads together, on average over a sequence: one
/// product with the keys that it sees, and one with their values.
pub(crate) fn flops(query_width: usize, positions: usize, window: Option<usize>) -> f64 {
    let window = window.map_or(positions, |window| window.min(positions)) as f64;
    // The first positions see fewer than a window.
    let seen = window - window * (window - 1.) / 2. / positions.max(1) as f64;
    4. * query_width as f64 * seen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_position_sees_itself_and_those_before_it() {
        for (positions, window) in [(1usize, None), (7, None), (7, Some(3)), (7, Some(1)), (7, Some(9))] {
            let sees = |position: usize| (position + 1).min(window.unwrap_or(positions));
            let seen: usize = (0..positions).map(sees).sum();
            assert_eq!(flops(5, positions, window), 20. * seen as f64 / positions as f64, "{positions} {window:?}");
        }
    }
}
