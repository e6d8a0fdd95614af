//! How much memory is in use: of all threads, as several bodies start some.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system's allocator, which counts.
pub(crate) struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// Counts before it is asked for: what is refused was asked for all the same.
fn take(bytes: usize) {
    let live = LIVE.fetch_add(bytes, Ordering::Relaxed).wrapping_add(bytes);
    PEAK.fetch_max(live, Ordering::Relaxed);
}

fn give(bytes: usize) {
    LIVE.fetch_sub(bytes, Ordering::Relaxed);
}

// SAFETY: everything is the system allocator's; counting changes nothing of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        // SAFETY: our caller's promises are those that are wanted here.
        let at = unsafe { System.alloc(layout) };
        if at.is_null() {
            give(layout.size());
        }
        at
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        // SAFETY: as above.
        let at = unsafe { System.alloc_zeroed(layout) };
        if at.is_null() {
            give(layout.size());
        }
        at
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) };
        give(layout.size());
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both may be there while it is copied.
        take(size);
        // SAFETY: as above.
        let new = unsafe { System.realloc(at, layout, size) };
        give(if new.is_null() { size } else { layout.size() });
        new
    }
}

/// Calls `work`; says how many bytes more than before were in use at once. Others must not work meanwhile.
pub(crate) fn peak_of(work: impl FnOnce()) -> usize {
    let before = LIVE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    work();
    PEAK.load(Ordering::Relaxed).saturating_sub(before)
}
