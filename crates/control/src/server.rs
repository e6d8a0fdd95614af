//! The socket: one thread that never waits for a client, and one for each client's commands.
//!
//! The thread of the socket reads, writes and keeps the sessions; whatever takes time is done by others, who leave what came of it in
//! the hub and wake it. So a client that sends half a message, sends without end or never reads costs itself: nobody waits for it.

mod conn;
mod socket;
mod worker;

use crate::events::{Events, Hub};
use crate::machine::Machine;
use crate::message::{self, Event, QmpError, Version};
use crate::session::{End, Limits};
use conn::Conn;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use worker::Workers;

/// Most clients at once; further ones are turned away.
const MOST_CLIENTS: usize = 32;
/// Most threads for clients' commands: a client that left while one of its was under way still has it.
const MOST_WORKERS: usize = 2 * MOST_CLIENTS;
/// How often the clock is looked at while somebody is connected.
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 500_000_000 };
/// How long the server goes on when it is to end, for commands under way and for answers that are not sent.
/// It ends earlier if nothing is left.
const LAST: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 1 });
/// How long a client may take to read why it is dropped.
const FAREWELL: Duration = Duration::from_secs(1);

/// Why there is no server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// The path is taken.
    #[error("another process listens at {0}, or it is no socket; give another path, or end that process")]
    Taken(PathBuf),
    /// The socket cannot be made.
    #[error("cannot listen at {0}")]
    Listen(PathBuf, #[source] std::io::Error),
    /// There is no thread for it.
    #[error("cannot start a thread for the control socket")]
    Thread(#[source] std::io::Error),
    /// These events have a server already.
    #[error("these events are told by another control socket")]
    Twice,
}

/// The listening socket. Dropping it ends the conversations, each with the answers that are due, and removes it.
#[derive(Debug)]
pub struct Server {
    path: PathBuf,
    events: Events,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens at `path` for this user and root; clients' commands are executed by `machine`, and they are told of `events`.
    ///
    /// A socket that nobody listens at any more is replaced.
    ///
    /// # Errors
    /// If the path is taken or cannot be used.
    pub fn start(
        path: &Path,
        machine: Arc<dyn Machine>,
        events: &Events,
        limits: Limits,
    ) -> Result<Self, ServerError> {
        if std::mem::replace(&mut events.0.lock().open, true) {
            return Err(ServerError::Twice);
        }
        let close = |error| {
            events.0.lock().open = false;
            error
        };
        let listener = socket::listen(path).map_err(close)?;
        let hub = Arc::clone(&events.0);
        let workers = Workers::start(Arc::clone(&machine), Arc::clone(&hub));
        let workers = workers.map_err(|error| close(ServerError::Thread(error)))?;
        let io = Io {
            version: machine.version(),
            listener,
            hub,
            workers,
            limits,
            clients: BTreeMap::new(),
            next: 0,
            rest_until: None,
        };
        let thread = vmferry_thread::spawn(vmferry_thread::Role::Api, "api", move || io.run());
        let thread = thread.map_err(|error| close(ServerError::Thread(error)))?;
        Ok(Self { path: path.into(), events: events.clone(), thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let mut inbox = self.events.0.lock();
        inbox.stop = true;
        inbox.open = false;
        drop(inbox);
        self.events.0.wake();
        if let Some(thread) = self.thread.take() {
            // A panic of it was printed when it happened.
            let _ = thread.join();
        }
        let _ = std::fs::remove_file(&self.path);
    }
}

/// What the thread of the socket owns.
struct Io {
    version: Version,
    listener: UnixListener,
    hub: Arc<Hub>,
    workers: Workers,
    limits: Limits,
    clients: BTreeMap<u64, Conn>,
    next: u64,
    /// Nobody is accepted until then: the host had no descriptor for them.
    rest_until: Option<Instant>,
}

impl Io {
    fn run(mut self) {
        let mut last = None;
        loop {
            let (ready, accept) = self.wait(last.is_some());
            let now = Instant::now();
            self.take(now);
            if accept {
                self.accept(now);
            }
            for (id, flags) in ready {
                if let Some(client) = self.clients.get_mut(&id) {
                    client.read(flags, now);
                }
            }
            self.attend(now);
            let (stop, left) = self.left();
            if stop {
                let until = *last.get_or_insert(now + LAST);
                if now >= until || !left {
                    return;
                }
            }
        }
    }

    /// Whether it is to end, and whether anything is left to do before.
    fn left(&self) -> (bool, bool) {
        let inbox = self.hub.lock();
        let unread = self.clients.values().any(Conn::has_output);
        // What came since the inbox was emptied is no less due: the last event is that this process ends.
        (inbox.stop, unread || inbox.busy > 0 || !inbox.done.is_empty() || !inbox.events.is_empty())
    }

    /// Waits for something to do: which clients, and whether somebody knocks.
    fn wait(&self, ending: bool) -> (Vec<(u64, PollFlags)>, bool) {
        let accepts = !ending && self.rest_until.is_none();
        let mut fds = vec![PollFd::from_borrowed_fd(self.hub.waker(), PollFlags::IN)];
        fds.push(PollFd::new(&self.listener, if accepts { PollFlags::IN } else { PollFlags::empty() }));
        for client in self.clients.values() {
            fds.push(PollFd::from_borrowed_fd(client.stream().as_fd(), client.interest()));
        }
        let quick = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
        let idle = self.clients.is_empty() && self.rest_until.is_none();
        let timeout = if ending { Some(&quick) } else { (!idle).then_some(&TICK) };
        // Interrupted by a signal, or out of memory: nothing is ready then, and it is tried again.
        let _ = poll(&mut fds, timeout);
        let ready = self.clients.keys().zip(&fds[2..]);
        let ready = ready.map(|(id, fd)| (*id, fd.revents())).filter(|(_, flags)| !flags.is_empty());
        (ready.collect(), accepts && fds[1].revents().contains(PollFlags::IN))
    }

    /// Takes what others have left: events for all, answers for one.
    fn take(&mut self, now: Instant) {
        let (events, done) = self.hub.take();
        for event in &events {
            self.tell(event);
        }
        for done in done {
            // Whoever asked may have gone.
            if let Some(client) = self.clients.get_mut(&done.client) {
                client.answer(done);
            }
        }
        if self.rest_until.is_some_and(|until| now >= until) {
            self.rest_until = None;
        }
    }

    fn tell(&mut self, event: &Event) {
        for client in self.clients.values_mut() {
            client.session.event(event);
        }
    }

    fn accept(&mut self, now: Instant) {
        // No more at once, or a crowd at the door would keep those who are in from being heard.
        for _ in 0..MOST_CLIENTS {
            match self.listener.accept() {
                Ok((stream, _)) => self.greet(stream, now),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => {
                    tracing::warn!(%error, "the control socket takes no clients for a second");
                    self.rest_until = Some(now + Duration::from_secs(1));
                    return;
                }
            }
        }
    }

    fn greet(&mut self, stream: UnixStream, now: Instant) {
        if let Err(why) = socket::check_peer(&stream) {
            tracing::warn!("control socket: {why}");
            return turn_away(&stream, &why);
        }
        if self.clients.len() >= MOST_CLIENTS || self.workers.count() >= MOST_WORKERS {
            return turn_away(&stream, "too many clients; try again when one has left");
        }
        let id = self.next;
        self.next += 1;
        if let Ok(client) = Conn::new(id, stream, &self.version, self.limits.clone(), now) {
            self.clients.insert(id, client);
        }
    }

    /// Moves every conversation on: requests to those who execute them, bytes to the sockets.
    fn attend(&mut self, now: Instant) {
        let Self { clients, workers, .. } = self;
        clients.retain(|_, client| {
            client.advance(workers, now);
            if let Some(why) = client.gone(now) {
                if why != End::Done {
                    tracing::warn!("control socket: {why}");
                }
                return false;
            }
            !client.broken()
        });
    }
}

/// Says why, if there is room for it, and closes.
fn turn_away(stream: &UnixStream, why: &str) {
    use std::io::Write;
    if stream.set_nonblocking(true).is_ok() {
        let _ = (&mut &*stream).write(&message::answer(Err(QmpError::generic(why)), None));
    }
}

#[cfg(test)]
#[path = "server/tests.rs"]
mod tests;
