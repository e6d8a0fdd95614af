//! The target's session, whatever its source, its host and its driver say.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vmferry_hostile::run("target", bytes));
