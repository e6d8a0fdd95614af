//! Complete migrations of guests that report free pages, use them again, answer late, or report
//! nonsense. By precopy. Postcopy is tested with real faults and the process guest.

use crate::freeing::FreeKind;
use crate::rig::{between, between_with_handle, check_owner, move_well, quick, unix_uri};
use crate::toy::{Options, Toy, Tracking};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use vmferry_engine::{FreePagesFigures, MigrationHandle, MigrationState, OnTimeout, Settings};
use vmferry_testkit::{PATIENCE, wait};

const PAGES: u64 = 6700;
const FREED: u64 = 4000;
/// Lower bound of skipped pages. A sender takes 512 pages at a time, and the source cannot skip
/// pages that a sender has taken. On a busy host each of the two senders may take pages three times
/// before the guest's answer arrives.
const AT_LEAST: u64 = FREED - 2 * 3 * 512;
const USED: u64 = 600;

/// Options for 6000 and 700 pages, of which 600 each are in use, and 4000 and 100 were written and
/// freed.
fn options(free: FreeKind, tracking: Tracking) -> Options {
    Options {
        pages: vec![6000, 700],
        used: USED,
        free: Some(free),
        freed: FREED,
        tracking,
        ..Options::default()
    }
}

/// Settings with which the pages in use take 100 ms in the first pass.
fn slow() -> Settings {
    Settings { max_bandwidth: Some(50_000_000), ..quick() }
}

/// Settings with which a guest answers in the first pass even on a busy host: the pages in use take
/// 600 ms. A guest that dirties faster than the link sends is stopped after some passes.
fn slowest() -> Settings {
    let (timeout, on_timeout) = (Some(Duration::from_secs(4)), OnTimeout::Switch);
    Settings { max_bandwidth: Some(8_000_000), timeout, on_timeout, ..quick() }
}

#[test]
fn freed_pages_are_not_sent() {
    let check = |free, tracking| {
        let settings = Settings { verify: true, ..slowest() };
        let (report, _) = move_well(options(free, tracking), &unix_uri(), &settings);
        let without = Settings { free_pages: false, verify: true, ..quick() };
        let (all, _) = move_well(options(free, tracking), &unix_uri(), &without);
        let skipped = report.bytes.free_pages_skipped;
        assert!(skipped >= AT_LEAST, "{free:?}: {report:?}");
        assert_eq!(report.skipped_pages, skipped, "{free:?}");
        assert_eq!(report.verified_pages + skipped, PAGES, "{free:?}");
        // Only the first pass is compared. How often the pages in use are sent again in later
        // passes depends on the link. With marks, memory is asked for touched pages before they are
        // sent, so the pass lacks the pages that the guest touches in the meantime.
        let (first, first_of_all) = (report.passes[0].wire_bytes, all.passes[0].wire_bytes);
        if matches!(tracking, Tracking::ByHand) {
            assert!(first + AT_LEAST * 4096 <= first_of_all, "{free:?}: {first} of {first_of_all} bytes");
        }
        let figures = report.free_pages.as_ref().unwrap();
        assert!(figures.questions >= 1 && figures.first_answer_ms.is_some(), "{figures:?}");
        assert_eq!((all.bytes.free_pages_skipped, all.free_pages.is_none()), (0, true));
        assert_eq!(all.verified_pages, PAGES);
    };
    // Run in parallel, because these migrations mostly wait for the bandwidth cap.
    std::thread::scope(|scope| {
        for tracking in [Tracking::Marks, Tracking::ByHand] {
            for free in [
                FreeKind::AtOnce,
                FreeKind::After(Duration::from_millis(5)),
                FreeKind::Repeats(Duration::from_millis(8)),
            ] {
                scope.spawn(move || check(free, tracking));
            }
        }
    });
}

/// Pages change between free and in use all the time. The guest finds every stamp, on source or
/// target.
#[test]
fn pages_that_are_freed_and_used_again_arrive() {
    const LANES: usize = 3;
    let move_once = |round: u64| {
        let tracking = if round.is_multiple_of(2) { Tracking::Marks } else { Tracking::ByHand };
        let free = match round % 4 {
            0 | 1 => FreeKind::AtOnce,
            2 => FreeKind::After(Duration::from_micros(300 * round)),
            _ => FreeKind::Repeats(Duration::from_millis(round)),
        };
        let options =
            Options { free_one_in: 3, write_pause: Duration::from_micros(100), ..options(free, tracking) };
        let settings = Settings {
            verify: round.is_multiple_of(3),
            channels: 1 + u16::try_from(round % 3).unwrap(),
            timeout: Some(Duration::from_millis(600)),
            on_timeout: OnTimeout::Switch,
            ..slow()
        };
        let (report, _) = move_well(options, &unix_uri(), &settings);
        (report.bytes.free_pages_skipped, report.free_pages.as_ref().unwrap().dropped_reports)
    };
    // Several run in parallel, because a migration mostly waits for its bandwidth cap and its
    // timeout.
    let (skipped, dropped) = std::thread::scope(|scope| {
        let lanes: [_; LANES] = std::array::from_fn(|lane| {
            scope.spawn(move || (0..24).skip(lane).step_by(LANES).map(move_once).collect::<Vec<_>>())
        });
        let moves = lanes.into_iter().flat_map(|lane| lane.join().unwrap());
        moves.fold((0, 0), |sum, moved| (sum.0 + moved.0, sum.1 + moved.1))
    });
    assert!(skipped > 24 * AT_LEAST / 2, "{skipped}");
    assert!(dropped > 0, "no answer was late");
}

#[test]
fn late_answers_are_dropped() {
    // Much later than the end of the migration: the answer is useless by then.
    let free = FreeKind::After(PATIENCE);
    let (report, _) = move_well(options(free, Tracking::ByHand), &unix_uri(), &quick());
    assert_eq!(report.bytes.free_pages_skipped, 0, "{report:?}");
    let figures = report.free_pages.unwrap();
    assert!(figures.questions >= 1 && figures.reports == 0, "{figures:?}");
    // The first answer is late, and arrives in a later pass while another question is open.
    let free = FreeKind::Repeats(Duration::from_millis(30));
    let settings = Settings { downtime_limit: Duration::from_micros(1), ..slow() };
    let (handle, late) = (MigrationHandle::new(), |figures: FreePagesFigures| figures.late_reports > 0);
    let mut source = Toy::new(options(free, Tracking::ByHand), true);
    let mut target = source.target();
    let ended = std::thread::scope(|scope| {
        scope.spawn(|| {
            wait("a late answer", || handle.progress().free_pages.is_some_and(late));
            handle.cancel();
        });
        between_with_handle(&mut source, &mut target, &settings, &handle)
    });
    check_owner(&source, &target, &ended);
    assert_eq!(ended.state(), Some(MigrationState::Cancelled), "{}", ended.error());
    let figures = ended.sent.unwrap().free_pages.unwrap();
    assert!(figures.late_reports > 0 && figures.late_reports <= figures.dropped_reports, "{figures:?}");
}

#[test]
fn migration_succeeds_if_the_free_page_source_never_answers_or_fails() {
    for free in [FreeKind::Never, FreeKind::Fails, FreeKind::FailsLater] {
        let settings = Settings { verify: true, ..quick() };
        let (report, _) = move_well(options(free, Tracking::ByHand), &unix_uri(), &settings);
        let skipped = report.bytes.free_pages_skipped;
        // A source that fails later has reported some pages before.
        assert!(skipped == 0 || free == FreeKind::FailsLater, "{free:?}: {skipped}");
        assert_eq!((skipped + report.verified_pages, report.skipped_pages), (PAGES, skipped), "{free:?}");
    }
}

#[test]
fn free_pages_outside_memory_are_counted_and_ignored() {
    let settings = Settings { verify: true, ..slowest() };
    let (report, _) = move_well(options(FreeKind::Outside, Tracking::ByHand), &unix_uri(), &settings);
    let figures = report.free_pages.unwrap();
    assert!(figures.outside_pages > 1 << 60, "{figures:?}");
    assert!(report.bytes.free_pages_skipped >= AT_LEAST);
}

/// However the migration ends, the guest is told to stop reporting, and the next attempt sends all
/// pages that must be sent.
#[test]
fn cancel_stops_the_reporting_of_free_pages() {
    let mut told = 0;
    for round in 0..8u64 {
        let free = if round % 2 == 0 { FreeKind::AtOnce } else { FreeKind::After(Duration::from_millis(3)) };
        let mut source = Toy::new(Options { free_one_in: 3, ..options(free, Tracking::ByHand) }, true);
        let mut target = source.target();
        let (handle, done) = (MigrationHandle::new(), AtomicBool::new(false));
        let ended = std::thread::scope(|scope| {
            scope.spawn(|| {
                // 1200 pages in use, 4.9 MB.
                let sent = || handle.progress().wire_bytes > round * 600_000;
                wait("so many bytes", || sent() || done.load(Ordering::Relaxed));
                handle.cancel();
            });
            let ended = between_with_handle(&mut source, &mut target, &slow(), &handle);
            done.store(true, Ordering::Relaxed);
            ended
        });
        check_owner(&source, &target, &ended);
        assert_eq!(source.surprises(), 0);
        told += source.told_to_stop();
        if ended.state() == Some(MigrationState::Completed) {
            continue;
        }
        assert!(source.works());
        drop(target);
        let mut target = source.target();
        let again = between(&mut source, &mut target, &quick());
        check_owner(&source, &target, &again);
        assert_eq!(again.state(), Some(MigrationState::Completed), "{}", again.error());
        assert_eq!((target.lost(), target.surprises()), (vec![], 0));
    }
    assert!(told > 0);
}

/// Returns settings under which the source waits `millis` for the guest's answer.
fn waiting(millis: u64) -> Settings {
    Settings { free_pages_wait: Duration::from_millis(millis), verify: true, ..quick() }
}

/// Limit of a wait that a test does not sit out.
const LONG: u64 = 120_000;

#[test]
fn source_waits_for_the_answer_and_sends_no_free_page() {
    let delay = Duration::from_millis(40);
    for free in [FreeKind::After(delay), FreeKind::Repeats(delay)] {
        let (report, _) = move_well(options(free, Tracking::ByHand), &unix_uri(), &waiting(LONG));
        // No sender has started when the answer arrives, so none of the free pages is sent.
        let skipped = report.bytes.free_pages_skipped;
        assert!(skipped >= FREED, "{free:?}: {report:?}");
        assert_eq!(report.verified_pages + skipped, PAGES, "{free:?}");
        // The wait lasts until the guest has answered completely, and no longer than needed.
        let waited = report.free_pages.as_ref().unwrap().waited_ms;
        assert!((40.0..LONG as f64 / 2.0).contains(&waited), "{free:?}: {waited} ms");
        assert!(report.setup_ms >= waited, "{free:?}: {report:?}");
        assert!(report.passes[0].start_ms >= waited, "{free:?}: {report:?}");
    }
}

/// The guest never answers. The wait is longer than the time after which a silent peer is given up,
/// so the link must stay in use during the wait.
#[test]
fn wait_for_the_answer_ends_at_its_limit() {
    let settings = Settings { peer_timeout: Duration::from_millis(700), ..waiting(1500) };
    let (report, _) = move_well(options(FreeKind::Never, Tracking::ByHand), &unix_uri(), &settings);
    let waited = report.free_pages.as_ref().unwrap().waited_ms;
    assert!((1500.0..15_000.0).contains(&waited), "{waited} ms");
    assert_eq!((report.bytes.free_pages_skipped, report.verified_pages), (0, PAGES), "{report:?}");
}

#[test]
fn source_does_not_wait_for_answers_that_come_at_once_or_never_can() {
    let waited = |options, settings: &Settings| {
        let (report, _) = move_well(options, &unix_uri(), settings);
        report.free_pages.map_or(0.0, |figures| figures.waited_ms)
    };
    let free = |kind| options(kind, Tracking::ByHand);
    assert_eq!(waited(free(FreeKind::AtOnce), &waiting(LONG)), 0.0);
    // A guest that cannot be asked, and a migration that does not ask.
    assert_eq!(waited(Options { free: None, ..free(FreeKind::Never) }, &waiting(LONG)), 0.0);
    let off = Settings { free_pages: false, ..waiting(LONG) };
    assert_eq!(waited(free(FreeKind::Never), &off), 0.0);
    // The source learns that the question failed when it asks, or when it polls.
    for kind in [FreeKind::Fails, FreeKind::FailsLater] {
        let waited = waited(free(kind), &waiting(LONG));
        assert!(waited < LONG as f64 / 2.0, "{kind:?}: {waited} ms");
    }
}

#[test]
fn operator_can_cancel_or_switch_while_the_source_waits_for_the_answer() {
    for cancel in [true, false] {
        let mut source = Toy::new(options(FreeKind::Never, Tracking::ByHand), true);
        let mut target = source.target();
        let handle = MigrationHandle::new();
        let ended = std::thread::scope(|scope| {
            scope.spawn(|| {
                let waits = || handle.progress().free_pages.is_some_and(|figures| figures.questions > 0);
                wait("the question", waits);
                if cancel { handle.cancel() } else { handle.switch_now() }
            });
            between_with_handle(&mut source, &mut target, &waiting(LONG), &handle)
        });
        check_owner(&source, &target, &ended);
        let report = ended.sent.as_ref().unwrap();
        let state = if cancel { MigrationState::Cancelled } else { MigrationState::Completed };
        assert_eq!(ended.state(), Some(state), "{}", ended.error());
        let waited = report.free_pages.as_ref().unwrap().waited_ms;
        assert!(waited > 0.0 && waited < LONG as f64 / 2.0, "{waited} ms");
        assert_eq!(report.bytes.raw_pages == 0, cancel, "{report:?}");
        assert!(source.told_to_stop() > 0, "the guest is told that no answer is needed");
        if cancel {
            assert!(source.works());
        }
    }
}
