//! Sockets of both kinds, with the addresses of the engine.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use socket2::{Domain, SockAddr, Socket, Type};
use std::io;
use std::os::fd::AsFd;
use vmferry_engine::Uri;
use vmferry_testkit::{PATIENCE, temp_path};

/// Returns the address of a Unix socket that no other call returns.
pub fn unix_uri() -> Uri {
    Uri::Unix(temp_path("socket"))
}

/// Returns the address and the domain of the socket at `uri`.
fn address(uri: &Uri) -> (SockAddr, Domain) {
    match uri {
        Uri::Unix(path) => (SockAddr::unix(path).expect("a path of a socket"), Domain::UNIX),
        Uri::Tcp { host, port } => {
            let host: std::net::IpAddr = host.parse().unwrap_or_else(|_| panic!("{uri} is not numeric"));
            let address = std::net::SocketAddr::from((host, *port));
            (address.into(), Domain::for_address(address))
        }
        other => panic!("{other} is neither TCP nor a Unix socket"),
    }
}

/// Listens at `uri`. Returns the socket and its address, which has the port that the kernel chose.
pub(crate) fn listen(uri: &Uri) -> (Socket, Uri) {
    let (address, domain) = address(uri);
    let socket = Socket::new(domain, Type::STREAM, None).expect("a socket");
    socket.bind(&address).unwrap_or_else(|error| panic!("{uri}: {error}"));
    socket.listen(128).expect("a listening socket");
    let uri = match uri {
        Uri::Tcp { host, .. } => {
            let bound = socket.local_addr().expect("the address").as_socket().expect("an IP address");
            Uri::Tcp { host: host.clone(), port: bound.port() }
        }
        other => other.clone(),
    };
    (socket, uri)
}

/// Connects to `uri`.
pub(crate) fn connect(uri: &Uri) -> io::Result<Socket> {
    let (address, domain) = address(uri);
    let socket = Socket::new(domain, Type::STREAM, None)?;
    socket.connect(&address)?;
    Ok(socket)
}

/// Removes the file of the Unix socket at `uri`.
pub(crate) fn remove(uri: &Uri) {
    if let Uri::Unix(path) = uri {
        let _ = std::fs::remove_file(path);
    }
}

/// Waits until the peer of `stream` has hung up, without reading.
///
/// # Panics
///
/// Panics if the peer does not hang up within [`PATIENCE`].
pub fn until_hung_up(stream: &impl AsFd) {
    let within = Timespec::try_from(PATIENCE).expect("a time");
    let found = poll(&mut [PollFd::new(stream, PollFlags::RDHUP)], Some(&within));
    assert_eq!(found, Ok(1), "the peer does not hang up");
}
