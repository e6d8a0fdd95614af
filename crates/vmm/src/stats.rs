//! Reading the statistics page that the bare-metal guest keeps (guest/abi).
//!
//! Whoever does so is a thread that must never sleep on guest memory (traps.md 18): every look at the page is a
//! [`LazySlot::look`].

use crate::memory::GuestRam;
use std::sync::atomic::Ordering;
use vmferry_fault::LazySlot;
use vmferry_guest_abi::{STATS_GPA, StatsError, StatsPage, StatsSnapshot, stats_bytes};
use vmferry_memory::{Gpa, PAGE_SHIFT, PAGE_SIZE, PageRun};

/// What the guest reports, a guest of at most `cpus` vCPUs.
pub(crate) fn snapshot(ram: &GuestRam, lazy: &LazySlot, cpus: u32) -> Result<StatsSnapshot, StatsError> {
    let page = page(ram).ok_or(StatsError::NotYet)?;
    // The guest may have fewer, and never touched what is behind their blocks. What it says is taken once: the loads of
    // the snapshot are bounded by what was looked for.
    let cpus = look(ram, lazy, 0, || page.header.cpus.load(Ordering::Relaxed).min(u64::from(cpus)))?;
    look(ram, lazy, cpus, || page.snapshot_of(usize::try_from(cpus).unwrap_or(0)))?
}

/// Writes the number of a verify request onto the page of a guest that has one, and marks that page as written; says
/// whether it did.
pub(crate) fn request_verify(ram: &GuestRam, lazy: &LazySlot, request: u64) -> bool {
    let Some(page) = page(ram) else { return false };
    let written = look(ram, lazy, 0, || {
        // Whether it is a guest that keeps one; the blocks of its vCPUs read as zeros.
        let ours = !matches!(page.snapshot_of(0), Err(StatsError::NotYet | StatsError::Invalid { .. }));
        if ours {
            page.header.verify_request.store(request, Ordering::Relaxed);
        }
        ours
    });
    // KVM does not see this write (traps.md 4): write, then mark. The page lies in the first region, which starts at 0.
    if let (Ok(true), Some(region)) = (written, ram.regions().first()) {
        region.marks().bitmap().set(STATS_GPA >> PAGE_SHIFT);
    }
    written == Ok(true)
}

/// What `read` says if the header and the blocks of `cpus` vCPUs are there.
fn look<T>(ram: &GuestRam, lazy: &LazySlot, cpus: u64, read: impl FnOnce() -> T) -> Result<T, StatsError> {
    let region = ram.regions().first().ok_or(StatsError::NotYet)?.region();
    let pages = stats_bytes(cpus).div_ceil(PAGE_SIZE);
    let run = PageRun::from(STATS_GPA >> PAGE_SHIFT..(STATS_GPA >> PAGE_SHIFT) + pages);
    lazy.look(region.id, run, read).ok_or(StatsError::Elsewhere)
}

fn page(ram: &GuestRam) -> Option<&StatsPage> {
    let page = ram.host_range(Gpa(STATS_GPA), size_of::<StatsPage>()).ok()?;
    debug_assert!(page.cast::<StatsPage>().is_aligned());
    // SAFETY: the bytes are mapped for as long as `ram` is borrowed, aligned (mappings start at 2 MiB, the page at a
    // multiple of 4 KiB), and every field of the type is an atomic, so the guest may write them meanwhile.
    Some(unsafe { page.cast::<StatsPage>().as_ref() })
}
