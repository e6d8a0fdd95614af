//! Opening channels to a target.

use super::{IoBuf, Stream, Uri};
use crate::MigrateError;
use crate::monitor::Monitor;
use crate::source::Settings;
use socket2::{Domain, SockAddr, Socket, Type};
use std::io;
use std::net::ToSocketAddrs;
use std::time::{Duration, Instant};
use vmferry_wire::{
    FEATURES, HELLO_BYTES, Hello, HelloReply, MigrationId, RefusalCode, Role, Token, VERSION_MAX,
    VERSION_MIN, WireError, fence_digest,
};

/// How often a listener is tried whose queue is full.
const AGAIN: Duration = Duration::from_millis(10);

/// Opens channel `index` of `role` of a migration, with the token that the target gave out for it. A cancel of `monitor` ends whatever
/// is waited for of the target; what it has said against the migration by then is told all the same.
pub(crate) fn connect(
    uri: &Uri,
    (migration, role, index, token): (MigrationId, Role, u16, Token),
    settings: &Settings,
    monitor: Option<&Monitor>,
) -> Result<Stream, MigrateError> {
    let (version_min, version_max, features) = (VERSION_MIN, VERSION_MAX, FEATURES);
    let fence = settings.fence.as_ref().map_or(0, |fence| fence_digest(&fence.name()));
    let hello = Hello { version_min, version_max, features, migration, role, index, token, fence };
    let stream = open(uri, settings, &hello, monitor);
    let Some(monitor) = monitor else { return stream };
    monitor.opened();
    match stream {
        // Also of a stream that is there: it may just have been ended.
        Ok(_)
        | Err(
            MigrateError::Connect { .. }
            | MigrateError::Passed { .. }
            | MigrateError::Hello { .. }
            | MigrateError::Tls { .. },
        ) if monitor.cancelled() => Err(MigrateError::Cancelled { uri: uri.to_string() }),
        stream => stream,
    }
}

fn open(
    uri: &Uri,
    settings: &Settings,
    hello: &Hello,
    monitor: Option<&Monitor>,
) -> Result<Stream, MigrateError> {
    let timeout = settings.peer_timeout;
    let unreachable = |source| MigrateError::Connect { uri: uri.to_string(), source };
    let socket = match (uri, &settings.sockets) {
        (Uri::Fd(_), Some(sockets)) => sockets.next(uri, hello, settings, monitor)?,
        _ => reach(uri, settings.insecure || settings.tls.is_some(), timeout, monitor)?,
    };
    let mut stream = Stream::new(socket, uri.to_string()).map_err(unreachable)?;
    if let Some(tls) = &settings.tls {
        let host = if let Uri::Tcp { host, .. } = uri { Some(host.as_str()) } else { None };
        let encrypted = stream.encrypt_to(tls, host, timeout);
        encrypted.map_err(|source| MigrateError::Tls { uri: uri.to_string(), source })?;
    }
    let reply = say_hello(&stream, hello, timeout).map_err(|source| {
        let uri = uri.to_string();
        // A target says what it thinks of our certificate only when we read.
        let silent = matches!(source.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock);
        match settings.tls {
            Some(_) if !silent => MigrateError::Tls { uri, source },
            _ => MigrateError::Hello { uri, source },
        }
    })?;
    let reply = check_reply(&reply, hello, uri)?;
    if reply.features & !FEATURES != 0 {
        return Err(MigrateError::RefusedHello {
            uri: uri.to_string(),
            code: RefusalCode::Feature,
            theirs: reply.version,
        });
    }
    stream.features = reply.features;
    Ok(stream)
}

/// Says `hello`, and waits for the bytes of the reply.
pub(super) fn say_hello(stream: &Stream, hello: &Hello, timeout: Duration) -> io::Result<[u8; HELLO_BYTES]> {
    stream.set_timeouts(Some(timeout), Some(timeout))?;
    stream.send(&mut [IoBuf::from_bytes(&hello.encode())]).map_err(|failed| failed.error)?;
    let mut reply = [0; HELLO_BYTES];
    stream.receive_bytes_within(&mut reply, timeout)?;
    stream.set_timeouts(Some(timeout), Some(timeout))?;
    Ok(reply)
}

/// Reads the reply to `hello`, which must be a yes to that.
pub(super) fn check_reply(
    reply: &[u8; HELLO_BYTES],
    hello: &Hello,
    uri: &Uri,
) -> Result<HelloReply, MigrateError> {
    let reply =
        HelloReply::decode(reply).map_err(|source| MigrateError::Peer { uri: uri.to_string(), source })?;
    if let Some(code) = reply.refused {
        return Err(MigrateError::RefusedHello { uri: uri.to_string(), code, theirs: reply.version });
    }
    if reply.migration != hello.migration {
        let source = WireError::Message("it answered the hello of another migration".into());
        return Err(MigrateError::Peer { uri: uri.to_string(), source });
    }
    if !(VERSION_MIN..=VERSION_MAX).contains(&reply.version) {
        let source =
            WireError::Field { what: "version", value: reply.version.into(), allowed: "what was offered" };
        return Err(MigrateError::Peer { uri: uri.to_string(), source });
    }
    Ok(reply)
}

fn reach(
    uri: &Uri,
    anywhere: bool,
    timeout: Duration,
    monitor: Option<&Monitor>,
) -> Result<Socket, MigrateError> {
    let unreachable = |source| MigrateError::Connect { uri: uri.to_string(), source };
    let new = |domain| {
        let socket = Socket::new(domain, Type::STREAM, None)?;
        monitor.map_or(Ok(()), |monitor| monitor.opening(&socket))?;
        Ok(socket)
    };
    match uri {
        Uri::Tcp { host, port } => {
            let addresses = (host.as_str(), *port).to_socket_addrs().map_err(unreachable)?;
            let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
            for address in addresses {
                if !anywhere && !address.ip().is_loopback() {
                    return Err(MigrateError::NotLoopback { uri: uri.to_string() });
                }
                let tried = new(Domain::for_address(address))
                    .and_then(|socket| socket.connect_timeout(&address.into(), timeout).map(|()| socket));
                match tried {
                    Ok(socket) => return Ok(socket),
                    Err(error) if monitor.is_some_and(Monitor::cancelled) => return Err(unreachable(error)),
                    Err(error) => last = error,
                }
            }
            Err(unreachable(last))
        }
        Uri::Unix(path) => {
            let address = SockAddr::unix(path).map_err(unreachable)?;
            let socket = new(Domain::UNIX).map_err(unreachable)?;
            socket.set_nonblocking(true).map_err(unreachable)?;
            let began = Instant::now();
            // A listener whose queue is full lets us wait, but not for ever; and nobody else could end that wait (unix(7)).
            while let Err(error) = socket.connect(&address) {
                let full = error.kind() == io::ErrorKind::WouldBlock;
                if full && began.elapsed() >= timeout {
                    return Err(unreachable(io::ErrorKind::TimedOut.into()));
                }
                if !full || monitor.is_some_and(Monitor::cancelled) {
                    return Err(unreachable(error));
                }
                std::thread::sleep(AGAIN);
            }
            socket.set_nonblocking(false).map_err(unreachable)?;
            Ok(socket)
        }
        Uri::Fd(_) | Uri::File(_) => Err(MigrateError::NoSockets { uri: uri.to_string() }),
    }
}
