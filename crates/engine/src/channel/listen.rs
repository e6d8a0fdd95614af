//! Taking channels from a source.

use super::carried::Arrivals;
use super::greeting::{Connection, Greeting, HELLO_TIMEOUT};
use super::passed::{Kind, is_remote};
use super::{IoBuf, Stream, Tls, Uri};
use crate::MigrateError;
use crate::wake::Ending;
use socket2::{Domain, SockAddr, Socket, Type};
use std::io;
use std::net::ToSocketAddrs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use vmferry_wire::{CARRIER, FEATURES, HELLO_BYTES, Hello, HelloReply, RefusalCode, VERSION_MAX, negotiate};

/// Connections that the kernel keeps until they are accepted: a crowd should not make a source wait for its second attempt.
const BACKLOG: i32 = 1024;
/// How long the listener waits after an attempt to accept failed, and how long an attempt may take.
const AGAIN: Duration = Duration::from_millis(100);

/// A socket on which a guest can arrive.
#[derive(Debug)]
pub struct Listener {
    /// `None` where the caller handed over connected sockets.
    socket: Option<Socket>,
    /// Connections that do not come to `socket`.
    arrivals: Arc<Arrivals>,
    /// There is no `socket`, and no connection either any more.
    over: AtomicBool,
    uri: Uri,
    insecure: bool,
    tls: Option<Arc<Tls>>,
    /// Who has yet to say hello: kept while nobody listens for a moment, for it may be a source that comes back.
    greeting: Mutex<Greeting>,
    /// A Unix socket's path, removed at the end because we made it.
    made: Option<PathBuf>,
}

/// A connection that said a proper hello and waits for the answer.
#[derive(Debug)]
pub(crate) struct Greeted {
    pub(crate) stream: Arc<Stream>,
    pub(crate) hello: Hello,
}

impl Listener {
    /// Listens at `uri`; with `insecure` also where other hosts can connect.
    ///
    /// # Errors
    /// If the address is taken, not ours, not loopback without `insecure`, or no kind that can be
    /// listened on. For [`Uri::Fd`] there is [`passed`](Self::passed).
    pub fn bind(uri: &Uri, insecure: bool) -> Result<Self, MigrateError> {
        Self::new(uri, insecure, None)
    }

    /// Listens at `uri`, also where other hosts can connect, and takes encrypted connections only.
    ///
    /// # Errors
    /// If the address is taken, not ours, or no kind that can be listened on.
    pub fn bind_encrypted(uri: &Uri, tls: Tls) -> Result<Self, MigrateError> {
        Self::new(uri, true, Some(Arc::new(tls)))
    }

    /// Takes guests over sockets that the caller hands over as `uri`: one that listens, or
    /// connected ones. A connected socket carries one channel of a migration, or all of them, as
    /// the source has it.
    ///
    /// With `tls` only encrypted channels are taken. Without it, `insecure` permits peers on other
    /// hosts.
    ///
    /// # Errors
    /// If `descriptors` are neither one listening nor some connected stream sockets, or a peer is on
    /// another host.
    pub fn passed(
        descriptors: Vec<OwnedFd>,
        uri: &Uri,
        insecure: bool,
        tls: Option<Tls>,
    ) -> Result<Self, MigrateError> {
        let failed = |source| MigrateError::Passed { uri: uri.to_string(), source };
        let insecure = insecure || tls.is_some();
        let kinds = descriptors.into_iter().map(Kind::of).collect::<io::Result<Vec<_>>>().map_err(failed)?;
        let alone = kinds.len() == 1;
        let mut listener = Self::of(None, uri, insecure, tls.map(Arc::new)).map_err(failed)?;
        for kind in kinds {
            match kind {
                Kind::Listening(socket) if alone => {
                    listen_at(&socket).map_err(failed)?;
                    listener.socket = Some(socket);
                }
                Kind::Listening(_) => {
                    let why = "a listening socket takes all channels and is passed alone";
                    return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, why)));
                }
                Kind::Connected(socket) if !insecure && is_remote(&socket) => {
                    return Err(MigrateError::NotLoopback { uri: uri.to_string() });
                }
                Kind::Connected(socket) => {
                    let peer = peer_name(socket.peer_addr().ok(), uri);
                    listener.arrivals.add(Connection { socket, peer, lane_of: None, lasting: true });
                }
            }
        }
        Ok(listener)
    }

    fn of(socket: Option<Socket>, uri: &Uri, insecure: bool, tls: Option<Arc<Tls>>) -> io::Result<Self> {
        Ok(Self {
            socket,
            arrivals: Arc::new(Arrivals::new()?),
            over: AtomicBool::new(false),
            uri: uri.clone(),
            insecure,
            tls,
            greeting: Mutex::default(),
            made: None,
        })
    }

    /// `insecure`: other hosts may connect.
    fn new(uri: &Uri, insecure: bool, tls: Option<Arc<Tls>>) -> Result<Self, MigrateError> {
        let failed = |source| MigrateError::Listen { uri: uri.to_string(), source };
        let (socket, made) = match uri {
            Uri::Tcp { host, port } => {
                let mut addresses = (host.as_str(), *port).to_socket_addrs().map_err(failed)?;
                let address = addresses.next().ok_or_else(|| {
                    failed(io::Error::new(io::ErrorKind::NotFound, "the name has no address"))
                })?;
                if !insecure && !address.ip().is_loopback() {
                    return Err(MigrateError::NotLoopback { uri: uri.to_string() });
                }
                let socket = Socket::new(Domain::for_address(address), Type::STREAM, None).map_err(failed)?;
                socket.set_reuse_address(true).map_err(failed)?;
                socket.bind(&address.into()).map_err(failed)?;
                (socket, None)
            }
            Uri::Unix(path) => {
                let socket = Socket::new(Domain::UNIX, Type::STREAM, None).map_err(failed)?;
                let address = SockAddr::unix(path).map_err(failed)?;
                let bound = socket.bind(&address).or_else(|error| {
                    if error.kind() != io::ErrorKind::AddrInUse || !abandoned(path) {
                        return Err(error);
                    }
                    std::fs::remove_file(path)?;
                    socket.bind(&address)
                });
                bound.map_err(failed)?;
                (socket, Some(path.clone()))
            }
            Uri::Fd(_) | Uri::File(_) => return Err(MigrateError::NoSockets { uri: uri.to_string() }),
        };
        listen_at(&socket).map_err(failed)?;
        let mut listener = Self::of(Some(socket), uri, insecure, tls).map_err(failed)?;
        listener.made = made;
        Ok(listener)
    }

    /// Whether no source can come any more: all connections that the caller handed over have ended. It is known when
    /// [`serve`](Self::serve) has returned.
    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Returns the error of a target that no source can reach any more.
    pub(crate) fn no_source(&self) -> MigrateError {
        let why = "each passed connection has ended, and no guest came over them";
        let source = io::Error::new(io::ErrorKind::NotConnected, why);
        MigrateError::Passed { uri: self.uri.to_string(), source }
    }

    /// The address it listens at, with the port that was chosen.
    ///
    /// # Errors
    /// If the kernel does not say.
    pub fn uri(&self) -> io::Result<Uri> {
        let address = self.socket.as_ref().map(Socket::local_addr).transpose()?;
        Ok(match address.and_then(|address| address.as_socket()) {
            Some(address) => Uri::Tcp { host: address.ip().to_string(), port: address.port() },
            None => self.uri.clone(),
        })
    }

    /// Accepts until `ending` is raised, or no source can come any more. Gives every connection with a proper hello to `take`. A
    /// stranger's connection (garbage, silence, another program) is closed, costs nobody else time, and gives way where there are
    /// many: see [`Greeting`].
    pub(crate) fn serve(&self, ending: &Ending, take: impl Fn(Greeted) + Send + Sync + Clone + 'static) {
        let mut greeting = self.greeting.lock().unwrap_or_else(PoisonError::into_inner);
        while !ending.wait(Duration::ZERO) {
            let doors = [self.socket.as_ref().map(AsFd::as_fd), Some(self.arrivals.door())];
            let [knocks, others] = greeting.wait(doors, ending, None);
            let (tls, arrivals) = (self.tls.clone(), Arc::clone(&self.arrivals));
            let left = move || arrivals.knock();
            let arrivals = Arc::clone(&self.arrivals);
            let hear = move |connection| read_hello(connection, tls.as_deref(), &arrivals);
            greeting.hear(hear, take.clone(), left);
            if others {
                self.arrivals.take().into_iter().for_each(|connection| greeting.add(connection));
            }
            let Some(socket) = &self.socket else {
                // In this order: a connection that was heard may carry lanes by now, and may have brought lanes.
                if greeting.is_idle() && self.arrivals.is_idle() {
                    self.over.store(true, Ordering::Release);
                    return;
                }
                continue;
            };
            if !knocks {
                continue;
            }
            let (socket, address) = match socket.accept() {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(error) => {
                    // It concerns one connection or passes (no descriptors left), but comes back at once until then.
                    tracing::warn!("a connection could not be accepted: {error}");
                    greeting.make_room();
                    ending.wait(AGAIN);
                    continue;
                }
            };
            if !self.insecure && address.as_socket().is_some_and(|a| !a.ip().is_loopback()) {
                continue;
            }
            let peer = peer_name(Some(address), &self.uri);
            greeting.add(Connection { socket, peer, lane_of: None, lasting: false });
        }
    }
}

/// A socket whose process has ended without removing it. (Connecting to what is no socket is refused, too.)
fn abandoned(path: &Path) -> bool {
    let socket = std::fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket());
    let gone = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
    socket && UnixStream::connect(path).is_err_and(gone)
}

fn listen_at(socket: &Socket) -> io::Result<()> {
    socket.listen(BACKLOG)?;
    socket.set_read_timeout(Some(AGAIN))
}

/// Name of a peer that connected from `address` to `uri`.
fn peer_name(address: Option<SockAddr>, uri: &Uri) -> String {
    let address = address.and_then(|address| address.as_socket());
    address.map_or_else(|| uri.to_string(), |address| format!("tcp:{address}"))
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(path) = &self.made {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Reads the hello of a connection. `None`: it carries all channels of a migration, which come as
/// lanes.
fn read_hello(
    Connection { socket, peer, lane_of, .. }: Connection,
    tls: Option<&Tls>,
    arrivals: &Arc<Arrivals>,
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
        // A connection that carries channels is plain. Each channel is what has to be encrypted.
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
            Err(io::Error::other("it is not encrypted, which this side asks for"))
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

/// Has a thread carry the channels of a migration over `stream`, whose source has asked for that by
/// `hello`.
fn carry(stream: Stream, hello: &Hello, peer: String, arrivals: &Arc<Arrivals>) -> io::Result<()> {
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

/// Makes the connection encrypted if its source wants that, and says whether it is.
fn encrypt(stream: &mut Stream, tls: Option<&Tls>) -> io::Result<bool> {
    /// What TLS begins with: a handshake record of any version 3.x (RFC 8446, 5.1).
    const TLS: [u8; 2] = [22, 3];
    let mut first = [0; 2];
    stream.peek(&mut first, HELLO_TIMEOUT)?;
    if first != TLS {
        return Ok(false);
    }
    let Some(tls) = tls else {
        return Err(io::Error::other(
            "it wants an encrypted connection, for which this side has no certificate",
        ));
    };
    stream.encrypt_from(tls, HELLO_TIMEOUT).map(|()| true)
}

/// Answers a hello.
pub(crate) fn answer(stream: &Stream, hello: &Hello, verdict: Result<(), RefusalCode>) -> io::Result<()> {
    let (version, features) = negotiate(hello).unwrap_or((VERSION_MAX, FEATURES));
    let reply = HelloReply { refused: verdict.err(), version, features, migration: hello.migration };
    stream.send(&mut [IoBuf::from_bytes(&reply.encode())]).map_err(|failed| failed.error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::sync::mpsc::channel;
    use vmferry_testkit::PATIENCE;

    #[test]
    fn what_a_process_that_is_gone_has_left_keeps_nobody_from_listening() {
        let path = std::env::temp_dir().join(format!("vmferry-left-{}", std::process::id()));
        drop(UnixListener::bind(&path).unwrap());
        let uri = Uri::Unix(path.clone());
        let listener = Listener::bind(&uri, false).unwrap();
        assert!(Listener::bind(&uri, false).is_err(), "somebody listens there");
        drop(listener);
        std::fs::write(&path, "a file").unwrap();
        assert!(Listener::bind(&uri, false).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"a file", "it stays");
        std::fs::remove_file(&path).unwrap();
    }

    fn passed(descriptors: Vec<OwnedFd>) -> Result<Listener, MigrateError> {
        Listener::passed(descriptors, &"fd:3,4".parse().unwrap(), false, None)
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
