//! See `shardwise_fuzz::safetensors_header`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| shardwise_fuzz::checked(shardwise_fuzz::safetensors_header, bytes));
