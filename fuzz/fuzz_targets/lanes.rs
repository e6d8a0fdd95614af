//! Pieces of channels that share a connection, in any order and with any numbers.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vmferry_hostile::run("lanes", bytes));
