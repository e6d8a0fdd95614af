//! Session of the source, with arbitrary events of its target, its host and its driver.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vmferry_hostile::run("source", bytes));
