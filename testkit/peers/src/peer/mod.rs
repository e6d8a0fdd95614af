//! Scripted peers: the test decides which messages they send.

mod source;
mod target;

pub use source::{Frame, Source};
pub use target::Target;

use crate::socket;
use serde::Serialize;
use serde::de::DeserializeOwned;
use socket2::Socket;
use std::io::{Read, Write};
use vmferry_engine::Uri;
use vmferry_testkit::{PATIENCE, wait_for};
use vmferry_wire::{
    CONTROL_HEADER_BYTES, ControlHeader, HELLO_BYTES, Hello, HelloReply, MigrationId, RefusalCode, Role,
    Token, VERSION_MAX, VERSION_MIN, decode_control, encode_control,
};

/// Sends `message` on a control channel. Ignores the error of a peer that has hung up.
pub fn send_message(stream: &mut impl Write, message: &impl Serialize) {
    let _ = stream.write_all(&encode_control(message).expect("a message that can be encoded"));
}

/// Returns the next message of a control channel, or `None` at its end.
///
/// # Panics
///
/// Panics if the message cannot be decoded.
pub fn receive_message<M: DeserializeOwned>(stream: &mut impl Read) -> Option<M> {
    let mut header = [0; CONTROL_HEADER_BYTES];
    stream.read_exact(&mut header).ok()?;
    let header = ControlHeader::decode(&header).expect("the header of a control message");
    let mut body = vec![0; header.len];
    stream.read_exact(&mut body).ok()?;
    Some(decode_control(header, &body).expect("a control message"))
}

/// Returns the hello of a channel, for the migration id of scripted sources.
pub fn hello(role: Role, index: u16, token: Token) -> Hello {
    let migration = MigrationId([7; 16]);
    let (version_min, version_max) = (VERSION_MIN, VERSION_MAX);
    Hello { version_min, version_max, features: 0, migration, role, index, token, arbiter: 0 }
}

/// Sends `hello` on `stream`. Returns the reason of a refusal, or `None` if the target accepts.
///
/// # Panics
///
/// Panics if the target does not reply, or names another migration.
pub fn exchange_hello(stream: &mut (impl Read + Write), hello: &Hello) -> Option<RefusalCode> {
    stream.write_all(&hello.encode()).expect("a target that takes a hello");
    let mut reply = [0; HELLO_BYTES];
    stream.read_exact(&mut reply).expect("the reply to a hello");
    let reply = HelloReply::decode(&reply).expect("the reply to a hello");
    assert_eq!(reply.migration, hello.migration);
    reply.refused
}

/// Connects to the target at `uri`. The target must answer within [`PATIENCE`].
///
/// # Panics
///
/// Panics if the connection fails.
pub fn connect(uri: &Uri) -> Socket {
    let stream = socket::connect(uri).unwrap_or_else(|error| panic!("{uri}: {error}"));
    stream.set_read_timeout(Some(PATIENCE)).expect("a read timeout");
    stream.set_write_timeout(Some(PATIENCE)).expect("a write timeout");
    stream
}

/// Connects to the target at `uri` and sends `hello`. Returns the channel, and the reason of a
/// refusal.
pub fn connect_with(uri: &Uri, hello: &Hello) -> (Socket, Option<RefusalCode>) {
    let mut stream = connect(uri);
    let refused = exchange_hello(&mut stream, hello);
    (stream, refused)
}

/// Accepts the greeting of a source. Returns its hello, or `None` if the source hung up.
pub fn answer(stream: &mut (impl Read + Write)) -> Option<Hello> {
    answer_with(stream, 0)
}

/// Does the same as [`answer`], and offers `features`.
pub fn answer_with(stream: &mut (impl Read + Write), features: u64) -> Option<Hello> {
    let mut bytes = [0; HELLO_BYTES];
    stream.read_exact(&mut bytes).ok()?;
    let hello = Hello::decode(&bytes).expect("a hello");
    let reply = HelloReply { refused: None, version: 1, features, migration: hello.migration };
    stream.write_all(&reply.encode()).ok()?;
    Some(hello)
}

/// Socket to which sources connect. Its file is removed when it is dropped.
#[derive(Debug)]
pub struct Listener {
    socket: Socket,
    uri: Uri,
}

impl Listener {
    /// Listens at a Unix socket.
    pub fn unix() -> Self {
        Self::at(&socket::unix_uri())
    }

    /// Listens at a TCP port of this host.
    pub fn tcp() -> Self {
        Self::at(&Uri::Tcp { host: "127.0.0.1".into(), port: 0 })
    }

    fn at(uri: &Uri) -> Self {
        let (socket, uri) = socket::listen(uri);
        // The test must not hang if no source connects.
        socket.set_nonblocking(true).expect("a socket that does not block");
        Self { socket, uri }
    }

    /// Returns the address of the socket.
    pub fn uri(&self) -> &Uri {
        &self.uri
    }

    /// Waits for the next connection of a source.
    pub fn connection(&self) -> Socket {
        let (stream, _) = wait_for("a connection of the source", || self.socket.accept());
        stream.set_read_timeout(Some(PATIENCE)).expect("a read timeout");
        stream
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        socket::remove(&self.uri);
    }
}
