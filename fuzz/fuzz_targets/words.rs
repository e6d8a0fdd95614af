//! What users write: workloads, addresses, sizes; and what a guest writes on its serial line.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vmferry_hostile::run("words", bytes));
