//! Targets that learn which guest comes before they have a VM.

use crate::rig::{Ended, check_owner, quick, unix_uri};
use crate::toy::{Options, Toy};
use std::time::Duration;
use vmferry_engine::{
    Arrival, Incoming, Listener, Migratable, MigrationHandle, MigrationMode, MigrationState, ReceiveFailure,
    Settings, migrate,
};
use vmferry_testkit_peers::peer::connect;

/// Moves the guest of `source` to a target that has no VM before `create` makes one.
fn move_to_blank(
    source: &mut Toy,
    settings: &Settings,
    create: impl FnOnce(&Incoming) -> Toy + Send,
) -> (Ended, Toy) {
    let listener = Listener::bind(&unix_uri(), false).unwrap();
    let (uri, arrival) = (listener.uri().unwrap(), Arrival::new(settings.peer_timeout));
    std::thread::scope(|scope| {
        let target = scope.spawn(|| {
            let incoming = Incoming::accept(&listener, &arrival).unwrap();
            let mut vm = create(&incoming);
            let received = incoming.receive(&mut vm, &listener, &arrival).map(|mut received| {
                received.postcopy.take().map(|postcopy| postcopy.finish(&listener, &arrival));
                received
            });
            (received, vm)
        });
        let sent = migrate(source, &uri, None, settings, &MigrationHandle::new());
        let (received, vm) = target.join().unwrap();
        (Ended { sent, received }, vm)
    })
}

#[test]
fn vm_is_created_from_what_the_source_announces() {
    let moved = |mode| {
        let description = "disks: none";
        let mut source = Toy::new(Options { description, demand_paging: true, ..Options::default() }, true);
        let blank = source.target();
        let machine = source.config();
        // Creating the VM takes longer than the source's peer timeout.
        let settings = Settings { mode, peer_timeout: Duration::from_secs(10), ..Settings::default() };
        let create = |incoming: &Incoming| {
            assert_eq!(*incoming.machine(), machine);
            assert_eq!(incoming.description(), description.as_bytes());
            std::thread::sleep(Duration::from_secs(12));
            blank
        };
        let (ended, target) = move_to_blank(&mut source, &settings, create);
        check_owner(&source, &target, &ended);
        assert_eq!(ended.state(), Some(MigrationState::Completed), "{mode}: {}", ended.error());
        assert_eq!(target.lost(), [], "the guest misses pages");
    };
    std::thread::scope(|scope| {
        for mode in [MigrationMode::Precopy, MigrationMode::Hybrid, MigrationMode::Postcopy] {
            scope.spawn(move || moved(mode));
        }
    });
}

#[test]
fn vm_that_differs_from_the_announcement_is_refused() {
    let mut source = Toy::new(Options::default(), true);
    let create = |_: &Incoming| Toy::new(Options { vcpus: 7, ..Options::default() }, false);
    let (ended, target) = move_to_blank(&mut source, &quick(), create);
    check_owner(&source, &target, &ended);
    assert!(ended.error().contains("vCPUs: the guest has 2, the target has 7"), "{}", ended.error());
    assert!(matches!(ended.received, Err(ReceiveFailure::Failed(_))), "{:?}", ended.received);
}

/// Announces the guest of a source to a target that calls `then` with it. Returns the reason why
/// the guest stays.
fn turned_away(then: impl FnOnce(Incoming) + Send) -> String {
    let mut source = Toy::new(Options::default(), true);
    let listener = Listener::bind(&unix_uri(), false).unwrap();
    let (uri, settings) = (listener.uri().unwrap(), quick());
    let arrival = Arrival::new(settings.peer_timeout);
    let report = std::thread::scope(|scope| {
        scope.spawn(|| then(Incoming::accept(&listener, &arrival).unwrap()));
        migrate(&mut source, &uri, None, &settings, &MigrationHandle::new()).unwrap()
    });
    assert_eq!(report.state, MigrationState::Failed);
    assert!(source.works(), "the guest goes on");
    report.error.unwrap()
}

#[test]
fn refused_source_gets_the_reason_and_keeps_the_guest() {
    let why = turned_away(|incoming| incoming.refuse("this host has no room"));
    assert!(why.contains("this host has no room"), "{why}");
    let why = turned_away(drop);
    assert!(why.contains("closed the connection"), "{why}");
}

#[test]
fn wait_for_an_announcement_ends_at_a_stop_and_survives_other_programs() {
    let uri = unix_uri();
    let listener = Listener::bind(&uri, false).unwrap();
    let arrival = Arrival::new(Duration::from_secs(120));
    std::thread::scope(|scope| {
        let target = scope.spawn(|| Incoming::accept(&listener, &arrival).map(drop));
        drop(connect(&uri));
        arrival.stop();
        assert!(matches!(target.join().unwrap(), Err(ReceiveFailure::Stopped)));
    });
}
