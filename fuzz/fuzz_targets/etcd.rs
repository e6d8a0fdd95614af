//! What answers where an etcd is looked for.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vmferry_hostile::run("etcd", bytes));
