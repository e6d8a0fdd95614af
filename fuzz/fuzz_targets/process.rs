//! State of a process guest, and the first steps of the guest.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vmferry_hostile::run("process", bytes));
