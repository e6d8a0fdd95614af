//! Connection of one client: its socket, its session, and the functions to call when an answer has
//! been sent.

use super::{FAREWELL, worker::Workers};
use crate::events::Done;
use crate::message::Version;
use crate::session::{Call, End, Limits, Session, Ticket};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::collections::BTreeMap;
use std::fmt;
use std::io::{ErrorKind, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::Sender;
use std::time::Instant;

/// Maximum number of bytes of one read.
const PIECE: usize = 64 << 10;

type Promise = Box<dyn FnOnce() + Send>;

pub(super) struct Conn {
    id: u64,
    stream: UnixStream,
    pub(super) session: Session,
    /// Bytes that were read and that the session has not taken yet, at most one piece.
    input: Vec<u8>,
    promises: BTreeMap<Ticket, Promise>,
    /// Thread that executes the client's commands. `None` until the client has sent a command.
    worker: Option<Sender<Call>>,
    ended_at: Option<Instant>,
    broken: bool,
}

impl fmt::Debug for Conn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Conn").field("id", &self.id).field("session", &self.session).finish_non_exhaustive()
    }
}

impl Conn {
    pub(super) fn new(
        id: u64,
        stream: UnixStream,
        version: &Version,
        limits: Limits,
        now: Instant,
    ) -> std::io::Result<Self> {
        stream.set_nonblocking(true)?;
        let mut conn = Self {
            id,
            stream,
            session: Session::new(version, limits),
            input: Vec::new(),
            promises: BTreeMap::new(),
            worker: None,
            ended_at: None,
            broken: false,
        };
        conn.write(now);
        Ok(conn)
    }

    pub(super) fn stream(&self) -> &UnixStream {
        &self.stream
    }

    pub(super) fn has_output(&self) -> bool {
        !self.session.output().is_empty()
    }

    fn may_read(&self) -> bool {
        self.input.is_empty() && self.session.wants_input()
    }

    /// Returns the events of the socket to wait for.
    pub(super) fn interest(&self) -> PollFlags {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, self.may_read());
        flags.set(PollFlags::OUT, self.has_output());
        flags
    }

    /// Reads available bytes if the session wants input.
    pub(super) fn read(&mut self, flags: PollFlags, now: Instant) {
        if !self.may_read() {
            // The session wants no input until the client reads its output. If the client has
            // closed its socket, it will never read the output.
            self.broken |= flags.intersects(PollFlags::HUP | PollFlags::ERR);
            return;
        }
        if !flags.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
            return;
        }
        let mut piece = [0; PIECE];
        match self.receive(&mut piece) {
            Ok(0) => {
                self.session.finish();
                self.broken |= flags.contains(PollFlags::HUP);
            }
            Ok(count) => {
                let taken = self.session.receive(&piece[..count], now);
                self.input.extend_from_slice(&piece[taken..count]);
            }
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(_) => self.broken = true,
        }
    }

    /// Receives bytes. A single descriptor that comes with them is passed to the session. If
    /// several descriptors come, they are closed.
    fn receive(&mut self, piece: &mut [u8]) -> rustix::io::Result<usize> {
        // The kernel closes descriptors for which the buffer has no room.
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = recvmsg(&self.stream, &mut [IoSliceMut::new(piece)], &mut ancillary, flags)?;
        let passed = ancillary.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        });
        let mut passed: Vec<_> = passed.flatten().collect();
        if let (Some(one), true) = (passed.pop(), passed.is_empty()) {
            self.session.pass(one);
        }
        Ok(received.bytes)
    }

    pub(super) fn answer(&mut self, done: Done) {
        let Done { ticket, result, .. } = done;
        let result = result.map(|answer| {
            if let Some(promise) = answer.sent {
                self.promises.insert(ticket, promise);
            }
            answer.value
        });
        self.session.answer(ticket, result);
    }

    /// Advances the session as far as possible without waiting.
    pub(super) fn advance(&mut self, workers: &mut Workers, now: Instant) {
        loop {
            while let Some(call) = self.session.next_call() {
                workers.give(self.id, call, &mut self.worker);
            }
            if self.input.is_empty() || !self.session.wants_input() {
                break;
            }
            let taken = self.session.receive(&self.input, now);
            self.input.drain(..taken);
        }
        if self.session.ended().is_some() {
            self.input = Vec::new();
        }
        self.write(now);
        self.session.tick(now);
    }

    fn write(&mut self, now: Instant) {
        while self.has_output() && !self.broken {
            match self.stream.write(self.session.output()) {
                Ok(count) => {
                    for ticket in self.session.sent(count, now) {
                        if let Some(promise) = self.promises.remove(&ticket) {
                            promise();
                        }
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => self.broken = true,
            }
        }
    }

    /// Returns true if the client has closed its socket, or if the socket has failed.
    pub(super) fn broken(&self) -> bool {
        self.broken
    }

    /// Returns the reason if the connection must be closed now, because the client has received the
    /// reason or had enough time to read it.
    pub(super) fn gone(&mut self, now: Instant) -> Option<End> {
        let why = self.session.ended()?;
        let since = *self.ended_at.get_or_insert(now);
        (why == End::Unread || !self.has_output() || now - since >= FAREWELL).then_some(why)
    }
}
