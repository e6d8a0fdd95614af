//! Dropping pages, so that they are missing.

use crate::error::FaultError;
use crate::region::{Backing, PagedRegion};
use crate::shards::ShardedRegion;
use std::os::fd::AsFd;
use vmferry_bitmap::Bitmap;
use vmferry_core::PageRun;
use vmferry_sys::{mapping, memfd};

/// Drops the pages of `missing` from `region`, run by run, including their content.
///
/// Anonymous pages are missing after `MADV_DONTNEED`, whether they were present, swapped out or
/// part of a huge page (whose mapping is split once). If only part of a memfd's huge page is
/// dropped while the huge page is in use, the part is not missing but filled with zeros. An access
/// to that part would raise no fault, and the guest would read the zeros. Therefore the function
/// checks the file, and returns an error if pages remain.
///
/// Dropping pages of a memfd is slow: 1 GiB in a single run took 162 ms on the two-core test host.
/// Several threads do not help, because the lock of the file admits one at a time (two threads: 177
/// ms). Smaller pieces do not help either (2 MiB: 171 to 211 ms, 4 KiB: 1.2 s), nor does unmapping
/// the pages first (178 ms, of which unmapping took 37 ms). Therefore each run is dropped with one
/// call.
///
/// # Safety
/// No Rust reference covers the region's bytes, and their content may be lost.
pub(crate) unsafe fn discard(
    region: &PagedRegion,
    place: &ShardedRegion,
    missing: &Bitmap,
) -> Result<(), FaultError> {
    for run in missing.runs().map(PageRun::from) {
        match &region.backing {
            Backing::Anonymous => {
                // SAFETY: the run lies in the region (the bitmap has its length), which is private
                // and anonymous, as its backing says. The caller guarantees the rest.
                let dropped = unsafe { mapping::drop_pages(place.span(run)) };
                dropped.map_err(FaultError::host(region.id))?;
            }
            Backing::Memfd { file, offset } => {
                let bytes = offset + run.first.offset()..offset + run.first.offset() + run.bytes();
                if !punch(file.as_fd(), bytes).map_err(FaultError::host(region.id))? {
                    return Err(FaultError::Sticky { region: region.id, run });
                }
            }
            // Nothing is dropped for huge pages, because `huge` removes them from the mapping.
            Backing::HugeMemfd { .. } => {}
        }
    }
    Ok(())
}

/// Punches the pages out of the file, and returns true if they are gone. Makes up to five attempts,
/// because a user of a huge page (a running `readv`, a scan of the kernel) releases it soon.
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
