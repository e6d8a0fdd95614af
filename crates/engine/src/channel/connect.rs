//! Dialer, which opens the channels from a source to a target.

use super::carrier::Carrier;
use super::connector::{Attempt, ChannelCounts, Connect, Connected};
use super::passed::{invalid, is_remote, stream_socket};
use super::{IoBuf, Stream};
use crate::MigrateError;
use crate::handle::MigrationHandle;
use crate::source::{MigrationMode, Settings};
use crate::vm::caught_io;
use socket2::Socket;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use vmferry_wire::{
    CARRIER, FEATURE_LOCAL_MEMORY, FEATURES, HELLO_BYTES, Hello, HelloReply, MigrationId, RefusalCode, Role,
    Token, VERSION_MAX, VERSION_MIN, WireError, arbiter_digest,
};

/// Opens the channels of one migration.
///
/// Only the migrating thread opens channels. Its waits end in these ways:
///
/// | wait | ends by itself | ends after a cancel |
/// |---|---|---|
/// | the connector's call | when the connector returns | if the connector [watches](Attempt::watch) its socket |
/// | the TLS handshake, and the wait for the answer to a hello | after `peer_timeout` | yes: the socket is shut down |
#[derive(Debug)]
pub(crate) struct Dialer<'a> {
    connector: &'a dyn Connect,
    settings: &'a Settings,
    /// Connection that carries all channels, if the connector has provided one.
    carrier: Mutex<Option<Carrier>>,
    /// True after a hello on that connection had no answer. The connection may be dead without an
    /// error of its socket, or may only be slow. Therefore the connector is asked for another one,
    /// and without another one, the connection is used again.
    doubtful: AtomicBool,
}

impl<'a> Dialer<'a> {
    pub(crate) fn new(connector: &'a dyn Connect, settings: &'a Settings) -> Self {
        Self { connector, settings, carrier: Mutex::default(), doubtful: AtomicBool::new(false) }
    }

    /// Returns the target's name for messages.
    pub(crate) fn name(&self) -> String {
        self.connector.name()
    }

    /// Returns an error if the connector knows that it cannot connect the channels of this
    /// migration.
    pub(crate) fn check(&self) -> Result<(), MigrateError> {
        self.connector.check(&ChannelCounts::of(self.settings)).map_err(|error| {
            error.downcast().unwrap_or_else(|error| MigrateError::Settings(error.to_string()))
        })
    }

    /// Returns true if one connection carries all channels. Descriptors cannot be passed over such
    /// channels.
    pub(crate) fn carries_all(&self) -> bool {
        self.carrier.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Opens channel number `index` of `role` for `migration`, with the token that the target has
    /// issued for channels of this role.
    ///
    /// A cancel through `handle` ends each wait for the target. If the target has refused the
    /// migration before the cancel, the error is the refusal and not the cancel.
    pub(crate) fn open(
        &self,
        (migration, role, index, token): (MigrationId, Role, u16, Token),
        handle: Option<&MigrationHandle>,
    ) -> Result<Stream, MigrateError> {
        let (version_min, version_max) = (VERSION_MIN, VERSION_MAX);
        let local = role == Role::Control && self.settings.mode == MigrationMode::Local;
        let features = FEATURES | if local { FEATURE_LOCAL_MEMORY } else { 0 };
        let arbiter = self.settings.arbiter.as_ref().map_or(0, |arbiter| arbiter_digest(&arbiter.name()));
        let hello = Hello { version_min, version_max, features, migration, role, index, token, arbiter };
        let stream = self.exchange_hello(&hello, handle);
        let Some(handle) = handle else { return stream };
        handle.opened();
        match stream {
            // A stream that was opened may also have been shut down by the cancel.
            Ok(_)
            | Err(
                MigrateError::Connect { .. }
                | MigrateError::Passed { .. }
                | MigrateError::Hello { .. }
                | MigrateError::Tls { .. },
            ) if handle.cancelled() => Err(MigrateError::Cancelled { uri: self.name() }),
            stream => stream,
        }
    }

    fn exchange_hello(
        &self,
        hello: &Hello,
        handle: Option<&MigrationHandle>,
    ) -> Result<Stream, MigrateError> {
        let (uri, timeout, tls) = (self.name(), self.settings.peer_timeout, self.settings.tls());
        let socket = self.socket(hello, handle)?;
        let stream = Stream::new(socket, uri.clone());
        let mut stream = stream.map_err(|source| MigrateError::Connect { uri: uri.clone(), source })?;
        if let Some(tls) = tls {
            let encrypted = stream.encrypt_to(tls, self.connector.host(), timeout);
            let encrypted = encrypted.inspect_err(|_| self.doubtful.store(true, Ordering::Relaxed));
            encrypted.map_err(|source| MigrateError::Tls { uri: uri.clone(), source })?;
        }
        let reply = say_hello(&stream, hello, timeout).map_err(|source| {
            self.doubtful.store(true, Ordering::Relaxed);
            let uri = uri.clone();
            // The source learns whether the target accepts its certificate only when it reads from
            // the connection. Therefore an error of the exchange may be an error of TLS.
            let silent = matches!(source.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock);
            match tls {
                Some(_) if !silent => MigrateError::Tls { uri, source },
                _ => MigrateError::Hello { uri, source },
            }
        })?;
        self.doubtful.store(false, Ordering::Relaxed);
        let reply = check_reply(&reply, hello, &uri)?;
        if reply.features & !hello.features != 0 {
            return Err(MigrateError::RefusedHello {
                uri,
                code: RefusalCode::Feature,
                peer_version: reply.version,
            });
        }
        stream.features = reply.features;
        Ok(stream)
    }

    /// Returns the socket for the channel of `hello`: a lane of the connection that carries all
    /// channels, or a new connection.
    fn socket(&self, hello: &Hello, handle: Option<&MigrationHandle>) -> Result<Socket, MigrateError> {
        let mut carrier = self.carrier.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.doubtful.load(Ordering::Relaxed)
            && let Some(lane) = self.lane(carrier.as_ref())?
        {
            return self.ready(lane, handle);
        }
        let attempt = Attempt::new((hello.role, hello.index), self.settings, handle);
        // A panic of the connector must not end a migration whose guest needs this process.
        let connected = match caught_io(|| self.connector.connect(&attempt)) {
            Ok(connected) => connected,
            Err(error) => match self.lane(carrier.as_ref()) {
                Ok(Some(lane)) => return self.ready(lane, handle),
                _ => return Err(self.unreachable(error)),
            },
        };
        *carrier = None;
        match connected {
            Connected::Channel(descriptor) => self.accepted(descriptor, handle),
            Connected::All(descriptor) => {
                let link = self.accepted(descriptor, handle)?;
                let agreed = carrier.insert(self.carry(link, hello)?);
                let lane = agreed.open().map_err(|source| self.unusable(source))?;
                self.ready(lane, handle)
            }
        }
    }

    /// Returns a new lane of `carrier`; `None` if there is no such connection, or it has ended.
    fn lane(&self, carrier: Option<&Carrier>) -> Result<Option<Socket>, MigrateError> {
        match carrier.map(Carrier::open).transpose() {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(None),
            lane => lane.map_err(|source| self.unusable(source)),
        }
    }

    /// Returns the socket that the connector has connected, if it is usable for a channel.
    fn accepted(
        &self,
        descriptor: OwnedFd,
        handle: Option<&MigrationHandle>,
    ) -> Result<Socket, MigrateError> {
        let unusable = |source| self.unusable(source);
        let socket = stream_socket(descriptor).map_err(unusable)?;
        if socket.is_listener().map_err(unusable)? {
            return Err(unusable(invalid("the socket listens, and is not connected")));
        }
        if !self.settings.permits_remote() && is_remote(&socket).map_err(unusable)? {
            return Err(MigrateError::NotLoopback { uri: self.name() });
        }
        self.ready(socket, handle)
    }

    /// Prepares `socket` for a channel. From now on, a cancel ends each wait on the socket.
    fn ready(&self, socket: Socket, handle: Option<&MigrationHandle>) -> Result<Socket, MigrateError> {
        let watched = || handle.map_or(Ok(()), |handle| handle.opening(&socket));
        socket.set_nonblocking(false).and_then(|()| watched()).map_err(|source| self.unusable(source))?;
        Ok(socket)
    }

    /// Agrees with the target that `link` carries all channels of the migration of `hello`.
    fn carry(&self, link: Socket, hello: &Hello) -> Result<Carrier, MigrateError> {
        let (uri, unusable) = (self.name(), |source| self.unusable(source));
        let stream = Stream::new(link, uri.clone()).map_err(unusable)?;
        let (features, role, index, token) = (FEATURES | CARRIER, Role::Control, 0, Token::NONE);
        let hello = Hello { features, role, index, token, arbiter: 0, ..hello.clone() };
        let said = say_hello(&stream, &hello, self.settings.peer_timeout);
        let said = said.map_err(|source| MigrateError::Hello { uri: uri.clone(), source })?;
        let reply = match check_reply(&said, &hello, &uri) {
            Err(MigrateError::RefusedHello { code: RefusalCode::Feature, .. }) => {
                let why = "the target is an older vmferry, which needs a connection for each channel; pass one socket for each channel";
                return Err(unusable(io::Error::new(io::ErrorKind::Unsupported, why)));
            }
            reply => reply?,
        };
        if reply.features & CARRIER == 0 {
            let why = "the target did not confirm that the connection carries all channels";
            return Err(unusable(invalid(why)));
        }
        stream.set_timeouts(None, None).and_then(|()| Carrier::start(stream.into_socket())).map_err(unusable)
    }

    fn unusable(&self, source: io::Error) -> MigrateError {
        MigrateError::Passed { uri: self.name(), source }
    }

    fn unreachable(&self, error: io::Error) -> MigrateError {
        error.downcast().unwrap_or_else(|source| MigrateError::Connect { uri: self.name(), source })
    }
}

/// Sends `hello`, and waits for the bytes of the reply.
fn say_hello(stream: &Stream, hello: &Hello, timeout: Duration) -> io::Result<[u8; HELLO_BYTES]> {
    stream.set_timeouts(Some(timeout), Some(timeout))?;
    stream.send(&mut [IoBuf::from_bytes(&hello.encode())]).map_err(|failed| failed.error)?;
    let mut reply = [0; HELLO_BYTES];
    stream.receive_bytes_within(&mut reply, timeout)?;
    stream.set_timeouts(Some(timeout), Some(timeout))?;
    Ok(reply)
}

/// Decodes the reply to `hello`. Returns an error if the target has refused the hello, or if the
/// reply does not match the hello.
fn check_reply(reply: &[u8; HELLO_BYTES], hello: &Hello, uri: &str) -> Result<HelloReply, MigrateError> {
    let reply =
        HelloReply::decode(reply).map_err(|source| MigrateError::Peer { uri: uri.to_owned(), source })?;
    if let Some(code) = reply.refused {
        return Err(MigrateError::RefusedHello { uri: uri.to_owned(), code, peer_version: reply.version });
    }
    if reply.migration != hello.migration {
        let source = WireError::Message("it answered the hello of another migration".into());
        return Err(MigrateError::Peer { uri: uri.to_owned(), source });
    }
    if !(VERSION_MIN..=VERSION_MAX).contains(&reply.version) {
        let source = WireError::Field {
            what: "version",
            value: reply.version.into(),
            allowed: "a version that was offered",
        };
        return Err(MigrateError::Peer { uri: uri.to_owned(), source });
    }
    Ok(reply)
}
