//! Connected or listening sockets that the caller passes.

use super::connector::{Attempt, ChannelCounts, Connect, Connected};
use crate::MigrateError;
use socket2::{Domain, Socket, Type};
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};

/// Connector that provides sockets that are already connected.
///
/// If there is one socket, it carries all channels of the migration, and the target must be able to
/// take all channels from one connection. If there are several sockets, each carries one channel,
/// so their number must be [`ChannelCounts::total`]. Because each socket is used only once, a link
/// that is lost in postcopy cannot be restored.
#[derive(Debug)]
pub struct Sockets {
    name: String,
    count: usize,
    left: Mutex<VecDeque<Socket>>,
}

impl Sockets {
    /// Takes ownership of `descriptors`. The first one is for the control channel.
    ///
    /// # Errors
    /// If `descriptors` is empty, or one of them is not a connected TCP, Unix or vsock stream
    /// socket.
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
        let (name, count) = ("the passed sockets".into(), sockets.len());
        Ok(Self { name, count, left: Mutex::new(sockets) })
    }

    /// Sets the name of these sockets in messages.
    #[must_use]
    pub fn named(self, name: impl Into<String>) -> Self {
        Self { name: name.into(), ..self }
    }
}

impl Connect for Sockets {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn connect(&self, _: &Attempt<'_>) -> io::Result<Connected> {
        let next = self.left.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        let Some(socket) = next else {
            let source = invalid("each of its sockets has been used");
            return Err(io::Error::other(MigrateError::Passed { uri: self.name.clone(), source }));
        };
        let connected = if self.count == 1 { Connected::All } else { Connected::Channel };
        Ok(connected(socket.into()))
    }

    fn check(&self, channels: &ChannelCounts) -> io::Result<()> {
        let count = self.count;
        if count == 1 || count == channels.total() {
            return Ok(());
        }
        Err(invalid(&format!(
            "{count} sockets were passed for {channels}; pass one socket for each channel, or one socket for all"
        )))
    }
}

/// Stream socket that the caller has passed.
#[derive(Debug)]
pub(super) enum Kind {
    Listening(Socket),
    Connected(Socket),
}

impl Kind {
    /// Returns the kind of `descriptor`.
    ///
    /// # Errors
    /// If `descriptor` is not a TCP, Unix or vsock stream socket, or if it neither listens nor is
    /// connected.
    pub(super) fn of(descriptor: OwnedFd) -> io::Result<Self> {
        let socket = stream_socket(descriptor)?;
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

/// Converts `descriptor` to a socket.
///
/// # Errors
/// If `descriptor` is not a TCP, Unix or vsock stream socket.
pub(super) fn stream_socket(descriptor: OwnedFd) -> io::Result<Socket> {
    let socket = Socket::from(descriptor);
    match socket.r#type() {
        Ok(Type::STREAM) => {}
        Ok(_) => return Err(invalid("the descriptor is not a stream socket")),
        Err(_) => return Err(invalid("the descriptor is not a socket")),
    }
    if ![Domain::UNIX, Domain::IPV4, Domain::IPV6, Domain::VSOCK].contains(&socket.domain()?) {
        return Err(invalid("the socket is not a TCP, Unix or vsock socket"));
    }
    Ok(socket)
}

pub(super) fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why)
}

/// Returns true if the peer of a connected socket is on another host. Connections over Unix sockets
/// and vsock do not leave the host.
///
/// # Errors
/// If `socket` is a TCP socket that is not connected.
pub(super) fn is_remote(socket: &Socket) -> io::Result<bool> {
    if ![Domain::IPV4, Domain::IPV6].contains(&socket.domain()?) {
        return Ok(false);
    }
    let peer = socket.peer_addr()?.as_socket();
    Ok(peer.is_none_or(|address| !address.ip().is_loopback()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Settings;
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
    fn one_socket_carries_all_channels_and_several_carry_one_each() {
        let set = |count: usize| {
            let ends = (0..count).map(|_| UnixStream::pair().unwrap().0.into());
            Sockets::new(ends.collect()).unwrap()
        };
        let settings = Settings { channels: 3, ..Settings::default() };
        let channels = ChannelCounts::of(&settings);
        assert!(set(1).check(&channels).is_ok() && set(4).check(&channels).is_ok());
        for count in [2, 3, 5] {
            let error = set(count).check(&channels).unwrap_err().to_string();
            let want =
                format!("{count} sockets were passed for 4 channels (1 control, 3 bulk, 0 urgent, 0 probe)");
            assert!(error.contains(&want), "{error}");
        }
        let hybrid = ChannelCounts::of(&Settings { mode: crate::MigrationMode::Hybrid, ..settings });
        assert!(set(7).check(&hybrid).is_ok() && set(4).check(&hybrid).is_err());
    }

    #[test]
    fn only_loopback_and_unix_peers_are_local() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let here = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(!is_remote(&here.into()).unwrap());
        assert!(!is_remote(&UnixStream::pair().unwrap().0.into()).unwrap());
        // A socket that is not connected may connect to another host later.
        let unconnected = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        assert_eq!(is_remote(&unconnected).unwrap_err().kind(), io::ErrorKind::NotConnected);
    }
}
