//! Listener of a target: accepts the connections of a source.

use super::acceptor::{Accept, Bound, PassedSockets};
use super::carried::CarriedConnections;
use super::greeting::{Connection, Greeting, HELLO_TIMEOUT};
use super::passed::{Kind, invalid, is_remote, stream_socket};
use super::tls::Tls;
use super::{IoBuf, Stream, Uri};
use crate::MigrateError;
use crate::vm::caught_io;
use crate::wake::Ending;
use socket2::{SockAddr, Socket};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use vmferry_wire::{
    CARRIER, FEATURE_KNOWN_PAGES, FEATURE_LOCAL_MEMORY, FEATURES, HELLO_BYTES, Hello, HelloReply,
    RefusalCode, VERSION_MAX, negotiate,
};

/// Delay after a failed attempt to accept a connection.
const AGAIN: Duration = Duration::from_millis(100);

/// Reason with which a target without a certificate refuses an encrypted connection.
const NO_CERTIFICATE: &str = if cfg!(feature = "tls") {
    "the peer requests an encrypted connection, but this side has no certificate"
} else {
    "the peer requests an encrypted connection, but this side was built without the feature `tls`"
};

/// Listener of a target. It takes connections at an address, from sockets that the caller passes,
/// or from an implementation of [`Accept`].
#[derive(Debug)]
pub struct Listener {
    acceptor: Box<dyn Accept>,
    name: String,
    /// Address of the listener. `None` for an acceptor of the caller.
    uri: Option<Uri>,
    /// True once `acceptor` provides no more connections.
    exhausted: AtomicBool,
    /// Connections that do not come from `acceptor`, which are the lanes of connections that carry
    /// all channels.
    arrivals: Arc<CarriedConnections>,
    /// True once no more connections can arrive and all earlier ones have ended.
    over: AtomicBool,
    insecure: bool,
    tls: Option<Arc<Tls>>,
    /// Connections that have not sent a hello yet. They are kept between two calls of `serve`,
    /// because one of them may be a source that reconnects.
    greeting: Mutex<Greeting>,
}

/// Connection that has sent a valid hello and waits for the answer.
#[derive(Debug)]
pub(crate) struct Greeted {
    pub(crate) stream: Arc<Stream>,
    pub(crate) hello: Hello,
}

impl Listener {
    /// Listens at `uri`. Addresses at which other hosts can connect are allowed only if `insecure`
    /// is true.
    ///
    /// # Errors
    /// If the address is in use, does not belong to this host, or is of a kind that cannot be
    /// listened on, or if it is not a loopback address and `insecure` is false. For [`Uri::Fd`],
    /// use [`passed`](Self::passed).
    pub fn bind(uri: &Uri, insecure: bool) -> Result<Self, MigrateError> {
        Self::bound(uri, insecure, None)
    }

    /// Listens at `uri`, where other hosts may connect, and accepts only encrypted connections.
    ///
    /// # Errors
    /// If the address is in use, does not belong to this host, or is of a kind that cannot be
    /// listened on.
    #[cfg(feature = "tls")]
    pub fn bind_encrypted(uri: &Uri, tls: Tls) -> Result<Self, MigrateError> {
        Self::bound(uri, true, Some(tls))
    }

    /// Accepts guests over sockets that the caller passes: either one listening socket, or
    /// connected sockets. `uri` is their name in messages.
    ///
    /// The source decides whether a connected socket carries one channel of a migration or all of
    /// them. Peers on other hosts are allowed only if `insecure` is true.
    ///
    /// # Errors
    /// If `descriptors` are neither one listening socket nor one or more connected stream sockets,
    /// or if a peer is on another host and `insecure` is false.
    pub fn passed(descriptors: Vec<OwnedFd>, uri: &Uri, insecure: bool) -> Result<Self, MigrateError> {
        Self::handed(descriptors, uri, insecure, None)
    }

    /// Accepts guests over sockets as [`passed`](Self::passed) does, but only over encrypted
    /// channels. Peers may be on other hosts.
    ///
    /// # Errors
    /// If `descriptors` are neither one listening socket nor one or more connected stream sockets.
    #[cfg(feature = "tls")]
    pub fn passed_encrypted(descriptors: Vec<OwnedFd>, uri: &Uri, tls: Tls) -> Result<Self, MigrateError> {
        Self::handed(descriptors, uri, true, Some(tls))
    }

    /// Accepts guests over the connections of `acceptor`. Connections from other hosts are closed
    /// unless `insecure` is true.
    ///
    /// # Errors
    /// If the process cannot open another descriptor.
    pub fn through(acceptor: impl Accept + 'static, insecure: bool) -> Result<Self, MigrateError> {
        let name = acceptor.name();
        Self::new(Box::new(acceptor), None, insecure, None)
            .map_err(|source| MigrateError::Listen { uri: name, source })
    }

    /// Accepts guests over the connections of `acceptor`, but only over encrypted channels. Peers
    /// may be on other hosts.
    ///
    /// # Errors
    /// If the process cannot open another descriptor.
    #[cfg(feature = "tls")]
    pub fn through_encrypted(acceptor: impl Accept + 'static, tls: Tls) -> Result<Self, MigrateError> {
        let name = acceptor.name();
        Self::new(Box::new(acceptor), None, true, Some(tls))
            .map_err(|source| MigrateError::Listen { uri: name, source })
    }

    fn bound(uri: &Uri, insecure: bool, tls: Option<Tls>) -> Result<Self, MigrateError> {
        let failed = |source| MigrateError::Listen { uri: uri.to_string(), source };
        let bound = Bound::at(uri, insecure)?;
        let address = bound.address().map_err(failed)?;
        Self::new(Box::new(bound), Some(address), insecure, tls).map_err(failed)
    }

    fn handed(
        descriptors: Vec<OwnedFd>,
        uri: &Uri,
        insecure: bool,
        tls: Option<Tls>,
    ) -> Result<Self, MigrateError> {
        let failed = |source| MigrateError::Passed { uri: uri.to_string(), source };
        let kinds = descriptors.into_iter().map(Kind::of).collect::<io::Result<Vec<_>>>().map_err(failed)?;
        let (mut connected, mut listening) = (Vec::new(), Vec::new());
        for kind in kinds {
            match kind {
                Kind::Listening(socket) => listening.push(socket),
                Kind::Connected(socket) => connected.push(socket),
            }
        }
        match (listening.pop(), &*listening, &*connected) {
            (Some(socket), [], []) => {
                let bound = Bound::over(socket, uri).map_err(failed)?;
                let address = bound.address().map_err(failed)?;
                return Self::new(Box::new(bound), Some(address), insecure, tls).map_err(failed);
            }
            (Some(_), ..) => {
                return Err(failed(invalid("a listening socket takes all channels and is passed alone")));
            }
            (None, ..) => {}
        }
        for socket in &connected {
            if !insecure && is_remote(socket).map_err(failed)? {
                return Err(MigrateError::NotLoopback { uri: uri.to_string() });
            }
        }
        let handed = PassedSockets::new(connected, uri.to_string()).map_err(failed)?;
        Self::new(Box::new(handed), Some(uri.clone()), insecure, tls).map_err(failed)
    }

    /// Creates a listener. If `insecure` is true, other hosts may connect.
    fn new(
        acceptor: Box<dyn Accept>,
        uri: Option<Uri>,
        insecure: bool,
        tls: Option<Tls>,
    ) -> io::Result<Self> {
        Ok(Self {
            name: acceptor.name(),
            acceptor,
            uri,
            exhausted: AtomicBool::new(false),
            arrivals: Arc::new(CarriedConnections::new()?),
            over: AtomicBool::new(false),
            insecure,
            tls: tls.map(Arc::new),
            greeting: Mutex::default(),
        })
    }

    /// Returns true if no source can connect any more, because no more connections can arrive and
    /// all earlier ones have ended. [`serve`](Self::serve) determines the value before it returns.
    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Returns the error for a target that no source can reach any more.
    pub(crate) fn no_source(&self) -> MigrateError {
        let why = "every connection has ended, and no guest arrived";
        let source = io::Error::new(io::ErrorKind::NotConnected, why);
        MigrateError::Passed { uri: self.name.clone(), source }
    }

    /// Returns the address of the listener, with the port that the host has chosen if none was
    /// given.
    ///
    /// # Errors
    /// If the listener was created from an implementation of [`Accept`], because the engine does
    /// not know its address.
    pub fn uri(&self) -> io::Result<Uri> {
        self.uri.clone().ok_or_else(|| {
            let why = format!("{} is not an address", self.name);
            io::Error::new(io::ErrorKind::Unsupported, why)
        })
    }

    /// Accepts connections until `ending` is raised, or until no source can connect any more.
    /// Passes every connection with a valid hello to `take`.
    ///
    /// A connection that sends no valid hello, such as the connection of another program, is
    /// closed. Such a connection does not delay others, and is closed earlier if there are many:
    /// see [`Greeting`].
    ///
    /// The thread waits only in poll(2), which `ending` ends. A call of the acceptor must not wait.
    pub(crate) fn serve(&self, ending: &Ending, take: impl Fn(Greeted) + Send + Sync + Clone + 'static) {
        let mut greeting = self.greeting.lock().unwrap_or_else(PoisonError::into_inner);
        while !ending.wait(Duration::ZERO) {
            let exhausted = self.exhausted.load(Ordering::Acquire);
            let inputs = [(!exhausted).then(|| self.acceptor.as_fd()), Some(self.arrivals.wake_fd())];
            let [arrived, others] = greeting.wait(inputs, ending, None);
            let (tls, arrivals) = (self.tls.clone(), Arc::clone(&self.arrivals));
            let left = move || arrivals.wake();
            let arrivals = Arc::clone(&self.arrivals);
            let read = move |connection| read_hello(connection, tls.as_deref(), &arrivals);
            greeting.read_hellos(read, take.clone(), left);
            if others {
                self.arrivals.take().into_iter().for_each(|connection| greeting.add(connection));
            }
            // `greeting` must be checked before `arrivals`, because a connection that has left
            // `greeting` may carry lanes by now.
            if exhausted && greeting.is_idle() && self.arrivals.is_idle() {
                self.over.store(true, Ordering::Release);
                return;
            }
            if arrived {
                self.accept(&mut greeting, ending);
            }
        }
    }

    /// Takes the next connection from the acceptor.
    fn accept(&self, greeting: &mut Greeting, ending: &Ending) {
        match caught_io(|| self.acceptor.accept()) {
            Ok(Some(descriptor)) => {
                if let Err(error) = self.admit(descriptor, greeting) {
                    greeting.log_refused(&self.name, &error.to_string());
                }
            }
            Ok(None) => {
                self.exhausted.store(true, Ordering::Release);
                // This thread must check again whether the listener is over, and there may be no
                // connection whose end would wake the thread.
                self.arrivals.wake();
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                // The error concerns one connection, or is temporary, such as a lack of
                // descriptors. Without the pause below, this thread would spin on a temporary
                // error, because poll(2) returns at once while a connection waits.
                tracing::warn!("cannot accept a connection: {error}");
                greeting.make_room();
                ending.wait(AGAIN);
            }
        }
    }

    /// Adds a connection that has not sent a hello yet.
    fn admit(&self, descriptor: OwnedFd, greeting: &mut Greeting) -> io::Result<()> {
        let socket = stream_socket(descriptor)?;
        if socket.is_listener()? {
            return Err(invalid("the socket listens, and is not connected"));
        }
        if !self.insecure && is_remote(&socket)? {
            return Err(invalid(
                "the peer is on another host, and unencrypted connections are accepted from this host only",
            ));
        }
        let peer = peer_name(&socket, &self.name);
        greeting.add(Connection { socket, peer, lane_of: None, lasting: self.acceptor.is_patient() });
        Ok(())
    }
}

/// Returns the name of the peer of `socket` for messages. `name` is the name of the listener, which
/// is used if the peer has no address.
fn peer_name(socket: &Socket, name: &str) -> String {
    let address = socket.peer_addr().ok();
    if let Some(address) = address.as_ref().and_then(SockAddr::as_socket) {
        return format!("tcp:{address}");
    }
    match address.as_ref().and_then(SockAddr::as_vsock_address) {
        Some((cid, port)) => format!("vsock:{cid}:{port}"),
        None => name.to_owned(),
    }
}

/// Reads the hello of a connection. Returns `None` if the connection carries all channels of a
/// migration, which arrive as lanes.
fn read_hello(
    Connection { socket, peer, lane_of, .. }: Connection,
    tls: Option<&Tls>,
    arrivals: &Arc<CarriedConnections>,
) -> io::Result<Option<Greeted>> {
    socket.set_nonblocking(false)?;
    let mut stream = Stream::new(socket, peer.clone())?;
    stream.set_timeouts(Some(HELLO_TIMEOUT), Some(HELLO_TIMEOUT))?;
    let encrypted = encrypt(&mut stream, tls)?;
    stream.set_timeouts(Some(HELLO_TIMEOUT), Some(HELLO_TIMEOUT))?;
    let mut bytes = [0; HELLO_BYTES];
    stream.receive_bytes_within(&mut bytes, HELLO_TIMEOUT)?;
    let hello = Hello::decode(&bytes).map_err(io::Error::other);
    let carries = hello.as_ref().is_ok_and(|hello| hello.features & CARRIER != 0);
    let verdict = hello.as_ref().map_or(Ok(()), |hello| match tls {
        // A connection that carries channels is not encrypted itself, because each of its channels
        // is encrypted.
        _ if carries && !encrypted && lane_of.is_none() => negotiate(hello).map(drop),
        Some(_) if !encrypted => Err(RefusalCode::Encryption),
        _ if carries => Err(RefusalCode::Feature),
        _ => negotiate(hello).map(drop),
    });
    if let (Ok(hello), Err(code)) = (&hello, verdict) {
        answer(&stream, hello, Err(code))?;
    }
    match (hello, verdict) {
        (_, Err(RefusalCode::Encryption)) => {
            Err(io::Error::other("the connection is not encrypted, but this side requires encryption"))
        }
        (Ok(_), Err(code)) => Err(io::Error::other(code.to_string())),
        (Err(error), _) => Err(error),
        (Ok(hello), Ok(())) if carries => carry(stream, &hello, peer, arrivals).map(|()| None),
        (Ok(hello), Ok(())) => {
            lane_of.iter().for_each(|carried| carried.prove());
            Ok(Some(Greeted { stream: Arc::new(stream), hello }))
        }
    }
}

/// Starts a thread that carries all channels of a migration over `stream`, as the source has
/// requested in `hello`.
fn carry(stream: Stream, hello: &Hello, peer: String, arrivals: &Arc<CarriedConnections>) -> io::Result<()> {
    let carried = match arrivals.admit(&stream) {
        Ok(carried) => carried,
        Err(error) => {
            answer(&stream, hello, Err(RefusalCode::Busy))?;
            return Err(error);
        }
    };
    let answered = answer(&stream, hello, Ok(())).and_then(|()| stream.set_timeouts(None, None));
    answered.inspect_err(|_| arrivals.forget(&carried))?;
    arrivals.carry(stream.into_socket(), peer, carried)
}

/// Encrypts the connection if the source requests encryption. Returns true if the connection is
/// encrypted.
fn encrypt(stream: &mut Stream, tls: Option<&Tls>) -> io::Result<bool> {
    /// First bytes of a TLS connection: a handshake record of any version 3.x (RFC 8446, 5.1).
    const TLS: [u8; 2] = [22, 3];
    let mut first = [0; 2];
    stream.peek(&mut first, HELLO_TIMEOUT)?;
    if first != TLS {
        return Ok(false);
    }
    let Some(tls) = tls else {
        return Err(io::Error::other(NO_CERTIFICATE));
    };
    stream.encrypt_from(tls, HELLO_TIMEOUT).map(|()| true)
}

/// Features that a target has or lacks at run time.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct TargetFeatures {
    /// True if the target has known pages.
    pub(crate) known_pages: bool,
    /// True if the target's VM maps the memory of a source on the same host.
    pub(crate) local_memory: bool,
}

/// Answers a hello: accepts it, or refuses it with a code.
pub(crate) fn answer(stream: &Stream, hello: &Hello, verdict: Result<(), RefusalCode>) -> io::Result<()> {
    reply(stream, hello, verdict, TargetFeatures::default())
}

/// Accepts the hello of a control channel.
pub(crate) fn accept(stream: &Stream, hello: &Hello, has: TargetFeatures) -> io::Result<()> {
    reply(stream, hello, Ok(()), has)
}

fn reply(
    stream: &Stream,
    hello: &Hello,
    verdict: Result<(), RefusalCode>,
    has: TargetFeatures,
) -> io::Result<()> {
    let (version, mut features) = negotiate(hello).unwrap_or((VERSION_MAX, FEATURES));
    if !has.known_pages {
        features &= !FEATURE_KNOWN_PAGES;
    }
    if !has.local_memory {
        features &= !FEATURE_LOCAL_MEMORY;
    }
    let reply = HelloReply { refused: verdict.err(), version, features, migration: hello.migration };
    stream.send(&mut [IoBuf::from_bytes(&reply.encode())]).map_err(|failed| failed.error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::sync::mpsc::channel;
    use vmferry_testkit::PATIENCE;

    #[test]
    fn socket_left_by_a_dead_process_is_replaced() {
        let path = std::env::temp_dir().join(format!("vmferry-left-{}", std::process::id()));
        drop(UnixListener::bind(&path).unwrap());
        let uri = Uri::Unix(path.clone());
        let listener = Listener::bind(&uri, false).unwrap();
        assert!(Listener::bind(&uri, false).is_err(), "another listener uses the socket");
        drop(listener);
        std::fs::write(&path, "a file").unwrap();
        assert!(Listener::bind(&uri, false).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"a file", "the file was replaced");
        std::fs::remove_file(&path).unwrap();
    }

    fn passed(descriptors: Vec<OwnedFd>) -> Result<Listener, MigrateError> {
        Listener::passed(descriptors, &"fd:3,4".parse().unwrap(), false)
    }

    #[test]
    fn a_listening_socket_is_passed_alone_and_connected_ones_together() {
        let path = std::env::temp_dir().join(format!("vmferry-passed-{}", std::process::id()));
        let listening = || {
            let _ = std::fs::remove_file(&path);
            OwnedFd::from(UnixListener::bind(&path).unwrap())
        };
        let connected = || OwnedFd::from(UnixStream::pair().unwrap().0);
        assert!(passed(vec![listening()]).is_ok());
        assert!(passed(vec![connected(), connected()]).is_ok());
        let both = passed(vec![listening(), connected()]).unwrap_err().to_string();
        assert!(both.contains("fd:3,4") && both.contains("is passed alone"), "{both}");
        let null = std::fs::File::open("/dev/null").unwrap().into();
        let error = passed(vec![null]).unwrap_err().to_string();
        assert!(error.contains("the descriptor is not a socket"), "{error}");
        let error = Listener::bind(&"fd:3".parse().unwrap(), false).unwrap_err();
        assert!(matches!(error, MigrateError::NoSockets { .. }), "{error}");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn encrypted_connection_is_refused_by_a_side_without_certificates() {
        let (own, mut source) = UnixStream::pair().unwrap();
        source.write_all(&[22, 3, 1]).unwrap();
        let mut stream = Stream::new(own.into(), "source".into()).unwrap();
        let error = encrypt(&mut stream, None).unwrap_err().to_string();
        assert!(error.contains("the peer requests an encrypted connection"), "{error}");
        assert_eq!(error.contains("built without the feature `tls`"), !cfg!(feature = "tls"), "{error}");
    }

    #[test]
    fn serve_returns_when_it_is_told_to_although_nothing_arrives() {
        let listener = Listener::bind(&Uri::Tcp { host: "127.0.0.1".into(), port: 0 }, false).unwrap();
        let (ending, (ended, over)) = (Arc::new(Ending::new().unwrap()), channel());
        let own = Arc::clone(&ending);
        std::thread::spawn(move || {
            listener.serve(&own, |_| ());
            ended.send(()).unwrap();
        });
        ending.end();
        over.recv_timeout(PATIENCE).expect("the listener still waits");
    }

    #[test]
    fn serve_returns_when_the_passed_connections_have_ended() {
        let (own, source) = UnixStream::pair().unwrap();
        let listener = passed(vec![own.into()]).unwrap();
        let (ended, over) = channel();
        let served = std::thread::spawn(move || {
            listener.serve(&Ending::new().unwrap(), |_| ());
            ended.send(()).unwrap();
            listener
        });
        assert!(over.try_recv().is_err(), "the source may still speak");
        drop(source);
        over.recv_timeout(PATIENCE).expect("the end of the connection was not noticed");
        let listener = served.join().unwrap();
        assert!(listener.is_over() && listener.no_source().to_string().contains("has ended"));
    }
}
