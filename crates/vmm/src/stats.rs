//! Reading the statistics page that the bare-metal guest keeps (guest/abi).

use crate::memory::GuestRam;
use vmferry_guest_abi::{STATS_GPA, StatsError, StatsPage, StatsSnapshot};
use vmferry_memory::Gpa;

/// What the guest reports.
pub(crate) fn snapshot(ram: &GuestRam) -> Result<StatsSnapshot, StatsError> {
    let Ok(page) = ram.host_range(Gpa(STATS_GPA), size_of::<StatsPage>()) else {
        return Err(StatsError::NotYet);
    };
    debug_assert!(page.cast::<StatsPage>().is_aligned());
    // SAFETY: the bytes are mapped for as long as `ram` is borrowed, aligned (mappings start at 2 MiB, the page at a
    // multiple of 4 KiB), and every field of the type is an atomic, so the guest may write them meanwhile.
    let page = unsafe { page.cast::<StatsPage>().as_ref() };
    page.snapshot()
}
