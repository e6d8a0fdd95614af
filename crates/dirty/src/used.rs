//! Detection of the pages that a guest has used since its memory was mapped.

use crate::region::map_of;
use crate::residency::has_no_scan;
use crate::{MappedRegion, TrackerError};
use vmferry_core::{PageRun, PageSet, UsedPages, VmError};
use vmferry_sys::pagemap::{IS_PRESENT, IS_SWAPPED, Match, PageRegion, Pagemap};
use vmferry_sys::uffd::{FEATURE_WP, FEATURE_WP_ASYNC, FEATURE_WP_SHMEM, Userfaultfd};
use vmferry_sys::{SysError, mapping};

/// Maximum number of runs that one scan returns.
const RUNS: usize = 2048;
/// Number of bytes that are unregistered at a time. The kernel blocks page faults meanwhile.
const PART: usize = 256 << 20;

/// Filter for pages that have an entry in the page table.
const ENTRY: Match =
    Match { inverted: 0, all: 0, any: IS_PRESENT | IS_SWAPPED, report: IS_PRESENT, protect: false };

/// Finder of the pages that have an entry in the page table of this process.
///
/// # Precision
/// The entries alone are not precise: when a page of a file is read, the kernel also maps its
/// neighbours that are in the page cache, which are 64 KiB or a whole huge page. It does not do
/// this in memory that is registered with a userfaultfd for write protection
/// (`uffd_disable_fault_around` in the kernel's `mm/memory.c`). Therefore the memory is registered
/// while this value exists, and no page is ever protected. A userfaultfd in asynchronous mode needs
/// no privilege.
///
/// Memory belongs to one userfaultfd at a time. Drop this value before a
/// [`WpTracker`](crate::WpTracker) is started or a snapshot is taken.
#[derive(Debug)]
pub struct MappedPages {
    regions: Vec<MappedRegion>,
    uffd: Option<Userfaultfd>,
    runs: Vec<PageRegion>,
}

impl MappedPages {
    /// Begins to find the pages of `regions`, whose mappings must not change while this value
    /// exists. Pages that are mapped already count as used.
    ///
    /// # Errors
    /// Returns an error if a region is not valid, or if the pagemap cannot be read.
    pub fn new(regions: Vec<MappedRegion>) -> Result<Self, TrackerError> {
        regions.iter().try_for_each(MappedRegion::check)?;
        Pagemap::own().map_err(TrackerError::Unavailable)?;
        let mut used = Self { regions, uffd: None, runs: vec![PageRegion::default(); RUNS] };
        if let Err(error) = used.register() {
            tracing::warn!("the working set also contains pages beside those that the guest uses: {error}");
        }
        Ok(used)
    }

    /// Returns true if only pages that were used are found, and not their neighbours.
    #[must_use]
    pub fn is_precise(&self) -> bool {
        self.uffd.is_some()
    }

    fn register(&mut self) -> Result<(), SysError> {
        let uffd = Userfaultfd::open(FEATURE_WP | FEATURE_WP_ASYNC | FEATURE_WP_SHMEM)?;
        // After an error, `uffd` is closed, which unregisters the memory.
        self.regions.iter().try_for_each(|region| uffd.register_wp(region.span()))?;
        self.uffd = Some(uffd);
        Ok(())
    }
}

impl UsedPages for MappedPages {
    fn find(&mut self, used: &mut PageSet) -> Result<(), VmError> {
        let map = Pagemap::own().map_err(TrackerError::Unavailable)?;
        for region in &self.regions {
            let pages = map_of(used, region.id, region.pages())?;
            let scanned = map.for_each(region.span(), ENTRY, &mut self.runs, |run| {
                pages.set_range(region.pages_at(run.start..run.end));
            });
            match scanned {
                Err(error) if has_no_scan(&error) => {
                    map.for_each_populated_entry(region.span(), |page| pages.set_range(region.pages_at(page)))
                }
                scanned => scanned.map(|_| ()),
            }
            .map_err(TrackerError::host(region.id))?;
        }
        Ok(())
    }
}

impl Drop for MappedPages {
    fn drop(&mut self) {
        let Some(uffd) = &self.uffd else { return };
        for region in &self.regions {
            let span = region.span();
            for start in span.clone().step_by(PART) {
                let end = span.end.min(start.saturating_add(PART as u64));
                // After an error, the rest is unregistered when the descriptor is closed.
                let _ = uffd.unregister(start..end);
            }
        }
    }
}

/// Maps the pages of `run`, so that the first read of a page causes no page fault. Pages of a file
/// are read if they are not in the page cache. No page is copied.
///
/// # Errors
/// Returns [`TrackerError::NoPages`] if `run` is not in the region, and [`TrackerError::Host`] if
/// the host refuses. A kernel before 5.14 refuses every call.
pub fn map_pages(region: &MappedRegion, run: PageRun) -> Result<(), TrackerError> {
    mapping::populate_for_reading(region.span_of(run)?).map_err(TrackerError::host(region.id))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backing, WpTracker};
    use std::fs::File;
    use std::io::Write;
    use std::os::fd::OwnedFd;
    use std::sync::Arc;
    use vmferry_core::RegionId;
    use vmferry_sys::mapping::Sharing;

    const PAGES: u64 = 600;

    /// Private mapping of a new file, unmapped when dropped.
    struct Private {
        region: MappedRegion,
        _folder: vmferry_testkit::Folder,
    }

    impl Private {
        fn new() -> Self {
            let folder = vmferry_testkit::Folder::new();
            let path = folder.path("pages");
            File::create(&path).unwrap().write_all(&vec![7; usize::try_from(PAGES << 12).unwrap()]).unwrap();
            let file = Arc::new(OwnedFd::from(File::open(&path).unwrap()));
            let (len, flags) = (PAGES << 12, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let size = usize::try_from(len).unwrap();
            // SAFETY: a new mapping at an address that the kernel chooses.
            let start = unsafe { libc::mmap(std::ptr::null_mut(), size, access, flags, -1, 0) };
            assert_ne!(start, libc::MAP_FAILED);
            let host = start.addr() as u64;
            let backing = Backing::PrivateFile { file: Arc::clone(&file), offset: 0 };
            let (marks, returned_pages) = (None, None);
            let region = MappedRegion { id: RegionId(4), host, len, backing, marks, returned_pages };
            use std::os::fd::AsFd;
            // SAFETY: this test owns the mapping, and no reference to it exists.
            drop(unsafe { mapping::replace(region.span(), file.as_fd(), 0, Sharing::Private) }.unwrap());
            Self { region, _folder: folder }
        }

        fn at(&self, page: u64) -> *mut u8 {
            std::ptr::with_exposed_provenance_mut(usize::try_from(self.region.host + (page << 12)).unwrap())
        }

        fn read(&self, page: u64) {
            // SAFETY: the page is in the mapping.
            assert_eq!(unsafe { self.at(page).read_volatile() }, 7);
        }

        fn found(&self, used: &mut MappedPages) -> Vec<std::ops::Range<u64>> {
            let mut set = PageSet::of([(self.region.id, PAGES)]);
            used.find(&mut set).unwrap();
            set.region(self.region.id).unwrap().runs().collect()
        }
    }

    impl Drop for Private {
        fn drop(&mut self) {
            // SAFETY: the test owns the mapping and does not use it any more.
            unsafe { libc::munmap(self.at(0).cast(), usize::try_from(self.region.len).unwrap()) };
        }
    }

    #[test]
    fn exactly_the_pages_that_were_used_are_found() {
        if let Err(error) = WpTracker::available() {
            vmferry_testkit::skip(vmferry_testkit::Need::Uffd, error);
            return;
        }
        let memory = Private::new();
        let mut used = MappedPages::new(vec![memory.region.clone()]).unwrap();
        assert!(used.is_precise());
        assert_eq!(memory.found(&mut used), []);
        [3, 100, 101, 599].into_iter().for_each(|page| memory.read(page));
        // SAFETY: the page is in the mapping.
        unsafe { memory.at(300).write_volatile(1) };
        let runs = vec![3..4, 100..102, 300..301, 599..600];
        assert_eq!(memory.found(&mut used), runs);
        assert_eq!(memory.found(&mut used), runs, "a second call changes nothing");
        drop(used);
        // The memory can be registered again.
        let used = MappedPages::new(vec![memory.region.clone()]).unwrap();
        assert!(used.is_precise());
    }

    #[test]
    fn used_pages_are_found_beside_a_tracker() {
        if let Err(error) = WpTracker::available() {
            vmferry_testkit::skip(vmferry_testkit::Need::Uffd, error);
            return;
        }
        use vmferry_core::DirtyTracker;
        let memory = Private::new();
        let mut tracker = WpTracker::new(vec![memory.region.clone()]).unwrap();
        tracker.start().unwrap();
        let mut used = MappedPages::new(vec![memory.region.clone()]).unwrap();
        assert!(!used.is_precise());
        memory.read(200);
        let found = memory.found(&mut used);
        assert!(found.iter().any(|run| run.contains(&200)), "{found:?}");
        tracker.stop().unwrap();
    }

    #[test]
    fn mapped_pages_need_no_fault_and_are_not_copied() {
        if vmferry_testkit::skip_if_emulated("MADV_POPULATE_READ") {
            return;
        }
        let memory = Private::new();
        map_pages(&memory.region, (10..40).into()).unwrap();
        let written =
            Match { inverted: vmferry_sys::pagemap::IS_FILE, all: vmferry_sys::pagemap::IS_FILE, ..ENTRY };
        let map = Pagemap::own().unwrap();
        if let Err(error) = map.first(&memory.region.span(), written) {
            vmferry_testkit::skip(vmferry_testkit::Need::Kernel, error);
            return;
        }
        assert_eq!(map.first(&memory.region.span(), written).unwrap(), None, "no page is a copy");
        let mut set = PageSet::of([(memory.region.id, PAGES)]);
        MappedPages::new(vec![memory.region.clone()]).unwrap().find(&mut set).unwrap();
        assert_eq!(set.region(memory.region.id).unwrap().count_range(10..40), 30);
        assert!(matches!(map_pages(&memory.region, (590..601).into()), Err(TrackerError::NoPages { .. })));
    }
}
