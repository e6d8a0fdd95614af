//! Definitions that vmferry's guests share with the host: workloads, stamps, the statistics page,
//! the command line.
//!
//! Two guests run this code: the bare-metal guest (`guest/`, vCPUs in ring 3) and the process guest
//! (threads that write to tracked memory). Both drive one [`Worker`] per vCPU. A workload therefore
//! means the same on both, and both detect a page that a migration lost by the same rules.
//!
//! * [`Workload`] is the specification (`uniform,ws=256M,rate=100k`), and [`GuestArgs`] the kernel
//!   command line that contains it.
//! * [`Layout`] gives the number of pages with content and their owners: each page has exactly one
//!   writer.
//! * [`Worker`] fills, writes, stamps and checks pages, through the small trait [`PageStore`].
//! * [`AllocPage`] is the report of a guest's allocator and balloon.
//! * [`balloon`] has the additions of the balloon to the specification.
//! * [`StatsPage`] is the report of a guest. [`Line`] is the same on a serial line, for hosts that
//!   cannot read the page.
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
mod write;

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
pub use write::Write;

/// Size of a page in bytes, for the workload and for x86-64 memory.
pub const PAGE_SIZE: u64 = 4096;

/// Number of 64-bit words in a page.
pub const PAGE_WORDS: usize = 512;

/// Guest-physical address of the [`StatsPage`]: the first page of the bare-metal guest's image,
/// reserved in its `link.ld`.
pub const STATS_GPA: u64 = 0x10_0000;

/// Offset of the page numbers of the allocation workload in a [`Corrupt`]: such a page has this
/// number plus its guest-physical page number.
pub const ALLOC_PAGE: u64 = 1 << 52;

/// Interval at which a guest refreshes its block of the statistics page, in nanoseconds.
pub const REPORT_NS: u64 = 10_000_000;

/// Port of QEMU's `isa-debug-exit` device, to which the guest writes [`PANIC_EXIT`] after a `PANIC`
/// line.
pub const DEBUG_EXIT_PORT: u16 = 0xf4;

/// Value that a guest writes to [`DEBUG_EXIT_PORT`] after a panic. QEMU then exits with status `2 *
/// PANIC_EXIT + 1`.
pub const PANIC_EXIT: u8 = 0x11;
