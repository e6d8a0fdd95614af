//! The benches of `vmferry-bench`, which compare vmferry, QEMU and the floor in one run.
//!
//! Every comparison runs its sides in turn within one process run, repeats them, and reports median
//! and spread. Only ratios are meaningful, absolute times are not. A case that cannot run on this
//! host has `"skipped": "why"`.
//!
//! Each bench is a module that defines its cases, sides and goals. A bench does not know how
//! vmferry is driven: [`command`] has vmferry's side. That side uses processes of the shipped
//! executable `vmferry`, and for some benches guests in this process. Results are documents of
//! `vmferry-report`, which also displays them.

pub mod branch;
mod cases;
mod cgroup;
mod child;
pub mod codec;
pub mod command;
pub mod cpu;
pub mod density;
pub mod etcd;
mod first_touch;
pub mod floor;
pub mod footprint;
pub mod free_page;
mod goal;
pub mod host;
pub mod link;
pub mod migrate;
pub mod plan;
mod pool;
pub mod postcopy;
pub mod qemu;
pub mod reaper;
pub mod result;
mod rounds;
pub mod rtt;
pub mod scale;
pub mod scan;
pub mod slow_disk;
pub mod snapshot;
pub mod stalls;
pub mod warm;
