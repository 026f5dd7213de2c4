//! The dtypes that Shardwise stores and communicates.

use std::fmt;

/// The type of one element of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Dtype {
    /// IEEE 754 double precision: losses and norms; parameters, to check numerics.
    F64,
    /// IEEE 754 single precision.
    F32,
    /// bfloat16: the upper half of an `F32`.
    Bf16,
    /// IEEE 754 half precision.
    F16,
    /// Signed 64-bit integers: token ids and counts.
    I64,
    /// Raw bytes: quantized payloads and messages.
    U8,
}

impl Dtype {
    /// All dtypes, in declaration order.
    pub const ALL: [Dtype; 6] = [Dtype::F64, Dtype::F32, Dtype::Bf16, Dtype::F16, Dtype::I64, Dtype::U8];

    /// The size of one element in bytes.
    pub const fn bytes(self) -> usize {
        match self {
            Dtype::F64 | Dtype::I64 => 8,
            Dtype::F32 => 4,
            Dtype::Bf16 | Dtype::F16 => 2,
            Dtype::U8 => 1,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Dtype::F64 => "f64",
            Dtype::F32 => "f32",
            Dtype::Bf16 => "bf16",
            Dtype::F16 => "f16",
            Dtype::I64 => "i64",
            Dtype::U8 => "u8",
        })
    }
}
