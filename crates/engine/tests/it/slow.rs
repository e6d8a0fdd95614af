//! VMs that take longer for something than either side bears silence: a slow disk that is flushed, vCPUs that do not stop at once. The other
//! side hears meanwhile that its peer is there.

use crate::rig::{Ended, between, check_owner};
use crate::toy::{Method, Options, Toy, Tracking};
use std::time::Duration;
use vmferry_engine::{MigrationState, Settings};

/// Moves a guest between VMs of which one takes `time` for `method`, and both bear silence for `peer_timeout`.
fn moved(method: Method, time: Duration, peer_timeout: Duration) -> (Toy, Toy, Ended) {
    let mut source = Toy::new(Options { tracking: Tracking::ByHand, ..Options::default() }, true);
    let mut target = source.target();
    let there = matches!(method, Method::Load | Method::Start);
    (if there { &target } else { &source }).takes(method, time);
    // A guest that stands still for that long is no reason to go on.
    let settings = Settings { peer_timeout, downtime_limit: Duration::from_secs(60), ..Settings::default() };
    let ended = between(&mut source, &mut target, &settings);
    check_owner(&source, &target, &ended);
    (source, target, ended)
}

#[test]
fn what_a_vm_takes_long_for_is_no_silence() {
    use Method::{Harvest, Load, Pause, Save, Start, TrackerStart};
    // Something is said four times in this time.
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
fn a_vm_that_hangs_is_not_waited_for_for_ever() {
    // A side is spoken for during three of these, and then given up after one.
    const BORNE: Duration = Duration::from_secs(1);
    std::thread::scope(|scope| {
        for method in [Method::Save, Method::Load] {
            scope.spawn(move || {
                let (source, _target, ended) = moved(method, BORNE * 5, BORNE);
                // On a busy host the greeting itself may come too late: then nothing was begun.
                let failed = matches!(ended.state(), Some(MigrationState::Failed) | None);
                assert!(failed, "{method:?}: {}", ended.error());
                assert!(source.works(), "{method:?}: the guest stands still");
            });
        }
    });
}
