//! Sockets that the caller has connected, or listens at, and hands over.

use super::carrier::Carrier;
use super::{Stream, Uri, connect};
use crate::MigrateError;
use crate::monitor::Monitor;
use crate::source::Settings;
use socket2::{Domain, Socket, Type};
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use vmferry_wire::{CARRIER, FEATURES, Hello, RefusalCode, Role, Token};

/// Connected sockets that a migration uses instead of opening connections; clones share them. See
/// [`Settings::sockets`].
///
/// One socket carries all channels of the migration, and the target must know how to take them from
/// it. Several sockets carry one channel each. Each socket is used once: a link that is lost cannot
/// be taken up again.
#[derive(Debug, Clone)]
pub struct Sockets(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    count: usize,
    left: Mutex<Left>,
}

#[derive(Debug)]
struct Left {
    sockets: VecDeque<Socket>,
    carrier: Option<Carrier>,
}

impl Sockets {
    /// Takes over `descriptors`, the control channel's first.
    ///
    /// # Errors
    /// If there is none, or one of them is not a connected TCP or Unix stream socket.
    pub fn new(descriptors: Vec<OwnedFd>) -> io::Result<Self> {
        let mut sockets = VecDeque::new();
        for descriptor in descriptors {
            match Kind::of(descriptor)? {
                Kind::Connected(socket) => sockets.push_back(socket),
                Kind::Listening(_) => return Err(invalid("the socket listens, and is not connected")),
            }
        }
        if sockets.is_empty() {
            return Err(invalid("no socket was given"));
        }
        let count = sockets.len();
        Ok(Self(Arc::new(Inner { count, left: Mutex::new(Left { sockets, carrier: None }) })))
    }

    /// Fails if there are neither one socket nor as many as `settings` ask for channels.
    pub(crate) fn check(&self, settings: &Settings) -> Result<(), MigrateError> {
        let (bulk, urgent, probe) = (settings.channels, settings.urgent_count(), u16::from(settings.probe()));
        let channels = 1 + usize::from(bulk) + usize::from(urgent) + usize::from(probe);
        let count = self.0.count;
        if count == 1 || count == channels {
            return Ok(());
        }
        Err(MigrateError::Settings(format!(
            "{count} sockets were passed for {channels} channels (1 control, {bulk} bulk, {urgent} urgent, {probe} probe); pass one socket \
             for each channel, or one socket for all"
        )))
    }

    /// Returns the socket of the next channel, on which `hello` is said then.
    pub(super) fn next(
        &self,
        uri: &Uri,
        hello: &Hello,
        settings: &Settings,
        monitor: Option<&Monitor>,
    ) -> Result<Socket, MigrateError> {
        let failed = |source| MigrateError::Passed { uri: uri.to_string(), source };
        let mut left = self.0.left.lock().unwrap_or_else(PoisonError::into_inner);
        let next = match left.sockets.pop_front() {
            Some(socket) if !settings.insecure && settings.tls.is_none() && is_remote(&socket) => {
                return Err(MigrateError::NotLoopback { uri: uri.to_string() });
            }
            Some(socket) if self.0.count > 1 => socket,
            Some(socket) => {
                watch(monitor, &socket).map_err(failed)?;
                let carrier = carry(socket, uri, hello, settings)?;
                left.carrier.insert(carrier).open().map_err(failed)?
            }
            None => match &left.carrier {
                Some(carrier) => carrier.open().map_err(failed)?,
                None => return Err(failed(invalid("each of its sockets has been used"))),
            },
        };
        drop(left);
        next.set_nonblocking(false).and_then(|()| watch(monitor, &next)).map_err(failed)?;
        Ok(next)
    }
}

/// A cancel ends whatever is waited for on `socket`.
fn watch(monitor: Option<&Monitor>, socket: &Socket) -> io::Result<()> {
    monitor.map_or(Ok(()), |monitor| monitor.opening(socket))
}

/// Agrees with the target that the connection carries all channels of the migration that `hello`
/// names.
fn carry(socket: Socket, uri: &Uri, hello: &Hello, settings: &Settings) -> Result<Carrier, MigrateError> {
    let failed = |source| MigrateError::Passed { uri: uri.to_string(), source };
    socket.set_nonblocking(false).map_err(failed)?;
    let stream = Stream::new(socket, uri.to_string()).map_err(failed)?;
    let (features, role, index, token) = (FEATURES | CARRIER, Role::Control, 0, Token::NONE);
    let hello = Hello { features, role, index, token, fence: 0, ..hello.clone() };
    let said = connect::say_hello(&stream, &hello, settings.peer_timeout);
    let said = said.map_err(|source| MigrateError::Hello { uri: uri.to_string(), source })?;
    let reply = match connect::check_reply(&said, &hello, uri) {
        Err(MigrateError::RefusedHello { code: RefusalCode::Feature, .. }) => {
            let why = "the target is an older vmferry, which needs a connection for each channel; pass one socket for each";
            return Err(failed(io::Error::new(io::ErrorKind::Unsupported, why)));
        }
        reply => reply?,
    };
    if reply.features & CARRIER == 0 {
        return Err(failed(invalid("the target answered as if it had not been asked to carry all channels")));
    }
    stream.set_timeouts(None, None).and_then(|()| Carrier::start(stream.into_socket())).map_err(failed)
}

/// A stream socket that was handed over.
#[derive(Debug)]
pub(super) enum Kind {
    Listening(Socket),
    Connected(Socket),
}

impl Kind {
    /// Tells which kind `descriptor` is.
    ///
    /// # Errors
    /// If it is not a TCP or Unix stream socket, or one that neither listens nor is connected.
    pub(super) fn of(descriptor: OwnedFd) -> io::Result<Self> {
        let socket = Socket::from(descriptor);
        match socket.r#type() {
            Ok(Type::STREAM) => {}
            Ok(_) => return Err(invalid("the descriptor is not a stream socket")),
            Err(_) => return Err(invalid("the descriptor is not a socket")),
        }
        if ![Domain::UNIX, Domain::IPV4, Domain::IPV6].contains(&socket.domain()?) {
            return Err(invalid("the socket is neither a TCP nor a Unix socket"));
        }
        if socket.is_listener()? {
            return Ok(Self::Listening(socket));
        }
        match socket.peer_addr() {
            Ok(_) => Ok(Self::Connected(socket)),
            Err(error) if error.kind() == io::ErrorKind::NotConnected => {
                Err(invalid("the socket neither listens nor is connected"))
            }
            Err(error) => Err(error),
        }
    }
}

fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why)
}

/// Whether the peer of a connected socket is, or may be, on another host.
pub(super) fn is_remote(socket: &Socket) -> bool {
    let peer = socket.peer_addr().ok().and_then(|address| address.as_socket());
    peer.is_some_and(|address| !address.ip().is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};

    #[test]
    fn descriptors_of_the_wrong_kind_are_named() {
        let path = std::env::temp_dir().join(format!("vmferry-kinds-{}", std::process::id()));
        let unconnected = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        let kinds: [(OwnedFd, &str); 4] = [
            (std::fs::File::open("/dev/null").unwrap().into(), "is not a socket"),
            (UnixDatagram::unbound().unwrap().into(), "is not a stream socket"),
            (unconnected.into(), "neither listens nor is connected"),
            (UnixListener::bind(&path).unwrap().into(), "the socket listens"),
        ];
        std::fs::remove_file(&path).unwrap();
        for (descriptor, words) in kinds {
            let error = Sockets::new(vec![descriptor]).unwrap_err().to_string();
            assert!(error.contains(words), "{words}: {error}");
        }
        assert!(Sockets::new(Vec::new()).is_err());
    }

    #[test]
    fn one_socket_carries_all_channels_and_a_set_one_each() {
        let set = |count: usize| {
            let ends = (0..count).map(|_| UnixStream::pair().unwrap().0.into());
            Sockets::new(ends.collect()).unwrap()
        };
        let settings = Settings { channels: 3, ..Settings::default() };
        assert!(set(1).check(&settings).is_ok() && set(4).check(&settings).is_ok());
        for count in [2, 3, 5] {
            let error = set(count).check(&settings).unwrap_err().to_string();
            let want =
                format!("{count} sockets were passed for 4 channels (1 control, 3 bulk, 0 urgent, 0 probe)");
            assert!(error.contains(&want), "{error}");
        }
        let lazy = Settings { mode: crate::MigrationMode::Hybrid, ..settings };
        assert!(set(7).check(&lazy).is_ok() && set(4).check(&lazy).is_err());
    }

    #[test]
    fn only_local_peers_are_local() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let here = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(!is_remote(&here.into()));
        assert!(!is_remote(&UnixStream::pair().unwrap().0.into()));
    }
}
