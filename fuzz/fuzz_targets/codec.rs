//! Frames of LZ4 and zstd, and the decoder that fills pages from them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vmferry_hostile::run("codec", bytes));
