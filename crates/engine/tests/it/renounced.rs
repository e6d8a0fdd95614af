//! Loss of the link between the source's commit and the start of a guest whose memory is incomplete
//! on the target. The target renounces the guest and waits. The source resumes the guest after it
//! has learned this over a new link.

use crate::rig::{Ended, attempt, check_owner, quick, unix_uri};
use crate::toy::{Options, Toy};
use std::time::{Duration, Instant};
use vmferry_engine::{
    Arrival, Listener, MigrationHandle, MigrationMode, MigrationState, ReceiveFailure, Settings, migrate,
    receive,
};
use vmferry_testkit::{PATIENCE, wait_for};
use vmferry_testkit_peers::link::{Direction, Harm, Proxy, Rule};

const CONTROL: Direction = Direction { connection: 0, to_target: true };

fn options() -> Options {
    Options { demand_paging: true, write_pause: Duration::from_millis(2), ..Options::default() }
}

fn settings(mode: MigrationMode) -> Settings {
    Settings { mode, ..quick() }
}

/// Source, target and a link that makes this fault at the commit.
struct Scene {
    source: Toy,
    target: Toy,
    listener: Listener,
    proxy: Proxy,
}

impl Scene {
    fn new(harm: Harm) -> Self {
        let source = Toy::new(options(), true);
        let target = source.target();
        let uri = unix_uri();
        let listener = Listener::bind(&uri, false).unwrap();
        let proxy = Proxy::new(&uri, Some(Rule::on(CONTROL, 0, harm)));
        Self { source, target, listener, proxy }
    }

    fn check_returned(&self, ended: &Ended) {
        assert!(self.proxy.harmed() > 0);
        check_owner(&self.source, &self.target, ended);
        assert_eq!(ended.state(), Some(MigrationState::Failed), "{}", ended.error());
        assert!(ended.error().contains("before the guest was started on the target"), "{}", ended.error());
        assert!(matches!(ended.received, Err(ReceiveFailure::Failed(_))), "{:?}", ended.received);
        assert!(self.source.works(), "the guest stands still");
        assert_eq!(self.source.lost(), [], "the guest misses pages");
    }
}

#[test]
fn guest_that_was_not_started_returns_over_a_new_link() {
    for mode in [MigrationMode::Postcopy, MigrationMode::Hybrid] {
        for harm in [Harm::CutAtCommit, Harm::CutAllAtCommit, Harm::CutOthersAtCommit] {
            let mut scene = Scene::new(harm);
            let (uri, handle) = (scene.proxy.uri(), MigrationHandle::new());
            // The source is told and need not find out by its timeout, which would take longer than
            // this test.
            let settings = Settings {
                downtime_limit: Duration::from_micros(1),
                peer_timeout: PATIENCE * 2,
                ..settings(mode)
            };
            if mode == MigrationMode::Hybrid {
                handle.switch_now();
            }
            let began = Instant::now();
            let ended =
                attempt(&mut scene.source, &mut scene.target, &scene.listener, &uri, &settings, &handle);
            scene.check_returned(&ended);
            assert!(began.elapsed() < PATIENCE, "{harm:?} {:?}", began.elapsed());
        }
    }
}

/// Waits until `handle` reports that the operator must decide.
fn until_recover_is_awaited(handle: &MigrationHandle) {
    wait_for("a source that has to be told", || {
        let progress = handle.progress();
        if progress.awaits_recover { Ok(()) } else { Err(Box::new(progress)) }
    });
}

#[test]
fn source_without_reconnects_learns_of_the_return_on_recover() {
    let mut scene = Scene::new(Harm::CutAllAtCommit);
    let (uri, handle) = (scene.proxy.uri(), MigrationHandle::new());
    let settings = Settings {
        reconnect_for: Duration::ZERO,
        peer_timeout: Duration::from_secs(5),
        ..settings(MigrationMode::Postcopy)
    };
    let ended = std::thread::scope(|scope| {
        scope.spawn(|| {
            until_recover_is_awaited(&handle);
            // Longer than the target waits for anything else. On a busy host the target may not
            // have come so far, which only hides a defect.
            std::thread::sleep(settings.peer_timeout + Duration::from_millis(500));
            handle.recover();
        });
        attempt(&mut scene.source, &mut scene.target, &scene.listener, &uri, &settings, &handle)
    });
    scene.check_returned(&ended);
}

/// A target that has renounced a guest accepts only the guest's source, and its operator may end
/// the wait.
#[test]
fn target_that_has_renounced_a_guest_can_be_stopped() {
    let Scene { mut source, mut target, listener, proxy } = Scene::new(Harm::CutAllAtCommit);
    let (uri, handle) = (proxy.uri(), MigrationHandle::new());
    let settings = Settings { reconnect_for: Duration::ZERO, ..settings(MigrationMode::Postcopy) };
    let arrival = Arrival::new(settings.peer_timeout);
    let (sent, received) = std::thread::scope(|scope| {
        let receiving = scope.spawn(|| receive(&mut target, &listener, &arrival));
        let sending = scope.spawn(|| migrate(&mut source, &uri, None, &settings, &handle));
        until_recover_is_awaited(&handle);
        let mut other = Toy::new(options(), true);
        let refused = migrate(&mut other, &uri, None, &settings, &MigrationHandle::new());
        assert!(refused.is_err(), "{refused:?}");
        assert!(other.works() && !receiving.is_finished());
        arrival.stop();
        let received = receiving.join().unwrap();
        handle.abandon();
        (sending.join().unwrap(), received)
    });
    let ended = Ended { sent, received };
    assert_eq!(ended.state(), Some(MigrationState::Unknown), "{}", ended.error());
    check_owner(&source, &target, &ended);
}
