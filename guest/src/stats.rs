//! The statistics page in memory.

use vmferry_guest_abi::StatsPage;

/// Linked to `STATS_GPA`. The host reads it, and writes `verify_request`, while the guest runs: all of it is atomics.
#[unsafe(link_section = ".bss.stats")]
pub(crate) static PAGE: StatsPage = StatsPage::new();
