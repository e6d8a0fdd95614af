//! Reading the statistics page that the bare-metal guest keeps (guest/abi).

use crate::memory::GuestRam;
use std::sync::atomic::Ordering;
use vmferry_guest_abi::{STATS_GPA, StatsError, StatsPage, StatsSnapshot};
use vmferry_memory::Gpa;

/// What the guest reports.
pub(crate) fn snapshot(ram: &GuestRam) -> Result<StatsSnapshot, StatsError> {
    page(ram).ok_or(StatsError::NotYet)?.snapshot()
}

/// Writes the number of a verify request onto the page of a guest that has one, and marks that page as written.
pub(crate) fn request_verify(ram: &GuestRam, request: u64) {
    let Some(page) = page(ram).filter(|page| page.snapshot().is_ok()) else { return };
    page.header.verify_request.store(request, Ordering::Relaxed);
    // KVM does not see this write (traps.md 4): write, then mark. The page lies in the first region, which starts at 0.
    if let Some(region) = ram.regions().first() {
        region.marks().bitmap().set(STATS_GPA >> vmferry_memory::PAGE_SHIFT);
    }
}

fn page(ram: &GuestRam) -> Option<&StatsPage> {
    let page = ram.host_range(Gpa(STATS_GPA), size_of::<StatsPage>()).ok()?;
    debug_assert!(page.cast::<StatsPage>().is_aligned());
    // SAFETY: the bytes are mapped for as long as `ram` is borrowed, aligned (mappings start at 2 MiB, the page at a
    // multiple of 4 KiB), and every field of the type is an atomic, so the guest may write them meanwhile.
    Some(unsafe { page.cast::<StatsPage>().as_ref() })
}
