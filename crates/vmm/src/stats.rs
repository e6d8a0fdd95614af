//! Reading the statistics page that the bare-metal guest keeps (guest/abi).
//!
//! The threads that read the page must never sleep on guest memory (hazards.md 18), so every access
//! to the page is a [`PagingSlot::read_if_present`].

use crate::memory::GuestRam;
use std::sync::atomic::Ordering;
use vmferry_core::{Gpa, PAGE_SHIFT, PAGE_SIZE, PageRun};
use vmferry_fault::PagingSlot;
use vmferry_guest_abi::{
    ALLOC_STATS_GPA, AllocPage, AllocSnapshot, STATS_GPA, StatsError, StatsPage, StatsSnapshot,
    alloc_stats_bytes, stats_bytes,
};

/// Returns the report of a guest with at most `cpus` vCPUs.
pub(crate) fn snapshot(ram: &GuestRam, paging: &PagingSlot, cpus: u32) -> Result<StatsSnapshot, StatsError> {
    let page: &StatsPage = page(ram, STATS_GPA).ok_or(StatsError::NotYet)?;
    // The guest may have fewer vCPUs, and never touched the pages after their blocks. The number is
    // read once. It bounds the loads of the snapshot to the pages that were found present.
    let cpus =
        read_if_present(ram, paging, 0, || page.header.cpus.load(Ordering::Relaxed).min(u64::from(cpus)))?;
    read_if_present(ram, paging, cpus, || page.snapshot_of(usize::try_from(cpus).unwrap_or(0)))?
}

/// Returns the report about allocator and balloon of a guest with at most `cpus` vCPUs.
pub(crate) fn alloc_snapshot(
    ram: &GuestRam,
    paging: &PagingSlot,
    cpus: u32,
) -> Result<AllocSnapshot, StatsError> {
    let page: &AllocPage = page(ram, ALLOC_STATS_GPA).ok_or(StatsError::NotYet)?;
    let bytes = alloc_stats_bytes(cpus.into());
    read_range(ram, paging, (ALLOC_STATS_GPA, bytes), || {
        page.snapshot_of(usize::try_from(cpus).unwrap_or(0))
    })?
}

/// Writes the number of a verify request to the statistics page of the guest, and marks the page as
/// dirty. Returns true if the guest has such a page and it is present.
pub(crate) fn request_verify(ram: &GuestRam, paging: &PagingSlot, request: u64) -> bool {
    let Some(page) = page::<StatsPage>(ram, STATS_GPA) else { return false };
    let written = read_if_present(ram, paging, 0, || {
        // True if the guest keeps the page. The blocks of its vCPUs read as zeros.
        let ours = !matches!(page.snapshot_of(0), Err(StatsError::NotYet | StatsError::Invalid { .. }));
        if ours {
            page.header.verify_request.store(request, Ordering::Relaxed);
        }
        ours
    });
    // KVM does not see this write (hazards.md 4), so it is marked after the write. The page lies in
    // the first region, which starts at 0.
    if let (Ok(true), Some(region)) = (written, ram.regions().first()) {
        region.marks().bitmap().set(STATS_GPA >> PAGE_SHIFT);
    }
    written == Ok(true)
}

/// Returns the result of `read` if the header and the blocks of `cpus` vCPUs are present.
fn read_if_present<T>(
    ram: &GuestRam,
    paging: &PagingSlot,
    cpus: u64,
    read: impl FnOnce() -> T,
) -> Result<T, StatsError> {
    read_range(ram, paging, (STATS_GPA, stats_bytes(cpus)), read)
}

/// Returns the result of `read` if this range, which starts in the first region, is present.
fn read_range<T>(
    ram: &GuestRam,
    paging: &PagingSlot,
    (gpa, bytes): (u64, u64),
    read: impl FnOnce() -> T,
) -> Result<T, StatsError> {
    let region = ram.regions().first().ok_or(StatsError::NotYet)?.region();
    let first = gpa >> PAGE_SHIFT;
    let run = PageRun::from(first..first + bytes.div_ceil(PAGE_SIZE));
    paging.read_if_present(region.id, run, read).ok_or(StatsError::Elsewhere)
}

/// Type through which a page of statistics may be accessed.
///
/// # Safety
/// Any bytes must be a valid value, every field must be an atomic, and the alignment must be at
/// most that of a page.
unsafe trait AtomicPage {}

// SAFETY: 64-bit atomics throughout, aligned to a page.
unsafe impl AtomicPage for StatsPage {}
// SAFETY: as above.
unsafe impl AtomicPage for AllocPage {}

fn page<T: AtomicPage>(ram: &GuestRam, gpa: u64) -> Option<&T> {
    let page = ram.host_range(Gpa(gpa), size_of::<T>()).ok()?;
    debug_assert!(page.cast::<T>().is_aligned());
    // SAFETY: the bytes are mapped for as long as `ram` is borrowed, aligned (mappings start at 2
    // MiB, the page at a multiple of 4 KiB), and by the trait the guest may write them meanwhile.
    Some(unsafe { page.cast::<T>().as_ref() })
}
