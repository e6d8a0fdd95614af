//! Tests of write protection with real memory and real page tables.

use crate::memory::{Kind, Memory, random};
use crate::pool::Pool;
use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use vmferry_bitmap::{AtomicBitmap, Bitmap};
use vmferry_core::{
    DirtyTracker, Gpa, Layout, PAGE_BYTES, PageIndex, PageRun, PageSet, Protect, Region, RegionId,
};
use vmferry_dirty::{MappedRegion, WpTracker, touched};
use vmferry_sys::pagemap::{IS_PRESENT, IS_WRITTEN, Match, PageRegion, Pagemap};
use vmferry_sys::uffd::{Access, FEATURE_WP, FEATURE_WP_ASYNC, FEATURE_WP_SHMEM, Userfaultfd};
use vmferry_testkit::{Need, skip};

const KINDS: [Kind; 3] = [Kind::Small, Kind::Huge, Kind::Memfd];

fn layout(regions: &[MappedRegion]) -> Layout {
    let mut gpa = 0;
    let regions = regions.iter().map(|region| {
        let at = gpa;
        gpa += region.len;
        Region { id: region.id, gpa: Gpa(at), len: region.len }
    });
    Layout::new(regions.collect()).unwrap()
}

/// Returns whether this host can run the calling test, which is skipped otherwise.
pub(crate) fn available() -> bool {
    WpTracker::available().map_err(|error| skip(Need::Uffd, error)).is_ok()
}

fn harvest(tracker: &mut WpTracker, layout: &Layout) -> Vec<u64> {
    let mut set = PageSet::empty(layout);
    let began = Instant::now();
    tracker.harvest(&mut set).unwrap();
    let (took, in_kernel) = (began.elapsed(), tracker.harvest_kernel_time().unwrap());
    assert!(Duration::ZERO < in_kernel && in_kernel < took, "{in_kernel:?} of {took:?}");
    set.iter().flat_map(|(_, map)| map.runs().flatten().collect::<Vec<_>>()).collect()
}

fn started(memory: &Memory) -> (WpTracker, Layout) {
    let region = memory.region(0);
    let layout = layout(std::slice::from_ref(&region));
    let mut tracker = WpTracker::new(vec![region]).unwrap();
    tracker.start().unwrap();
    (tracker, layout)
}

#[test]
fn only_written_pages_are_harvested_each_once() {
    if !available() {
        return;
    }
    for kind in KINDS {
        let memory = Memory::new(kind, 4096);
        (0..100).for_each(|page| memory.write(page, 1));
        (1024..1030).for_each(|page| assert_eq!(memory.word(page).load(Ordering::Relaxed), 0));
        let (mut tracker, layout) = started(&memory);
        assert_eq!(
            harvest(&mut tracker, &layout),
            [],
            "{kind:?}: everything present is protected at the start"
        );
        memory.write(5, 2);
        memory.write(99, 2);
        memory.write(1027, 2);
        assert_eq!(harvest(&mut tracker, &layout), [5, 99, 1027], "{kind:?}: one page, also of a huge page");
        assert_eq!(harvest(&mut tracker, &layout), [], "{kind:?}");
        memory.write(5, 3);
        // Pages that did not exist when tracking started.
        memory.write(2600, 1);
        memory.write(4095, 1);
        let found: BTreeSet<u64> = harvest(&mut tracker, &layout).into_iter().collect();
        assert!(found.is_superset(&[5, 2600, 4095].into()), "{kind:?}: {found:?}");
        if kind != Kind::Huge {
            assert_eq!(found.len(), 3, "{kind:?}: {found:?}");
        }
        // After the stop, no page is found, and writes continue to work.
        tracker.stop().unwrap();
        memory.write(6, 3);
        let error = tracker.harvest(&mut PageSet::empty(&layout)).unwrap_err();
        assert!(error.to_string().contains("not started"), "{error}");
        tracker.start().unwrap();
        assert_eq!(harvest(&mut tracker, &layout), [], "{kind:?}: after a second start");
    }
}

/// Runs threads that stamp random pages while pages are harvested and copied. The final copy must
/// be equal.
fn nothing_is_lost(kind: Kind, pages: u64, rounds: u32) {
    let memory = Memory::new(kind, pages);
    let mut seed = 7;
    (0..pages / 2).for_each(|_| memory.write(random(&mut seed) % pages, 1));
    let (mut tracker, layout) = started(&memory);
    let stop = AtomicBool::new(false);
    let writes = AtomicU64::new(0);
    let mut copy = vec![0u8; usize::try_from(pages).unwrap() * PAGE_BYTES];
    let mut take = |page: u64| {
        let at = usize::try_from(page).unwrap() * PAGE_BYTES;
        copy[at..at + PAGE_BYTES].copy_from_slice(&memory.page(page));
    };
    std::thread::scope(|scope| {
        for thread in 0..3u64 {
            let (memory, stop, writes) = (&memory, &stop, &writes);
            scope.spawn(move || {
                let (mut seed, mut done) = (thread, 0);
                while !stop.load(Ordering::Relaxed) {
                    done += 1;
                    memory.write(random(&mut seed) % pages, done * 4 + thread);
                    writes.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let mut base = Bitmap::new(pages);
        touched(&memory.region(0), PageRun::from(0..pages), &mut base).unwrap();
        base.runs().flatten().for_each(&mut take);
        let (mut harvested, mut round) = (0, 0);
        // As many rounds as requested, and more until the writers had their share of a busy host.
        while round < rounds || writes.load(Ordering::Relaxed) < 10_000 {
            let found = harvest(&mut tracker, &layout);
            harvested += found.len();
            found.into_iter().for_each(&mut take);
            round += 1;
        }
        stop.store(true, Ordering::Relaxed);
        println!("{kind:?}: {harvested} pages harvested in {round} rounds");
    });
    // The pause: every writer has ended. The last harvest finds the pages that they wrote since the
    // previous one.
    harvest(&mut tracker, &layout).into_iter().for_each(&mut take);
    let wrong: Vec<u64> = (0..pages)
        .filter(|page| {
            let at = usize::try_from(*page).unwrap() * PAGE_BYTES;
            copy[at..at + PAGE_BYTES] != memory.page(*page)
        })
        .collect();
    assert_eq!(wrong, [], "{kind:?}: pages lost");
}

#[test]
fn no_write_to_small_pages_is_lost() {
    if available() {
        nothing_is_lost(Kind::Small, 2048, 60);
    }
}

#[test]
fn no_write_to_huge_pages_is_lost() {
    if available() {
        nothing_is_lost(Kind::Huge, 4096, 60);
    }
}

#[test]
fn no_write_to_a_memfd_is_lost() {
    if available() {
        nothing_is_lost(Kind::Memfd, 2048, 60);
    }
}

/// Checks huge pages of the host's pool, which are never split: a write dirties all of its huge
/// page, which is found once.
#[test]
fn no_write_to_huge_pages_of_the_pool_is_lost() {
    if !available() {
        return;
    }
    let _pool = match Pool::with(8) {
        Ok(pool) => pool,
        Err(why) => return skip(Need::HugePages, why),
    };
    {
        let memory = Memory::new(Kind::Pool, 4096);
        (0..2048).for_each(|page| memory.write(page, 1));
        let (mut tracker, layout) = started(&memory);
        assert_eq!(harvest(&mut tracker, &layout), [], "everything present is protected at the start");
        memory.write(5, 2);
        memory.write(1030, 2);
        let whole = |number: u64| number * 512..(number + 1) * 512;
        let want: Vec<u64> = whole(0).chain(whole(2)).collect();
        assert_eq!(harvest(&mut tracker, &layout), want);
        assert_eq!(harvest(&mut tracker, &layout), []);
        // A page that did not exist before.
        memory.write(4095, 2);
        assert_eq!(harvest(&mut tracker, &layout), whole(7).collect::<Vec<_>>());
        tracker.stop().unwrap();
        assert_eq!((memory.word(5).load(Ordering::Relaxed), memory.word(6).load(Ordering::Relaxed)), (2, 1));
        let mut all = Bitmap::new(4096);
        touched(&memory.region(0), PageRun::from(0..4096), &mut all).unwrap();
        assert_eq!(all.count(), 4096, "the file does not report its data, so no page counts as untouched");
    }
    nothing_is_lost(Kind::Pool, 4096, 60);
}

#[test]
fn memfd_page_that_was_written_and_then_unmapped_is_found() {
    if !available() {
        return;
    }
    let memory = Memory::new(Kind::Memfd, 1024);
    (0..600).for_each(|page| memory.write(page, 1));
    let (mut tracker, layout) = started(&memory);
    assert_eq!(harvest(&mut tracker, &layout), []);
    memory.write(7, 2);
    memory.write(700, 2);
    // Reclaim has the same effect on a mapping, without the swap: pages leave the page table, and
    // their content stays in the file.
    memory.drop_pages(PageRun::new(PageIndex(0), 1024));
    assert_eq!(harvest(&mut tracker, &layout), [7, 700]);
    assert_eq!(harvest(&mut tracker, &layout), [], "reported once");
    assert_eq!(memory.word(700).load(Ordering::Relaxed), 2);
    memory.write(8, 2);
    assert!(harvest(&mut tracker, &layout).contains(&8), "tracked again");
}

#[test]
fn data_of_another_mapping_counts_as_touched() {
    let memory = Memory::new(Kind::Memfd, 256);
    let file = memory.file.as_ref().unwrap();
    // `pwrite` replaces another mapping of the file, in this process or another.
    rustix::io::pwrite(file, &[1; 100], 9 * 4096 + 4000).unwrap();
    let mut map = Bitmap::new(256);
    touched(&memory.region(0), PageRun::from(0..256), &mut map).unwrap();
    assert_eq!(map.runs().flatten().collect::<Vec<_>>(), [9, 10]);
    let mut part = Bitmap::new(256);
    touched(&memory.region(0), PageRun::from(10..256), &mut part).unwrap();
    assert_eq!(part.runs().flatten().collect::<Vec<_>>(), [10]);
    // A tracker reports the pages once, because they may have been written at any time.
    if available() {
        let (mut tracker, layout) = started(&memory);
        assert_eq!(harvest(&mut tracker, &layout), [9, 10]);
        assert_eq!(harvest(&mut tracker, &layout), []);
    }
}

#[test]
fn untouched_anonymous_pages_are_skipped_while_tracking() {
    for kind in [Kind::Small, Kind::Huge] {
        let memory = Memory::new(kind, 4096);
        memory.write(3, 1);
        memory.write(2000, 1);
        // Reading untouched memory maps the kernel's zero page.
        assert_eq!(memory.word(3000).load(Ordering::Relaxed), 0);
        let tracking = available().then(|| started(&memory));
        let mut map = Bitmap::new(4096);
        touched(&memory.region(0), PageRun::from(0..4096), &mut map).unwrap();
        assert!(map.test(3) && map.test(2000), "{kind:?}");
        if tracking.is_some() {
            assert!(!map.test(3000), "{kind:?}: the zero page");
        }
        if kind == Kind::Small {
            assert!(map.count() <= 3, "{map:?}");
        } else {
            assert!(map.count() <= 2 * 512 + 1, "{map:?}");
        }
    }
}

#[test]
fn marks_are_merged_and_marks_from_before_the_start_are_discarded() {
    if !available() {
        return;
    }
    let memory = Memory::new(Kind::Small, 64);
    let marks = Arc::new(AtomicBitmap::new(64));
    let region = MappedRegion { marks: Some(Arc::clone(&marks) as _), ..memory.region(4) };
    let layout = layout(std::slice::from_ref(&region));
    let mut tracker = WpTracker::new(vec![region.clone()]).unwrap();
    marks.set(1);
    tracker.start().unwrap();
    marks.set(20);
    memory.write(2, 1);
    assert_eq!(harvest(&mut tracker, &layout), [2, 20]);
    assert_eq!(harvest(&mut tracker, &layout), []);
    let short = MappedRegion { marks: Some(Arc::new(AtomicBitmap::new(63))), ..region };
    let error = WpTracker::new(vec![short]).unwrap_err().to_string();
    assert!(error.contains("has 64 pages, but a bitmap for it has 63"), "{error}");
}

#[test]
fn every_page_taken_from_the_marks_is_handed_back() {
    if !available() {
        return;
    }
    let memory = Memory::new(Kind::Small, 64);
    let (marks, returned_pages) = (Arc::new(AtomicBitmap::new(64)), Arc::new(AtomicBitmap::new(64)));
    let region = MappedRegion {
        marks: Some(Arc::clone(&marks) as _),
        returned_pages: Some(Arc::clone(&returned_pages)),
        ..memory.region(4)
    };
    let layout = layout(std::slice::from_ref(&region));
    let mut tracker = WpTracker::new(vec![region]).unwrap();
    marks.set(1);
    tracker.start().unwrap();
    marks.set(20);
    memory.write(2, 1);
    assert_eq!(harvest(&mut tracker, &layout), [2, 20]);
    tracker.stop().unwrap();
    let found: Vec<u64> = (0..64).filter(|page| returned_pages.test(*page)).collect();
    assert_eq!(found, [1, 2, 20]);
}

#[test]
fn memory_that_cannot_be_tracked_is_refused_with_the_reason() {
    if !available() {
        return;
    }
    let memory = Memory::new(Kind::Small, 64);
    let (_tracker, _) = started(&memory);
    // Another userfaultfd has the memory already, and the first tracker still works afterwards.
    let mut second = WpTracker::new(vec![memory.region(0)]).unwrap();
    let error = second.start().unwrap_err().to_string();
    assert!(error.contains("region 0") && error.contains("another userfaultfd"), "{error}");
    let nowhere = MappedRegion { host: 4096, ..memory.region(1) };
    let error = WpTracker::new(vec![nowhere]).unwrap().start().unwrap_err().to_string();
    assert!(error.contains("region 1"), "{error}");
}

#[test]
fn user_mode_userfaultfd_finds_writes_of_system_calls() {
    if !available() {
        return;
    }
    let memory = Memory::new(Kind::Small, 16);
    (0..16).for_each(|page| memory.write(page, 1));
    let features = FEATURE_WP | FEATURE_WP_ASYNC | FEATURE_WP_SHMEM;
    let uffd = Userfaultfd::open_user_mode_only(features).unwrap();
    assert_eq!(uffd.access(), Access::UserModeOnly);
    let span = memory.host()..memory.host() + 16 * 4096;
    uffd.register_wp(span.clone()).unwrap();
    let what =
        Match { all: IS_WRITTEN, any: IS_PRESENT, report: IS_PRESENT, protect: true, ..Match::default() };
    let scan = || {
        let mut found = Vec::new();
        Pagemap::open()
            .unwrap()
            .for_each(span.clone(), what, &mut [PageRegion::default(); 16], |run| {
                found.push(((run.start - span.start) / 4096, (run.end - span.start) / 4096));
            })
            .unwrap();
        found
    };
    assert_eq!(scan(), [(0, 16)]);
    assert_eq!(scan(), []);
    let source = rustix::fs::memfd_create("source", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::io::pwrite(&source, &[9; 100], 0).unwrap();
    let target = memory.window().slice(5, 1).as_ptr();
    // SAFETY: the page is mapped and only written by the kernel in this call.
    let read =
        unsafe { libc::pread(std::os::fd::AsRawFd::as_raw_fd(&source.as_fd()), target.cast(), 100, 0) };
    assert_eq!(read, 100, "{}", std::io::Error::last_os_error());
    assert_eq!(scan(), [(5, 6)]);
    assert_eq!(memory.page(5)[..100], [9; 100]);
}

#[test]
fn protect_without_regions_succeeds() {
    let tracker = WpTracker::new(Vec::new()).unwrap();
    let protector: Arc<dyn Protect> = tracker.protector();
    protector.protect(RegionId(0), PageRun::from(0..1), &Bitmap::new(1)).unwrap();
}
