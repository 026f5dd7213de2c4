//! The size of elements that are quantized to 8 bits; `shardwise-torch` has the encoder.

/// The number of elements that share a scale.
pub const INT8_BLOCK: usize = 256;

/// The bytes of `elements` elements that are quantized to 8 bits: one for each, and an f32 scale for each block.
pub fn int8_bytes(elements: usize) -> usize {
    elements + elements.div_ceil(INT8_BLOCK) * size_of::<f32>()
}
