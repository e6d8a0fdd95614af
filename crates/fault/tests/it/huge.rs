//! Tests of demand paging for memory made of real huge pages (hugetlbfs).

use crate::pool::Pool;
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use vmferry_core::{
    DemandPaging, Gpa, Layout, PAGE_BYTES, PageIndex, PageRun, PageSet, Placed, Region, RegionId,
};
use vmferry_fault::{Backing, PagedRegion, UffdMemory, UffdOptions, VcpuThreads};
use vmferry_testkit::{Need, PATIENCE, emulator, skip};

const BLOCK: u64 = 512;
const BLOCKS: u64 = 6;
const PAGES: u64 = BLOCKS * BLOCK;
const ID: RegionId = RegionId(3);
const STALE: u64 = u64::MAX;

/// Mapping of huge pages.
#[derive(Debug)]
struct Mapped {
    start: NonNull<u8>,
    file: Arc<OwnedFd>,
}

// SAFETY: the value holds an address, and the bytes are accessed by atomics only.
unsafe impl Send for Mapped {}
// SAFETY: the value holds an address, and the bytes are accessed by atomics only.
unsafe impl Sync for Mapped {}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), LEN) };
    }
}

const LEN: usize = 6 << 21;

impl Mapped {
    fn new(flags: MapFlags) -> Self {
        let huge = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        let file = rustix::fs::memfd_create("huge", huge).unwrap();
        rustix::fs::ftruncate(&file, LEN as u64).unwrap();
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe { mmap(std::ptr::null_mut(), LEN, access, MapFlags::SHARED | flags, &file, 0) };
        Self { start: NonNull::new(start.unwrap().cast()).unwrap(), file: Arc::new(file) }
    }

    /// Returns the first word of a page.
    fn word(&self, page: u64) -> &AtomicU64 {
        assert!(page < PAGES);
        // SAFETY: the address is inside the mapping and aligned. All accesses are atomic or made by
        // the kernel when it places pages.
        unsafe {
            AtomicU64::from_ptr(self.start.as_ptr().add(usize::try_from(page).unwrap() * PAGE_BYTES).cast())
        }
    }

    fn read(&self, page: u64) -> u64 {
        self.word(page).load(Ordering::Relaxed)
    }

    fn region(&self) -> PagedRegion {
        let backing = Backing::HugeMemfd { file: Arc::clone(&self.file), offset: 0 };
        PagedRegion { id: ID, host: self.start.addr().get() as u64, len: LEN as u64, backing }
    }
}

fn layout() -> Layout {
    Layout::new(vec![Region { id: ID, gpa: Gpa(0), len: LEN as u64 }]).unwrap()
}

struct Setup {
    mapped: Arc<Mapped>,
    paging: UffdMemory,
    /// Pool of huge pages, dropped last.
    _pool: Pool,
}

fn setup(pages: u64, flags: MapFlags) -> Option<Setup> {
    let pool = match Pool::with(pages) {
        Ok(pool) => pool,
        Err(why) => {
            skip(Need::HugePages, why);
            return None;
        }
    };
    if let Some(emulator) = emulator() {
        skip(Need::HugePages, format!("{emulator} maps huge pages at addresses that the kernel refuses"));
        return None;
    }
    let mapped = Arc::new(Mapped::new(flags));
    let mut options = UffdOptions::new(Arc::new(VcpuThreads::new(8)));
    (options.shards, options.user_mode_only) = (2, true);
    // SAFETY: `mapped` owns the mapping, and accesses its bytes through atomics.
    match unsafe { UffdMemory::new(vec![mapped.region()], Arc::clone(&mapped) as _, &options) } {
        Ok(paging) => Some(Setup { mapped, paging, _pool: pool }),
        Err(error) => {
            skip(Need::Uffd, error);
            None
        }
    }
}

fn content(page: u64) -> u64 {
    if page.is_multiple_of(5) { 0 } else { page + 1 }
}

impl Setup {
    fn stale(&self) {
        (0..PAGES).for_each(|page| self.mapped.word(page).store(STALE, Ordering::Relaxed));
    }

    /// Places a page as a migration channel does.
    fn place(&self, page: u64) -> Placed {
        let run = PageRun::new(PageIndex(page), 1);
        if content(page) == 0 {
            return self.paging.place_zeros(ID, run).unwrap();
        }
        let mut bytes = [7; PAGE_BYTES];
        bytes[..8].copy_from_slice(&content(page).to_ne_bytes());
        self.paging.place(ID, run, &bytes).unwrap()
    }

    fn fault(&self, page: u64) -> PageIndex {
        let shard = self.paging.shard_of(ID, PageIndex(page));
        let fault = self.paging.next_fault(shard, PATIENCE).unwrap().expect("a fault");
        assert_eq!((fault.region, fault.page.0 / BLOCK), (ID, page / BLOCK));
        fault.page
    }
}

/// Returns the numbers below `count`, each once, in an order that depends on `seed`.
fn shuffled(count: u64, seed: u64) -> impl Iterator<Item = u64> {
    // 1021 is prime and not a factor of any count in these tests.
    (0..count).map(move |at| (at * 1021 + seed * 377) % count)
}

#[test]
fn fault_ends_when_the_last_page_of_its_huge_page_is_placed() {
    let Some(setup) = setup(BLOCKS, MapFlags::empty()) else { return };
    setup.stale();
    setup.paging.begin(&PageSet::full(&layout())).unwrap();
    assert_eq!(setup.paging.unit_pages(ID), BLOCK);
    let (block, touched) = (BLOCK..2 * BLOCK, BLOCK + 300);
    let awake = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(setup.mapped.read(touched), content(touched));
            awake.store(true, Ordering::Release);
        });
        setup.fault(touched);
        let order: Vec<u64> = shuffled(BLOCK, 3).map(|at| block.start + at).collect();
        // The page that the thread waits for is not the last one, and every tenth page is placed
        // twice.
        for page in &order[..511] {
            assert_eq!(setup.place(*page), Placed { pages: 1, already_present: 0 });
            if page.is_multiple_of(10) {
                assert_eq!(setup.place(*page), Placed { pages: 0, already_present: 1 });
            }
        }
        // Gives a thread that wrongly does not wait time to run. If it gets no processor meanwhile,
        // the test misses the error.
        std::thread::sleep(Duration::from_millis(20));
        assert!(!awake.load(Ordering::Acquire), "the thread sees an incomplete huge page");
        assert_eq!(setup.place(order[511]), Placed { pages: 1, already_present: 0 });
    });
    assert!(awake.load(Ordering::Acquire));
    for page in block.clone() {
        assert_eq!(setup.mapped.read(page), content(page), "page {page}");
    }
    // A page that is placed again does not overwrite later writes of the guest.
    setup.mapped.word(touched).store(99, Ordering::Relaxed);
    assert_eq!(setup.place(touched), Placed { pages: 0, already_present: 1 });
    assert_eq!(setup.mapped.read(touched), 99);
    // A run over several huge pages, one of which is already present.
    let zeros = setup.paging.place_zeros(ID, PageRun::from(100..PAGES)).unwrap();
    assert_eq!(zeros, Placed { pages: PAGES - 100 - BLOCK, already_present: BLOCK });
    assert_eq!((setup.mapped.read(PAGES - 1), setup.mapped.read(touched)), (0, 99));
}

#[test]
fn pages_that_are_not_missing_keep_their_content_and_untouched_pages_are_zero() {
    let Some(setup) = setup(BLOCKS, MapFlags::empty()) else { return };
    // The last two huge pages are never touched.
    for page in 0..PAGES - 2 * BLOCK {
        setup.mapped.word(page).store(STALE - page, Ordering::Relaxed);
    }
    let mut missing = PageSet::empty(&layout());
    let lost = missing.region_mut(ID).unwrap();
    (0..2 * BLOCK).step_by(3).for_each(|page| _ = lost.set(page));
    lost.set_range(PAGES - BLOCK..PAGES - BLOCK + 7);
    setup.paging.begin(&missing).unwrap();
    let lost = missing.region(ID).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for shard in 0..2 {
            let (setup, done) = (&setup, &done);
            scope.spawn(move || {
                while !done.load(Ordering::Acquire) {
                    let fault = setup.paging.next_fault(shard, Duration::from_secs(5)).unwrap();
                    let Some(fault) = fault else { continue };
                    let first = fault.page.0 / BLOCK * BLOCK;
                    let some = lost.runs_in(first..first + BLOCK).flatten();
                    some.for_each(|page| _ = setup.place(page));
                    // The engine does the same when no page is missing (any more).
                    setup.paging.place_zeros(ID, PageRun::new(fault.page, 1)).unwrap();
                }
            });
        }
        for page in 0..PAGES {
            let want = match page {
                page if lost.test(page) => content(page),
                page if page < PAGES - 2 * BLOCK => STALE - page,
                _ => 0,
            };
            assert_eq!(setup.mapped.read(page), want, "page {page}");
        }
        done.store(true, Ordering::Release);
        setup.paging.interrupt();
    });
}

#[test]
fn threads_that_place_the_same_pages_do_not_overwrite_guest_writes() {
    let Some(setup) = setup(BLOCKS, MapFlags::empty()) else { return };
    for round in 0..10 {
        setup.stale();
        setup.paging.begin(&PageSet::full(&layout())).unwrap();
        let placed = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for bringer in 0..3 {
                let (setup, placed) = (&setup, &placed);
                scope.spawn(move || {
                    for page in shuffled(PAGES, bringer + round) {
                        placed.fetch_add(setup.place(page).pages, Ordering::Relaxed);
                    }
                });
            }
            for guest in 0..2 {
                let mapped = &setup.mapped;
                scope.spawn(move || {
                    // Each thread has its own half of the pages. It reads the placed content and
                    // overwrites it.
                    for page in shuffled(PAGES, guest).filter(|page| page % 2 == guest) {
                        assert_eq!(mapped.read(page), content(page), "page {page}");
                        mapped.word(page).store(page + 1_000_000, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(placed.into_inner(), PAGES, "each page once");
        for page in 0..PAGES {
            assert_eq!(setup.mapped.read(page), page + 1_000_000, "the guest's write is gone");
        }
        setup.paging.end().unwrap();
    }
}

#[test]
fn end_wakes_sleeping_threads_and_shows_no_stale_content() {
    let Some(setup) = setup(BLOCKS, MapFlags::empty()) else { return };
    for _ in 0..3 {
        setup.stale();
        setup.paging.begin(&PageSet::full(&layout())).unwrap();
        setup.place(BLOCK + 1);
        std::thread::scope(|scope| {
            let reading =
                [scope.spawn(|| setup.mapped.read(7)), scope.spawn(|| setup.mapped.read(BLOCK + 1))];
            setup.fault(7);
            setup.fault(BLOCK + 1);
            setup.paging.end().unwrap();
            assert_eq!(reading.map(|read| read.join().unwrap()), [0, content(BLOCK + 1)]);
        });
        for page in (0..PAGES).filter(|page| *page != BLOCK + 1) {
            assert_eq!(setup.mapped.read(page), 0, "page {page}");
        }
        let run = PageRun::new(PageIndex(0), 1);
        assert!(setup.paging.place_zeros(ID, run).is_err(), "nothing is missing any more");
    }
}

#[test]
fn reading_if_present_never_sleeps() {
    let Some(setup) = setup(BLOCKS, MapFlags::empty()) else { return };
    let run = PageRun::new(PageIndex(5), 1);
    let read_if_present = || setup.paging.read_if_present(ID, run, || setup.mapped.read(5));
    setup.stale();
    assert_eq!(read_if_present(), Some(STALE));
    setup.paging.begin(&PageSet::full(&layout())).unwrap();
    assert_eq!(read_if_present(), None);
    (0..BLOCK - 1).for_each(|page| _ = setup.place(page));
    assert_eq!(read_if_present(), None, "one page of its huge page is missing");
    setup.place(BLOCK - 1);
    assert_eq!(read_if_present(), Some(content(5)));
}

/// Checks that placing a page fails if the host has no free huge page. An access to such a page
/// would end the process.
#[test]
fn placing_fails_when_the_host_has_no_free_huge_page() {
    let Some(setup) = setup(2, MapFlags::NORESERVE) else { return };
    setup.paging.begin(&PageSet::full(&layout())).unwrap();
    let placed = |page| {
        let run = PageRun::new(PageIndex(page), 1);
        setup.paging.place(ID, run, &[1; PAGE_BYTES]).map_err(|error| error.to_string())
    };
    let results: Vec<_> = (0..BLOCKS).map(|block| placed(block * BLOCK)).collect();
    let (good, bad): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
    assert!(good.len() >= 2);
    let Some(Err(error)) = bad.first() else {
        return skip(Need::HugePages, "the host has more free huge pages than the test reserved");
    };
    assert!(error.contains("no (huge) page left"), "{error}");
}
