//! Benchmarks that compare vmferry, QEMU and the floor in one run.
