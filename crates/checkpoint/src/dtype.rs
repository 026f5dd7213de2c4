//! The dtype names of safetensors.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use shardwise_plan::Dtype;

/// Returns the safetensors name of a dtype.
pub(crate) fn name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F64 => "F64",
        Dtype::F32 => "F32",
        Dtype::Bf16 => "BF16",
        Dtype::F16 => "F16",
        Dtype::I64 => "I64",
        Dtype::U8 => "U8",
    }
}

/// Returns the dtype with this safetensors name, if Shardwise supports it.
pub(crate) fn from_name(name: &str) -> Option<Dtype> {
    Dtype::ALL.into_iter().find(|&dtype| self::name(dtype) == name)
}

pub(crate) fn serialize<S: Serializer>(dtype: &Dtype, serializer: S) -> Result<S::Ok, S::Error> {
    name(*dtype).serialize(serializer)
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Dtype, D::Error> {
    let text = String::deserialize(deserializer)?;
    from_name(&text).ok_or_else(|| serde::de::Error::custom(format!("unknown dtype {text:?}")))
}
