//! Bytes of a client at the control socket: framing, requests, negotiation, limits.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vmferry_hostile::run("qmp", bytes));
