//! Conversation with one client, as a state machine without sockets, threads or clocks.
//!
//! The caller passes the received bytes and the time to the session, executes the [`Call`]s that
//! the session returns, and sends its output. The memory of a session is bounded for any input: it
//! holds at most one message of [`Limits::message_bytes`], [`Limits::pending`] requests,
//! [`Limits::out_bytes`] of output, and one answer for each of these requests. The session takes no
//! input while its client does not read.

use crate::framer::{Excess, Frame, Framer};
use crate::machine::Arguments;
use crate::message::{self, BadRequest, Event, QmpError, Request, Version};
use serde_json::Value;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// Limits for one client of the control socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Maximum length of a message in bytes.
    pub message_bytes: usize,
    /// Maximum nesting depth of brackets in a message.
    pub depth: usize,
    /// Maximum number of requests that wait or are being executed. Further requests stay in the
    /// socket.
    pub pending: usize,
    /// Maximum number of bytes of output that may wait for the client. If an event exceeds this
    /// limit, the session ends.
    pub out_bytes: usize,
    /// Maximum time from the first byte of a message to its last.
    pub message_time: Duration,
    /// Maximum time for which a client may read nothing while output is waiting.
    pub read_time: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            // A request may contain the certificates of all authorities that a host trusts.
            message_bytes: 1 << 20,
            depth: 32,
            pending: 8,
            out_bytes: 1 << 20,
            message_time: Duration::from_secs(30),
            read_time: Duration::from_secs(30),
        }
    }
}

/// Identifier of a call within its session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub(crate) u64);

/// Name of the command that takes a descriptor, which the client passes together with the bytes of
/// the command.
const GETFD: &str = "getfd";

/// Command that the caller must execute, and then answer with [`Session::answer`].
#[derive(Debug)]
pub struct Call {
    /// Ticket with which the command is answered.
    pub ticket: Ticket,
    /// Name of the command.
    pub name: String,
    /// Arguments of the command.
    pub arguments: Arguments,
    /// True if the command is out of band, so that it must not wait for commands that are being
    /// executed.
    pub oob: bool,
    /// Descriptor that came with the command. Always `None` for commands other than `getfd`.
    pub descriptor: Option<OwnedFd>,
}

/// Reason for the end of a session. The text is for the client and for the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum End {
    /// A message exceeded [`Limits::message_bytes`].
    TooLong,
    /// A message exceeded [`Limits::depth`].
    TooDeep,
    /// A message did not end within [`Limits::message_time`].
    HalfMessage,
    /// The client does not read its output: it exceeded [`Limits::out_bytes`] or
    /// [`Limits::read_time`].
    Unread,
    /// The client has closed its sending direction, and all of its answers have been sent.
    Done,
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TooLong => "a message was longer than is allowed; this connection ends",
            Self::TooDeep => "a message was nested deeper than is allowed; this connection ends",
            Self::HalfMessage => "a message was begun and did not end in time; this connection ends",
            Self::Unread => "the client does not read what is sent; this connection ends",
            Self::Done => "the client has closed the connection",
        })
    }
}

/// Request that waits for its turn.
#[derive(Debug)]
enum Waiting {
    Call(Request),
    /// Invalid request, whose error is also sent in its turn.
    Bad(BadRequest),
}

/// Conversation with one client.
#[derive(Debug)]
pub struct Session {
    limits: Limits,
    framer: Framer,
    /// Descriptor that was received last and that no command has taken yet.
    passed: Option<OwnedFd>,
    /// Result of the negotiation: `Some(true)` if the client enabled `oob`, and `None` before
    /// `qmp_capabilities`.
    negotiated: Option<bool>,
    waiting: VecDeque<Waiting>,
    /// Out-of-band requests that [`Session::next_call`] has not returned yet.
    urgent: VecDeque<Request>,
    /// Requests that [`Session::next_call`] has returned and that are not answered yet. Each has
    /// its id, and a flag that is true if the request is in-band. At most one is in-band.
    taken: BTreeMap<Ticket, (Option<Value>, bool)>,
    next: u64,
    out: VecDeque<u8>,
    /// Number of bytes that were put into `out` since the beginning. Invariant: `sent + out.len()
    /// == queue_line`.
    queue_line: u64,
    sent: u64,
    /// Positions in the output at which answers end.
    marks: VecDeque<(u64, Ticket)>,
    half_since: Option<Instant>,
    unread_since: Option<Instant>,
    finished: bool,
    end: Option<End>,
}

impl Session {
    /// Creates a session, whose first output is the greeting with `version`.
    #[must_use]
    pub fn new(version: &Version, limits: Limits) -> Self {
        let mut session = Self {
            framer: Framer::new(limits.message_bytes, limits.depth),
            limits,
            passed: None,
            negotiated: None,
            waiting: VecDeque::new(),
            urgent: VecDeque::new(),
            taken: BTreeMap::new(),
            next: 0,
            out: VecDeque::new(),
            queue_line: 0,
            sent: 0,
            marks: VecDeque::new(),
            half_since: None,
            unread_since: None,
            finished: false,
            end: None,
        };
        session.queue_line(&message::line(&version.greeting()));
        session
    }

    /// Returns true if the session takes more bytes at present.
    #[must_use]
    pub fn wants_input(&self) -> bool {
        let pending = self.waiting.len() + self.urgent.len() + self.taken.len();
        self.end.is_none()
            && !self.finished
            && pending < self.limits.pending
            // A client that sends requests without reading gets its answers before more of its
            // bytes are taken.
            && self.out.len() < self.limits.out_bytes / 4
    }

    /// Passes a descriptor to the session, before [`receive`](Self::receive) is called with the
    /// bytes that came with it. The next `getfd` in these or later bytes takes the descriptor. If
    /// an earlier descriptor has not been taken, it is closed.
    pub fn pass(&mut self, descriptor: OwnedFd) {
        self.passed = Some(descriptor);
    }

    /// Takes bytes that were received at the time `now`, but no more than the session wants.
    /// Returns the number of taken bytes.
    pub fn receive(&mut self, bytes: &[u8], now: Instant) -> usize {
        let mut taken = 0;
        while taken < bytes.len() && self.wants_input() {
            let (count, frame) = self.framer.push(&bytes[taken..]);
            taken += count;
            if let Some(frame) = frame {
                self.half_since = None;
                self.frame(frame);
            }
        }
        self.half_since = if self.framer.half() { self.half_since.or(Some(now)) } else { None };
        taken
    }

    /// Records that the client has closed its sending direction. The client may still read.
    pub fn finish(&mut self) {
        self.finished = true;
        self.half_since = None;
        self.done_if_so();
    }

    /// Returns the next command that the caller must execute, or `None` if no command may be
    /// executed at present.
    pub fn next_call(&mut self) -> Option<Call> {
        if self.end.is_some() {
            return None;
        }
        if let Some(request) = self.urgent.pop_front() {
            return Some(self.hand_out(request, true));
        }
        if self.taken.values().any(|(_, in_band)| *in_band) {
            return None;
        }
        loop {
            match self.waiting.pop_front()? {
                Waiting::Call(request) => return Some(self.hand_out(request, false)),
                Waiting::Bad(BadRequest { id, error }) => self.queue_line(&message::answer(Err(error), id)),
            }
        }
    }

    /// Answers the call with the ticket `ticket`. The method ignores a ticket that does not exist
    /// or was already answered.
    pub fn answer(&mut self, ticket: Ticket, result: Result<Value, QmpError>) {
        let Some((id, _)) = self.taken.remove(&ticket) else { return };
        if matches!(self.end, None | Some(End::Done)) {
            self.queue_line(&message::answer(result, id));
            self.marks.push_back((self.queue_line, ticket));
        }
        self.done_if_so();
    }

    /// Sends an event to the client, if the negotiation is complete.
    pub fn event(&mut self, event: &Event) {
        if self.negotiated.is_none() || self.end.is_some() {
            return;
        }
        self.queue_line(&message::line(&event.to_json()));
        if self.out.len() > self.limits.out_bytes {
            self.end(End::Unread);
        }
    }

    /// Returns the next contiguous part of the output. It is empty if no output is waiting.
    #[must_use]
    pub fn output(&self) -> &[u8] {
        let (first, second) = self.out.as_slices();
        if first.is_empty() { second } else { first }
    }

    /// Records that `count` bytes of [`output`](Self::output) were sent at the time `now`. Returns
    /// the tickets of the calls whose answers have now been sent completely.
    pub fn sent(&mut self, count: usize, now: Instant) -> Vec<Ticket> {
        let count = count.min(self.out.len());
        self.out.drain(..count);
        self.sent += count as u64;
        if self.out.is_empty() {
            // Release the memory of a long answer.
            self.out.shrink_to(4096);
        }
        if count > 0 {
            self.unread_since = if self.out.is_empty() { None } else { Some(now) };
        }
        let ended = self.marks.partition_point(|(end, _)| *end <= self.sent);
        let tickets = self.marks.drain(..ended).map(|(_, ticket)| ticket).collect();
        self.done_if_so();
        tickets
    }

    /// Ends the session if a time limit has been exceeded at the time `now`. The caller must call
    /// this method periodically.
    pub fn tick(&mut self, now: Instant) {
        let since = |then: Option<Instant>| then.map(|then| now.saturating_duration_since(then));
        if since(self.half_since).is_some_and(|time| time > self.limits.message_time) {
            self.end(End::HalfMessage);
        }
        if self.out.is_empty() {
            self.unread_since = None;
        } else if self.unread_since.is_none() {
            self.unread_since = Some(now);
        } else if since(self.unread_since).is_some_and(|time| time > self.limits.read_time) {
            self.end(End::Unread);
        }
    }

    /// Returns the reason for the end of the session, or `None` if it has not ended. The caller may
    /// still send the remaining output.
    #[must_use]
    pub fn ended(&self) -> Option<End> {
        self.end
    }

    fn frame(&mut self, frame: Frame) {
        match frame {
            Frame::Object(text) => match message::parse(&text) {
                Ok(request) => self.request(request),
                Err(bad) => self.waiting.push_back(Waiting::Bad(bad)),
            },
            Frame::Garbage(why) => self.refuse(None, QmpError::generic(why)),
            Frame::Excess(Excess::Long) => self.end(End::TooLong),
            Frame::Excess(Excess::Deep) => self.end(End::TooDeep),
        }
    }

    fn request(&mut self, mut request: Request) {
        if request.name == GETFD {
            request.descriptor = self.passed.take();
        }
        match (self.negotiated, &*request.name) {
            (None, "qmp_capabilities") => match negotiate(&request) {
                Ok(oob) => {
                    self.negotiated = Some(oob);
                    self.queue_line(&message::answer(Ok(serde_json::json!({})), request.id));
                }
                Err(error) => self.refuse(request.id, error),
            },
            (None, _) => {
                let desc = "Expecting capabilities negotiation with 'qmp_capabilities'".to_owned();
                self.refuse(request.id, QmpError { desc, ..QmpError::not_found("") });
            }
            (Some(_), "qmp_capabilities") => {
                let desc = "Capabilities negotiation is already complete, command ignored".to_owned();
                self.refuse(request.id, QmpError { desc, ..QmpError::not_found("") });
            }
            (Some(false), _) if request.oob => {
                let why = "QMP input member 'exec-oob' needs the capability 'oob', which was not enabled";
                self.refuse(request.id, QmpError::generic(why));
            }
            (Some(_), _) if request.oob => self.urgent.push_back(request),
            (Some(_), _) => self.waiting.push_back(Waiting::Call(request)),
        }
    }

    /// Queues an error, which is sent in its turn.
    fn refuse(&mut self, id: Option<Value>, error: QmpError) {
        self.waiting.push_back(Waiting::Bad(BadRequest { id, error }));
    }

    fn hand_out(&mut self, request: Request, oob: bool) -> Call {
        let ticket = Ticket(self.next);
        self.next += 1;
        let Request { name, arguments, id, descriptor, .. } = request;
        self.taken.insert(ticket, (id, !oob));
        Call { ticket, name, arguments: Arguments(arguments), oob, descriptor }
    }

    fn queue_line(&mut self, line: &[u8]) {
        self.out.extend(line);
        self.queue_line += line.len() as u64;
    }

    fn end(&mut self, why: End) {
        if self.end.is_none() {
            self.end = Some(why);
            // A client that does not read is in the middle of a line, so a further message would be
            // lost.
            if why != End::Unread {
                self.queue_line(&message::answer(Err(QmpError::generic(why.to_string())), None));
            }
            self.waiting.clear();
            self.urgent.clear();
            self.passed = None;
        }
    }

    fn done_if_so(&mut self) {
        let pending = !(self.waiting.is_empty() && self.urgent.is_empty() && self.taken.is_empty());
        if self.finished && self.end.is_none() && !pending && self.out.is_empty() {
            self.end = Some(End::Done);
        }
    }
}

/// Returns true if the client enables `oob`.
fn negotiate(request: &Request) -> Result<bool, QmpError> {
    if request.oob {
        return Err(QmpError::generic("The command qmp_capabilities does not support OOB"));
    }
    #[derive(serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Wanted {
        #[serde(default)]
        enable: Vec<String>,
    }
    let wanted: Wanted = Arguments(request.arguments.clone()).read()?;
    if let Some(other) = wanted.enable.iter().find(|name| *name != "oob") {
        let other: String = other.chars().take(80).collect();
        return Err(QmpError::generic(format!("Parameter 'enable' does not accept value '{other}'")));
    }
    Ok(!wanted.enable.is_empty())
}

#[cfg(test)]
#[path = "session_tests.rs"]
mod tests;
