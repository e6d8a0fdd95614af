//! Guests whose I/O cannot be quiesced at once: they continue to run, and move later.

use crate::rig::{Ended, between, between_with_handle, check_owner, quick};
use crate::toy::{Options, Toy, Tracking};
use std::time::Duration;
use vmferry_engine::{MigrationHandle, MigrationMode, MigrationState, Settings};
use vmferry_testkit::wait;

/// Moves a guest whose I/O is busy at the attempts that are true in `busy`.
fn moved(mode: MigrationMode, busy: &[bool]) -> (Toy, Toy, Ended) {
    let mut source =
        Toy::new(Options { tracking: Tracking::ByHand, demand_paging: true, ..Options::default() }, true);
    let mut target = source.target();
    source.busy(busy);
    let settings = Settings { mode, verify: true, ..quick() };
    let ended = between(&mut source, &mut target, &settings);
    check_owner(&source, &target, &ended);
    (source, target, ended)
}

#[test]
fn guest_runs_until_its_io_is_quiesced_and_then_moves() {
    let limit = Settings::default().downtime_limit;
    // Run in parallel, because these migrations mostly wait for their next attempt.
    std::thread::scope(|scope| {
        for mode in [MigrationMode::Precopy, MigrationMode::Hybrid] {
            // Busy in the trial pauses, in the pause of the switchover, or in both.
            for busy in [&[true, true][..], &[false, true], &[true, false, true, false, true]] {
                scope.spawn(move || goes_on_and_moves(mode, busy, limit));
            }
        }
    });
}

fn goes_on_and_moves(mode: MigrationMode, busy: &[bool], limit: Duration) {
    let (source, target, ended) = moved(mode, busy);
    assert_eq!(ended.state(), Some(MigrationState::Completed), "{mode} {busy:?}: {}", ended.error());
    assert!(target.works() && target.lost().is_empty(), "{mode} {busy:?}: {:?}", target.lost());
    let report = ended.sent.unwrap();
    let times = busy.iter().filter(|busy| **busy).count() as u64;
    assert_eq!(report.deferrals, times, "{mode} {busy:?}");
    let quiesces = source.quiesces();
    assert!(quiesces.len() > busy.len(), "{mode} {busy:?}: {quiesces:?}");
    assert!(quiesces.iter().all(|within| *within <= limit), "{mode} {busy:?}: {quiesces:?}");
    // The downtime counts from the stop that succeeded, and not from the first one. In between, the
    // guest ran for a quarter of a second at least.
    let (down, total) = (report.downtime_ms, report.total_ms);
    assert!(down + 250.0 < total, "{mode} {busy:?}: {down} of {total} ms");
}

#[test]
fn postcopy_waits_for_io_while_the_guest_runs() {
    let (source, target, ended) = moved(MigrationMode::Postcopy, &[true, true, true]);
    assert_eq!(ended.state(), Some(MigrationState::Completed), "{}", ended.error());
    assert!(target.works() && target.lost().is_empty(), "{:?}", target.lost());
    let report = ended.sent.unwrap();
    assert_eq!(report.deferrals, 3);
    assert_eq!(source.quiesces(), [Settings::default().downtime_limit; 4]);
    // The waits are a quarter of a second, half a second, and one second.
    let (down, total) = (report.downtime_ms, report.total_ms);
    assert!(down + 1750.0 < total, "{down} of {total} ms");
}

#[test]
fn switch_request_ends_the_wait_of_a_postcopy() {
    let mut source =
        Toy::new(Options { tracking: Tracking::ByHand, demand_paging: true, ..Options::default() }, true);
    let mut target = source.target();
    // If the source kept its intervals, the last of these attempts would be minutes away.
    source.busy(&[true; 20]);
    let settings = Settings { mode: MigrationMode::Postcopy, ..quick() };
    let handle = MigrationHandle::new();
    let ended = std::thread::scope(|scope| {
        scope.spawn(|| {
            wait("a guest that is waited for", || handle.progress().busy.is_some());
            handle.switch_now();
        });
        between_with_handle(&mut source, &mut target, &settings, &handle)
    });
    check_owner(&source, &target, &ended);
    assert_eq!(handle.progress().busy, None, "it waits for nothing any more");
    // The last attempt waits as long as the VM needs, and its failure is final.
    assert_eq!(ended.state(), Some(MigrationState::Failed), "{}", ended.error());
    let want = "quiescing the guest's I/O failed: requests are under way";
    assert!(ended.error().contains(want), "{}", ended.error());
    assert!(source.works());
    let quiesces = source.quiesces();
    let (last, before) = quiesces.split_last().unwrap();
    // Before it, there is more than one attempt only if this thread had to wait for a processor.
    assert!(*last == Duration::MAX && (1..19).contains(&before.len()), "{quiesces:?}");
    assert!(before.iter().all(|within| *within == settings.downtime_limit), "{quiesces:?}");
}
