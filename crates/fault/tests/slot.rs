//! The end of a guest that may sleep on missing pages.

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use vmferry_engine::LazyMemory;
use vmferry_fault::{Backing, LazyRegion, LazySlot, UffdMemory, UffdOptions};
use vmferry_memory::{Gpa, Layout, PageSet, Region, RegionId};

const PAGES: u64 = 512;
const NEVER: Duration = Duration::from_secs(600);

/// Memory that stays mapped until the process ends; `None`, and why, where this user has no faults.
fn memory(slot: &LazySlot) -> Option<Arc<UffdMemory>> {
    let made = slot.get_or_make(|threads| {
        let len = usize::try_from(PAGES << 12).unwrap();
        let (access, kind) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), len, access, kind) }.unwrap();
        let host = start.addr() as u64;
        let region = LazyRegion { id: RegionId(0), host, len: PAGES << 12, backing: Backing::Anonymous };
        let mut options = UffdOptions::new(threads);
        options.user_mode_only = true;
        // SAFETY: it is never unmapped, and nobody refers to it.
        unsafe { UffdMemory::new(vec![region], Arc::new(()), &options) }
    });
    made.map_err(|error| writeln!(std::io::stdout(), "missing pages: not run: {error}").unwrap()).ok()
}

fn everything() -> PageSet {
    let region = Region { id: RegionId(0), gpa: Gpa(0), len: PAGES << 12 };
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
    memory.begin(&everything()).unwrap();
    let begin = Instant::now();
    assert!(!slot.stop_or_sleep(NEVER, goes_on));
    assert!(begin.elapsed() < NEVER / 10, "{:?}", begin.elapsed());
    assert!(slot.stop_or_sleep(NEVER, |_| true));
    slot.end();
}

#[test]
fn a_guest_whose_pages_come_is_given_its_time() {
    const PATIENCE: Duration = Duration::from_millis(300);
    let slot = LazySlot::new(1);
    // Nothing is missing, neither without such memory nor with it.
    let waits = |slot: &LazySlot| {
        let begin = Instant::now();
        !slot.stop_or_sleep(PATIENCE, goes_on) && begin.elapsed() >= PATIENCE
    };
    assert!(waits(&slot));
    let Some(memory) = memory(&slot) else { return };
    assert!(waits(&slot));
    memory.begin(&everything()).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Acquire) {
                memory.next_fault(0, NEVER).unwrap();
            }
        });
        // Until the server is at its place nobody serves.
        let begin = Instant::now();
        while !waits(&slot) {
            assert!(begin.elapsed() < NEVER / 10);
        }
        done.store(true, Ordering::Release);
        memory.interrupt();
    });
    slot.end();
}
