//! Events for all clients, and the queue of the server's thread.

use crate::Answer;
use crate::message::{Event, QmpError};
use crate::session::Ticket;
use rustix::event::{EventfdFlags, eventfd};
use serde_json::Value;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Maximum number of events that wait for the server's thread. The thread takes them at once,
/// because no client can delay it.
const MOST_EVENTS: usize = 4096;

/// Sender of events to all clients of a server. Events are discarded while no server runs. A clone
/// sends to the same clients.
#[derive(Debug, Clone)]
pub struct Events(pub(crate) Arc<EventQueue>);

impl Events {
    /// Creates a sender, which can be used by one server at a time.
    ///
    /// # Errors
    /// Returns an error if the eventfd that wakes the server cannot be created.
    pub fn new() -> std::io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self(Arc::new(EventQueue { inbox: Mutex::default(), wake })))
    }

    /// Sends the event `name` with the current time, and with `data` unless it is null. The call
    /// never waits.
    pub fn emit(&self, name: &str, data: Value) {
        self.send(Event::now(name, data));
    }

    /// Sends `event`. The call never waits. If the server's thread is 4096 events behind, the event
    /// is discarded.
    pub fn send(&self, event: Event) {
        let mut inbox = self.0.lock();
        if inbox.open && inbox.events.len() < MOST_EVENTS {
            inbox.events.push(event);
            drop(inbox);
            self.0.wake();
        }
    }
}

/// Result of a command that was executed for the client with the number `client`.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) client: u64,
    pub(crate) ticket: Ticket,
    pub(crate) result: Result<Answer, QmpError>,
}

#[derive(Debug, Default)]
pub(crate) struct Inbox {
    /// True while a server runs.
    pub(crate) open: bool,
    pub(crate) events: Vec<Event>,
    /// Results of commands, at most one for each command that is being executed.
    pub(crate) done: Vec<Done>,
    /// Number of commands that are being executed, for all clients.
    pub(crate) busy: usize,
    /// True if the server must end.
    pub(crate) stop: bool,
}

/// Queue of the server's thread, and the eventfd that wakes the thread.
#[derive(Debug)]
pub(crate) struct EventQueue {
    inbox: Mutex<Inbox>,
    wake: OwnedFd,
}

impl EventQueue {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn wake(&self) {
        // The write fails only if the counter is full, and the thread wakes in that case too.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    pub(crate) fn waker(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    pub(crate) fn begin(&self) {
        self.lock().busy += 1;
    }

    pub(crate) fn finish(&self, done: Done) {
        let mut inbox = self.lock();
        inbox.busy -= 1;
        inbox.done.push(done);
        drop(inbox);
        self.wake();
    }

    /// Takes the queued events and results.
    pub(crate) fn take(&self) -> (Vec<Event>, Vec<Done>) {
        let mut counter = [0; 8];
        let _ = rustix::io::read(&self.wake, &mut counter);
        let mut inbox = self.lock();
        (std::mem::take(&mut inbox.events), std::mem::take(&mut inbox.done))
    }
}
