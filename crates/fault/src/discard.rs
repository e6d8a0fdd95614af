//! Making pages missing.

use crate::error::FaultError;
use crate::region::{Backing, LazyRegion};
use crate::stripes::Place;
use std::os::fd::AsFd;
use vmferry_bitmap::Bitmap;
use vmferry_core::PageRun;
use vmferry_sys::{mapping, memfd};

/// Drops the pages of `missing` from `region`, run by run, whatever they held.
///
/// Anonymous pages are gone after `MADV_DONTNEED`, present, swapped out or part of a huge page (whose mapping is split,
/// once). A part of a memfd's huge page may stay, as zeros, if that page is in use; then no fault would ever come for it
/// and the guest would read the zeros, so the file is asked, and staying is an error.
///
/// A memfd's pages take their time: 1 GiB of them in one run 162 ms on the two-core test host. Several threads do not help,
/// because the file's lock lets one in at a time (two: 177 ms), nor do smaller pieces (2 MiB: 171 to 211 ms, 4 KiB:
/// 1.2 s) or unmapping first (178 ms, 37 of them for the mapping). So each run goes in one call.
///
/// # Safety
/// No Rust reference covers the region's bytes, and what they held may be lost.
pub(crate) unsafe fn discard(region: &LazyRegion, place: &Place, missing: &Bitmap) -> Result<(), FaultError> {
    for run in missing.runs().map(PageRun::from) {
        match &region.backing {
            Backing::Anonymous => {
                // SAFETY: the run lies in the region (the bitmap has its length), which is private and anonymous as its
                // backing says; the rest is the caller's promise.
                let dropped = unsafe { mapping::drop_pages(place.span(run)) };
                dropped.map_err(FaultError::host(region.id))?;
            }
            Backing::Memfd { file, offset } => {
                let bytes = offset + run.first.offset()..offset + run.first.offset() + run.bytes();
                if !punch(file.as_fd(), bytes).map_err(FaultError::host(region.id))? {
                    return Err(FaultError::Sticky { region: region.id, run });
                }
            }
            // Nothing is dropped: `huge` takes them out of the mapping.
            Backing::HugeMemfd { .. } => {}
        }
    }
    Ok(())
}

/// Punches until the pages are gone: who holds a huge page (a `readv` under way, the kernel's own scans) lets it go soon.
fn punch(
    file: std::os::fd::BorrowedFd<'_>,
    bytes: std::ops::Range<u64>,
) -> Result<bool, vmferry_sys::SysError> {
    const ATTEMPTS: u32 = 5;
    for attempt in 0..ATTEMPTS {
        if memfd::punch(file, bytes.clone())? {
            return Ok(true);
        }
        std::thread::sleep(std::time::Duration::from_micros(100 << attempt));
    }
    Ok(false)
}
