//! Source and target that run together.

use vmferry_engine::{
    Arrival, Listener, MigrationHandle, PostcopyState, ReceiveFailure, Report, Settings, SourceVm, TargetVm,
    TrackerKind, Uri, migrate, receive,
};

/// Result of a target: how its memory arrived, if the guest arrived first.
pub type TargetResult = Result<Option<PostcopyState>, ReceiveFailure>;

/// Moves the guest of `source` to `target`, which listens at `at`, until all of its memory has
/// arrived.
///
/// Source and target tolerate silence for the peer timeout of `settings`. The calling thread runs
/// the source.
///
/// # Panics
///
/// Panics if the migration cannot begin.
pub fn moved(
    at: &Uri,
    source: &mut dyn SourceVm,
    target: &mut (impl TargetVm + Send),
    kind: Option<TrackerKind>,
    settings: &Settings,
    handle: &MigrationHandle,
) -> (Report, TargetResult) {
    let listener = Listener::bind(at, false).expect("a target that listens");
    let (uri, arrival) = (listener.uri().expect("its address"), Arrival::new(settings.peer_timeout));
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| {
            let received = receive(target, &listener, &arrival)?;
            Ok(received.postcopy.map(|postcopy| postcopy.finish(&listener, &arrival)))
        });
        let report = migrate(source, &uri, kind, settings, handle).expect("a migration");
        (report, receiving.join().expect("the target's thread"))
    })
}
