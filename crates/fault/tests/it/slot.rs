//! Tests of the end of a guest that may sleep on missing pages.

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use vmferry_core::{DemandPaging, Gpa, Layout, PAGE_BYTES, PageIndex, PageSet, Region, RegionId};
use vmferry_fault::{Backing, PagedRegion, PagingSlot, UffdMemory, UffdOptions};
use vmferry_testkit::{Need, PATIENCE, skip, wait};

const PAGES: u64 = 512;
const NEVER: Duration = Duration::from_secs(600);

/// Maps `pages` pages, which stay mapped until the process ends.
fn mapped(pages: u64) -> *mut u8 {
    let len = usize::try_from(pages << 12).unwrap();
    let (access, kind) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: a new mapping at an address that the kernel chooses.
    unsafe { mmap_anonymous(std::ptr::null_mut(), len, access, kind) }.unwrap().cast()
}

/// Returns the demand paging of the pages that are mapped at `start`. Skips the calling test if
/// this user may not handle faults.
fn memory_at(slot: &PagingSlot, start: *mut u8, pages: u64) -> Option<Arc<UffdMemory>> {
    let made = slot.get_or_make(|threads| {
        let host = start.addr() as u64;
        let region = PagedRegion { id: RegionId(0), host, len: pages << 12, backing: Backing::Anonymous };
        let mut options = UffdOptions::new(threads);
        options.user_mode_only = true;
        // SAFETY: the memory is never unmapped, and no reference covers it.
        unsafe { UffdMemory::new(vec![region], Arc::new(()), &options) }
    });
    made.map_err(|error| skip(Need::Uffd, error)).ok()
}

fn memory(slot: &PagingSlot) -> Option<Arc<UffdMemory>> {
    memory_at(slot, mapped(PAGES), PAGES)
}

fn everything(pages: u64) -> PageSet {
    let region = Region { id: RegionId(0), gpa: Gpa(0), len: pages << 12 };
    PageSet::full(&Layout::new(vec![region]).unwrap())
}

/// Callback of a vCPU that does not stop.
fn goes_on(within: Duration) -> bool {
    std::thread::sleep(within);
    false
}

#[test]
fn stop_does_not_wait_for_a_vcpu_whose_faults_are_not_served() {
    let slot = PagingSlot::new(1);
    let Some(memory) = memory(&slot) else { return };
    memory.begin(&everything(PAGES)).unwrap();
    let begin = Instant::now();
    assert!(!slot.stop_or_sleep(NEVER, goes_on));
    assert!(begin.elapsed() < PATIENCE, "{:?}", begin.elapsed());
    assert!(slot.stop_or_sleep(NEVER, |_| true));
    slot.end();
}

#[test]
fn stop_waits_the_full_time_while_faults_are_served() {
    const TIME: Duration = Duration::from_millis(300);
    let slot = PagingSlot::new(1);
    // No page is missing, neither in an empty slot nor before `begin`.
    let waits = |slot: &PagingSlot| {
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
        // The faults are not served until the server thread waits.
        wait("the server", || waits(&slot));
        done.store(true, Ordering::Release);
        memory.interrupt();
    });
    slot.end();
}

/// Threads wake in one part of the memory and touch the next part, which is being unregistered.
#[test]
fn no_thread_sleeps_after_the_end() {
    /// Number of pages that are unregistered at once.
    const CHUNK: usize = 512;
    const CHUNKS: usize = 16;
    const THREADS: usize = 4;
    const ROUNDS: u32 = 1000;
    let pages = (CHUNK * CHUNKS) as u64;
    let start = mapped(pages);
    let words: Vec<&AtomicU64> = (0..CHUNKS)
        // SAFETY: mapped until the process ends, aligned, and accessed by atomics only.
        .map(|chunk| unsafe { AtomicU64::from_ptr(start.add(chunk * CHUNK * PAGE_BYTES).cast()) })
        .collect();
    let slot = PagingSlot::new(0);
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
            // `wait` is not used here: after a failure, the sleeping threads must be woken, or the
            // test would hang.
            let deadline = Instant::now() + PATIENCE;
            while done.load(Ordering::Relaxed) < THREADS && Instant::now() < deadline {
                std::thread::yield_now();
            }
            let lost = THREADS - done.load(Ordering::Relaxed);
            // Wake the threads: otherwise the test would hang after a failure.
            for chunk in 0..CHUNKS {
                memory.wake(RegionId(0), PageIndex((chunk * CHUNK) as u64)).unwrap();
            }
            lost
        });
        assert_eq!(lost, 0, "round {round}: threads sleep on pages that no thread will place");
    }
}
