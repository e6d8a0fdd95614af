//! Guest bytes at the virtio-mmio transport and the balloon: registers, rings, buffers, saved
//! state.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vmferry_hostile::run("balloon", bytes));
