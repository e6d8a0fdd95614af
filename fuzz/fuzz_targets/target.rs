//! Session of the target, with arbitrary events of its source, its host and its driver.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vmferry_hostile::run("target", bytes));
