//! Lost links that are taken up by hand, given up, or not needed any more.

use crate::rig::{View, asleep, can_fault, go, settings, stands_still, whole, writes};
use std::time::Duration;
use vmferry_engine::{MigrationMode, MigrationState, Settings};
use vmferry_testkit::{say, wait};
use vmferry_wire::Role;

/// Slow, and nobody tries by himself.
fn by_hand() -> Settings {
    Settings {
        reconnect_for: Duration::ZERO,
        max_bandwidth: Some(1 << 20),
        ..settings(MigrationMode::Postcopy)
    }
}

/// Until some pages have come, and then until both sides know that the link is lost.
fn cut_in_the_middle(view: &View<'_>) {
    view.until("pages at the target", || view.rest().is_some_and(|rest| rest.left < 5500));
    assert!(!view.finished());
    view.proxy.cut(|_| true);
    both_paused(view);
}

fn both_paused(view: &View<'_>) {
    view.until("both sides to say so", || {
        let here = view.monitor.progress();
        let there = view.rest().unwrap();
        here.state == MigrationState::PostcopyPaused
            && here.awaits_recover
            && there.state == MigrationState::PostcopyPaused
    });
    assert!(!view.finished());
}

#[test]
fn a_lost_link_waits_for_somebody_and_goes_on_where_it_was() {
    if !can_fault() {
        return;
    }
    let moved = go(&by_hand(), vec![], |view| {
        for _ in 0..3 {
            cut_in_the_middle(view);
            let (here, there) = (view.monitor.progress(), view.rest().unwrap());
            assert!(here.interrupted.is_some() && here.runs_there, "{here:?}");
            assert!(there.why.is_some() && there.left > 0, "{there:?}");
            // Nobody tries, and nothing comes. What would come later on a busy host is missed, and no more.
            std::thread::sleep(Duration::from_millis(200));
            assert_eq!(view.rest().unwrap().left, there.left);
            // Without a way to the target one attempt is made, and the state stays.
            view.proxy.close(true);
            let turned_away = view.proxy.turned_away();
            view.monitor.recover();
            view.until("the attempt", || view.proxy.turned_away() > turned_away);
            both_paused(view);
            view.proxy.close(false);
            view.monitor.recover();
            view.until("the link to be taken up", || view.rest().unwrap().left < there.left);
        }
    });
    let report = moved.completed("recovered by hand");
    // One that is cut while it is still being taken up is not counted again.
    assert!(report.interruptions > 0, "{}", report.interruptions);
}

#[test]
fn a_link_that_is_given_up_is_a_guest_that_is_lost() {
    if !can_fault() {
        return;
    }
    for reconnect_for in [Duration::ZERO, Duration::from_secs(600)] {
        let settings = Settings { reconnect_for, ..by_hand() };
        let mut left = 0;
        let moved = go(&settings, vec![], |view| {
            view.until("pages at the target", || view.rest().is_some_and(|rest| rest.left < 5500));
            // Too late, and without effect.
            view.monitor.cancel();
            view.proxy.close(true);
            view.proxy.cut(|_| true);
            let paused = |state| state == MigrationState::PostcopyPaused;
            view.until("the loss", || {
                paused(view.monitor.progress().state) && paused(view.rest().unwrap().state)
            });
            if !reconnect_for.is_zero() {
                view.until("an attempt", || view.proxy.turned_away() > 0);
            }
            left = view.rest().unwrap().left;
            view.monitor.abandon();
            // Also while it is being tried, which is not waited for to its end.
            view.until("the end", || false);
        });
        assert_eq!(moved.state(), MigrationState::Lost, "{}", moved.error());
        assert!(moved.error().contains("given up before the target said"), "{}", moved.error());
        stands_still(&moved.source, "given up");
        let rest = moved.received.unwrap();
        assert_eq!((rest.state, rest.left), (MigrationState::PostcopyPaused, left), "nothing is made up");
        assert!(left > 0);
        asleep(moved.target);
    }
}

/// The guest's threads go on until they need a page, and no further; what they have is right.
#[test]
fn the_guest_goes_on_without_a_link_until_it_needs_a_page() {
    if !can_fault() {
        return;
    }
    let moved = go(&by_hand(), vec![], |view| {
        cut_in_the_middle(view);
        let waits = |view: &View<'_>| view.rest().unwrap().postcopy.requests;
        let before = waits(view);
        // What threads have to wait for at least, below.
        std::thread::sleep(Duration::from_secs(3));
        assert_eq!(waits(view), before, "there is nobody to ask");
        view.monitor.recover();
        view.until("whoever waits to be asked for", || waits(view) > before);
    });
    let report = moved.completed("without a link");
    let longest = report.postcopy.as_ref().unwrap().max_us;
    say(format!("a thread waited for {:.0} ms", longest / 1e3));
    assert!(longest > 400e3, "the time without a link counts: {longest} us");
}

/// All pages come, and the source never hears of it, until somebody takes up the link again.
#[test]
fn a_target_that_has_everything_waits_for_a_source_that_does_not_know() {
    if !can_fault() {
        return;
    }
    // One of the sides finds the loss by silence.
    let settings = Settings { max_bandwidth: None, peer_timeout: Duration::from_secs(10), ..by_hand() };
    let mut ended_by_itself = 0;
    // The cut finds it with everything, or nearly, by chance.
    for _ in 0..4 {
        let moved = go(&settings, vec![], |view| {
            view.until("nearly all pages at the target", || view.rest().is_some_and(|rest| rest.left < 200));
            view.proxy.cut(|role| role == Role::Control);
            view.until("the loss", || view.monitor.progress().awaits_recover);
            if view.finished() {
                ended_by_itself += 1;
                return;
            }
            let rest = view.rest().unwrap();
            // Of a guest that lacks nothing nobody says that it is paused.
            view.until("the target to see it", || {
                let rest = view.rest().unwrap();
                rest.state
                    == if rest.left == 0 { MigrationState::Completed } else { MigrationState::PostcopyPaused }
            });
            say(format!("{} pages were lacking when the link was lost", rest.left));
            view.monitor.recover();
        });
        moved.completed("told late");
    }
    say(format!("{ended_by_itself} of 4 had ended before the cut"));
}

/// A target that is told to stop leaves its guest's threads asleep, and its source waits for somebody.
#[test]
fn a_target_that_is_stopped_in_postcopy_makes_nothing_up() {
    if !can_fault() {
        return;
    }
    let moved = go(&by_hand(), vec![], |view| {
        view.until("pages at the target", || view.rest().is_some_and(|rest| rest.left < 5500));
        view.arrival.abandon();
        view.until("the loss", || view.monitor.progress().awaits_recover);
        view.monitor.abandon();
    });
    assert_eq!(moved.state(), MigrationState::Lost, "{}", moved.error());
    let rest = moved.received.unwrap();
    assert!(rest.left > 0 && rest.state != MigrationState::Completed, "{rest:?}");
    stands_still(&moved.source, "stopped");
    asleep(moved.target);
}

/// Cancelled before the handover it stays; the target has not run it.
#[test]
fn before_the_handover_it_can_be_called_off() {
    if !can_fault() {
        return;
    }
    let settings = Settings { max_bandwidth: Some(2 << 20), ..settings(MigrationMode::Hybrid) };
    let moved = go(&settings, vec![], |view| {
        view.until("pages sent", || view.monitor.progress().wire_bytes > 1 << 20);
        view.monitor.cancel();
    });
    assert_eq!(moved.state(), MigrationState::Cancelled, "{}", moved.error());
    assert!(moved.received.is_err());
    whole(&moved.source, "called off");
    let before = writes(&moved.source);
    wait("the guest going on", || writes(&moved.source) > before);
}
