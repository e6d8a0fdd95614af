//! Claims of chunks in many interleavings of bulk threads (shuttle).

use super::Claims;
use crate::source::settings::UrgentPath;
use shuttle::thread;
use std::sync::Arc;
// The counters are not under test, so they are no step for the scheduler.
use std::sync::atomic::{AtomicUsize as Count, Ordering};
use vmferry_core::{Gpa, Layout, PAGE_SIZE, PageSet, Region, RegionId};
use vmferry_testkit::tries;

const TRIES: usize = 2000;

/// Returns the claims of two regions: one of 3 chunks and a part, and one of 2 chunks.
fn two_regions() -> Claims {
    let region = |id, gpa, pages: u64| Region { id: RegionId(id), gpa: Gpa(gpa), len: pages << 12 };
    let layout = Layout::new(vec![region(0, 0, 1600), region(1, 1 << 32, 1024)]).unwrap();
    Claims::new(PageSet::full(&layout), UrgentPath::Dedicated, false)
}

#[test]
fn bulk_threads_take_each_page_once_wherever_the_guest_is() {
    let work = |claims: &Claims, taken: &[Count]| {
        while let Some(chunk) = claims.next_chunk() {
            assert!(chunk.pages.contains(&chunk.from) || chunk.from == chunk.pages.end);
            let before = if chunk.region == 0 { 0 } else { 1600 };
            for first in chunk.pages.step_by(64) {
                let pages = claims.regions[chunk.region].1.take_64(first, u64::MAX);
                for page in (0..64).filter(|page| pages >> page & 1 == 1) {
                    taken[usize::try_from(before + first + page).unwrap()].fetch_add(1, Ordering::SeqCst);
                }
            }
        }
    };
    let run = move || {
        let taken: Arc<Vec<Count>> = Arc::new((0..2624).map(|_| Count::new(0)).collect());
        let claims = Arc::new(two_regions());
        let start = || {
            let (claims, taken) = (Arc::clone(&claims), Arc::clone(&taken));
            thread::spawn(move || work(&claims, &taken))
        };
        let workers = [start(), start()];
        for (region, page) in [(0, 1599), (1, 600), (1, 1 << 40), (0, 0)] {
            claims.guest_runs_on(region, page);
        }
        workers.into_iter().for_each(|worker| worker.join().unwrap());
        assert!(taken.iter().all(|taken| taken.load(Ordering::SeqCst) == 1));
    };
    shuttle::check_random(run, tries(TRIES));
}

#[test]
fn bulk_threads_follow_a_guest_that_accesses_memory_sequentially() {
    let run = || {
        let claims = two_regions();
        let next =
            || claims.next_chunk().map(|chunk| (chunk.region, chunk.pages.start, chunk.from, chunk.near));
        let send = |region: usize, first: u64| {
            claims.regions[region].1.take_range(first..first + 512);
        };
        assert_eq!(next(), Some((0, 0, 0, false)));
        claims.guest_runs_on(1, 100);
        assert_eq!(next(), Some((1, 0, 64, true)), "the chunk of the guest");
        assert_eq!(next(), Some((1, 0, 64, true)), "another thread helps with it");
        send(1, 0);
        assert_eq!(next(), Some((1, 512, 512, true)), "the chunk after it");
        send(1, 512);
        assert_eq!(next(), Some((0, 512, 512, false)), "then the first that is left");
        send(0, 512);
        claims.guest_runs_on(0, 700);
        assert_eq!(next(), Some((0, 1024, 1024, true)), "the guest's chunk is sent, so the one after it");
        send(0, 0);
        send(0, 1024);
        assert_eq!(next(), Some((0, 1536, 1536, true)));
        claims.regions[0].1.take_range(1536..1600);
        assert_eq!(next(), None);
    };
    shuttle::check_random(run, 1);
}

#[test]
fn frames_and_queues_are_short_near_a_sequential_guest() {
    let run = || {
        let claims = two_regions();
        // Half a millisecond at 2 Gb/s takes 30 pages.
        let rate = 250_000_000;
        claims.fit_frames(rate);
        assert_eq!((claims.frame_pages(false), claims.unsent_bytes(rate)), (30, 125_000));
        claims.guest_runs_on(0, 700);
        assert_eq!((claims.frame_pages(true), claims.unsent_bytes(rate)), (4, 31_250));
        assert_eq!(claims.unsent_bytes(1), 2 * PAGE_SIZE, "room for one page and its headers");
        // The guest has reached the end of memory, and all of it is sent.
        claims.regions[0].1.take_range(0..1600);
        claims.regions[1].1.take_range(0..1024);
        while claims.next_chunk().is_some() {}
        assert_eq!(claims.unsent_bytes(rate), 125_000);
    };
    shuttle::check_random(run, 1);
}
