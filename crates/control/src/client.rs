//! Client side of the protocol.

use crate::message::{ErrorClass, Event, QmpError};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, ErrorKind, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant, UNIX_EPOCH};

/// Maximum length of a line that the client reads, in bytes.
const LONGEST: usize = 16 << 20;
/// Maximum number of events that are kept for [`Client::events`]. If there are more, the oldest are
/// dropped.
const MOST_EVENTS: usize = 1024;

/// Error that a command or the connection returns.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The client cannot connect to the socket, for example because no process listens there.
    #[error("cannot connect")]
    Connect(#[source] io::Error),
    /// Reading from or writing to the connection failed.
    #[error("the connection broke")]
    Broken(#[source] io::Error),
    /// No answer came in time.
    #[error("no answer came within {0:?}")]
    Late(Duration),
    /// The server closed the connection.
    #[error("the process ended")]
    Ended,
    /// The server does not follow the protocol.
    #[error("the server does not speak QMP: {0}")]
    Strange(String),
    /// The server refused the command.
    #[error("{0}")]
    Refused(QmpError),
}

/// Connection to a control socket, on which the capabilities have been negotiated.
#[derive(Debug)]
pub struct Client {
    stream: BufReader<UnixStream>,
    patience: Duration,
    /// Received part of the next line.
    line: Vec<u8>,
    next: u64,
    greeting: Value,
    events: VecDeque<Event>,
}

impl Client {
    /// Connects to the socket at `path` and negotiates the capabilities. `patience` is the maximum
    /// time that the server may take for each answer.
    ///
    /// # Errors
    /// Returns an error if no process listens at `path`, or if the process does not speak the
    /// protocol or refuses this client.
    pub fn connect(path: &Path, patience: Duration) -> Result<Self, ClientError> {
        let stream = UnixStream::connect(path).map_err(ClientError::Connect)?;
        stream.set_write_timeout(Some(patience)).map_err(ClientError::Broken)?;
        let stream = BufReader::new(stream);
        let (line, events) = (Vec::new(), VecDeque::new());
        let mut client = Self { stream, patience, line, next: 0, greeting: Value::Null, events };
        let until = Instant::now() + patience;
        let mut greeting = client.message(until)?;
        // QEMU sends an event that occurs while it accepts the connection before its greeting.
        while client.keep_event(&greeting) {
            greeting = client.message(until)?;
        }
        if let Some(error) = greeting.get_mut("error") {
            return Err(refused(error));
        }
        client.greeting = greeting["QMP"].take();
        if client.greeting.is_null() {
            return Err(ClientError::Strange(format!("it begins with {greeting}")));
        }
        let enable: &[&str] = if client.greeting["capabilities"] == json!(["oob"]) { &["oob"] } else { &[] };
        client.execute("qmp_capabilities", json!({ "enable": enable }))?;
        Ok(client)
    }

    /// Returns the user id of the server process. It can be that of any user who was able to create
    /// the socket.
    ///
    /// # Errors
    /// Returns an error if the kernel does not report the user.
    pub fn peer_uid(&self) -> io::Result<u32> {
        Ok(rustix::net::sockopt::socket_peercred(self.stream.get_ref())?.uid.as_raw())
    }

    /// Returns the process id of the server.
    ///
    /// # Errors
    /// Returns an error if the kernel does not report the process.
    pub fn peer_pid(&self) -> io::Result<i32> {
        Ok(rustix::net::sockopt::socket_peercred(self.stream.get_ref())?.pid.as_raw_pid())
    }

    /// Returns the greeting of the server, an object with the members `version` and `capabilities`.
    #[must_use]
    pub fn greeting(&self) -> &Value {
        &self.greeting
    }

    /// Sends the command `command` and waits for its answer.
    ///
    /// # Errors
    /// Returns [`ClientError::Refused`] if the server refuses the command, [`ClientError::Late`] if
    /// no answer comes in time, and another error if the connection fails.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, ClientError> {
        self.request(command, &arguments, None)
    }

    /// Passes a duplicate of `descriptor` to the server, which keeps it under the name `name`
    /// (`getfd`).
    ///
    /// # Errors
    /// Returns an error in the cases of [`execute`](Self::execute).
    pub fn pass(&mut self, name: &str, descriptor: BorrowedFd<'_>) -> Result<Value, ClientError> {
        self.request("getfd", &json!({ "fdname": name }), Some(descriptor))
    }

    fn request(
        &mut self,
        command: &str,
        arguments: &Value,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<Value, ClientError> {
        self.next += 1;
        let id = self.next;
        let request = json!({ "execute": command, "arguments": arguments, "id": id });
        let line = format!("{request}\n").into_bytes();
        let sent = match descriptor {
            None => Ok(0),
            Some(descriptor) => send_with(self.stream.get_ref(), &line, descriptor),
        };
        let sent = sent.and_then(|sent| self.stream.get_mut().write_all(&line[sent..]));
        let until = Instant::now() + self.patience;
        // If writing failed, the server may have sent the reason before it closed the connection.
        // Return that reason rather than the error of the write.
        loop {
            let mut message = match (self.message(until), &sent) {
                (Ok(message), _) => message,
                (Err(_), Err(error)) => return Err(ClientError::Broken(io::Error::from(error.kind()))),
                (Err(error), Ok(())) => return Err(error),
            };
            if self.keep_event(&message) {
                continue;
            }
            // An error without an id refers to the connection.
            if message.get("id").is_some_and(|named| *named != json!(id)) {
                continue;
            }
            if let Some(error) = message.get_mut("error") {
                return Err(refused(error));
            }
            return match message.get_mut("return") {
                Some(value) => Ok(value.take()),
                None => Err(ClientError::Strange(format!("{message} is neither a return nor an error"))),
            };
        }
    }

    /// Returns and removes the events that have been received so far. The method does not read from
    /// the connection: events are received while [`execute`](Self::execute) or
    /// [`next_event`](Self::next_event) waits.
    pub fn events(&mut self) -> impl Iterator<Item = Event> {
        std::mem::take(&mut self.events).into_iter()
    }

    /// Waits for at most `time` and returns the next event, or `None` if no event comes.
    ///
    /// # Errors
    /// Returns an error if the connection has ended.
    pub fn next_event(&mut self, time: Duration) -> Result<Option<Event>, ClientError> {
        let until = Instant::now() + time;
        while self.events.is_empty() {
            match self.message(until) {
                Ok(message) => self.keep_event(&message),
                Err(ClientError::Late(_)) => return Ok(None),
                Err(error) => return Err(error),
            };
        }
        Ok(self.events.pop_front())
    }

    fn keep_event(&mut self, message: &Value) -> bool {
        let Some(name) = message["event"].as_str() else { return false };
        let part = |name: &str| message["timestamp"][name].as_u64().unwrap_or(0);
        let at = UNIX_EPOCH.checked_add(Duration::from_secs(part("seconds")));
        let at = at.and_then(|at| at.checked_add(Duration::from_micros(part("microseconds"))));
        if self.events.len() == MOST_EVENTS {
            self.events.pop_front();
        }
        let data = message["data"].clone();
        self.events.push_back(Event { name: name.to_owned(), data, at: at.unwrap_or(UNIX_EPOCH) });
        true
    }

    /// Reads the next line. If a line does not end in time, its received part is kept for the next
    /// call.
    fn message(&mut self, until: Instant) -> Result<Value, ClientError> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ClientError::Late(self.patience));
            }
            self.stream.get_ref().set_read_timeout(Some(left)).map_err(ClientError::Broken)?;
            let room = (LONGEST - self.line.len()) as u64;
            match self.stream.by_ref().take(room).read_until(b'\n', &mut self.line) {
                Ok(_) if self.line.ends_with(b"\n") => {
                    let line = std::mem::take(&mut self.line);
                    return serde_json::from_slice(&line)
                        .map_err(|error| ClientError::Strange(format!("{error} in {:?}", shown(&line))));
                }
                Ok(_) if self.line.len() == LONGEST => {
                    return Err(ClientError::Strange(format!("a line of more than {LONGEST} bytes")));
                }
                Ok(_) => return Err(ClientError::Ended),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return Err(ClientError::Ended),
                Err(error) => return Err(ClientError::Broken(error)),
            }
        }
    }
}

/// Sends the beginning of `line` together with `descriptor`, and returns the number of sent bytes.
fn send_with(stream: &UnixStream, line: &[u8], descriptor: BorrowedFd<'_>) -> io::Result<usize> {
    let descriptors = [descriptor];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    Ok(sendmsg(stream, &[IoSlice::new(line)], &mut ancillary, SendFlags::NOSIGNAL)?)
}

fn shown(line: &[u8]) -> String {
    String::from_utf8_lossy(&line[..line.len().min(80)]).into_owned()
}

fn refused(error: &Value) -> ClientError {
    let class = match error["class"].as_str() {
        Some("CommandNotFound") => ErrorClass::CommandNotFound,
        Some("DeviceNotActive") => ErrorClass::DeviceNotActive,
        Some("DeviceNotFound") => ErrorClass::DeviceNotFound,
        Some("KVMMissingCap") => ErrorClass::KvmMissingCap,
        _ => ErrorClass::GenericError,
    };
    let desc = error["desc"].as_str().unwrap_or("the server gave no reason").to_owned();
    ClientError::Refused(QmpError { class, desc })
}
