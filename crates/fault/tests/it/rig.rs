//! Memory whose faults are served by threads.

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use vmferry_core::{DemandPaging, Gpa, Layout, PAGE_BYTES, PageRun, Region, RegionId};
use vmferry_fault::{Backing, PagedRegion, UffdMemory, UffdOptions, VcpuThreads};
use vmferry_testkit::{Need, skip};

/// Pages of two regions (20 MiB and 4 MiB), so that ids, shards and addresses differ.
pub(crate) const PAGES: [u64; 2] = [5120, 1024];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Anonymous,
    /// Anonymous memory that is full of huge pages before demand paging begins, if the host has
    /// them.
    Huge,
    Memfd,
}

pub(crate) const KINDS: [Kind; 3] = [Kind::Anonymous, Kind::Huge, Kind::Memfd];

/// Mappings that are unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Mapped(pub(crate) Vec<Mapping>);

/// Start, length in bytes, and file of a mapping.
pub(crate) type Mapping = (NonNull<u8>, usize, Option<Arc<OwnedFd>>);

// SAFETY: the value holds addresses, and the bytes are accessed by atomics only.
unsafe impl Send for Mapped {}
// SAFETY: the value holds addresses, and the bytes are accessed by atomics only.
unsafe impl Sync for Mapped {}

impl Drop for Mapped {
    fn drop(&mut self) {
        for (start, len, _) in &self.0 {
            // SAFETY: mapped by `new`.
            let _ = unsafe { munmap(start.as_ptr().cast(), *len) };
        }
    }
}

impl Mapped {
    pub(crate) fn new(kind: Kind, sizes: &[u64]) -> Self {
        let map = |pages: &u64| {
            let len = usize::try_from(pages << 12).unwrap();
            let (access, hint) = (ProtFlags::READ | ProtFlags::WRITE, std::ptr::null_mut());
            let file = (kind == Kind::Memfd).then(|| {
                let file = rustix::fs::memfd_create("faults", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
                rustix::fs::ftruncate(&file, pages << 12).unwrap();
                Arc::new(file)
            });
            // SAFETY: new mappings at addresses that the kernel chooses.
            let start = unsafe {
                match &file {
                    Some(file) => mmap(hint, len, access, MapFlags::SHARED, file, 0),
                    None => mmap_anonymous(hint, len, access, MapFlags::PRIVATE | MapFlags::NORESERVE),
                }
            };
            let start = start.unwrap();
            if kind == Kind::Huge {
                // SAFETY: this value owns the mapping. A host without huge pages refuses, which is
                // fine.
                let _ = unsafe { madvise(start, len, Advice::LinuxHugepage) };
            }
            (NonNull::new(start.cast::<u8>()).unwrap(), len, file)
        };
        Self(sizes.iter().map(map).collect())
    }

    /// Returns word `word` of a page.
    pub(crate) fn word(&self, region: usize, page: u64, word: usize) -> &AtomicU64 {
        let at = usize::try_from(page).unwrap() * PAGE_BYTES + word * 8;
        assert!(at < self.0[region].1 && word < 512);
        // SAFETY: the address is inside the mapping and aligned. All accesses are atomic or made by
        // the kernel when it places pages.
        unsafe { AtomicU64::from_ptr(self.0[region].0.as_ptr().add(at).cast()) }
    }

    pub(crate) fn fill(&self, value: u64) {
        for (region, (_, len, _)) in self.0.iter().enumerate() {
            for page in 0..*len as u64 >> 12 {
                (0..512).for_each(|word| self.word(region, page, word).store(value, Ordering::Relaxed));
            }
        }
    }

    pub(crate) fn regions(&self) -> Vec<PagedRegion> {
        let region = |(id, (start, len, file)): (u32, &Mapping)| PagedRegion {
            id: RegionId(id),
            host: start.addr().get() as u64,
            len: *len as u64,
            backing: match file {
                Some(file) => Backing::Memfd { file: Arc::clone(file), offset: 0 },
                None => Backing::Anonymous,
            },
        };
        (0..).zip(&self.0).map(region).collect()
    }
}

pub(crate) fn layout(sizes: &[u64]) -> Layout {
    let region = |(id, pages): (u32, &u64)| Region {
        id: RegionId(id),
        gpa: Gpa(u64::from(id) << 32),
        len: pages << 12,
    };
    Layout::new((0..).zip(sizes).map(region).collect()).unwrap()
}

pub(crate) struct Setup {
    pub(crate) mapped: Arc<Mapped>,
    pub(crate) paging: Arc<UffdMemory>,
    pub(crate) threads: Arc<VcpuThreads>,
}

/// Creates memory with `shards` shards. Skips the calling test if the host does not support demand
/// paging.
pub(crate) fn setup(kind: Kind, shards: usize) -> Option<Setup> {
    setup_of(kind, shards, &PAGES)
}

pub(crate) fn setup_of(kind: Kind, shards: usize, sizes: &[u64]) -> Option<Setup> {
    let mapped = Arc::new(Mapped::new(kind, sizes));
    let threads = Arc::new(VcpuThreads::new(8));
    let mut options = UffdOptions::new(Arc::clone(&threads));
    // The threads of these tests touch the memory themselves, so an ordinary user can run the
    // tests.
    (options.shards, options.user_mode_only, options.huge_pages) = (shards, true, kind == Kind::Huge);
    // SAFETY: `mapped` owns the mappings, and accesses their bytes through atomics.
    match unsafe { UffdMemory::new(mapped.regions(), Arc::clone(&mapped) as _, &options) } {
        Ok(paging) => Some(Setup { mapped, paging: Arc::new(paging), threads }),
        Err(error) => {
            skip(Need::Uffd, error);
            None
        }
    }
}

/// Returns the expected value of word `word` of a page. Every fifth page is a page of zeros.
pub(crate) fn content(region: u32, page: u64, word: usize) -> u64 {
    if page.is_multiple_of(5) { 0 } else { (u64::from(region) << 60 | page << 16 | word as u64) + 1 }
}

pub(crate) fn bytes(region: u32, run: PageRun) -> Vec<u8> {
    run.range()
        .flat_map(|page| (0..512).flat_map(move |word| content(region, page, word).to_ne_bytes()))
        .collect()
}

/// Serves the faults of `shard` until `done` is set. Counts the placed pages in `placed` and the
/// faults in `faults`.
pub(crate) fn serve(
    paging: &UffdMemory,
    shard: usize,
    done: &AtomicBool,
    placed: &AtomicU64,
    faults: &AtomicU64,
) {
    while !done.load(Ordering::Acquire) {
        let Some(fault) = paging.next_fault(shard, Duration::from_secs(5)).unwrap() else { continue };
        faults.fetch_add(1, Ordering::Relaxed);
        assert_eq!(paging.shard_of(fault.region, fault.page), shard);
        let run = PageRun::new(fault.page, 1);
        let result = if fault.page.0.is_multiple_of(5) {
            paging.place_zeros(fault.region, run)
        } else {
            paging.place(fault.region, run, &bytes(fault.region.0, run))
        }
        .unwrap();
        assert_eq!(result.pages + result.already_present, 1);
        placed.fetch_add(result.pages, Ordering::Relaxed);
    }
}

/// Runs `work` while every shard is served. Returns the numbers of placed pages and of faults.
pub(crate) fn served(setup: &Setup, work: impl FnOnce()) -> (u64, u64) {
    let (done, placed, faults) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for shard in 0..setup.paging.shards() {
            let (paging, done, placed, faults) = (&setup.paging, &done, &placed, &faults);
            scope.spawn(move || serve(paging, shard, done, placed, faults));
        }
        work();
        done.store(true, Ordering::Release);
        setup.paging.interrupt();
    });
    (placed.into_inner(), faults.into_inner())
}

/// Starts threads that touch every page, each in its own order, and checks the content.
pub(crate) fn touch_all(setup: &Setup, threads: u32) {
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                let _registered = setup.threads.register(thread);
                let total = PAGES.iter().sum::<u64>();
                let step = [1, 4099, 2053, 1999][thread as usize % 4];
                for index in 0..total {
                    let flat = (index * step + u64::from(thread) * 700) % total;
                    let (region, page) = if flat < PAGES[0] { (0, flat) } else { (1, flat - PAGES[0]) };
                    for word in [0, 1, 255, 511] {
                        let got = setup.mapped.word(region, page, word).load(Ordering::Relaxed);
                        assert_eq!(
                            got,
                            content(u32::try_from(region).unwrap(), page, word),
                            "{region} {page}"
                        );
                    }
                }
            });
        }
    });
}
