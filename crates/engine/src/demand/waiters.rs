//! Table of the threads that wait for pages, with the time at which each wait began.

use super::PageLocation;
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
use std::sync::atomic::Ordering;

/// Maximum number of waits that are measured at the same time. Although a thread can wait for only
/// one page, it may need several slots, because a vCPU that is interrupted while it waits causes
/// another fault. Waits that find no slot are not measured, but end like all others.
const SLOTS: usize = if cfg!(test) { 4 } else { 1024 };

const FREE: u64 = 0;
/// Key of a slot that a thread is filling or removing. Other threads ignore the slot.
const BUSY: u64 = u64::MAX;
const PAGE_BITS: u32 = 44;

#[derive(Debug, Default)]
struct Slot {
    /// FREE, BUSY, or the key of the page.
    key: AtomicU64,
    since: AtomicU64,
    /// Number of the vCPU plus one, or 0 for another thread.
    vcpu: AtomicU32,
}

/// Thread that waited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Waiter {
    pub(super) page: u64,
    /// Start of the wait, in nanoseconds since the start.
    pub(super) since: u64,
    pub(super) vcpu: Option<u32>,
}

/// Table without locks. A thread claims a slot by changing its key to BUSY.
#[derive(Debug)]
pub(super) struct Waiters {
    slots: Box<[Slot]>,
    /// Number of slots in use. A thread that delivers a page checks this number first, and usually
    /// need not check anything else.
    used: AtomicUsize,
    /// No slot from this index on was ever used.
    end: AtomicUsize,
    /// True once the table was full, so that a thread may wait without being recorded.
    overflowed: AtomicBool,
}

fn key(place: PageLocation) -> u64 {
    // The numbers of regions and of pages of a region are limited far below this
    // (`vmferry_core::{MAX_REGIONS, MAX_PAGES}`).
    ((place.region as u64) << PAGE_BITS | place.page) + 1
}

fn place(key: u64) -> PageLocation {
    let key = key - 1;
    let region = usize::try_from(key >> PAGE_BITS).unwrap_or(usize::MAX);
    PageLocation { region, page: key & ((1 << PAGE_BITS) - 1) }
}

impl Waiters {
    pub(super) fn new() -> Self {
        let slots = (0..SLOTS).map(|_| Slot::default()).collect();
        Self {
            slots,
            used: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            overflowed: AtomicBool::new(false),
        }
    }

    /// Records that a thread waits for a page. Returns false if the table is full.
    pub(super) fn add(&self, waits_for: PageLocation, since: u64, vcpu: Option<u32>) -> bool {
        for (at, slot) in self.slots.iter().enumerate() {
            let claim = slot.key.compare_exchange(FREE, BUSY, Ordering::Acquire, Ordering::Relaxed);
            if claim.is_err() {
                continue;
            }
            slot.since.store(since, Ordering::Relaxed);
            slot.vcpu.store(vcpu.map_or(0, |vcpu| vcpu.saturating_add(1)), Ordering::Relaxed);
            // Stored before the key: a thread that finds the key must search up to this index.
            self.end.fetch_max(at + 1, Ordering::SeqCst);
            self.used.fetch_add(1, Ordering::SeqCst);
            slot.key.store(key(waits_for), Ordering::SeqCst);
            return true;
        }
        self.overflowed.store(true, Ordering::SeqCst);
        false
    }

    /// Returns true if a thread may wait without being recorded.
    pub(super) fn overflowed(&self) -> bool {
        self.overflowed.load(Ordering::SeqCst)
    }

    /// Removes all waiters for pages of `pages` in region `region`.
    pub(super) fn take(&self, region: usize, pages: std::ops::Range<u64>, mut each: impl FnMut(Waiter)) {
        if self.used.load(Ordering::SeqCst) == 0 {
            return;
        }
        let wanted =
            key(PageLocation { region, page: pages.start })..key(PageLocation { region, page: pages.end });
        for slot in &self.slots[..self.end.load(Ordering::SeqCst)] {
            let found = slot.key.load(Ordering::SeqCst);
            if found == BUSY || !wanted.contains(&found) {
                continue;
            }
            if slot.key.compare_exchange(found, BUSY, Ordering::SeqCst, Ordering::Relaxed).is_err() {
                continue;
            }
            let waiter = Waiter {
                page: place(found).page,
                since: slot.since.load(Ordering::Relaxed),
                vcpu: slot.vcpu.load(Ordering::Relaxed).checked_sub(1),
            };
            slot.key.store(FREE, Ordering::Release);
            self.used.fetch_sub(1, Ordering::SeqCst);
            each(waiter);
        }
    }

    /// Returns the start of the longest wait. The result is approximate, because a waiter that is
    /// being removed may be included.
    pub(super) fn oldest(&self) -> Option<u64> {
        let used = self.slots[..self.end.load(Ordering::SeqCst)].iter();
        let waiting = used.filter(|slot| ![FREE, BUSY].contains(&slot.key.load(Ordering::SeqCst)));
        waiting.map(|slot| slot.since.load(Ordering::Relaxed)).min()
    }

    /// Returns the pages that threads wait for now.
    pub(super) fn waiting(&self) -> Vec<PageLocation> {
        let keys = self.slots.iter().map(|slot| slot.key.load(Ordering::SeqCst));
        keys.filter(|key| ![FREE, BUSY].contains(key)).map(place).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmferry_core::{MAX_PAGES, MAX_REGIONS};

    const fn at(region: usize, page: u64) -> PageLocation {
        PageLocation { region, page }
    }

    #[test]
    fn every_place_has_a_key_of_its_own() {
        const { assert!(MAX_PAGES <= 1 << PAGE_BITS && (MAX_REGIONS as u64) < 1 << (63 - PAGE_BITS)) }
        for found in [at(0, 0), at(0, MAX_PAGES - 1), at(MAX_REGIONS - 1, MAX_PAGES - 1), at(3, 7)] {
            assert_eq!(place(key(found)), found);
            assert!(![FREE, BUSY].contains(&key(found)));
        }
    }

    #[test]
    fn waiter_is_removed_once() {
        shuttle::check_random(taken_out_once, 1);
    }

    fn taken_out_once() {
        let waiters = Waiters::new();
        assert!(waiters.add(at(0, 5), 100, Some(0)) && waiters.add(at(0, 5), 200, None));
        assert!(waiters.add(at(0, 9), 300, Some(1)) && waiters.add(at(1, 5), 400, Some(2)));
        let take = |region, pages| {
            let mut taken = Vec::new();
            waiters.take(region, pages, |waiter| taken.push((waiter.page, waiter.since, waiter.vcpu)));
            taken
        };
        assert_eq!(take(0, 6..9), []);
        assert_eq!(take(0, 0..6), [(5, 100, Some(0)), (5, 200, None)]);
        assert_eq!(take(0, 0..6), []);
        assert_eq!(waiters.waiting(), [at(0, 9), at(1, 5)]);
        assert_eq!(waiters.oldest(), Some(300));
        assert_eq!(take(1, 5..6), [(5, 400, Some(2))]);
        assert_eq!(take(0, 0..100), [(9, 300, Some(1))]);
        assert_eq!(waiters.waiting(), []);
    }

    #[test]
    fn full_table_rejects_waiters_until_it_is_emptied() {
        shuttle::check_random(full, 1);
    }

    fn full() {
        let waiters = Waiters::new();
        for page in 0..SLOTS as u64 {
            assert!(waiters.add(at(0, page), page, None));
        }
        assert!(!waiters.overflowed() && !waiters.add(at(0, 0), 0, None) && waiters.overflowed());
        let mut taken = 0;
        waiters.take(0, 0..SLOTS as u64, |_| taken += 1);
        assert_eq!(taken, SLOTS);
        assert!(waiters.add(at(0, 0), 0, None));
    }
}
