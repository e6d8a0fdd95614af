//! The statistics pages in memory.

use vmferry_guest_abi::{AllocPage, StatsPage};

/// Statistics page, linked to `STATS_GPA`. The host reads it, and writes `verify_request`, while
/// the guest runs: all of it is atomics.
#[unsafe(link_section = ".bss.stats")]
pub(crate) static PAGE: StatsPage = StatsPage::new();

/// Page of the allocator's report, linked after the statistics page to `ALLOC_STATS_GPA`. All of it
/// is atomics as well.
#[unsafe(link_section = ".bss.stats.alloc")]
pub(crate) static ALLOC: AllocPage = AllocPage::new();
