//! Benchmarks that compare vmferry, QEMU and the floor in one run.
//!
//! Every comparison runs its sides in turn within one process run, repeats them, and reports median and
//! spread. Ratios count, absolute times do not. What cannot run here is a case with `"skipped": "why"`.

mod cgroup;
mod child;
pub mod cpu;
pub mod density;
pub mod etcd;
pub mod floor;
pub mod free_page;
pub mod host;
pub mod json;
pub mod link;
pub mod migrate;
pub mod plan;
pub mod postcopy;
pub mod qemu;
pub mod reaper;
pub mod report;
pub mod result;
mod rounds;
pub mod rtt;
pub mod scan;
pub mod slow_disk;
pub mod stats;
pub mod warm;
