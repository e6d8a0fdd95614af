//! Tracking by write protection in this process's page tables.

use crate::region::{collect, forget, map_of};
use crate::{Backing, MappedRegion, TrackerError};
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;
use vmferry_bitmap::Bitmap;
use vmferry_core::{DirtyTracker, NothingToProtect, PageSet, Protect, TrackerKind, VmError};
use vmferry_sys::memfd;
use vmferry_sys::pagemap::{IS_PRESENT, IS_SWAPPED, IS_WRITTEN, Match, PageRegion, Pagemap};
use vmferry_sys::uffd::{FEATURE_WP, FEATURE_WP_ASYNC, FEATURE_WP_SHMEM, Userfaultfd};

/// Runs read from the kernel at a time: 48 KiB, allocated once. Written pages lie scattered, so nearly each is a run.
const RUNS: usize = 2048;

/// Bytes that one scan covers. For the time of a scan KVM keeps vCPUs from faulting in the whole range that is scanned
/// (its MMU notifier); 256 MiB of small pages take about half a millisecond, and up to 2 ms when all were written.
const SCAN_BYTES: u64 = 256 << 20;

/// Bytes that are unregistered at a time: the kernel excludes every page fault of the process meanwhile, 5 ms for this
/// many.
const UNREGISTER_BYTES: u64 = 256 << 20;

/// Written pages: there (or swapped out) and not protected.
///
/// Pages that are not there at all are left out on purpose. Newer kernels call them written, too; matching them would
/// put a marker in the page table for every page that the guest never touched, which costs page tables, keeps huge
/// pages from being used there, and makes untouched pages look swapped out. They need no protection: the first write
/// makes a page that is there and not protected.
const WRITTEN: Match = Match {
    inverted: 0,
    all: IS_WRITTEN,
    any: IS_PRESENT | IS_SWAPPED,
    report: IS_WRITTEN | IS_PRESENT,
    protect: true,
};

/// Pages of which the page table knows nothing, not even a marker.
const NOTHING: Match = Match {
    inverted: IS_PRESENT | IS_SWAPPED,
    all: IS_PRESENT | IS_SWAPPED,
    any: 0,
    report: IS_PRESENT | IS_SWAPPED,
    protect: false,
};

/// Finds written pages by userfaultfd's asynchronous write protection, read and renewed by `PAGEMAP_SCAN`.
///
/// It sees every write through the page tables of this process: by its threads, by the kernel on their behalf (`read`
/// into guest memory), and by KVM guests, whose writes to a protected page make KVM fault it in again. So the VMM marks
/// nothing for its ordinary writes. It works at any time and needs no privilege: it never waits for a fault, so the
/// restricted userfaultfd that ordinary users get is enough.
///
/// What it does not see, and who has to mark it ([`MappedRegion::marks`]):
/// * writes through another mapping of a memfd (a vhost-user backend): its page table is another one;
/// * device writes to pages that were pinned before they were protected (`O_DIRECT` reads, io_uring fixed buffers):
///   mark after the completion;
/// * dropped memory (see the crate's documentation).
///
/// A huge page is protected as one, at little cost. The first write to it splits it and dirties 4 KiB, not 2 MiB. The
/// kernel may join it again when tracking has stopped. One of the host's pool (hugetlbfs) is never split: a write to it
/// dirties all of its 2 MiB, so the log or the ring, which KVM keeps by 4 KiB, suit such a guest better.
///
/// # Why no write is lost
/// `PAGEMAP_SCAN` protects a page and reports it in one step, under the page table's lock, and flushes the TLBs before
/// it returns. So a page is in the harvested set only after it was protected again (never the other way round, which
/// would lose a write in between), and [`Protect::protect`] has nothing left to do: a write after the harvest returned,
/// hence every write after `protect` returned, lifts the protection and is found by the next scan.
#[derive(Debug)]
pub struct WpTracker {
    regions: Vec<MappedRegion>,
    runs: Vec<PageRegion>,
    active: Option<Active>,
}

/// What exists while tracking.
#[derive(Debug)]
struct Active {
    uffd: Userfaultfd,
    pagemap: Pagemap,
}

impl WpTracker {
    /// A tracker for `regions`, which stay mapped as they are for as long as it tracks.
    ///
    /// # Errors
    /// If a region is not whole pages, or its marks are of another length.
    pub fn new(regions: Vec<MappedRegion>) -> Result<Self, TrackerError> {
        regions.iter().try_for_each(MappedRegion::check)?;
        Ok(Self { regions, runs: Vec::new(), active: None })
    }

    /// Whether this host and this user can track this way.
    ///
    /// # Errors
    /// [`TrackerError::Unavailable`] says what is missing.
    pub fn available() -> Result<(), TrackerError> {
        Userfaultfd::open(FEATURE_WP | FEATURE_WP_ASYNC | FEATURE_WP_SHMEM)
            .and_then(|_| Pagemap::open())
            .map(|_| ())
            .map_err(TrackerError::Unavailable)
    }

    fn try_start(&mut self) -> Result<(), TrackerError> {
        // Stop first, so that starting twice is starting anew.
        self.try_stop()?;
        let uffd = Userfaultfd::open(FEATURE_WP | FEATURE_WP_ASYNC | FEATURE_WP_SHMEM)
            .map_err(TrackerError::Unavailable)?;
        let pagemap = Pagemap::open().map_err(TrackerError::Unavailable)?;
        self.runs.resize(RUNS, PageRegion::default());
        let active = Active { uffd, pagemap };
        for region in &self.regions {
            forget(region.marks.as_deref(), region.handed_back.as_deref());
            // On an error `active` is dropped: closing the userfaultfd lifts whatever was protected.
            active.uffd.register_wp(region.span()).map_err(TrackerError::host(region.id))?;
            for span in chunks(region.span(), SCAN_BYTES) {
                active
                    .pagemap
                    .for_each(span, WRITTEN, &mut self.runs, |_| ())
                    .map_err(TrackerError::host(region.id))?;
            }
        }
        self.active = Some(active);
        Ok(())
    }

    fn try_stop(&mut self) -> Result<(), TrackerError> {
        self.runs = Vec::new();
        let Some(active) = self.active.take() else { return Ok(()) };
        let mut result = Ok(());
        for region in &self.regions {
            for span in chunks(region.span(), UNREGISTER_BYTES) {
                // Go on after an error: what is left is unregistered when the descriptor is closed.
                let given = active.uffd.unregister(span).map_err(TrackerError::host(region.id));
                result = result.and(given);
            }
        }
        result
    }
}

impl DirtyTracker for WpTracker {
    fn kind(&self) -> TrackerKind {
        TrackerKind::Wp
    }

    fn start(&mut self) -> Result<(), VmError> {
        Ok(self.try_start()?)
    }

    fn harvest(&mut self, dirty: &mut PageSet) -> Result<(), VmError> {
        let active = self.active.as_ref().ok_or(TrackerError::NotStarted)?;
        for region in &self.regions {
            let map = map_of(dirty, region.id, region.pages())?;
            let runs = &mut self.runs;
            collect(map, region.handed_back.as_deref(), |map| {
                if let Some(marks) = &region.marks {
                    marks.harvest(map);
                }
                for span in chunks(region.span(), SCAN_BYTES) {
                    active.written(region, span.clone(), runs, map)?;
                    if let Backing::Memfd { file, offset } = &region.backing {
                        active.unmapped(region, span, (file.as_fd(), *offset), runs, map)?;
                    }
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    fn protector(&self) -> Arc<dyn Protect> {
        // See "Why no write is lost" above.
        Arc::new(NothingToProtect)
    }

    fn stop(&mut self) -> Result<(), VmError> {
        Ok(self.try_stop()?)
    }
}

impl Active {
    /// Adds the written pages of `span` to `map`, and protects them.
    fn written(
        &self,
        region: &MappedRegion,
        span: Range<u64>,
        runs: &mut [PageRegion],
        map: &mut Bitmap,
    ) -> Result<(), TrackerError> {
        let scanned = self.pagemap.for_each(span.clone(), WRITTEN, runs, |run| {
            map.set_range(region.pages_at(run.start..run.end));
        });
        scanned.map_err(|error| {
            // The scan may have protected pages that it did not come to report: take them all for written.
            map.set_range(region.pages_at(span));
            TrackerError::host(region.id)(error)
        })
    }

    /// Adds to `map` those pages of a memfd that hold data although this mapping knows nothing of them, and leaves
    /// protection markers for them, so that each is reported once.
    ///
    /// When the kernel takes a page of a memfd out of a mapping (to swap it out, say), it leaves a marker if the page
    /// was protected, and nothing if it had been written since. So "nothing" over data means: written, then unmapped.
    /// Data that only another mapping wrote looks the same, and is reported once, too.
    fn unmapped(
        &self,
        region: &MappedRegion,
        span: Range<u64>,
        (file, offset): (std::os::fd::BorrowedFd<'_>, u64),
        runs: &mut [PageRegion],
        map: &mut Bitmap,
    ) -> Result<(), TrackerError> {
        let mut failed = Ok(());
        let base = region.host;
        // Most guests have no such pages, or a few large holes: asking the file for data only there keeps this cheap.
        self.pagemap
            .for_each(span, NOTHING, runs, |nothing| {
                let within = nothing.start - base + offset..nothing.end - base + offset;
                let asked = memfd::data_ranges(file, within, |data| {
                    let addresses = data.start - offset + base..data.end - offset + base;
                    let pages = region.pages_at(addresses.clone());
                    // Protect first, then report. A page that is written in between stays written and comes again.
                    if let Err(error) = self.uffd.write_protect(addresses, true) {
                        failed = Err(error);
                    }
                    map.set_range(pages);
                });
                if let Err(error) = asked {
                    failed = Err(error);
                }
            })
            .and(failed)
            .map_err(TrackerError::host(region.id))
    }
}

/// `span` in pieces of at most `len` bytes.
fn chunks(span: Range<u64>, len: u64) -> impl Iterator<Item = Range<u64>> {
    let end = span.end;
    let step = usize::try_from(len).unwrap_or(usize::MAX);
    span.step_by(step).map(move |start| start..end.min(start.saturating_add(len)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_the_span_once() {
        for (end, count) in [(1, 1), (256, 1), (257, 2), (512, 2)] {
            let all: Vec<_> = chunks(4096..4096 + end, 256).collect();
            assert_eq!(all.len(), count);
            assert_eq!((all[0].start, all[count - 1].end), (4096, 4096 + end));
            assert!(all.windows(2).all(|pair| pair[0].end == pair[1].start));
        }
    }
}
