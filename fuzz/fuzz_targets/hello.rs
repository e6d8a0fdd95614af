//! First bytes of a channel, in both directions, and page requests.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vmferry_hostile::run("hello", bytes));
