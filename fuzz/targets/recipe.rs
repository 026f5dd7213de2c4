//! See `shardwise_fuzz::TARGETS`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| shardwise_fuzz::check("recipe", bytes));
