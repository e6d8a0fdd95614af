//! Taking channels from a source.

use super::greeting::{Greeting, HELLO_TIMEOUT};
use super::{IoBuf, Stream, Tls, Uri};
use crate::MigrateError;
use crate::wake::Ending;
use socket2::{Domain, SockAddr, Socket, Type};
use std::io;
use std::net::ToSocketAddrs;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, RawFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use vmferry_wire::{FEATURES, HELLO_BYTES, Hello, HelloReply, RefusalCode, VERSION_MAX, negotiate};

/// Connections that the kernel keeps until they are accepted: a crowd should not make a source wait for its second attempt.
const BACKLOG: i32 = 1024;
/// How long the listener waits after an attempt to accept failed, and how long an attempt may take.
const AGAIN: Duration = Duration::from_millis(100);

/// A socket on which a guest can arrive.
#[derive(Debug)]
pub struct Listener {
    socket: Socket,
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
pub(crate) struct Incoming {
    pub(crate) stream: Stream,
    pub(crate) hello: Hello,
}

impl Listener {
    /// Listens at `uri`; with `insecure` also where other hosts can connect.
    ///
    /// A [`Uri::Fd`] hands its descriptor over: it is closed when this is dropped, and must be named once only. A number that is no stream
    /// socket is left alone.
    ///
    /// # Errors
    /// If the address is taken, not ours, not loopback without `insecure`, or no kind that can be listened on.
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
            Uri::Fd(fd) => (taken_over(*fd).map_err(failed)?, None),
            Uri::File(_) => return Err(MigrateError::NoSockets { uri: uri.to_string() }),
        };
        let listener = Self { socket, uri: uri.clone(), insecure, tls, greeting: Mutex::default(), made };
        listener.socket.listen(BACKLOG).map_err(failed)?;
        listener.socket.set_read_timeout(Some(AGAIN)).map_err(failed)?;
        Ok(listener)
    }

    /// The address it listens at, with the port that was chosen.
    ///
    /// # Errors
    /// If the kernel does not say.
    pub fn uri(&self) -> io::Result<Uri> {
        Ok(match self.socket.local_addr()?.as_socket() {
            Some(address) => Uri::Tcp { host: address.ip().to_string(), port: address.port() },
            None => self.uri.clone(),
        })
    }

    /// Accepts until `ending` is raised and gives every connection with a proper hello to `take`. A stranger's connection
    /// (garbage, silence, another program) is closed, costs nobody else time, and gives way where there are many: see
    /// [`Greeting`].
    pub(crate) fn serve(&self, ending: &Ending, take: impl Fn(Incoming) + Send + Sync + Clone + 'static) {
        let mut greeting = self.greeting.lock().unwrap_or_else(PoisonError::into_inner);
        while !ending.wait(Duration::ZERO) {
            let knocks = greeting.wait(self.socket.as_fd(), ending, None);
            let tls = self.tls.clone();
            greeting.hear(move |socket, peer| read_hello(socket, peer, tls.as_deref()), take.clone());
            if !knocks {
                continue;
            }
            let (socket, address) = match self.socket.accept() {
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
            let peer = address.as_socket().map_or_else(|| self.uri.to_string(), |a| format!("tcp:{a}"));
            greeting.add(socket, peer);
        }
    }
}

/// A socket whose process has ended without removing it. (Connecting to what is no socket is refused, too.)
fn abandoned(path: &Path) -> bool {
    let socket = std::fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket());
    let gone = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
    socket && UnixStream::connect(path).is_err_and(gone)
}

/// A socket that somebody handed to this process by its number.
fn taken_over(fd: RawFd) -> io::Result<Socket> {
    if fd < 0 {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: only asked what it is, which any number may be: the kernel says if it is not open.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    if socket2::SockRef::from(&borrowed).r#type()? != Type::STREAM {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the descriptor is no stream socket"));
    }
    // SAFETY: it is an open socket, and whoever named it hands it over.
    Ok(unsafe { Socket::from_raw_fd(fd) })
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(path) = &self.made {
            let _ = std::fs::remove_file(path);
        }
    }
}

fn read_hello(socket: Socket, peer: String, tls: Option<&Tls>) -> io::Result<Incoming> {
    socket.set_nonblocking(false)?;
    let mut stream = Stream::new(socket, peer)?;
    stream.set_timeouts(Some(HELLO_TIMEOUT), Some(HELLO_TIMEOUT))?;
    encrypt(&mut stream, tls)
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", stream.peer)))?;
    stream.set_timeouts(Some(HELLO_TIMEOUT), Some(HELLO_TIMEOUT))?;
    let mut bytes = [0; HELLO_BYTES];
    let read = stream
        .receive_bytes_within(&mut bytes, HELLO_TIMEOUT)
        .and_then(|()| Hello::decode(&bytes).map_err(io::Error::other));
    let hello = read.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", stream.peer)))?;
    match negotiate(&hello) {
        Ok(_) => Ok(Incoming { stream, hello }),
        Err(code) => {
            answer(&stream, &hello, Err(code))?;
            Err(io::Error::other(format!("{}: {code}", stream.peer)))
        }
    }
}

/// Makes the connection what it has to be. A source that speaks the other way is told so, as far as it understands.
fn encrypt(stream: &mut Stream, tls: Option<&Tls>) -> io::Result<()> {
    /// What TLS begins with: a handshake record of any version 3.x (RFC 8446, 5.1).
    const TLS: [u8; 2] = [22, 3];
    let mut first = [0; 2];
    stream.peek(&mut first, HELLO_TIMEOUT)?;
    match tls {
        Some(tls) if first == TLS => stream.encrypt_from(tls, HELLO_TIMEOUT),
        None if first != TLS => Ok(()),
        None => {
            Err(io::Error::other("it wants an encrypted connection, for which this side has no certificate"))
        }
        Some(_) => {
            let mut bytes = [0; HELLO_BYTES];
            stream.receive_bytes_within(&mut bytes, HELLO_TIMEOUT)?;
            if let Ok(hello) = Hello::decode(&bytes) {
                answer(stream, &hello, Err(RefusalCode::Encryption))?;
            }
            Err(io::Error::other("it is not encrypted, which this side asks for"))
        }
    }
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
    use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
    use std::os::unix::net::{UnixDatagram, UnixListener};

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

    #[test]
    fn a_descriptor_that_is_no_stream_socket_is_left_alone() {
        let null = std::fs::File::open("/dev/null").unwrap();
        let datagrams = UnixDatagram::unbound().unwrap();
        for fd in [-1, 1 << 20, null.as_raw_fd(), datagrams.as_raw_fd()] {
            let error = Listener::bind(&Uri::Fd(fd), false).unwrap_err();
            assert!(matches!(error, MigrateError::Listen { .. }), "{error}");
        }
        assert!(null.metadata().is_ok() && datagrams.local_addr().is_ok(), "they are open");
        let path = std::env::temp_dir().join(format!("vmferry-handed-over-{}", std::process::id()));
        let handed_over = OwnedFd::from(UnixListener::bind(&path).unwrap()).into_raw_fd();
        drop(Listener::bind(&Uri::Fd(handed_over), false).unwrap());
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn serve_returns_when_it_is_told_to_although_nothing_arrives() {
        let listener = Listener::bind(&Uri::Tcp { host: "127.0.0.1".into(), port: 0 }, false).unwrap();
        let (ending, (ended, over)) = (Arc::new(Ending::new().unwrap()), std::sync::mpsc::channel());
        let own = Arc::clone(&ending);
        std::thread::spawn(move || {
            listener.serve(&own, |_| ());
            ended.send(()).unwrap();
        });
        ending.end();
        over.recv_timeout(Duration::from_secs(60)).expect("the listener still waits");
    }
}
