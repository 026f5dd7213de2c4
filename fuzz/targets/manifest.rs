//! See `shardwise_fuzz::manifest`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| shardwise_fuzz::checked(shardwise_fuzz::manifest, bytes));
