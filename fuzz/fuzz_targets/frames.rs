//! Frames of bulk and urgent channels, and the receiver that writes them into a guest's memory.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vmferry_hostile::run("frames", bytes));
