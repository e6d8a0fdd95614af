//! The first bytes of a channel, either way, and requests for pages.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vmferry_hostile::run("hello", bytes));
