//! Changed snapshot file, restored at once or by demand paging.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vmferry_hostile::run("snapshot", bytes));
