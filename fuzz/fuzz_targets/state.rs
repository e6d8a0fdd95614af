//! Device and vCPU state of a KVM guest.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vmferry_hostile::run("state", bytes));
