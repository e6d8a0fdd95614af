//! The source's session, whatever its target, its host and its driver say.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vmferry_hostile::run("source", bytes));
