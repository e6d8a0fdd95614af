//! Memory in use by all threads, because some targets start threads.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Allocator that counts the bytes of the system allocator.
pub(crate) struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// Counts `bytes` before the allocation, so that refused requests count too.
fn take(bytes: usize) {
    let live = LIVE.fetch_add(bytes, Ordering::Relaxed).wrapping_add(bytes);
    PEAK.fetch_max(live, Ordering::Relaxed);
}

fn give(bytes: usize) {
    LIVE.fetch_sub(bytes, Ordering::Relaxed);
}

// SAFETY: the system allocator does all work, and counting does not change its behaviour.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        // SAFETY: the caller guarantees the contract of this function, which is the contract of the
        // system allocator.
        let at = unsafe { System.alloc(layout) };
        if at.is_null() {
            give(layout.size());
        }
        at
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        // SAFETY: the caller guarantees the contract of this function, which is the contract of the
        // system allocator.
        let at = unsafe { System.alloc_zeroed(layout) };
        if at.is_null() {
            give(layout.size());
        }
        at
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller guarantees the contract of this function, which is the contract of the
        // system allocator.
        unsafe { System.dealloc(at, layout) };
        give(layout.size());
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both blocks may exist while the content is copied.
        take(size);
        // SAFETY: the caller guarantees the contract of this function, which is the contract of the
        // system allocator.
        let new = unsafe { System.realloc(at, layout, size) };
        give(if new.is_null() { size } else { layout.size() });
        new
    }
}

/// Calls `work` and returns the maximum number of bytes in use at once, above the number before the
/// call. Other threads must not allocate meanwhile.
pub(crate) fn peak_of(work: impl FnOnce()) -> usize {
    let before = LIVE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    work();
    PEAK.load(Ordering::Relaxed).saturating_sub(before)
}
