//! Lost links that the operator recovers, that are abandoned, or that are not needed any more.

use crate::rig::{View, asleep, can_fault, go, is_stopped, settings, whole, writes};
use std::time::Duration;
use vmferry_engine::{MigrationMode, MigrationState, Settings};
use vmferry_testkit::{print_line, wait};
use vmferry_wire::Role;

/// Settings of a slow link that is never reconnected without the operator.
fn by_hand() -> Settings {
    Settings {
        reconnect_for: Duration::ZERO,
        max_bandwidth: Some(1 << 20),
        ..settings(MigrationMode::Postcopy)
    }
}

/// Waits until some pages have arrived, cuts the link, and waits until both sides know of the loss.
fn cut_in_the_middle(view: &View<'_>) {
    view.until("pages at the target", || view.postcopy().is_some_and(|postcopy| postcopy.left < 5500));
    assert!(!view.finished());
    view.proxy.cut(|_| true);
    both_paused(view);
}

fn both_paused(view: &View<'_>) {
    view.until("both sides to say so", || {
        let here = view.handle.progress();
        let there = view.postcopy().unwrap();
        here.state == MigrationState::PostcopyPaused
            && here.awaits_recover
            && there.state == MigrationState::PostcopyPaused
    });
    assert!(!view.finished());
}

#[test]
fn lost_link_waits_for_the_operator_and_continues_where_it_stopped() {
    if !can_fault() {
        return;
    }
    let moved = go(&by_hand(), vec![], |view| {
        for _ in 0..3 {
            cut_in_the_middle(view);
            let (here, there) = (view.handle.progress(), view.postcopy().unwrap());
            assert!(here.interrupted.is_some() && here.runs_on_target, "{here:?}");
            assert!(there.why.is_some() && there.left > 0, "{there:?}");
            // Neither side reconnects and no page arrives. Pages that would arrive later than this
            // on a busy host only make the test miss a defect.
            std::thread::sleep(Duration::from_millis(200));
            assert_eq!(view.postcopy().unwrap().left, there.left);
            // Without a path to the target, recovery makes one attempt and the state stays.
            view.proxy.close(true);
            let turned_away = view.proxy.turned_away();
            view.handle.recover();
            view.until("the attempt", || view.proxy.turned_away() > turned_away);
            both_paused(view);
            view.proxy.close(false);
            view.handle.recover();
            view.until("the link to be taken up", || view.postcopy().unwrap().left < there.left);
        }
    });
    let report = moved.completed("recovered by hand");
    // A link that is cut during its recovery is not counted again.
    assert!(report.interruptions > 0, "{}", report.interruptions);
}

#[test]
fn abandoned_link_means_a_lost_guest() {
    if !can_fault() {
        return;
    }
    for reconnect_for in [Duration::ZERO, Duration::from_secs(600)] {
        let settings = Settings { reconnect_for, ..by_hand() };
        let mut left = 0;
        let moved = go(&settings, vec![], |view| {
            view.until("pages at the target", || {
                view.postcopy().is_some_and(|postcopy| postcopy.left < 5500)
            });
            // The cancel comes too late and has no effect.
            view.handle.cancel();
            view.proxy.close(true);
            view.proxy.cut(|_| true);
            let paused = |state| state == MigrationState::PostcopyPaused;
            view.until("the loss", || {
                paused(view.handle.progress().state) && paused(view.postcopy().unwrap().state)
            });
            if !reconnect_for.is_zero() {
                view.until("an attempt", || view.proxy.turned_away() > 0);
            }
            left = view.postcopy().unwrap().left;
            view.handle.abandon();
            // The end also comes during an attempt, without waiting for the attempt.
            view.until("the end", || false);
        });
        assert_eq!(moved.state(), MigrationState::Lost, "{}", moved.error());
        assert!(moved.error().contains("given up before the target reported"), "{}", moved.error());
        is_stopped(&moved.source, "given up");
        let postcopy = moved.received.unwrap();
        assert_eq!(
            (postcopy.state, postcopy.left),
            (MigrationState::PostcopyPaused, left),
            "no missing page is filled"
        );
        assert!(left > 0);
        asleep(moved.target);
    }
}

/// The guest's threads run until they need a missing page. What they have is correct.
#[test]
fn guest_runs_without_a_link_until_it_needs_a_missing_page() {
    if !can_fault() {
        return;
    }
    let moved = go(&by_hand(), vec![], |view| {
        cut_in_the_middle(view);
        let waits = |view: &View<'_>| view.postcopy().unwrap().postcopy.requests;
        let before = waits(view);
        // Least time that the threads wait, checked below.
        std::thread::sleep(Duration::from_secs(3));
        assert_eq!(waits(view), before, "a page was requested without a link");
        view.handle.recover();
        view.until("the requests of waiting threads", || waits(view) > before);
    });
    let report = moved.completed("without a link");
    let longest = report.postcopy.as_ref().unwrap().max_us;
    print_line(format!("a thread waited for {:.0} ms", longest / 1e3));
    assert!(longest > 400e3, "the time without a link counts: {longest} us");
}

/// All pages arrive, but the source is not told until the operator recovers the link.
#[test]
fn complete_target_waits_for_a_source_that_was_not_told() {
    if !can_fault() {
        return;
    }
    // One of the sides detects the loss by silence.
    let settings = Settings { max_bandwidth: None, peer_timeout: Duration::from_secs(10), ..by_hand() };
    let mut ended_by_itself = 0;
    // By chance the cut hits a target that has all pages or nearly all.
    for _ in 0..4 {
        let moved = go(&settings, vec![], |view| {
            view.until("nearly all pages at the target", || {
                view.postcopy().is_some_and(|postcopy| postcopy.left < 200)
            });
            view.proxy.cut(|role| role == Role::Control);
            view.until("the loss", || view.handle.progress().awaits_recover);
            if view.finished() {
                ended_by_itself += 1;
                return;
            }
            let postcopy = view.postcopy().unwrap();
            // A guest without missing pages is never reported as paused.
            view.until("the target to detect the loss", || {
                let postcopy = view.postcopy().unwrap();
                postcopy.state
                    == if postcopy.left == 0 {
                        MigrationState::Completed
                    } else {
                        MigrationState::PostcopyPaused
                    }
            });
            print_line(format!("{} pages were missing when the link was lost", postcopy.left));
            view.handle.recover();
        });
        moved.completed("told late");
    }
    print_line(format!("{ended_by_itself} of 4 had ended before the cut"));
}

/// A target that is told to stop leaves its guest's threads asleep, and the source waits for the
/// operator.
#[test]
fn target_stopped_in_postcopy_fills_no_missing_page() {
    if !can_fault() {
        return;
    }
    let moved = go(&by_hand(), vec![], |view| {
        view.until("pages at the target", || view.postcopy().is_some_and(|postcopy| postcopy.left < 5500));
        view.arrival.abandon();
        view.until("the loss", || view.handle.progress().awaits_recover);
        view.handle.abandon();
    });
    assert_eq!(moved.state(), MigrationState::Lost, "{}", moved.error());
    let postcopy = moved.received.unwrap();
    assert!(postcopy.left > 0 && postcopy.state != MigrationState::Completed, "{postcopy:?}");
    is_stopped(&moved.source, "stopped");
    asleep(moved.target);
}

/// A migration that is cancelled before the handover leaves the guest on the source; the target has
/// not run it.
#[test]
fn migration_can_be_cancelled_before_the_handover() {
    if !can_fault() {
        return;
    }
    let settings = Settings { max_bandwidth: Some(2 << 20), ..settings(MigrationMode::Hybrid) };
    let moved = go(&settings, vec![], |view| {
        view.until("pages sent", || view.handle.progress().wire_bytes > 1 << 20);
        view.handle.cancel();
    });
    assert_eq!(moved.state(), MigrationState::Cancelled, "{}", moved.error());
    assert!(moved.received.is_err());
    whole(&moved.source, "called off");
    let before = writes(&moved.source);
    wait("writes of the guest", || writes(&moved.source) > before);
}
