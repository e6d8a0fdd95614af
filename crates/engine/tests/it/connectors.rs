//! Migrations over connections that the caller makes.

use crate::rig::{attempt, check_owner, move_well_by, quick};
use crate::toy::{Options, Toy};
use socket2::{Domain, SockAddr, Socket, Type};
use std::collections::VecDeque;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use vmferry_engine::{
    Accept, Arrival, Attempt, ChannelCounts, ChannelRole, Connect, Connected, Listener, MigrateError,
    MigrationHandle, MigrationMode, MigrationState, ReceiveFailure, Settings, Uri, migrate, receive,
};
use vmferry_testkit::{Need, PATIENCE, skip, wait};

/// Passes the far end of each connection that the source's connector makes to the target's
/// acceptor, like a management daemon.
#[derive(Debug)]
struct Daemon {
    /// True if one connection carries all channels.
    one_for_all: bool,
    /// Results that the acceptor returns next. For each element there is one byte in `door`.
    waiting: Mutex<VecDeque<io::Result<Option<OwnedFd>>>>,
    door: UnixStream,
    knock: UnixStream,
    /// Requested channels, each with a duplicate of the source's end.
    made: Mutex<Vec<(ChannelRole, u16, UnixStream)>>,
}

#[derive(Debug)]
struct Near(Arc<Daemon>);
#[derive(Debug)]
struct Far(Arc<Daemon>);

impl Daemon {
    fn new(one_for_all: bool) -> Arc<Self> {
        let (door, knock) = UnixStream::pair().unwrap();
        door.set_nonblocking(true).unwrap();
        let (waiting, made) = (Mutex::default(), Mutex::default());
        Arc::new(Self { one_for_all, waiting, door, knock, made })
    }

    fn listener(self: &Arc<Self>) -> Listener {
        Listener::through(Far(Arc::clone(self)), false).unwrap()
    }

    fn give(&self, next: io::Result<Option<OwnedFd>>) {
        self.waiting.lock().unwrap().push_back(next);
        (&self.knock).write_all(&[0]).unwrap();
    }

    fn connect(&self, attempt: &Attempt<'_>) -> io::Result<Connected> {
        let (here, there) = UnixStream::pair()?;
        let known = (attempt.role(), attempt.index(), here.try_clone()?);
        self.made.lock().unwrap().push(known);
        self.give(Ok(Some(there.into())));
        Ok(if self.one_for_all { Connected::All(here.into()) } else { here.into() })
    }

    /// Returns the requested channels.
    fn asked(&self) -> Vec<(ChannelRole, u16)> {
        self.made.lock().unwrap().iter().map(|(role, index, _)| (*role, *index)).collect()
    }

    /// Closes every connection.
    fn cut(&self) {
        for (_, _, socket) in &*self.made.lock().unwrap() {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl Connect for Near {
    fn name(&self) -> String {
        "the daemon".into()
    }

    fn connect(&self, attempt: &Attempt<'_>) -> io::Result<Connected> {
        self.0.connect(attempt)
    }
}

impl AsFd for Far {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.door.as_fd()
    }
}

impl Accept for Far {
    fn name(&self) -> String {
        "the daemon's door".into()
    }

    fn accept(&self) -> io::Result<Option<OwnedFd>> {
        (&self.0.door).read_exact(&mut [0])?;
        self.0.waiting.lock().unwrap().pop_front().unwrap()
    }
}

/// Connector that is a function.
struct By<F>(F);

impl<F> fmt::Debug for By<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("By(..)")
    }
}

impl<F: Fn(&Attempt<'_>) -> io::Result<Connected> + Send + Sync> Connect for By<F> {
    fn name(&self) -> String {
        "the daemon".into()
    }

    fn connect(&self, attempt: &Attempt<'_>) -> io::Result<Connected> {
        (self.0)(attempt)
    }
}

/// Returns the reason why a migration that `connect` connects was not begun.
fn refused(connect: impl Fn(&Attempt<'_>) -> io::Result<Connected> + Send + Sync) -> MigrateError {
    let mut source = Toy::new(Options::default(), true);
    let error = migrate(&mut source, &By(connect), None, &quick(), &MigrationHandle::new()).unwrap_err();
    assert!(source.works(), "the guest does not run");
    error
}

#[test]
fn guest_moves_over_connections_that_the_caller_makes() {
    use ChannelRole::{Bulk, Control};
    for (one_for_all, want) in
        [(false, vec![(Control, 0), (Bulk, 0), (Bulk, 1), (Bulk, 2)]), (true, vec![(Control, 0)])]
    {
        let daemon = Daemon::new(one_for_all);
        let listener = daemon.listener();
        let settings = Settings { channels: 3, verify: true, ..quick() };
        let near = Near(Arc::clone(&daemon));
        let (report, received) = move_well_by(&listener, &near, Options::default(), &settings);
        assert_eq!((report.verified_pages, report.mismatched_pages), (1900, 0));
        assert_eq!(daemon.asked(), want);
        assert_eq!(received.source, "the daemon's door");
        assert!(listener.uri().unwrap_err().to_string().contains("the daemon's door"));
    }
}

fn with_demand_paging() -> (Toy, Toy) {
    let source = Toy::new(Options { demand_paging: true, ..Options::default() }, true);
    let target = source.target();
    (source, target)
}

/// Returns the settings of a postcopy in which most of the memory is missing while the test acts on
/// the connections.
fn slow_postcopy() -> Settings {
    Settings { mode: MigrationMode::Postcopy, max_bandwidth: Some(2 << 20), ..quick() }
}

#[test]
fn lost_link_is_taken_up_over_new_connections_of_the_connector() {
    for one_for_all in [false, true] {
        let daemon = Daemon::new(one_for_all);
        let listener = daemon.listener();
        let (mut source, mut target) = with_demand_paging();
        let settings = slow_postcopy();
        let handle = MigrationHandle::new();
        let near = Near(Arc::clone(&daemon));
        let ended = std::thread::scope(|scope| {
            scope.spawn(|| {
                wait("the guest to run on the target", || handle.progress().runs_on_target);
                daemon.cut();
            });
            attempt(&mut source, &mut target, &listener, &near, &settings, &handle)
        });
        check_owner(&source, &target, &ended);
        assert_eq!(ended.state(), Some(MigrationState::Completed), "{}", ended.error());
        assert!(target.works());
        assert_eq!(target.lost(), [], "the guest misses pages");
        let asked = daemon.asked();
        let again = asked.iter().filter(|(role, _)| *role == ChannelRole::Control).count();
        assert!(again >= 2, "the connector was not asked again: {asked:?}");
        assert!(ended.sent.unwrap().interruptions >= 1);
    }
}

/// Passes bytes between two sockets, except while the result is true. Meanwhile, both sockets are
/// open and silent, as on a path that loses all packets.
fn wire(near: &UnixStream, far: &UnixStream) -> io::Result<Arc<AtomicBool>> {
    let silent = Arc::new(AtomicBool::new(false));
    for (from, to) in [(near, far), (far, near)] {
        let (mut from, mut to, silent) = (from.try_clone()?, to.try_clone()?, Arc::clone(&silent));
        from.set_read_timeout(Some(Duration::from_millis(20)))?;
        std::thread::spawn(move || {
            let (mut bytes, began) = ([0; 1 << 16], Instant::now());
            while began.elapsed() < PATIENCE {
                let read = from.read(&mut bytes);
                while silent.load(Ordering::Acquire) && began.elapsed() < PATIENCE {
                    std::thread::sleep(Duration::from_millis(20));
                }
                match read {
                    Ok(count) if count > 0 && to.write_all(&bytes[..count]).is_ok() => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    _ => break,
                }
            }
            let _ = to.shutdown(Shutdown::Write);
        });
    }
    Ok(silent)
}

/// Moves a guest by postcopy over one connection for all channels. The connection is silent from
/// the start of the guest on: for six seconds, or until the end if the connector `has_another`.
fn over_a_silent_connection(has_another: bool) {
    let daemon = Daemon::new(true);
    let listener = daemon.listener();
    let (mut source, mut target) = with_demand_paging();
    let settings = Settings {
        // Longer than a thread pauses on a busy host.
        peer_timeout: Duration::from_secs(4),
        reconnect_for: PATIENCE,
        ..slow_postcopy()
    };
    let wires = Mutex::new(Vec::new());
    let near = By(|_: &Attempt<'_>| {
        let mut wires = wires.lock().unwrap();
        if !has_another && !wires.is_empty() {
            return Err(io::Error::other("there is no other connection"));
        }
        let ((here, near), (far, there)) = (UnixStream::pair()?, UnixStream::pair()?);
        wires.push(wire(&near, &far)?);
        daemon.give(Ok(Some(there.into())));
        Ok(Connected::All(here.into()))
    });
    let (handle, done) = (MigrationHandle::new(), AtomicBool::new(false));
    let ended = std::thread::scope(|scope| {
        scope.spawn(|| {
            wait("the guest to run on the target", || handle.progress().runs_on_target);
            let first = Arc::clone(&wires.lock().unwrap()[0]);
            first.store(true, Ordering::Release);
            if !has_another {
                std::thread::sleep(Duration::from_secs(6));
                first.store(false, Ordering::Release);
            }
            // Without a link, the source would wait for ever.
            let began = Instant::now();
            while !done.load(Ordering::Acquire) && began.elapsed() < PATIENCE {
                std::thread::sleep(Duration::from_millis(20));
            }
            handle.abandon();
        });
        let ended = attempt(&mut source, &mut target, &listener, &near, &settings, &handle);
        done.store(true, Ordering::Release);
        ended
    });
    check_owner(&source, &target, &ended);
    assert_eq!(ended.state(), Some(MigrationState::Completed), "{}", ended.error());
    assert!(target.works());
    assert_eq!(target.lost(), [], "the guest misses pages");
    assert!(ended.sent.unwrap().interruptions >= 1, "the silence was not noticed");
    assert_eq!(wires.lock().unwrap().len() > 1, has_another, "connections of the connector");
}

#[test]
fn connection_of_all_channels_that_is_silent_is_replaced() {
    over_a_silent_connection(true);
}

#[test]
fn connection_of_all_channels_that_was_silent_is_used_again_if_there_is_no_other() {
    over_a_silent_connection(false);
}

#[test]
fn error_of_a_connector_is_reported_with_its_text() {
    let error = refused(|_| Err(io::Error::other("there is no route to cell 7")));
    assert!(matches!(error, MigrateError::Connect { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.starts_with("cannot connect to the daemon: there is no route to cell 7"), "{text}");
    let error = refused(|_| panic!("the daemon's client is broken")).to_string();
    assert!(error.contains("the daemon's client is broken"), "{error}");
    // A connector that calls another one passes its error on.
    let error = refused(|attempt| Uri::Fd(vec!["7".into()]).connect(attempt));
    assert!(matches!(error, MigrateError::NoSockets { .. }), "{error:?}");
}

#[test]
fn guest_stays_when_a_later_channel_cannot_be_connected() {
    let daemon = Daemon::new(false);
    let listener = daemon.listener();
    let mut source = Toy::new(Options::default(), true);
    let mut target = source.target();
    let connector = By(|attempt: &Attempt<'_>| -> io::Result<Connected> {
        match (attempt.role(), attempt.index()) {
            (ChannelRole::Bulk, 1) => Err(io::Error::other("the daemon has no more connections")),
            _ => daemon.connect(attempt),
        }
    });
    let handle = MigrationHandle::new();
    let ended = attempt(&mut source, &mut target, &listener, &connector, &quick(), &handle);
    check_owner(&source, &target, &ended);
    assert_eq!(ended.state(), Some(MigrationState::Failed), "{}", ended.error());
    assert!(ended.error().contains("the daemon has no more connections"), "{}", ended.error());
    assert!(source.works());
}

#[test]
fn connector_can_refuse_a_migration_before_it_begins() {
    #[derive(Debug)]
    struct Narrow;
    impl Connect for Narrow {
        fn name(&self) -> String {
            "the narrow way".into()
        }
        fn connect(&self, _: &Attempt<'_>) -> io::Result<Connected> {
            panic!("it was asked for a connection")
        }
        fn check(&self, channels: &ChannelCounts) -> io::Result<()> {
            Err(io::Error::other(format!("2 connections are not enough for {channels}")))
        }
    }
    let mut source = Toy::new(Options::default(), true);
    let settings = Settings { channels: 4, ..quick() };
    let error = migrate(&mut source, &Narrow, None, &settings, &MigrationHandle::new()).unwrap_err();
    assert!(matches!(error, MigrateError::Settings(_)), "{error:?}");
    let text = error.to_string();
    assert!(text.starts_with("2 connections are not enough for 5 channels (1 control, 4 bulk"), "{text}");
    assert!(source.works());
}

#[test]
fn descriptor_that_no_channel_can_use_is_named() {
    let error = refused(|_| Ok(Connected::Channel(std::fs::File::open("/dev/null")?.into())));
    let text = error.to_string();
    assert!(text.contains("the daemon cannot be used: the descriptor is not a socket"), "{text}");
    let error = refused(|_| Ok(Connected::Channel(UdpSocket::bind("127.0.0.1:0")?.into())));
    assert!(error.to_string().contains("is not a stream socket"), "{error}");
    let error = refused(|_| Ok(Connected::All(TcpListener::bind("127.0.0.1:0")?.into())));
    assert!(error.to_string().contains("the socket listens"), "{error}");
    // The socket could be connected to another host later.
    let error = refused(|_| Ok(Connected::Channel(Socket::new(Domain::IPV4, Type::STREAM, None)?.into())));
    assert!(matches!(error, MigrateError::Passed { .. }), "{error:?}");
}

/// The peer timeout is ten minutes, so only the cancel can end these calls in the time of the test.
#[test]
fn cancel_ends_the_call_of_a_connector() {
    let waiting = AtomicBool::new(false);
    let watched = |attempt: &Attempt<'_>| -> io::Result<Connected> {
        let (mut here, _there) = UnixStream::pair()?;
        attempt.watch(&here)?;
        waiting.store(true, Ordering::Release);
        let count = here.read(&mut [0])?;
        Err(io::Error::other(format!("a peer that never answers sent {count} bytes")))
    };
    let asks = |attempt: &Attempt<'_>| -> io::Result<Connected> {
        waiting.store(true, Ordering::Release);
        wait("the cancel", || attempt.is_cancelled());
        Ok(UnixStream::pair()?.0.into())
    };
    for connector in [&By(watched) as &dyn Connect, &By(asks)] {
        waiting.store(false, Ordering::Release);
        let mut source = Toy::new(Options::default(), true);
        let settings = Settings { peer_timeout: Duration::from_secs(600), ..quick() };
        let handle = MigrationHandle::new();
        let report = std::thread::scope(|scope| {
            scope.spawn(|| {
                wait("the connector's call", || waiting.load(Ordering::Acquire));
                handle.cancel();
            });
            migrate(&mut source, connector, None, &settings, &handle).unwrap()
        });
        assert_eq!(report.state, MigrationState::Cancelled);
        assert!(source.works());
    }
}

#[test]
fn target_survives_errors_of_its_acceptor_and_ends_when_the_acceptor_ends() {
    let daemon = Daemon::new(false);
    let listener = daemon.listener();
    daemon.give(Err(io::ErrorKind::ConnectionAborted.into()));
    daemon.give(Ok(Some(std::fs::File::open("/dev/null").unwrap().into())));
    daemon.give(Ok(Some(TcpListener::bind("127.0.0.1:0").unwrap().into())));
    // This connection is closed before anything was sent on it.
    daemon.give(Ok(Some(UnixStream::pair().unwrap().0.into())));
    drop(move_well_by(&listener, &Near(Arc::clone(&daemon)), Options::default(), &quick()));

    let daemon = Daemon::new(false);
    let listener = daemon.listener();
    daemon.give(Ok(Some(UnixStream::pair().unwrap().0.into())));
    daemon.give(Ok(None));
    let mut target = Toy::new(Options::default(), true).target();
    let failure = receive(&mut target, &listener, &Arrival::new(quick().peer_timeout)).unwrap_err();
    assert!(matches!(failure, ReceiveFailure::Host(MigrateError::Passed { .. })), "{failure:?}");
    assert!(failure.to_string().contains("the daemon's door cannot be used"), "{failure}");
}

/// Copies the bytes of `from` with every bit inverted, like a stream that the caller encrypts.
/// Passes on the end of the stream.
fn pump(mut from: impl Read, mut to: impl Write, end: impl FnOnce()) {
    let mut buffer = [0; 65536];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        let bytes = &mut buffer[..count];
        bytes.iter_mut().for_each(|byte| *byte = !*byte);
        if to.write_all(bytes).is_err() {
            break;
        }
    }
    end();
}

/// Connects a stream that is not a plain socket with a socket for the engine, and returns that
/// socket.
fn joined(stream: TcpStream) -> io::Result<UnixStream> {
    let (engine, own) = UnixStream::pair()?;
    stream.set_nodelay(true)?;
    let ((reads, writes), (sends, receives)) = ((own.try_clone()?, own), (stream.try_clone()?, stream));
    std::thread::spawn(move || pump(&reads, &sends, || drop(sends.shutdown(Shutdown::Write))));
    std::thread::spawn(move || pump(&receives, &writes, || drop(writes.shutdown(Shutdown::Write))));
    Ok(engine)
}

#[derive(Debug)]
struct Tunnel(TcpListener);

impl AsFd for Tunnel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Accept for Tunnel {
    fn name(&self) -> String {
        "the tunnel".into()
    }

    fn accept(&self) -> io::Result<Option<OwnedFd>> {
        Ok(Some(joined(self.0.accept()?.0)?.into()))
    }
}

#[test]
fn stream_that_is_no_socket_is_joined_by_a_pair_of_sockets() {
    let tunnel = TcpListener::bind("127.0.0.1:0").unwrap();
    tunnel.set_nonblocking(true).unwrap();
    let address: SocketAddr = tunnel.local_addr().unwrap();
    let listener = Listener::through(Tunnel(tunnel), false).unwrap();
    let connector = By(move |attempt: &Attempt<'_>| -> io::Result<Connected> {
        let stream = TcpStream::connect_timeout(&address, attempt.timeout())?;
        Ok(joined(stream)?.into())
    });
    for mode in [MigrationMode::Precopy, MigrationMode::Postcopy] {
        let settings = Settings { mode, ..quick() };
        drop(move_well_by(
            &listener,
            &connector,
            Options { demand_paging: true, ..Options::default() },
            &settings,
        ));
    }
}

#[test]
fn guest_moves_over_vsock() {
    /// `VMADDR_CID_LOCAL` (vsock(7)).
    const LOCAL: u32 = 1;
    let new = || Socket::new(Domain::VSOCK, Type::STREAM, None);
    let listening = new().and_then(|socket| {
        socket.bind(&SockAddr::vsock(LOCAL, u32::MAX))?;
        socket.listen(8)?;
        let address = socket.local_addr()?;
        new()?.connect(&address)?;
        Ok((socket, address))
    });
    let (socket, address) = match listening {
        Ok(listening) => listening,
        Err(error) => return skip(Need::Kernel, format!("vsock on this host: {error}")),
    };
    let uri = Uri::Fd(vec!["vsock".into()]);
    let listener = Listener::passed(vec![socket.into()], &uri, false).unwrap();
    let connector = By(move |attempt: &Attempt<'_>| -> io::Result<Connected> {
        let socket = new()?;
        attempt.watch(&socket)?;
        socket.connect(&address)?;
        Ok(Connected::Channel(socket.into()))
    });
    for mode in [MigrationMode::Precopy, MigrationMode::Postcopy] {
        let settings = Settings { mode, ..quick() };
        let options = Options { demand_paging: true, ..Options::default() };
        let (_, received) = move_well_by(&listener, &connector, options, &settings);
        assert!(received.source.starts_with("vsock:1:"), "{}", received.source);
    }
}
