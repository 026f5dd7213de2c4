//! Fingerprints of gradients, for spot checks.

use shardwise_torch::tch::{Kind, Tensor};

/// One number per unit: the sum of the bit patterns of its gradients as integers, over all tensors and micro-batches, so that the
/// order does not matter. A unit's gradients are those that its backward pass computes, including that of a tied parameter.
pub(crate) type Fingerprints = Vec<i64>;

/// A tensor's elements, reinterpreted as integers of the same size.
fn bits(tensor: &Tensor) -> shardwise_torch::Result<Tensor> {
    let kind = match tensor.f_kind()? {
        Kind::Double => Kind::Int64,
        Kind::Float => Kind::Int,
        Kind::BFloat16 | Kind::Half => Kind::Int16,
        other => return Err(shardwise_torch::Error::UnsupportedKind(other)),
    };
    let tensor = tensor.f_detach()?;
    // A sparse gradient is zero except in these rows.
    let elements = if tensor.is_sparse() { tensor.f_internal_values()? } else { tensor };
    Ok(elements.f_view_dtype(kind)?)
}

/// Fingerprints a tensor.
pub(crate) fn fingerprint(tensor: &Tensor) -> shardwise_torch::Result<i64> {
    Ok(bits(tensor)?.f_sum(Kind::Int64)?.f_int64_value(&[])?)
}

/// Flips a bit of the first element.
pub(crate) fn flip(tensor: &Tensor) -> shardwise_torch::Result<()> {
    let mut first = bits(tensor)?;
    for _ in 0..first.dim() {
        first = first.f_select(0, 0)?;
    }
    first.f_bitwise_xor_(1 << 6).map(drop)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]

    use shardwise_torch::tch::Device;

    use super::*;

    #[test]
    fn fingerprints_do_not_depend_on_the_order_and_see_one_bit() {
        for kind in [Kind::Double, Kind::Float, Kind::BFloat16, Kind::Half] {
            let numbers = (Tensor::arange(12, (Kind::Float, Device::Cpu)).view([3, 4]) - 5.5).to_kind(kind);
            let before = fingerprint(&numbers).unwrap();
            assert_eq!(fingerprint(&numbers.tr().flip([1])).unwrap(), before);
            flip(&numbers).unwrap();
            assert_ne!(fingerprint(&numbers).unwrap(), before);
            assert_eq!((&numbers + 5.5).argmin(None, false).int64_value(&[]), 0, "a small fault");
            let sparse = numbers.to_sparse_sparse_dim(1);
            assert_eq!(fingerprint(&sparse).unwrap(), fingerprint(&numbers).unwrap());
            flip(&sparse).unwrap();
            assert_eq!(fingerprint(&sparse).unwrap(), before);
        }
    }
}
