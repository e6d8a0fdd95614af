//! Migrations over sockets that the caller has connected: one for all channels, or one for each.

#[cfg(feature = "ring")]
use crate::authority::Authority;
use crate::rig::{attempt, check_owner, move_well_by, quick, unix_uri};
use crate::toy::{Options, Toy};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;
use vmferry_engine::{Connect, Listener, MigrationHandle, MigrationState, Settings, Sockets, Uri, migrate};
#[cfg(feature = "ring")]
use vmferry_engine::{MigrateError, Tls};
use vmferry_testkit::wait;
use vmferry_wire::{CARRIER, HELLO_BYTES, Hello, HelloReply, RefusalCode};

fn uri() -> Uri {
    "fd:3,4".parse().unwrap()
}

fn unix_pair() -> (OwnedFd, OwnedFd) {
    let (here, there) = UnixStream::pair().unwrap();
    (here.into(), there.into())
}

fn tcp_pair() -> (OwnedFd, OwnedFd) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let here = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (here.into(), listener.accept().unwrap().0.into())
}

/// Returns connections to the address of `listener`.
fn connected(listener: &Listener, count: usize) -> Sockets {
    let connect = |_| match listener.uri().unwrap() {
        Uri::Tcp { host, port } => TcpStream::connect((host.as_str(), port)).unwrap().into(),
        Uri::Unix(path) => UnixStream::connect(path).unwrap().into(),
        other => panic!("{other} is not listened at"),
    };
    sockets((0..count).map(connect).collect())
}

fn sockets(descriptors: Vec<OwnedFd>) -> Sockets {
    Sockets::new(descriptors).unwrap().named(uri().to_string())
}

fn verified(channels: u16) -> Settings {
    Settings { channels, verify: true, ..quick() }
}

fn moves_well(listener: &Listener, sockets: &Sockets, settings: &Settings) {
    let (report, _) = move_well_by(listener, sockets, Options::default(), settings);
    assert_eq!((report.verified_pages, report.mismatched_pages), (1900, 0));
    assert!(report.passes.len() >= 2, "a loaded guest takes more than one pass");
}

#[test]
fn guest_moves_over_sockets_passed_to_source_and_target() {
    for pair in [unix_pair, tcp_pair] {
        for (count, channels) in [(1, 1), (1, 3), (2, 1), (4, 3)] {
            let (here, there) = (0..count).map(|_| pair()).unzip();
            let listener = Listener::passed(there, &uri(), false).unwrap();
            moves_well(&listener, &sockets(here), &verified(channels));
        }
    }
}

#[test]
fn guest_moves_over_passed_connections_to_a_listening_target() {
    let tcp = Uri::Tcp { host: "127.0.0.1".into(), port: 0 };
    for at in [tcp, unix_uri()] {
        for (count, channels) in [(1, 2), (3, 2)] {
            let listener = Listener::bind(&at, false).unwrap();
            moves_well(&listener, &connected(&listener, count), &verified(channels));
        }
    }
}

#[cfg(feature = "ring")]
#[test]
fn passed_sockets_are_encrypted_if_source_and_target_have_certificates() {
    let authority = Authority::new();
    let host = |name: &str| {
        let (certificate, key) = authority.issue(name);
        let tls = Tls::from_pem(certificate.as_bytes(), key.as_bytes(), authority.pem.as_bytes()).unwrap();
        // No address has the target's name.
        tls.expecting("target").unwrap()
    };
    for (count, channels) in [(1, 2), (3, 2)] {
        let (here, there) = (0..count).map(|_| tcp_pair()).unzip();
        let listener = Listener::passed_encrypted(there, &uri(), host("target")).unwrap();
        let settings = Settings { tls: Some(host("target")), ..verified(channels) };
        moves_well(&listener, &sockets(here), &settings);
    }
    // A source without a certificate is refused, whatever carries its channels.
    let (here, there) = tcp_pair();
    let listener = Listener::passed_encrypted(vec![there], &uri(), host("target")).unwrap();
    let mut source = Toy::new(Options::default(), true);
    let mut target = source.target();
    let one = sockets(vec![here]);
    let ended = attempt(&mut source, &mut target, &listener, &one, &verified(1), &MigrationHandle::new());
    check_owner(&source, &target, &ended);
    let code = match ended.sent {
        Err(MigrateError::RefusedHello { code, .. }) => code,
        other => panic!("{other:?}"),
    };
    assert_eq!(code, RefusalCode::Encryption);
}

/// The only connection is closed while pages are sent: the guest stays, and source and target end.
#[test]
fn guest_stays_when_its_only_connection_is_lost() {
    for round in 0..4u64 {
        let (here, there) = UnixStream::pair().unwrap();
        let cut = here.try_clone().unwrap();
        let listener = Listener::passed(vec![there.into()], &uri(), false).unwrap();
        let mut source = Toy::new(Options::default(), true);
        let mut target = source.target();
        let one = sockets(vec![here.into()]);
        let settings = Settings { max_bandwidth: Some(4_000_000), ..verified(2) };
        let handle = MigrationHandle::new();
        let ended = std::thread::scope(|scope| {
            scope.spawn(|| {
                wait("the migration to come so far", || handle.progress().wire_bytes > round << 19);
                cut.shutdown(std::net::Shutdown::Both).unwrap();
            });
            attempt(&mut source, &mut target, &listener, &one, &settings, &handle)
        });
        check_owner(&source, &target, &ended);
        assert_eq!(ended.state(), Some(MigrationState::Failed), "{}", ended.error());
        assert!(source.works());
    }
}

#[test]
fn each_socket_is_used_once() {
    let listener = Listener::bind(&unix_uri(), false).unwrap();
    let three = connected(&listener, 3);
    let mut source = Toy::new(Options::default(), true);
    let mut target = source.target();
    let handle = MigrationHandle::new();
    let ended = std::thread::scope(|scope| {
        scope.spawn(|| {
            wait("the migration to come so far", || handle.progress().wire_bytes > 0);
            handle.cancel();
        });
        let slow = Settings { max_bandwidth: Some(4_000_000), ..verified(2) };
        attempt(&mut source, &mut target, &listener, &three, &slow, &handle)
    });
    assert_eq!(ended.state(), Some(MigrationState::Cancelled), "{}", ended.error());
    let error =
        migrate(&mut source, &three, None, &verified(2), &MigrationHandle::new()).unwrap_err().to_string();
    assert!(error.contains("each of its sockets has been used"), "{error}");
    assert!(source.works());
}

#[test]
fn sockets_that_do_not_fit_the_migration_are_refused_before_it_begins() {
    let mut source = Toy::new(Options::default(), true);
    let mut refused = |connector: &dyn Connect, settings: &Settings| {
        migrate(&mut source, connector, None, settings, &MigrationHandle::new()).unwrap_err().to_string()
    };
    let two = sockets(vec![unix_pair().0, unix_pair().0]);
    let error = refused(&two, &verified(4));
    assert!(error.contains("2 sockets were passed for 5 channels"), "{error}");
    let error = refused(&uri(), &quick());
    assert!(error.contains("fd:3,4 cannot be used: live migration needs"), "{error}");
    assert!(source.works());
}

/// A target of a build that does not know the feature refuses it, as the high bits of the hello
/// require.
#[test]
fn target_without_support_for_one_connection_is_named() {
    let (here, mut there) = UnixStream::pair().unwrap();
    let target = std::thread::spawn(move || {
        let mut bytes = [0; HELLO_BYTES];
        there.read_exact(&mut bytes).unwrap();
        let hello = Hello::decode(&bytes).unwrap();
        assert_eq!(hello.features & CARRIER, CARRIER);
        let refused = Some(RefusalCode::Feature);
        let reply = HelloReply { refused, version: 1, features: 0, migration: hello.migration };
        there.write_all(&reply.encode()).unwrap();
    });
    let mut source = Toy::new(Options::default(), true);
    let one = sockets(vec![here.into()]);
    let error =
        migrate(&mut source, &one, None, &verified(1), &MigrationHandle::new()).unwrap_err().to_string();
    assert!(error.contains("older vmferry") && error.contains("one socket for each"), "{error}");
    target.join().unwrap();
    assert!(source.works());
}

/// A cancel ends the wait for a target that does not answer on its only connection.
#[test]
fn cancel_ends_the_wait_for_a_passed_connection() {
    let (here, mut there) = UnixStream::pair().unwrap();
    let mut source = Toy::new(Options::default(), true);
    let patient = Duration::from_secs(600);
    let (one, settings) = (sockets(vec![here.into()]), Settings { peer_timeout: patient, ..verified(1) });
    let handle = MigrationHandle::new();
    let report = std::thread::scope(|scope| {
        scope.spawn(|| {
            there.read_exact(&mut [0; HELLO_BYTES]).unwrap();
            handle.cancel();
        });
        migrate(&mut source, &one, None, &settings, &handle).unwrap()
    });
    assert_eq!(report.state, MigrationState::Cancelled);
    assert!(source.works());
}
