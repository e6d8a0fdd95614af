//! From whoever has something to tell to all clients.

use crate::Answer;
use crate::message::{Event, QmpError};
use crate::session::Ticket;
use rustix::event::{EventfdFlags, eventfd};
use serde_json::Value;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Events that wait for the server's thread at most: it takes them at once, whatever its clients do.
const MOST_EVENTS: usize = 4096;

/// Tells every client what happened; does nothing while no server listens. Clones tell the same clients.
#[derive(Debug, Clone)]
pub struct Events(pub(crate) Arc<Hub>);

impl Events {
    /// For one server.
    ///
    /// # Errors
    /// If the host has no more descriptors.
    pub fn new() -> std::io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self(Arc::new(Hub { inbox: Mutex::default(), wake })))
    }

    /// Tells that `name` happens now, with `data` unless that is null. Never waits.
    pub fn emit(&self, name: &str, data: Value) {
        self.send(Event::now(name, data));
    }

    /// Tells what happened. Never waits.
    pub fn send(&self, event: Event) {
        let mut inbox = self.0.lock();
        if inbox.open && inbox.events.len() < MOST_EVENTS {
            inbox.events.push(event);
            drop(inbox);
            self.0.wake();
        }
    }
}

/// A command that was executed for client `client`.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) client: u64,
    pub(crate) ticket: Ticket,
    pub(crate) result: Result<Answer, QmpError>,
}

#[derive(Debug, Default)]
pub(crate) struct Inbox {
    /// Whether there is a server.
    pub(crate) open: bool,
    pub(crate) events: Vec<Event>,
    /// At most one for each command that is being executed.
    pub(crate) done: Vec<Done>,
    /// Calls that are being executed, of all clients.
    pub(crate) busy: usize,
    /// The server is to end.
    pub(crate) stop: bool,
}

/// What waits for the server's thread, and how it is woken.
#[derive(Debug)]
pub(crate) struct Hub {
    inbox: Mutex<Inbox>,
    wake: OwnedFd,
}

impl Hub {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn wake(&self) {
        // It can only fail because it is full, and then the thread wakes anyway.
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

    /// Takes what there is.
    pub(crate) fn take(&self) -> (Vec<Event>, Vec<Done>) {
        let mut counter = [0; 8];
        let _ = rustix::io::read(&self.wake, &mut counter);
        let mut inbox = self.lock();
        (std::mem::take(&mut inbox.events), std::mem::take(&mut inbox.done))
    }
}
