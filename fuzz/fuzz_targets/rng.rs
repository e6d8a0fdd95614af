//! Guest bytes at the virtio-mmio transport and the source of random numbers.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vmferry_hostile::run("rng", bytes));
