//! Guest bytes at a disk: registers, rings, requests, saved state.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vmferry_hostile::run("blk", bytes));
