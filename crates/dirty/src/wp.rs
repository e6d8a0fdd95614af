//! Tracking with write protection in the page tables of this process.

use crate::region::{collect, forget, map_of};
use crate::{Backing, MappedRegion, TrackerError};
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vmferry_bitmap::Bitmap;
use vmferry_core::{DirtyTracker, NothingToProtect, PageSet, Protect, TrackerKind, VmError};
use vmferry_sys::memfd;
use vmferry_sys::pagemap::{IS_FILE, IS_PRESENT, IS_SWAPPED, IS_WRITTEN, Match, PageRegion, Pagemap};
use vmferry_sys::uffd::{FEATURE_WP, FEATURE_WP_ASYNC, FEATURE_WP_SHMEM, Userfaultfd};

/// Maximum number of runs that one scan returns. The buffer has 48 KiB and is allocated once.
/// Written pages are scattered, so nearly every page is a run of its own.
const RUNS: usize = 2048;

/// Number of bytes that one scan covers. During a scan, KVM's MMU notifier keeps vCPUs from
/// handling faults anywhere in the scanned range. A scan of 256 MiB of small pages takes about half
/// a millisecond, and up to 2 ms if all pages were written. When tracking stops, the same
/// number of bytes is unregistered at a time. During such a call, the kernel blocks all page faults
/// of the process, which takes 5 ms.
const SCAN_BYTES: u64 = 256 << 20;

/// Filter for pages that have an entry in the page table, which may be a marker.
const ENTRY: Match = Match { inverted: 0, all: 0, any: IS_PRESENT | IS_SWAPPED, report: 0, protect: false };

/// Filter for written pages: present (or swapped out) and not protected.
///
/// Pages that do not exist are excluded on purpose. Newer kernels also report them as written.
/// Matching them would put a marker into the page table for every page that the guest never
/// touched. The markers cost page tables, prevent huge pages, and make untouched pages look swapped
/// out. Such pages need no protection: the first write creates a page that is present and not
/// protected.
const WRITTEN: Match = Match {
    inverted: 0,
    all: IS_WRITTEN,
    any: IS_PRESENT | IS_SWAPPED,
    report: IS_WRITTEN | IS_PRESENT,
    protect: true,
};

/// Filter for written pages of a file that is mapped privately. A write copies the page, and the
/// copy does not belong to the file.
const WRITTEN_PRIVATELY: Match = Match { inverted: IS_FILE, all: IS_WRITTEN | IS_FILE, ..WRITTEN };

/// Filter for pages without any entry in the page table, not even a marker.
const NOTHING: Match = Match {
    inverted: IS_PRESENT | IS_SWAPPED,
    all: IS_PRESENT | IS_SWAPPED,
    any: 0,
    report: IS_PRESENT | IS_SWAPPED,
    protect: false,
};

/// Tracker that write-protects pages with userfaultfd in asynchronous mode. Each harvest uses
/// `PAGEMAP_SCAN` to find the written pages and to protect them again.
///
/// The tracker detects every write through the page tables of this process: writes of its threads,
/// writes of the kernel on behalf of these threads (such as `read` into guest memory), and writes
/// of KVM guests, because KVM faults a protected page in again before the guest can write to it.
/// Therefore the VMM need not mark its ordinary writes. The tracker needs no privilege, because it
/// handles no faults: the user-mode-only userfaultfd that any user may open is sufficient.
///
/// The tracker does not detect the following changes, which the VMM must mark in
/// [`MappedRegion::marks`]:
/// * writes through another mapping of a memfd, for example by a vhost-user backend, because they
///   do not use the page tables of the tracked mapping;
/// * device writes to pages that were pinned before they were protected (`O_DIRECT` reads, io_uring
///   fixed buffers), which must be marked after the I/O has completed;
/// * dropped memory (see the documentation of the crate).
///
/// A transparent huge page is protected as a whole, at little cost. The first write splits the huge
/// page and dirties 4 KiB, not 2 MiB. The kernel may merge the pages again after tracking has
/// stopped. A huge page of the host's pool (hugetlbfs) is never split, so a write dirties all of
/// its 2 MiB. For a guest with such memory, KVM's dirty log or dirty rings are better suited,
/// because they record pages of 4 KiB.
///
/// # Why no write is lost
/// `PAGEMAP_SCAN` protects a page and reports it in one step, under the lock of the page table, and
/// flushes the TLBs before it returns. Therefore a page is in the harvested set only after it has
/// been protected again. The opposite order would lose a write between the two steps.
/// [`Protect::protect`] has nothing to do: every write after the return of the harvest lifts the
/// protection, and the next scan finds the page.
#[derive(Debug)]
pub struct WpTracker {
    regions: Vec<MappedRegion>,
    runs: Vec<PageRegion>,
    active: Option<Active>,
    /// Time that the last harvest spent in `PAGEMAP_SCAN`, and in the other calls for memory of
    /// memfds.
    in_kernel: Option<Duration>,
}

/// State while tracking.
#[derive(Debug)]
struct Active {
    uffd: Userfaultfd,
    pagemap: Pagemap,
}

impl WpTracker {
    /// Creates a tracker for `regions`, whose mappings must not change while the tracker is
    /// started.
    ///
    /// # Errors
    /// Returns [`TrackerError::NotPages`] if a region is empty or does not consist of whole pages.
    /// Returns [`TrackerError::Length`] if `marks` or `returned_pages` of a region do not have one
    /// bit for each page of the region.
    pub fn new(regions: Vec<MappedRegion>) -> Result<Self, TrackerError> {
        regions.iter().try_for_each(MappedRegion::check)?;
        Ok(Self { regions, runs: Vec::new(), active: None, in_kernel: None })
    }

    /// Checks whether this kernel supports this kind of tracking and permits it to this user.
    ///
    /// # Errors
    /// Returns [`TrackerError::Unavailable`] with the missing feature or permission.
    pub fn available() -> Result<(), TrackerError> {
        Userfaultfd::open(FEATURE_WP | FEATURE_WP_ASYNC | FEATURE_WP_SHMEM)
            .and_then(|_| Pagemap::open())
            .map(|_| ())
            .map_err(TrackerError::Unavailable)
    }

    fn try_start(&mut self) -> Result<(), TrackerError> {
        // Stop first, so that a second call of `start` begins a new period of tracking.
        self.try_stop()?;
        let uffd = Userfaultfd::open(FEATURE_WP | FEATURE_WP_ASYNC | FEATURE_WP_SHMEM)
            .map_err(TrackerError::Unavailable)?;
        let pagemap = Pagemap::open().map_err(TrackerError::Unavailable)?;
        self.runs.resize(RUNS, PageRegion::default());
        let active = Active { uffd, pagemap };
        for region in &self.regions {
            forget(region.marks.as_deref(), region.returned_pages.as_deref());
            // On an error `active` is dropped: closing the userfaultfd lifts all protection.
            active.uffd.register_wp(region.span()).map_err(TrackerError::host(region.id))?;
            for_each_part(&active.pagemap, region, |part| match part {
                Part::Populated(span) => active
                    .pagemap
                    .for_each(span, written_filter(region), &mut self.runs, |_| ())
                    .map(|_| ())
                    .map_err(TrackerError::host(region.id)),
                Part::Empty(_) => Ok(()),
            })?;
        }
        self.active = Some(active);
        Ok(())
    }

    fn try_stop(&mut self) -> Result<(), TrackerError> {
        self.runs = Vec::new();
        let Some(active) = self.active.take() else { return Ok(()) };
        let mut result = Ok(());
        for region in &self.regions {
            // Continue after an error: the rest is unregistered when the descriptor is closed.
            let given = for_each_part(&active.pagemap, region, |part| {
                let (Part::Populated(span) | Part::Empty(span)) = part;
                active.uffd.unregister(span).map_err(TrackerError::host(region.id))
            });
            result = result.and(given);
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
        let mut in_kernel = Duration::ZERO;
        for region in &self.regions {
            let map = map_of(dirty, region.id, region.pages())?;
            let (runs, in_kernel) = (&mut self.runs, &mut in_kernel);
            collect(map, region.returned_pages.as_deref(), |map| {
                if let Some(marks) = &region.marks {
                    marks.harvest(map);
                }
                for_each_part(&active.pagemap, region, |part| {
                    let span = match part {
                        Part::Empty(span) => span,
                        Part::Populated(span) => {
                            *in_kernel += active.written(region, span.clone(), runs, map)?;
                            span
                        }
                    };
                    match &region.backing {
                        Backing::Memfd { file, offset } => {
                            *in_kernel +=
                                active.unmapped(region, span, (file.as_fd(), *offset), runs, map)?;
                            Ok(())
                        }
                        // A written page of a private mapping has an entry, even if it is swapped
                        // out.
                        Backing::Anonymous | Backing::PrivateFile { .. } | Backing::Other => Ok(()),
                    }
                })
            })?;
        }
        self.in_kernel = Some(in_kernel);
        Ok(())
    }

    fn harvest_kernel_time(&self) -> Option<Duration> {
        self.in_kernel
    }

    fn protector(&self) -> Arc<dyn Protect> {
        // See "Why no write is lost" in the documentation of the type.
        Arc::new(NothingToProtect)
    }

    fn stop(&mut self) -> Result<(), VmError> {
        Ok(self.try_stop()?)
    }
}

impl Active {
    /// Adds the written pages of `span` to `map`, and protects them. Returns the time of the scan.
    fn written(
        &self,
        region: &MappedRegion,
        span: Range<u64>,
        runs: &mut [PageRegion],
        map: &mut Bitmap,
    ) -> Result<Duration, TrackerError> {
        let scanned = self.pagemap.for_each(span.clone(), written_filter(region), runs, |run| {
            map.set_range(region.pages_at(run.start..run.end));
        });
        scanned.map_err(|error| {
            // The scan may have protected pages that it did not report, so all pages of `span`
            // count as written.
            map.set_range(region.pages_at(span));
            TrackerError::host(region.id)(error)
        })
    }

    /// Adds to `map` the pages of a memfd that have data but no entry in the page table of this
    /// mapping. Leaves protection markers for them, so that each page is reported once. Returns the
    /// time of all calls of the kernel, because each hole costs at least one call.
    ///
    /// When the kernel removes a page of a memfd from a mapping (for example to swap it out), it
    /// leaves a marker if the page was protected, and no entry if the page was written since. So a
    /// missing entry over data means that the page was written and then unmapped. Data that was
    /// written only through another mapping looks the same, and is also reported once.
    fn unmapped(
        &self,
        region: &MappedRegion,
        span: Range<u64>,
        (file, offset): (std::os::fd::BorrowedFd<'_>, u64),
        runs: &mut [PageRegion],
        map: &mut Bitmap,
    ) -> Result<Duration, TrackerError> {
        let (mut failed, began) = (Ok(()), Instant::now());
        let base = region.host;
        // Most guests have no page without an entry, or a few large holes. The cost is low because
        // the file is searched for data only in these holes.
        self.pagemap
            .for_each(span, NOTHING, runs, |nothing| {
                let within = nothing.start - base + offset..nothing.end - base + offset;
                let asked = memfd::data_ranges(file, within, |data| {
                    let addresses = data.start - offset + base..data.end - offset + base;
                    let pages = region.pages_at(addresses.clone());
                    // Protect first, then report. A page that is written in between stays written
                    // and is reported again.
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
            .map(|()| began.elapsed())
            .map_err(TrackerError::host(region.id))
    }
}

fn written_filter(region: &MappedRegion) -> Match {
    match region.backing {
        Backing::PrivateFile { .. } => WRITTEN_PRIVATELY,
        Backing::Anonymous | Backing::Memfd { .. } | Backing::Other => WRITTEN,
    }
}

/// Part of a region.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    /// At most [`SCAN_BYTES`] that have an entry in the page table.
    Populated(Range<u64>),
    /// Any number of bytes that had no entry. An entry that appears later belongs to a page that is
    /// not protected, so the next harvest reports the page.
    Empty(Range<u64>),
}

/// Calls `each` with the parts of `region`, in order, until it fails. The number of parts depends
/// on the populated memory, not on the size of the region.
fn for_each_part(
    pagemap: &Pagemap,
    region: &MappedRegion,
    mut each: impl FnMut(Part) -> Result<(), TrackerError>,
) -> Result<(), TrackerError> {
    let first = |span: &Range<u64>| pagemap.first(span, ENTRY).map_err(TrackerError::host(region.id));
    let mut rest = region.span();
    while !rest.is_empty() {
        let begin = match first(&rest)? {
            None => rest.end,
            Some(found) => part_start(&region.span(), found).max(rest.start),
        };
        if begin > rest.start {
            each(Part::Empty(rest.start..begin))?;
        }
        let end = rest.end.min(part_start(&region.span(), begin).saturating_add(SCAN_BYTES));
        if end > begin {
            each(Part::Populated(begin..end))?;
        }
        rest.start = end.max(begin);
    }
    Ok(())
}

/// Returns the address at which the part of `region` that contains `address` starts.
fn part_start(region: &Range<u64>, address: u64) -> u64 {
    address - (address - region.start) % SCAN_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmferry_core::RegionId;

    #[test]
    fn parts_cover_the_region_once_and_skip_what_has_no_entry() {
        // A gap of the address space, in which no page exists.
        let len = 40 * SCAN_BYTES + 4096;
        let hint = std::ptr::null_mut();
        let flags = rustix::mm::MapFlags::PRIVATE | rustix::mm::MapFlags::NORESERVE;
        let prot = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE;
        let bytes = usize::try_from(len).unwrap();
        // SAFETY: a new anonymous mapping that this test owns.
        let start = unsafe { rustix::mm::mmap_anonymous(hint, bytes, prot, flags) }.unwrap();
        let host = start.addr() as u64;
        for offset in [3 * SCAN_BYTES + 4096, 5 * SCAN_BYTES - 1, len - 1] {
            // SAFETY: within the mapping.
            unsafe { start.cast::<u8>().add(usize::try_from(offset).unwrap()).write_volatile(1) };
        }
        let region = MappedRegion {
            id: RegionId(0),
            host,
            len,
            backing: Backing::Anonymous,
            marks: None,
            returned_pages: None,
        };
        let mut parts = Vec::new();
        let walked = for_each_part(&Pagemap::open().unwrap(), &region, |part| {
            parts.push(match part {
                Part::Populated(span) => (true, span.start - host, span.end - host),
                Part::Empty(span) => (false, span.start - host, span.end - host),
            });
            Ok(())
        });
        // SAFETY: mapped above, and not used any more.
        unsafe { rustix::mm::munmap(start, bytes) }.unwrap();
        if let Err(error) = walked {
            return vmferry_testkit::skip(vmferry_testkit::Need::Kernel, format!("PAGEMAP_SCAN: {error}"));
        }
        let at = |part: u64| part * SCAN_BYTES;
        let want = [
            (false, 0, at(3)),
            (true, at(3), at(4)),
            (true, at(4), at(5)),
            (false, at(5), at(40)),
            (true, at(40), len),
        ];
        assert_eq!(parts, want);
    }
}
