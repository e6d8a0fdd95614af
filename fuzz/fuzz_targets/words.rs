//! Texts of users (workloads, addresses, sizes), and lines that a guest writes to its serial port.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vmferry_hostile::run("words", bytes));
