//! Acceptors, which provide the connections of a target.

use super::Uri;
use crate::MigrateError;
use socket2::{Domain, SockAddr, Socket, Type};
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::net::ToSocketAddrs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Maximum number of connections that the kernel queues until they are accepted. The number is
/// large, so that during a burst of connections the kernel drops no attempt of a source, which
/// would delay the source until its next attempt.
const BACKLOG: i32 = 1024;
/// Maximum time for which a call of `accept` may block, if the connection that waited was closed.
const PATIENCE: Duration = Duration::from_millis(100);

/// Provides the connections of sources to a [`Listener`](crate::Listener).
///
/// [`Listener::bind`](crate::Listener::bind) and [`Listener::passed`](crate::Listener::passed) use
/// built-in acceptors. Implement this trait if connections arrive in another way, for example over
/// vsock or from a management daemon, and pass the implementation to
/// [`Listener::through`](crate::Listener::through).
///
/// The supertrait [`AsFd`] returns a descriptor that is readable while a connection waits: a
/// listening socket, or one end of a pipe that another thread writes to. The engine polls this
/// descriptor, and calls [`accept`](Self::accept) when the descriptor is readable. At any time,
/// only one thread of the engine makes these calls. When the wait for a guest ends, the engine
/// wakes this thread from poll(2). It cannot wake the thread from `accept`, which therefore must
/// not block.
///
/// A connection must be a connected TCP, Unix or vsock stream socket. [`Connect`](crate::Connect)
/// states the reason, and describes how to use another kind of stream.
pub trait Accept: AsFd + fmt::Debug + Send + Sync {
    /// Returns the name of the acceptor for messages, such as its address.
    fn name(&self) -> String;

    /// Returns the next connection without waiting.
    ///
    /// `None` means that no more connections will arrive. The engine then makes no more calls, and
    /// the wait for a guest ends once all earlier connections have ended.
    ///
    /// # Errors
    /// [`WouldBlock`](io::ErrorKind::WouldBlock) if no connection waits. The engine logs any other
    /// error, and calls again after 100 ms.
    fn accept(&self) -> io::Result<Option<OwnedFd>>;

    /// Returns true if a source may use its connections long after they were made. The default
    /// returns false.
    ///
    /// If this is false, the engine closes a connection that sends nothing for 5 s. Return true
    /// only if every peer is trusted, because each silent connection occupies one of 256 places.
    fn is_patient(&self) -> bool {
        false
    }
}

/// Listening socket.
#[derive(Debug)]
pub(super) struct Bound {
    socket: Socket,
    uri: Uri,
    /// Path of a Unix socket that this value has created, and that it removes when it is dropped.
    made: Option<PathBuf>,
}

impl Bound {
    /// Listens at `uri`. If `insecure` is true, other hosts may be able to connect.
    pub(super) fn at(uri: &Uri, insecure: bool) -> Result<Self, MigrateError> {
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
            Uri::Unix(path) => (bind_path(path).map_err(failed)?, Some(path.clone())),
            Uri::Fd(_) | Uri::File(_) => return Err(MigrateError::NoSockets { uri: uri.to_string() }),
        };
        let mut bound = Self::over(socket, uri).map_err(failed)?;
        bound.made = made;
        Ok(bound)
    }

    /// Listens on `socket`. `uri` is its name in messages.
    pub(super) fn over(socket: Socket, uri: &Uri) -> io::Result<Self> {
        socket.listen(BACKLOG)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        Ok(Self { socket, uri: uri.clone(), made: None })
    }

    /// Returns the address of the socket, with the port that the host has chosen.
    pub(super) fn address(&self) -> io::Result<Uri> {
        Ok(match self.socket.local_addr()?.as_socket() {
            Some(address) => Uri::Tcp { host: address.ip().to_string(), port: address.port() },
            None => self.uri.clone(),
        })
    }
}

impl AsFd for Bound {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Accept for Bound {
    fn name(&self) -> String {
        self.uri.to_string()
    }

    fn accept(&self) -> io::Result<Option<OwnedFd>> {
        self.socket.accept().map(|(socket, _)| Some(socket.into()))
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        if let Some(path) = &self.made {
            let _ = std::fs::remove_file(path);
        }
    }
}

fn bind_path(path: &Path) -> io::Result<Socket> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    let address = SockAddr::unix(path)?;
    socket.bind(&address).or_else(|error| {
        if error.kind() != io::ErrorKind::AddrInUse || !abandoned(path) {
            return Err(error);
        }
        std::fs::remove_file(path)?;
        socket.bind(&address)
    })?;
    Ok(socket)
}

/// Returns true if `path` is a socket whose process has ended without removing it. The type of the
/// file is checked, because a connection to a file that is not a socket is refused, too.
fn abandoned(path: &Path) -> bool {
    let socket = std::fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket());
    let gone = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
    socket && UnixStream::connect(path).is_err_and(gone)
}

/// Connected sockets that the caller has passed.
#[derive(Debug)]
pub(super) struct PassedSockets {
    left: Mutex<VecDeque<Socket>>,
    name: String,
    /// Socket that is always readable, because its other end is closed.
    readable: UnixStream,
}

impl PassedSockets {
    pub(super) fn new(sockets: Vec<Socket>, name: String) -> io::Result<Self> {
        let (readable, _) = UnixStream::pair()?;
        Ok(Self { left: Mutex::new(sockets.into()), name, readable })
    }
}

impl AsFd for PassedSockets {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.readable.as_fd()
    }
}

impl Accept for PassedSockets {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn accept(&self) -> io::Result<Option<OwnedFd>> {
        Ok(self.left.lock().unwrap_or_else(PoisonError::into_inner).pop_front().map(OwnedFd::from))
    }

    /// Returns true, because the caller may have connected the sockets long before the source uses
    /// them.
    fn is_patient(&self) -> bool {
        true
    }
}
