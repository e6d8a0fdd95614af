//! Source and target on this host, a migration between them, and conditions that must hold after
//! any migration.

use crate::toy::{Options, Toy};
use std::time::{Duration, Instant};
use vmferry_engine::{
    Arrival, Connect, Listener, MigrateError, MigrationHandle, MigrationState, ReceiveFailure, Received,
    Report, Settings, Uri, migrate, receive,
};
use vmferry_testkit::wait;

pub(crate) use vmferry_testkit_peers::unix_uri;

/// Settings with a peer timeout that only a hang reaches. On a busy host, a thread that opens a
/// file or a socket may wait half a minute for the kernel (a grace period of RCU).
pub(crate) fn quick() -> Settings {
    Settings { peer_timeout: Duration::from_secs(120), ..Settings::default() }
}

pub(crate) struct Ended {
    pub(crate) sent: Result<Report, MigrateError>,
    pub(crate) received: Result<Received, ReceiveFailure>,
}

impl Ended {
    pub(crate) fn state(&self) -> Option<MigrationState> {
        self.sent.as_ref().ok().map(|report| report.state)
    }

    /// Returns the reason for the failure, as the source reports it.
    pub(crate) fn error(&self) -> String {
        match &self.sent {
            Ok(report) => report.error.clone().unwrap_or_default(),
            Err(error) => error.to_string(),
        }
    }
}

/// Migrates to `via`, which leads to the address of `listener`, until all of the guest's memory has
/// arrived.
pub(crate) fn attempt(
    source: &mut Toy,
    target: &mut Toy,
    listener: &Listener,
    via: &dyn Connect,
    settings: &Settings,
    handle: &MigrationHandle,
) -> Ended {
    attempt_at((source, target), listener, via, settings, (handle, &Arrival::new(settings.peer_timeout)))
}

/// Does the same as [`attempt`] with an arrival of the caller.
pub(crate) fn attempt_at(
    (source, target): (&mut Toy, &mut Toy),
    listener: &Listener,
    via: &dyn Connect,
    settings: &Settings,
    (handle, arrival): (&MigrationHandle, &Arrival),
) -> Ended {
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| {
            let mut received = receive(target, listener, arrival)?;
            received.postcopy.take().map(|postcopy| postcopy.finish(listener, arrival));
            Ok(received)
        });
        let sent = migrate(source, via, None, settings, handle);
        // A target that its source never reached, or not completely, continues to wait. Other
        // targets end by themselves.
        let began = Instant::now();
        let unheard = |report: &Report| report.setup_ms == 0.0 && report.state == MigrationState::Cancelled;
        let waits = sent.as_ref().map_or(true, unheard);
        let left_alone = || began.elapsed() > settings.peer_timeout + Duration::from_secs(2);
        wait("the target's end", || receiving.is_finished() || waits || left_alone());
        arrival.abandon();
        Ended { sent, received: receiving.join().unwrap() }
    })
}

/// Migrates the guest of `source` to `target` over a Unix socket.
pub(crate) fn between(source: &mut Toy, target: &mut Toy, settings: &Settings) -> Ended {
    between_with_handle(source, target, settings, &MigrationHandle::new())
}

/// Does the same as [`between`] with a handle of the caller.
pub(crate) fn between_with_handle(
    source: &mut Toy,
    target: &mut Toy,
    settings: &Settings,
    handle: &MigrationHandle,
) -> Ended {
    let listener = Listener::bind(&unix_uri(), false).unwrap();
    let uri = listener.uri().unwrap();
    attempt(source, target, &listener, &uri, settings, handle)
}

/// Checks that exactly one host runs the guest, or that none does and this is reported.
pub(crate) fn check_owner(source: &Toy, target: &Toy, ended: &Ended) {
    let (here, there) = (source.running(), target.running());
    let told = format!(
        "{:?} {:?} ({}), received: {:?}",
        ended.state(),
        ended.sent.is_ok(),
        ended.error(),
        ended.received
    );
    assert_eq!(ended.received.is_ok(), there, "the target says otherwise than it is: {told}");
    assert_eq!(target.ran(), there, "it ran on the target for a while: {told}");
    assert_ne!(target.arrived_equal(), Some(false), "it started with other memory: {told}");
    match ended.state() {
        Some(MigrationState::Completed) => assert!(there && !here, "{told}"),
        Some(MigrationState::Failed | MigrationState::Cancelled) | None => {
            assert!(here && !there, "here {here}, there {there}: {told}");
            assert!(!ended.error().is_empty(), "no reason: {told}");
        }
        Some(MigrationState::Unknown) => assert!(!here, "{told}"),
        other => panic!("{other:?} is no end"),
    }
}

/// Performs a complete migration that must succeed, and checks everything that must hold after it.
pub(crate) fn move_well(options: Options, uri: &Uri, settings: &Settings) -> (Report, Received) {
    move_well_to(&Listener::bind(uri, false).unwrap(), options, settings)
}

/// Does the same as [`move_well`] with a target that listens already.
pub(crate) fn move_well_to(listener: &Listener, options: Options, settings: &Settings) -> (Report, Received) {
    move_well_by(listener, &listener.uri().unwrap(), options, settings)
}

/// Does the same as [`move_well`] over connections of `via`.
pub(crate) fn move_well_by(
    listener: &Listener,
    via: &dyn Connect,
    options: Options,
    settings: &Settings,
) -> (Report, Received) {
    let mut source = Toy::new(options, true);
    let mut target = source.target();
    let ended = attempt(&mut source, &mut target, listener, via, settings, &MigrationHandle::new());
    check_owner(&source, &target, &ended);
    let report = ended.sent.unwrap();
    assert_eq!(report.state, MigrationState::Completed, "{:?}", report.error);
    let handed_over = source.writes();
    assert!(target.works(), "the guest stands still");
    assert!(target.writes() > handed_over, "the guest did not go on from where it was");
    assert_eq!(target.lost(), [], "the guest misses pages");
    assert_eq!(source.writes(), handed_over, "the guest wrote here after it had gone");
    (report, ended.received.unwrap())
}
