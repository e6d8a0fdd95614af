//! Tests of throttled process guests.

use crate::guest::can_track;
use crate::rig::{options, running, verified, whole};
use std::time::Duration;
use vmferry_engine::{AutoConverge, MigrationHandle, MigrationState, Settings, SourceVm};
use vmferry_guest_abi::CpuSnapshot;
use vmferry_process::ProcessGuest;
use vmferry_testkit::{PATIENCE, print_line, wait, wait_for};
use vmferry_testkit_peers::{pair, unix_uri};

fn cpu(guest: &ProcessGuest, cpu: usize) -> CpuSnapshot {
    let handle = guest.handle();
    wait_for("a report of the guest", || handle.stats()).cpus()[cpu]
}

/// Waits until thread `index` has published a report with more writes.
fn until_written(guest: &ProcessGuest, index: usize) {
    let before = cpu(guest, index).writes;
    wait("writes of the guest", || cpu(guest, index).writes > before);
}

#[test]
fn each_thread_is_stopped_for_its_own_share_and_runs_freely_afterwards() {
    let guest = running();
    until_written(&guest, 0);
    let before = cpu(&guest, 0);
    guest.throttle(&[0.8, 0.0]);
    wait("300 ms of holds", || guest.throttled()[0] >= Duration::from_millis(300));
    // The thread runs between its holds.
    until_written(&guest, 0);
    guest.throttle(&[0.0]);
    // A hold that had begun ends before the next write, and no other hold begins.
    until_written(&guest, 0);
    let held = guest.throttled();
    assert_eq!(held[1], Duration::ZERO, "{held:?}");
    until_written(&guest, 0);
    assert_eq!(guest.throttled(), held, "a thread was held after the end of the throttle");
    let after = cpu(&guest, 0);
    // The guest's own clock: each hold is a gap between two steps of the thread.
    let stalled = Duration::from_micros(after.stall_sum_us - before.stall_sum_us);
    print_line(format!("held for {held:?}, stalled for {stalled:?}"));
    assert!(stalled + Duration::from_micros(2) >= held[0], "held for {held:?}, stalled for {stalled:?}");
    whole(&guest, "after the throttle");
}

#[test]
fn throttled_guest_pauses_and_continues() {
    let mut guest = running();
    guest.throttle(&[0.9]);
    wait("holds of 200 ms in all", || {
        SourceVm::pause(&mut guest).unwrap();
        SourceVm::resume(&mut guest).unwrap();
        guest.throttled().iter().all(|held| *held >= Duration::from_millis(200))
    });
    guest.throttle(&[]);
    whole(&guest, "after the throttle");
}

/// The guest writes each page of its 6 MiB again within 80 ms. The link needs 250 ms for them, and
/// 20 ms are allowed.
#[test]
fn guest_that_outruns_its_link_converges_when_its_threads_are_throttled() {
    if !can_track() {
        return;
    }
    let mut guest = running();
    for auto_converge in [AutoConverge::All, AutoConverge::Writers] {
        let settings = Settings {
            auto_converge,
            max_bandwidth: Some(24 << 20),
            downtime_limit: Duration::from_millis(20),
            peer_timeout: PATIENCE,
            verify: true,
            ..Settings::default()
        };
        // A busy host may let the guest write little during one migration.
        wait("a migration in which the guest outran its link", || {
            let mut target = ProcessGuest::new_incoming(options()).unwrap();
            let handle = MigrationHandle::new();
            let (report, came) = pair::moved(&unix_uri(), &mut guest, &mut target, None, &settings, &handle);
            came.unwrap();
            assert_eq!(report.state, MigrationState::Completed, "{report:?}");
            assert_eq!(report.mismatched_pages, 0, "{report:?}");
            assert_eq!(verified(&target.handle(), 9).corrupt(), 0);
            assert_eq!(target.throttled(), [Duration::ZERO; 2], "the target does not throttle");
            guest = target;
            report.throttle.is_some_and(|throttle| {
                print_line(format!("{auto_converge:?}: {throttle:?}"));
                throttle.highest_share > 0.0 && throttle.held_ms.iter().all(|held| *held > 0.0)
            })
        });
    }
}
