//! State of a process guest, and its first steps.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vmferry_hostile::run("process", bytes));
