//! The mapping between Rust types, Shardwise's [`Dtype`]s and libtorch's kinds.

use half::{bf16, f16};
use shardwise_plan::Dtype;
use tch::Kind;

use crate::{Error, Result};

/// A Rust type that buffers can hold.
///
/// # Safety
/// The type has the size of `DTYPE`, no padding, and every bit pattern is a valid value.
pub unsafe trait Element: Copy + Default + PartialEq + std::fmt::Debug + Send + Sync + 'static {
    /// The corresponding dtype.
    const DTYPE: Dtype;
}

// SAFETY: plain numbers of the sizes of `Dtype::bytes`; any bits are a number.
unsafe impl Element for f64 {
    const DTYPE: Dtype = Dtype::F64;
}
// SAFETY: as above.
unsafe impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;
}
// SAFETY: as above; a transparent u16.
unsafe impl Element for bf16 {
    const DTYPE: Dtype = Dtype::Bf16;
}
// SAFETY: as above; a transparent u16.
unsafe impl Element for f16 {
    const DTYPE: Dtype = Dtype::F16;
}
// SAFETY: as above.
unsafe impl Element for i64 {
    const DTYPE: Dtype = Dtype::I64;
}
// SAFETY: as above.
unsafe impl Element for u8 {
    const DTYPE: Dtype = Dtype::U8;
}

/// The same number in f32, whose upper half it is. Unlike `to_f32`, this has no branch.
pub fn widen_bf16(number: bf16) -> f32 {
    f32::from_bits(u32::from(number.to_bits()) << 16)
}

/// The nearest bf16, ties to even. Unlike `from_f32`, this has no branch.
pub(crate) fn round_to_bf16(wide: f32) -> bf16 {
    let bits = wide.to_bits();
    let nearest = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1));
    bf16::from_bits(if wide.is_nan() { 0x7FC0 } else { (nearest >> 16) as u16 })
}

/// Returns libtorch's kind for a dtype.
pub fn kind_of(dtype: Dtype) -> Kind {
    match dtype {
        Dtype::F64 => Kind::Double,
        Dtype::F32 => Kind::Float,
        Dtype::Bf16 => Kind::BFloat16,
        Dtype::F16 => Kind::Half,
        Dtype::I64 => Kind::Int64,
        Dtype::U8 => Kind::Uint8,
    }
}

/// Returns the dtype of a libtorch kind, or an error if Shardwise does not support it.
pub fn dtype_of(kind: Kind) -> Result<Dtype> {
    Dtype::ALL.into_iter().find(|&dtype| kind_of(dtype) == kind).ok_or(Error::UnsupportedKind(kind))
}
