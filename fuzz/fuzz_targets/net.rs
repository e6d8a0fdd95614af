//! Guest bytes at the virtio-mmio transport and the network interface: registers, rings, buffers,
//! saved state, and frames of any kind.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vmferry_hostile::run("net", bytes));
