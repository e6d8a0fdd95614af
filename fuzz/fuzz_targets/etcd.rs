//! Answers of an etcd server, or of another server at its address.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vmferry_hostile::run("etcd", bytes));
