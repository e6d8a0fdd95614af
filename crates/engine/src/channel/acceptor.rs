//! Acceptors: where a migration's target gets its connections from.

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

/// Connections that the kernel queues until they are accepted. A burst of connections should not
/// make a source wait for its second attempt.
const BACKLOG: i32 = 1024;
/// Longest time that an attempt to accept may take.
const PATIENCE: Duration = Duration::from_millis(100);

/// Provides the connections of sources to a [`Listener`](crate::Listener).
///
/// [`Listener::bind`](crate::Listener::bind) and [`Listener::passed`](crate::Listener::passed) have
/// their own acceptors. Implement this trait if connections arrive in another way, for example over
/// vsock or from a management daemon.
///
/// The supertrait [`AsFd`] gives the descriptor that is readable while a connection waits: a
/// listening socket, or one end of a pipe that another thread writes to. The engine polls this
/// descriptor, and calls [`accept`](Self::accept) when it is readable. All calls come from one
/// thread of the engine at a time. The end of the wait for a guest wakes that thread from poll(2),
/// but not from `accept`.
///
/// A connection must be a connected stream socket: TCP, Unix or vsock. [`Connect`](crate::Connect)
/// gives the reason, and describes how to join another kind of stream.
pub trait Accept: AsFd + fmt::Debug + Send + Sync {
    /// Returns the name of the acceptor for messages, such as its address.
    fn name(&self) -> String;

    /// Returns the next connection, without waiting for one.
    ///
    /// `None` means that no more connections will come. The engine then makes no more calls, and
    /// the wait for a guest ends with the connections that have arrived.
    ///
    /// # Errors
    /// `WouldBlock` if no connection waits. Any other error is logged, and the engine calls again
    /// after 100 ms.
    fn accept(&self) -> io::Result<Option<OwnedFd>>;

    /// Returns true if a source may use its connections long after they are made.
    ///
    /// Otherwise the engine closes a connection that sends nothing for five seconds. Return true
    /// only if every peer is trusted: a silent connection holds one of 256 places.
    fn is_patient(&self) -> bool {
        false
    }
}

/// Listening socket.
#[derive(Debug)]
pub(super) struct Bound {
    socket: Socket,
    uri: Uri,
    /// Path of a Unix socket that this value has created, and removes when it is dropped.
    made: Option<PathBuf>,
}

impl Bound {
    /// Listens at `uri`. With `insecure`, also listens where other hosts can connect.
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

    /// Returns the address of the socket, with the port that was chosen.
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

/// Returns true if `path` is a socket whose process has ended without removing it. (A connection to
/// a file that is not a socket is refused, too.)
fn abandoned(path: &Path) -> bool {
    let socket = std::fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket());
    let gone = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
    socket && UnixStream::connect(path).is_err_and(gone)
}

/// Connected sockets that the caller has handed over.
#[derive(Debug)]
pub(super) struct PassedSockets {
    left: Mutex<VecDeque<Socket>>,
    name: String,
    /// Socket whose other end is closed, so it is always readable.
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

    /// Returns true: the caller may have connected the sockets long before the source uses them.
    fn is_patient(&self) -> bool {
        true
    }
}
