//! Deltas of pages in a row, and the page that they are applied to.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vmferry_hostile::run("delta", bytes));
