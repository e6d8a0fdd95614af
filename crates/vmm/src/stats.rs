//! Reading the statistics page that the bare-metal guest keeps (guest/abi).
//!
//! Whoever does so is a thread that must never sleep on guest memory (hazards.md 18): every look at the page is a
//! [`LazySlot::look`].

use crate::memory::GuestRam;
use std::sync::atomic::Ordering;
use vmferry_core::{Gpa, PAGE_SHIFT, PAGE_SIZE, PageRun};
use vmferry_fault::LazySlot;
use vmferry_guest_abi::{
    ALLOC_STATS_GPA, AllocPage, AllocSnapshot, STATS_GPA, StatsError, StatsPage, StatsSnapshot,
    alloc_stats_bytes, stats_bytes,
};

/// What the guest reports, a guest of at most `cpus` vCPUs.
pub(crate) fn snapshot(ram: &GuestRam, lazy: &LazySlot, cpus: u32) -> Result<StatsSnapshot, StatsError> {
    let page: &StatsPage = page(ram, STATS_GPA).ok_or(StatsError::NotYet)?;
    // The guest may have fewer, and never touched what is behind their blocks. What it says is taken once: the loads of
    // the snapshot are bounded by what was looked for.
    let cpus = look(ram, lazy, 0, || page.header.cpus.load(Ordering::Relaxed).min(u64::from(cpus)))?;
    look(ram, lazy, cpus, || page.snapshot_of(usize::try_from(cpus).unwrap_or(0)))?
}

/// What the guest reports of its allocator and its balloon, a guest of at most `cpus` vCPUs.
pub(crate) fn alloc_snapshot(
    ram: &GuestRam,
    lazy: &LazySlot,
    cpus: u32,
) -> Result<AllocSnapshot, StatsError> {
    let page: &AllocPage = page(ram, ALLOC_STATS_GPA).ok_or(StatsError::NotYet)?;
    let bytes = alloc_stats_bytes(cpus.into());
    look_at(ram, lazy, (ALLOC_STATS_GPA, bytes), || page.snapshot_of(usize::try_from(cpus).unwrap_or(0)))?
}

/// Writes the number of a verify request onto the page of a guest that has one, and marks that page as written; says
/// whether it did.
pub(crate) fn request_verify(ram: &GuestRam, lazy: &LazySlot, request: u64) -> bool {
    let Some(page) = page::<StatsPage>(ram, STATS_GPA) else { return false };
    let written = look(ram, lazy, 0, || {
        // Whether it is a guest that keeps one; the blocks of its vCPUs read as zeros.
        let ours = !matches!(page.snapshot_of(0), Err(StatsError::NotYet | StatsError::Invalid { .. }));
        if ours {
            page.header.verify_request.store(request, Ordering::Relaxed);
        }
        ours
    });
    // KVM does not see this write (hazards.md 4): write, then mark. The page lies in the first region, which starts at 0.
    if let (Ok(true), Some(region)) = (written, ram.regions().first()) {
        region.marks().bitmap().set(STATS_GPA >> PAGE_SHIFT);
    }
    written == Ok(true)
}

/// What `read` says if the header and the blocks of `cpus` vCPUs are there.
fn look<T>(ram: &GuestRam, lazy: &LazySlot, cpus: u64, read: impl FnOnce() -> T) -> Result<T, StatsError> {
    look_at(ram, lazy, (STATS_GPA, stats_bytes(cpus)), read)
}

/// What `read` says if so many bytes are there, from a guest-physical address of the first region on.
fn look_at<T>(
    ram: &GuestRam,
    lazy: &LazySlot,
    (gpa, bytes): (u64, u64),
    read: impl FnOnce() -> T,
) -> Result<T, StatsError> {
    let region = ram.regions().first().ok_or(StatsError::NotYet)?.region();
    let first = gpa >> PAGE_SHIFT;
    let run = PageRun::from(first..first + bytes.div_ceil(PAGE_SIZE));
    lazy.look(region.id, run, read).ok_or(StatsError::Elsewhere)
}

/// What a page of statistics may be seen as.
///
/// # Safety
/// Any bytes are a value, every field is an atomic, and the alignment is at most that of a page.
unsafe trait Shared {}

// SAFETY: 64-bit atomics throughout, aligned to a page.
unsafe impl Shared for StatsPage {}
// SAFETY: as above.
unsafe impl Shared for AllocPage {}

fn page<T: Shared>(ram: &GuestRam, gpa: u64) -> Option<&T> {
    let page = ram.host_range(Gpa(gpa), size_of::<T>()).ok()?;
    debug_assert!(page.cast::<T>().is_aligned());
    // SAFETY: the bytes are mapped for as long as `ram` is borrowed, aligned (mappings start at 2 MiB, the page at a
    // multiple of 4 KiB), and by the trait the guest may write them meanwhile.
    Some(unsafe { page.cast::<T>().as_ref() })
}
