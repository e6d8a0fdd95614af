//! Tests of the atomic bitmap with real threads and memory. `src/atomic_tests.rs` tests all
//! interleavings.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use vmferry_bitmap::{AtomicBitmap, Bitmap};

#[test]
fn no_write_is_lost_between_marking_and_harvesting() {
    // Three blocks of the summary, or two under Miri.
    const PAGES: u64 = if cfg!(miri) { 4200 } else { 9000 };
    const ROUNDS: u64 = if cfg!(miri) { 40 } else { 20_000 };
    let map = AtomicBitmap::new(PAGES);
    let content: Vec<AtomicU64> = (0..PAGES).map(|_| AtomicU64::new(0)).collect();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1..=ROUNDS {
                let page = round.wrapping_mul(0x9e37_79b9_7f4a_7c15) % PAGES;
                content[usize::try_from(page).unwrap()].store(round, Ordering::Relaxed);
                map.set(page);
            }
            done.store(true, Ordering::Release);
        });
        let mut copy = vec![0; usize::try_from(PAGES).unwrap()];
        let mut dirty = Bitmap::new(PAGES);
        loop {
            let last = done.load(Ordering::Acquire);
            map.harvest(&mut dirty);
            for page in dirty.runs().flatten() {
                let page = usize::try_from(page).unwrap();
                copy[page] = content[page].load(Ordering::Relaxed);
            }
            dirty.clear_all();
            if last {
                break;
            }
        }
        for (page, copied) in copy.iter().enumerate() {
            assert_eq!(*copied, content[page].load(Ordering::Relaxed), "page {page}");
        }
    });
}

#[test]
fn ranges_mark_across_words_and_are_harvested_once() {
    let map = AtomicBitmap::new(200);
    map.set_range(60..130);
    assert!(map.set(60) && !map.set(5));
    assert!(map.test(129) && !map.test(130));
    let mut out = Bitmap::new(200);
    assert_eq!(map.harvest(&mut out), 71);
    assert_eq!(out.runs().collect::<Vec<_>>(), [5..6, 60..130]);
    assert!(map.is_empty());
    assert_eq!(map.harvest(&mut out), 0);
    assert!(!map.test_and_clear(60));
}

#[test]
fn taking_a_word_takes_only_marked_pages_of_the_mask() {
    let map = AtomicBitmap::new(130);
    for page in [3, 64, 70, 129] {
        map.set(page);
    }
    assert_eq!(map.take_word(1, 1 << 6 | 1 << 9), 1 << 6, "page 70 is marked, and page 73 is not");
    assert_eq!(map.take_word(1, 1 << 6), 0, "page 70 was taken");
    assert!(map.test(64) && map.test(3), "no other page was taken");
    assert_eq!(map.take_word(2, u64::MAX), 1 << 1);
    assert_eq!(map.take_word(3, u64::MAX), 0, "there are no pages beyond the end");
    let mut out = Bitmap::new(130);
    assert_eq!(map.harvest(&mut out), 2);
    assert_eq!(out.runs().collect::<Vec<_>>(), [3..4, 64..65]);
}
