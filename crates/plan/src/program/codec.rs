//! How elements travel between ranks.

/// The encoding in which elements travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Codec {
    /// As they are.
    #[default]
    None,
    /// Gradients in the dtype of the parameters, in which a backward pass has computed them. That loses nothing, unless several were
    /// added up in a wider dtype.
    ParamDtype,
    /// Rounded to bf16.
    Bf16,
    /// Quantized to 8 bits, with a scale for each block ([`int8_bytes`](crate::int8_bytes)). Of parameters that are gathered only.
    Int8,
}

impl Codec {
    /// The bytes of an element that has this many bytes in memory, without scales. A parameter has `parameter_bytes`.
    pub fn element_bytes(self, in_memory: usize, parameter_bytes: usize) -> usize {
        match self {
            Codec::None => in_memory,
            Codec::ParamDtype => parameter_bytes,
            Codec::Bf16 => 2,
            Codec::Int8 => 1,
        }
    }
}
