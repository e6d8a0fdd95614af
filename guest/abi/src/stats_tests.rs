//! Tests of the statistics page.

use super::*;
use std::sync::atomic::AtomicBool;
use std::thread;

fn ready_page() -> StatsPage {
    let page = StatsPage::new();
    page.header.version.store(STATS_VERSION, Ordering::Relaxed);
    page.header.cpus.store(2, Ordering::Relaxed);
    page.header.magic.store(STATS_MAGIC, Ordering::Release);
    page
}

/// Returns a report whose every field follows from `n`, so that a torn report is recognized.
fn report(n: u64) -> Report {
    Report {
        t_us: n,
        writes: n,
        checks: n,
        corrupt: 1,
        first_corrupt: Some(Corrupt { page: n, word: n, want: n, got: n }),
        stalls: n,
        stall_sum_us: n,
        stall_max_us: n,
        window_max_us: n,
        sweeps: n,
        verify_done: n,
        hist: [n; HIST_BUCKETS],
        hist_sum_us: [n; HIST_BUCKETS],
    }
}

#[test]
fn unwritten_page_is_not_yet_valid() {
    assert_eq!(StatsPage::new().snapshot(), Err(StatsError::NotYet));
}

#[test]
fn invalid_page_is_refused() {
    for (word, value) in
        [(offset::MAGIC, 1), (offset::VERSION, 2), (offset::CPUS, 0), (offset::CPUS, 65), (3, 9)]
    {
        let page = ready_page();
        page.word(word).store(value, Ordering::Relaxed);
        assert_eq!(page.snapshot(), Err(StatsError::Invalid { word, value }));
    }
}

#[test]
fn published_report_is_read_unchanged() {
    let page = ready_page();
    page.cpus[1].publish(&report(7));
    page.raise(State::Corrupt);
    page.raise(State::Running);
    let snapshot = page.snapshot().unwrap();
    assert_eq!(snapshot.state, State::Corrupt);
    assert_eq!(snapshot.cpus().len(), 2);
    let cpu = snapshot.cpus()[1];
    assert_eq!((cpu.t_us, cpu.writes, cpu.hist, cpu.reports), (7, 7, [7; 16], 1));
    assert_eq!(cpu.hist_sum_us, [7; 16]);
    assert!(cpu.windows().eq([7]));
    assert_eq!(snapshot.cpus()[0], CpuSnapshot::default());
    assert_eq!((snapshot.writes(), snapshot.corrupt()), (7, 1));
    assert_eq!(snapshot.first_corrupt().unwrap().page, 7);
    assert!(!snapshot.verified(7));
    page.cpus[0].publish(&report(7));
    assert!(page.snapshot().unwrap().verified(7));
}

#[test]
fn state_is_never_older_than_a_failed_check() {
    for at in 0..offset::BLOCKS + offset::BLOCK_WORDS {
        let (page, mut happened) = (ready_page(), false);
        let snapshot = StatsSnapshot::read(|word| {
            // A vCPU finds a failure just before the reader reaches word `at`.
            if word == at && !std::mem::replace(&mut happened, true) {
                page.raise(State::Corrupt);
                page.cpus[0].publish(&report(1));
            }
            page.word(word).load(Ordering::Acquire)
        })
        .unwrap();
        assert!(snapshot.corrupt() == 0 || snapshot.state == State::Corrupt, "word {at}");
    }
}

#[test]
fn windows_give_every_reader_its_maximum() {
    let page = ready_page();
    for stall in [5, 90, 3, 4] {
        page.cpus[0].publish(&Report { window_max_us: stall, ..report(1) });
    }
    let cpu = page.snapshot().unwrap().cpus()[0];
    assert_eq!(cpu.stall_max_since(0), 90);
    assert_eq!(cpu.stall_max_since(2), 4);
    assert_eq!(cpu.stall_max_since(4), 0);
    for _ in 0..20 {
        page.cpus[0].publish(&Report { window_max_us: 1, ..report(1) });
    }
    assert_eq!(page.snapshot().unwrap().cpus()[0].stall_max_since(0), 1);
}

#[test]
fn block_that_stays_odd_is_busy() {
    let page = ready_page();
    page.cpus[1].words[offset::SEQ].store(1, Ordering::Relaxed);
    assert_eq!(page.snapshot(), Err(StatsError::Busy { cpu: 1 }));
    // The guest repairs the block when it continues.
    page.cpus[1].publish(&report(3));
    assert_eq!(page.snapshot().unwrap().cpus()[1].writes, 3);
}

#[test]
fn offsets_match_the_structure() {
    let page = ready_page();
    for word in 0..offset::BLOCKS + 2 * offset::BLOCK_WORDS {
        let address = std::ptr::from_ref(page.word(word)).addr();
        assert_eq!(address - std::ptr::from_ref(&page).addr(), 8 * word);
    }
}

#[test]
fn concurrent_readers_never_see_a_torn_block() {
    let page = ready_page();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut n = 0;
            while !stop.load(Ordering::Relaxed) {
                n += 1;
                page.cpus[0].publish(&report(n));
                for _ in 0..200 {
                    core::hint::spin_loop();
                }
            }
        });
        let mut seen = 0;
        for _ in 0..200_000 {
            // Busy is allowed (this thread may be slow). A mixture of two reports is not.
            if let Ok(snapshot) = page.snapshot() {
                let cpu = snapshot.cpus()[0];
                let n = cpu.t_us;
                assert!(n >= seen);
                seen = n;
                assert_eq!((cpu.writes, cpu.hist[15], cpu.verify_done), (n, n, n));
                assert!(n == 0 || cpu.first_corrupt.unwrap().got == n);
            }
            if seen > 2000 {
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
        assert!(seen > 0, "the reader never got a report");
    });
}
