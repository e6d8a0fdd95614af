//! A changed file, and a guest taken out of it at once or while it runs.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vmferry_hostile::run("snapshot", bytes));
