//! The statistics pages in memory.

use vmferry_guest_abi::{AllocPage, StatsPage};

/// Linked to `STATS_GPA`. The host reads it, and writes `verify_request`, while the guest runs: all of it is atomics.
#[unsafe(link_section = ".bss.stats")]
pub(crate) static PAGE: StatsPage = StatsPage::new();

/// Linked behind it, to `ALLOC_STATS_GPA`. All of it is atomics, too.
#[unsafe(link_section = ".bss.stats.alloc")]
pub(crate) static ALLOC: AllocPage = AllocPage::new();
