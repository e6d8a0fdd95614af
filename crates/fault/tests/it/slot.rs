//! The end of a guest that may sleep on missing pages.

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use vmferry_core::{Gpa, Layout, LazyMemory, PAGE_BYTES, PageIndex, PageSet, Region, RegionId};
use vmferry_fault::{Backing, LazyRegion, LazySlot, UffdMemory, UffdOptions};
use vmferry_testkit::{Need, PATIENCE, skip, wait};

const PAGES: u64 = 512;
const NEVER: Duration = Duration::from_secs(600);

/// A mapping of so many pages that stays until the process ends.
fn mapped(pages: u64) -> *mut u8 {
    let len = usize::try_from(pages << 12).unwrap();
    let (access, kind) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: a new mapping at an address of the kernel's choice.
    unsafe { mmap_anonymous(std::ptr::null_mut(), len, access, kind) }.unwrap().cast()
}

/// Memory of the pages mapped at `start`; where this user has no faults the calling test is skipped.
fn memory_at(slot: &LazySlot, start: *mut u8, pages: u64) -> Option<Arc<UffdMemory>> {
    let made = slot.get_or_make(|threads| {
        let host = start.addr() as u64;
        let region = LazyRegion { id: RegionId(0), host, len: pages << 12, backing: Backing::Anonymous };
        let mut options = UffdOptions::new(threads);
        options.user_mode_only = true;
        // SAFETY: it is never unmapped, and nobody refers to it.
        unsafe { UffdMemory::new(vec![region], Arc::new(()), &options) }
    });
    made.map_err(|error| skip(Need::Uffd, error)).ok()
}

fn memory(slot: &LazySlot) -> Option<Arc<UffdMemory>> {
    memory_at(slot, mapped(PAGES), PAGES)
}

fn everything(pages: u64) -> PageSet {
    let region = Region { id: RegionId(0), gpa: Gpa(0), len: pages << 12 };
    PageSet::full(&Layout::new(vec![region]).unwrap())
}

/// What somebody says who does not stop.
fn goes_on(within: Duration) -> bool {
    std::thread::sleep(within);
    false
}

#[test]
fn nobody_is_waited_for_who_sleeps_on_a_page_that_nobody_brings() {
    let slot = LazySlot::new(1);
    let Some(memory) = memory(&slot) else { return };
    memory.begin(&everything(PAGES)).unwrap();
    let begin = Instant::now();
    assert!(!slot.stop_or_sleep(NEVER, goes_on));
    assert!(begin.elapsed() < PATIENCE, "{:?}", begin.elapsed());
    assert!(slot.stop_or_sleep(NEVER, |_| true));
    slot.end();
}

#[test]
fn a_guest_whose_pages_come_is_given_its_time() {
    const TIME: Duration = Duration::from_millis(300);
    let slot = LazySlot::new(1);
    // Nothing is missing, neither without such memory nor with it.
    let waits = |slot: &LazySlot| {
        let begin = Instant::now();
        !slot.stop_or_sleep(TIME, goes_on) && begin.elapsed() >= TIME
    };
    assert!(waits(&slot));
    let Some(memory) = memory(&slot) else { return };
    assert!(waits(&slot));
    memory.begin(&everything(PAGES)).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Acquire) {
                memory.next_fault(0, NEVER).unwrap();
            }
        });
        // Until the server is at its place nobody serves.
        wait("the server", || waits(&slot));
        done.store(true, Ordering::Release);
        memory.interrupt();
    });
    slot.end();
}

/// Threads that wake in one part of the memory and touch the next, which is just being given back.
#[test]
fn nobody_sleeps_on_after_the_end() {
    /// Pages that are given back at once.
    const CHUNK: usize = 512;
    const CHUNKS: usize = 16;
    const THREADS: usize = 4;
    const ROUNDS: u32 = 1000;
    let pages = (CHUNK * CHUNKS) as u64;
    let start = mapped(pages);
    let words: Vec<&AtomicU64> = (0..CHUNKS)
        // SAFETY: mapped for ever, aligned, and reached by atomics only.
        .map(|chunk| unsafe { AtomicU64::from_ptr(start.add(chunk * CHUNK * PAGE_BYTES).cast()) })
        .collect();
    let slot = LazySlot::new(0);
    let Some(memory) = memory_at(&slot, start, pages) else { return };
    for round in 0..ROUNDS {
        memory.begin(&everything(pages)).unwrap();
        let (begun, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let lost = std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (words, begun, done) = (&words, &begun, &done);
                scope.spawn(move || {
                    begun.fetch_add(1, Ordering::Relaxed);
                    words[thread..].iter().for_each(|word| assert_eq!(word.load(Ordering::Relaxed), 0));
                    done.fetch_add(1, Ordering::Relaxed);
                });
            }
            while begun.load(Ordering::Relaxed) < THREADS {
                std::thread::yield_now();
            }
            slot.end();
            // No `wait`: a failure has to wake those that sleep, or it would hang.
            let deadline = Instant::now() + PATIENCE;
            while done.load(Ordering::Relaxed) < THREADS && Instant::now() < deadline {
                std::thread::yield_now();
            }
            let lost = THREADS - done.load(Ordering::Relaxed);
            // Else a failure would hang.
            for chunk in 0..CHUNKS {
                memory.wake(RegionId(0), PageIndex((chunk * CHUNK) as u64)).unwrap();
            }
            lost
        });
        assert_eq!(lost, 0, "round {round}: threads asleep on pages that nobody will bring");
    }
}
