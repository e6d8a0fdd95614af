//! What the guests of vmferry share with the host side: workloads, stamps, the statistics page, the command line.
//!
//! Two guests run the code in here: the bare-metal guest (`guest/`, vCPUs in ring 3) and the process guest (threads that
//! write to tracked memory). Both drive one [`Worker`] per vCPU, so that a workload means the same thing on either, and so
//! that a page that a migration loses is found by the same rules.
//!
//! * [`Workload`] is the specification (`uniform,ws=256M,rate=100k`), [`GuestArgs`] the kernel command line around it.
//! * [`Layout`] says how many pages hold content and which vCPU owns which: each page has exactly one writer.
//! * [`Worker`] fills, writes, stamps and checks pages, through the small trait [`PageStore`].
//! * [`AllocPage`] is what a guest tells of its allocator and its balloon.
//! * [`balloon`] is what the balloon has beyond the specification.
//! * [`StatsPage`] is where a guest reports; [`Line`] is the same on a serial line, for hosts that cannot see the page.
//!
//! The crate has no dependencies, needs no allocator and contains no unsafe code.
#![no_std]
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate std;

mod alloc_stats;
mod allocation;
pub mod balloon;
mod balloon_args;
mod cmdline;
mod fill;
mod layout;
mod line;
mod math;
mod pace;
mod pick;
mod stalls;
mod stats;
mod text;
mod units;
mod worker;
mod workload;

pub use alloc_stats::{
    ALLOC_HIST_BUCKETS, ALLOC_STATS_BYTES, ALLOC_STATS_GPA, ALLOC_STATS_MAGIC, ALLOC_STATS_VERSION, AllocCpu,
    AllocGuest, AllocPage, AllocSnapshot, alloc_stats_bytes,
};
pub use allocation::Allocation;
pub use balloon_args::{HintMode, InflateBy, Inflation, MAX_WINDOWS, ReportMode, Windows};
pub use cmdline::{CmdlineError, GuestArgs, StatsSink};
pub use fill::Fill;
pub use layout::{Layout, LayoutError, Share};
pub use line::{Line, LineError, ReadyLine, SerialReporter};
pub use pace::{Every, Pacer, TscClock};
pub use pick::{Picker, Prng};
pub use stalls::{HIST_BUCKETS, STALL_MIN_NS, Stalls};
pub use stats::{
    CpuBlock, CpuSnapshot, Header, MAX_CPUS, STATS_BYTES, STATS_MAGIC, STATS_VERSION, State, StatsError,
    StatsPage, StatsSnapshot, WINDOWS, offset, stats_bytes,
};
pub use text::Text;
pub use units::{parse_rate, parse_size};
pub use worker::{Corrupt, PageStore, Report, SavedWorker, Step, Worker};
pub use workload::{Pattern, Theta, Workload, WorkloadError};

/// Bytes in a page of the workload, and in a page of x86-64 memory.
pub const PAGE_SIZE: u64 = 4096;

/// 64-bit words in a page.
pub const PAGE_WORDS: usize = 512;

/// Guest physical address of the [`StatsPage`]: the first page of the bare-metal guest's image, reserved in its `link.ld`.
pub const STATS_GPA: u64 = 0x10_0000;

/// In a [`Corrupt`], pages of the allocation workload have this number plus their guest-physical page number.
pub const ALLOC_PAGE: u64 = 1 << 52;

/// How often a guest refreshes its block of the statistics page, in nanoseconds.
pub const REPORT_NS: u64 = 10_000_000;

/// Port of QEMU's `isa-debug-exit` device, to which the guest writes [`PANIC_EXIT`] after a `PANIC` line.
pub const DEBUG_EXIT_PORT: u16 = 0xf4;

/// What a guest that gives up writes to [`DEBUG_EXIT_PORT`]; QEMU then exits with status `2 * PANIC_EXIT + 1`.
pub const PANIC_EXIT: u8 = 0x11;
