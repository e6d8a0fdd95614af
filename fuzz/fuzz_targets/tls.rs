//! Encrypted connection whose bytes are changed in transit, from the first byte on.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vmferry_hostile::run("tls", bytes));
