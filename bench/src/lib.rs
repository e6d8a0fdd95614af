//! Benchmarks that compare vmferry, QEMU and the floor in one run.
mod child;
pub mod floor;
