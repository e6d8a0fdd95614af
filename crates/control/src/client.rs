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

/// Longest line in bytes that the client reads.
const LONGEST: usize = 16 << 20;
/// Most events that are kept for [`Client::events`]. Older events are dropped.
const MOST_EVENTS: usize = 1024;

/// Error of a command or of the connection.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// No process listens at the path.
    #[error("cannot connect")]
    Connect(#[source] io::Error),
    /// Reading or writing failed.
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

/// A connection on which the capabilities are negotiated.
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
    /// Connects to the socket at `path`. The server may take `patience` for each answer.
    ///
    /// # Errors
    /// If no process listens, or if it does not speak the protocol or refuses this client.
    pub fn connect(path: &Path, patience: Duration) -> Result<Self, ClientError> {
        let stream = UnixStream::connect(path).map_err(ClientError::Connect)?;
        stream.set_write_timeout(Some(patience)).map_err(ClientError::Broken)?;
        let stream = BufReader::new(stream);
        let (line, events) = (Vec::new(), VecDeque::new());
        let mut client = Self { stream, patience, line, next: 0, greeting: Value::Null, events };
        let mut greeting = client.message(Instant::now() + patience)?;
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

    /// Returns the user of the server process. This may be any user who could create the socket.
    ///
    /// # Errors
    /// If the kernel does not report the user.
    pub fn peer_uid(&self) -> io::Result<u32> {
        Ok(rustix::net::sockopt::socket_peercred(self.stream.get_ref())?.uid.as_raw())
    }

    /// Returns the greeting of the server: `version` and `capabilities`.
    #[must_use]
    pub fn greeting(&self) -> &Value {
        &self.greeting
    }

    /// Sends `command` and waits for its answer.
    ///
    /// # Errors
    /// If the server refuses the command, or no answer comes.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, ClientError> {
        self.request(command, &arguments, None)
    }

    /// Passes a duplicate of `descriptor` to the server, which keeps it as `name` (`getfd`).
    ///
    /// # Errors
    /// As for [`execute`](Self::execute).
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
        // The reason is the better error.
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

    /// Takes the events that came so far.
    pub fn events(&mut self) -> impl Iterator<Item = Event> {
        std::mem::take(&mut self.events).into_iter()
    }

    /// Returns the next event, or `None` if none comes within `time`.
    ///
    /// # Errors
    /// If the connection has ended.
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

    /// Reads the next line. A part of a line is kept if the rest does not come in time.
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

/// Sends the beginning of `line` with `descriptor`, and returns the number of bytes that were sent.
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
