//! Connections to an address.

use super::Uri;
use super::connector::{Attempt, ChannelCounts, Connect, Connected};
use crate::MigrateError;
use socket2::{Domain, SockAddr, Socket, Type};
use std::io;
use std::net::ToSocketAddrs;
use std::path::Path;
use std::time::{Duration, Instant};

/// Delay between two attempts to connect to a listener whose queue is full.
const AGAIN: Duration = Duration::from_millis(10);

/// Connects to a TCP port or a Unix socket. Other kinds of address return an error: to use the
/// sockets of a [`Uri::Fd`], pass them as [`Sockets`](crate::Sockets).
///
/// The C library looks up the host name of a TCP address, and limits the time for the lookup.
impl Connect for Uri {
    fn name(&self) -> String {
        self.to_string()
    }

    fn connect(&self, attempt: &Attempt<'_>) -> io::Result<Connected> {
        let socket = match self {
            Self::Tcp { host, port } => self.reach_port(host, *port, attempt)?,
            Self::Unix(path) => reach_path(path, attempt)?,
            Self::Fd(_) | Self::File(_) => return Err(self.no_sockets()),
        };
        Ok(Connected::Channel(socket.into()))
    }

    fn check(&self, _: &ChannelCounts) -> io::Result<()> {
        match self {
            Self::Tcp { .. } | Self::Unix(_) => Ok(()),
            Self::Fd(_) | Self::File(_) => Err(self.no_sockets()),
        }
    }

    fn host(&self) -> Option<&str> {
        if let Self::Tcp { host, .. } = self { Some(host) } else { None }
    }
}

impl Uri {
    fn no_sockets(&self) -> io::Error {
        io::Error::other(MigrateError::NoSockets { uri: self.to_string() })
    }

    fn reach_port(&self, host: &str, port: u16, attempt: &Attempt<'_>) -> io::Result<Socket> {
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        for address in (host, port).to_socket_addrs()? {
            if !attempt.permits_remote() && !address.ip().is_loopback() {
                return Err(io::Error::other(MigrateError::NotLoopback { uri: self.to_string() }));
            }
            let tried = watched(Domain::for_address(address), attempt).and_then(|socket| {
                socket.connect_timeout(&address.into(), attempt.timeout()).map(|()| socket)
            });
            match tried {
                Ok(socket) => return Ok(socket),
                Err(error) if attempt.is_cancelled() => return Err(error),
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

/// Returns a new socket, which a cancel shuts down.
fn watched(domain: Domain, attempt: &Attempt<'_>) -> io::Result<Socket> {
    let socket = Socket::new(domain, Type::STREAM, None)?;
    attempt.watch(&socket)?;
    Ok(socket)
}

fn reach_path(path: &Path, attempt: &Attempt<'_>) -> io::Result<Socket> {
    let address = SockAddr::unix(path)?;
    let socket = watched(Domain::UNIX, attempt)?;
    socket.set_nonblocking(true)?;
    let began = Instant::now();
    // A listener whose queue is full would block the call, and no other thread could end that wait
    // (unix(7)).
    while let Err(error) = socket.connect(&address) {
        let full = error.kind() == io::ErrorKind::WouldBlock;
        if full && began.elapsed() >= attempt.timeout() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        if !full || attempt.is_cancelled() {
            return Err(error);
        }
        std::thread::sleep(AGAIN);
    }
    Ok(socket)
}
