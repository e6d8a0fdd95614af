//! Write-protected pages: writers wait, readers do not, and no write is missed.

use crate::rig::{KINDS, Kind, Mapped, PAGES};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use vmferry_core::{PageIndex, PageRun, RegionId, WriteProtection};
use vmferry_fault::{Backing, FaultError, PagedRegion, PagingSlot, UffdOptions, UffdProtection, VcpuThreads};
use vmferry_testkit::{Need, skip, wait};

fn protection(mapped: &Arc<Mapped>, shards: usize) -> Option<Arc<UffdProtection>> {
    let mut options = UffdOptions::new(Arc::new(VcpuThreads::new(4)));
    // The threads of these tests write the memory themselves.
    (options.shards, options.user_mode_only) = (shards, true);
    match UffdProtection::new(&mapped.regions(), Arc::clone(mapped) as _, &options) {
        Ok(protection) => Some(Arc::new(protection)),
        Err(error) => {
            skip(Need::Uffd, error);
            None
        }
    }
}

fn all(region: usize) -> (RegionId, PageRun) {
    (RegionId(u32::try_from(region).unwrap()), PageRun::from(0..PAGES[region]))
}

/// Protects all memory, has threads write pages, and unprotects each page at its fault after its
/// content was checked.
#[test]
fn content_is_that_of_the_instant_until_the_page_is_unprotected() {
    for kind in KINDS {
        for shards in [1, 3] {
            let mapped = Arc::new(Mapped::new(kind, &PAGES));
            // Every other block of 64 pages is untouched.
            for (region, pages) in PAGES.iter().enumerate() {
                for page in (0..*pages).filter(|page| page / 64 % 2 == 0) {
                    mapped.word(region, page, 7).store(page + 1, Ordering::Relaxed);
                }
            }
            let Some(protection) = protection(&mapped, shards) else { return };
            protection.begin().unwrap();
            assert!(protection.begin().is_err(), "begun twice");
            for region in 0..2 {
                let (id, run) = all(region);
                protection.protect(id, run).unwrap();
            }
            let (done, faults) = (AtomicBool::new(false), AtomicU64::new(0));
            std::thread::scope(|scope| {
                for shard in 0..protection.shards() {
                    let (protection, mapped, done, faults) = (&protection, &mapped, &done, &faults);
                    scope.spawn(move || {
                        while !done.load(Ordering::Acquire) {
                            let next = protection.next_write(shard, Duration::from_secs(5)).unwrap();
                            let Some(fault) = next else { continue };
                            assert!(fault.write);
                            assert_eq!(protection.shard_of(fault.region, fault.page), shard);
                            let (region, page) = (fault.region.0 as usize, fault.page.0);
                            let before = mapped.word(region, page, 7).load(Ordering::Relaxed);
                            let expected = if page / 64 % 2 == 0 { page + 1 } else { 0 };
                            assert_eq!(before, expected, "{kind:?} {region} {page}");
                            faults.fetch_add(1, Ordering::Relaxed);
                            protection.unprotect(fault.region, PageRun::new(fault.page, 1)).unwrap();
                        }
                    });
                }
                std::thread::scope(|writers| {
                    for thread in 0..2 {
                        let mapped = &mapped;
                        writers.spawn(move || {
                            for (region, pages) in PAGES.iter().enumerate() {
                                for page in (0..*pages).filter(|page| page % 2 == thread) {
                                    mapped.word(region, page, 7).store(u64::MAX, Ordering::Relaxed);
                                }
                            }
                        });
                    }
                });
                done.store(true, Ordering::Release);
                protection.interrupt();
            });
            assert_eq!(faults.into_inner(), PAGES.iter().sum::<u64>(), "{kind:?}: each page has one fault");
            protection.end().unwrap();
            mapped.word(0, 0, 7).store(1, Ordering::Relaxed);
        }
    }
}

#[test]
fn end_wakes_writers_and_protection_can_begin_again() {
    let mapped = Arc::new(Mapped::new(Kind::Anonymous, &PAGES));
    mapped.fill(5);
    let Some(protection) = protection(&mapped, 2) else { return };
    for _ in 0..3 {
        protection.begin().unwrap();
        protection.protect(all(0).0, all(0).1).unwrap();
        // A reader never waits.
        assert_eq!(mapped.word(0, 99, 0).load(Ordering::Relaxed), 5);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| mapped.word(0, 99, 0).store(5, Ordering::Relaxed));
            let (id, shard) = (RegionId(0), protection.shard_of(RegionId(0), PageIndex(99)));
            wait("the fault", || protection.next_write(shard, Duration::from_secs(1)).unwrap().is_some());
            assert!(!writer.is_finished(), "the writer waits");
            assert!(protection.protect(id, PageRun::from(0..PAGES[0] + 1)).is_err());
            protection.end().unwrap();
            writer.join().unwrap();
        });
        protection.end().unwrap();
        mapped.word(0, 100, 0).store(5, Ordering::Relaxed);
        assert!(protection.protect(RegionId(0), PageRun::from(0..1)).is_err(), "not registered");
    }
}

#[test]
fn nothing_is_given_back_while_pages_may_be_protected() {
    let mapped = Arc::new(Mapped::new(Kind::Anonymous, &PAGES));
    let slot = PagingSlot::new(1);
    assert_eq!(slot.if_droppable(|| 1), Some(1));
    let make = |threads| {
        let mut options = UffdOptions::new(threads);
        options.user_mode_only = true;
        UffdProtection::new(&mapped.regions(), Arc::clone(&mapped) as _, &options)
    };
    let protection = match slot.get_or_make_protection(make) {
        Ok(protection) => protection,
        Err(error) => return skip(Need::Uffd, error),
    };
    assert!(Arc::ptr_eq(&protection, &slot.get_or_make_protection(make).unwrap()));
    assert_eq!(slot.if_droppable(|| 2), Some(2));
    protection.begin().unwrap();
    assert_eq!(slot.if_droppable(|| 3), None);
    assert_eq!(slot.if_complete(|| 3), Some(3), "no page is missing");
    slot.end();
    assert_eq!(slot.if_droppable(|| 4), Some(4));
}

#[test]
fn huge_pages_are_refused() {
    let file: Arc<OwnedFd> =
        Arc::new(rustix::fs::memfd_create("none", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    let backing = Backing::HugeMemfd { file, offset: 0 };
    let region = PagedRegion { id: RegionId(3), host: 2 << 20, len: 2 << 20, backing };
    let options = UffdOptions::new(Arc::new(VcpuThreads::new(1)));
    let error = UffdProtection::new(&[region], Arc::new(()), &options).unwrap_err();
    assert!(matches!(error, FaultError::HugePages(RegionId(3))), "{error}");
}
