//! VMs with calls that take longer than the peer timeout, such as a flush of a slow disk, or vCPUs
//! that do not stop at once. Meanwhile the peer is told that the source or target is alive.

use crate::rig::{Ended, between, check_owner};
use crate::toy::{Method, Options, Toy, Tracking};
use std::time::Duration;
use vmferry_engine::{MigrationState, Settings};

/// Moves a guest between VMs of which one takes `time` for `method`. Source and target have this
/// `peer_timeout`.
fn moved(method: Method, time: Duration, peer_timeout: Duration) -> (Toy, Toy, Ended) {
    let mut source = Toy::new(Options { tracking: Tracking::ByHand, ..Options::default() }, true);
    let mut target = source.target();
    let there = matches!(method, Method::Load | Method::Start);
    (if there { &target } else { &source }).takes(method, time);
    // A long downtime must not defer the switchover.
    let settings = Settings { peer_timeout, downtime_limit: Duration::from_secs(60), ..Settings::default() };
    let ended = between(&mut source, &mut target, &settings);
    check_owner(&source, &target, &ended);
    (source, target, ended)
}

#[test]
fn slow_calls_of_a_vm_are_not_silence() {
    use Method::{Harvest, Load, Pause, Save, Start, TrackerStart};
    // Four messages are sent in this time.
    const BORNE: Duration = Duration::from_secs(3);
    std::thread::scope(|scope| {
        for method in [TrackerStart, Harvest, Pause, Save, Load, Start] {
            scope.spawn(move || {
                let (_source, target, ended) = moved(method, BORNE * 2, BORNE);
                assert_eq!(ended.state(), Some(MigrationState::Completed), "{method:?}: {}", ended.error());
                assert!(target.works(), "{method:?}");
                assert_eq!(target.lost(), [], "{method:?}");
            });
        }
    });
}

#[test]
fn vm_that_hangs_is_given_up() {
    // Messages are sent for three times this time, and the peer gives up after one more.
    const BORNE: Duration = Duration::from_secs(1);
    std::thread::scope(|scope| {
        for method in [Method::Save, Method::Load] {
            scope.spawn(move || {
                let (source, _target, ended) = moved(method, BORNE * 5, BORNE);
                // On a busy host even the hello may come too late. Then nothing was begun.
                let failed = matches!(ended.state(), Some(MigrationState::Failed) | None);
                assert!(failed, "{method:?}: {}", ended.error());
                assert!(source.works(), "{method:?}: the guest stands still");
            });
        }
    });
}
